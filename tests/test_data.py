"""The sampler's promises by property, and what loaders keep of them."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp2.data import sampler
from fsdp2.data.loader import Batches, evaluation_batches
from fsdp2.data.splits import Windows
from fsdp2.models import llama
from fsdp2_extra.text.windows import Documents

CPU = torch.device("cpu")

sizes = st.integers(1, 200)
worlds = st.integers(1, 8)
parts = st.integers(1, 4)


@given(sizes, st.integers(0, 2**40), st.integers(0, 50))
def test_an_epoch_reads_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(sampler.epoch_order(size, seed, epoch).tolist()) == list(range(size))


@given(st.integers(20, 200), st.integers(0, 1000), st.integers(0, 50))
def test_epochs_and_seeds_have_other_orders(size: int, seed: int, epoch: int) -> None:
    order = sampler.epoch_order(size, seed, epoch)
    assert not torch.equal(order, sampler.epoch_order(size, seed, epoch + 1))
    assert not torch.equal(order, sampler.epoch_order(size, seed + 1, epoch))


@given(sizes, st.integers(1, 64), worlds, parts)
def test_ranks_divide_each_global_batch_without_overlap_or_loss(
    size: int, global_batch: int, world_size: int, accumulation: int
) -> None:
    order = sampler.epoch_order(size, 1, 0)
    seen = []
    for batch in sampler.global_batches(order, global_batch):
        shares = [sampler.microbatches(batch, rank, world_size, accumulation) for rank in range(world_size)]
        assert all(len(share) == accumulation for share in shares)
        together = torch.cat([part for share in shares for part in share])
        assert torch.equal(together, batch), "the order of samples depends on the world size"
        lengths = [sum(map(len, share)) for share in shares]
        assert max(lengths) - min(lengths) <= 1
        seen.append(together)
    assert torch.equal(torch.cat(seen), order)


@given(sizes, st.integers(1, 64), st.data())
def test_a_resumed_epoch_goes_on_where_it_stopped(size: int, global_batch: int, draw: st.DataObject) -> None:
    order = sampler.epoch_order(size, 1, 0)
    whole = list(sampler.global_batches(order, global_batch))
    done = draw.draw(st.integers(0, len(whole)))
    rest = list(sampler.global_batches(order, global_batch, position=done * global_batch))
    assert [batch.tolist() for batch in rest] == [batch.tolist() for batch in whole[done:]]


def _split(size: int) -> Windows:
    return Windows(torch.arange(size + 1), seq_len=1)  # sample i is the token i


def _batches(size: int, rank: int, world_size: int, accumulation: int, workers: int = 0) -> Batches:
    return Batches(
        _split(size), global_batch=12, accumulation=accumulation, seed=1, rank=rank, world_size=world_size,
        device=CPU, workers=workers,
    )  # fmt: skip


@settings(max_examples=30, deadline=None)  # builds a DataLoader for each step
@given(sizes, st.integers(1, 4), st.integers(1, 3))
def test_batches_are_the_same_samples_in_each_step_at_any_world_size(
    size: int, world_size: int, accumulation: int
) -> None:
    def steps(rank: int, world_size: int, accumulation: int) -> list[list[int]]:
        batches = _batches(size, rank, world_size, accumulation)
        result = []
        for microbatches in batches:
            rows: list[int] = []
            for batch in microbatches:
                assert batch.inputs.numel() > 0, "also a placeholder has something to compute on"
                rows += batch.inputs.flatten().tolist() if batch.valid else []
            result.append(rows)
            assert batches.position == sum(map(len, result)) or world_size > 1
        assert batches.at_end()
        return result

    alone = steps(0, 1, 1)
    together = [steps(rank, world_size, accumulation) for rank in range(world_size)]
    assert [list(itertools.chain(*step)) for step in zip(*together, strict=True)] == alone


def test_a_saved_place_in_the_data_is_found_again() -> None:
    batches = _batches(100, 0, 1, 1)
    batches.next_epoch()
    for index, microbatches in enumerate(batches):
        for _ in microbatches:
            pass
        if index == 2:
            break
    state = batches.state_dict()
    rest = [[batch.inputs.tolist() for batch in microbatches] for microbatches in batches]
    again = _batches(100, 0, 1, 1)
    again.load_state_dict(state)
    assert (again.epoch, again.position, again.steps_done()) == (1, 36, 3)
    assert [[batch.inputs.tolist() for batch in microbatches] for microbatches in again] == rest
    with pytest.raises(ValueError, match="--dataset"):
        _batches(99, 0, 1, 1).load_state_dict(state)


def test_loader_processes_give_the_same_batches() -> None:
    def all_of(batches: Batches) -> list[list[list[int]]]:
        return [[batch.inputs.flatten().tolist() for batch in microbatches] for microbatches in batches]

    assert all_of(_batches(100, 1, 2, 2, workers=2)) == all_of(_batches(100, 1, 2, 2))


class _ReadBy(Windows):
    """Its samples are the processes that read them."""

    def __getitems__(self, indices: Any) -> Any:
        inputs, targets = super().__getitems__(indices)
        return torch.full_like(inputs, os.getpid()), targets


def test_a_step_in_which_nothing_is_learned_has_a_loss_and_gradients_of_zero() -> None:
    """Documents of one token have no target, and a whole batch may be of such."""
    ones = Documents(numpy.zeros(33, dtype=numpy.uint8), numpy.arange(1, 34), 8, apart=True)
    batches = Batches(ones, global_batch=2, accumulation=1, seed=1, rank=0, world_size=1, device=CPU)
    found = [batch for microbatches in batches for batch in microbatches]
    assert [batch.target_count for batch in found] == [1, 1]
    logits = torch.randn(2, 8, 5, requires_grad=True)
    loss = llama.loss(logits, found[0].targets) / found[0].target_count
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_loader_processes_survive_an_epoch_and_end_with_the_batches() -> None:
    batches = Batches(
        _ReadBy(torch.arange(49), seq_len=1), global_batch=12, accumulation=1, seed=1, rank=0, world_size=1,
        device=CPU, workers=2,
    )  # fmt: skip
    before = torch.get_rng_state()
    readers = []
    for _ in range(2):
        readers.append({batch.inputs[0].item() for microbatches in batches for batch in microbatches})
        batches.next_epoch()
    assert readers[0] == readers[1]
    assert len(readers[0]) == 2
    assert os.getpid() not in readers[0]
    # A loader that drew from it would give a resumed run, which starts another one, other dropout.
    assert torch.equal(torch.get_rng_state(), before)
    next(next(iter(batches)))  # left in the middle of an epoch
    gc.disable()
    try:
        gone = weakref.ref(batches)
        del batches
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_were_left_in_an_epoch_go_on_from_any_place(workers: int) -> None:
    def rest(batches: Batches, epoch: int, position: int) -> list[list[int]]:
        batches.load_state_dict({"epoch": epoch, "position": position, "seed": 1, "size": 100})
        return [b.inputs.flatten().tolist() for microbatches in batches for b in microbatches]

    batches = _batches(100, 0, 2, 2, workers=workers)
    for index, microbatches in enumerate(batches):
        list(microbatches)
        if index == 1:
            break  # workers have read ahead
    for epoch, position in ((3, 36), (0, 0), (0, 96), (0, 100)):
        expected = [
            part.tolist()
            for batch in sampler.global_batches(sampler.epoch_order(100, 1, epoch), 12, position)
            for part in sampler.microbatches(batch, 0, 2, 2)
        ]
        assert rest(batches, epoch, position) == expected


def test_an_epoch_is_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = sampler.microbatches

    def counted(batch: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
        asked.append(len(batch))
        return real(batch, *sizes)

    monkeypatch.setattr(sampler, "microbatches", counted)
    for microbatches in _batches(10**6, 0, 1, 1):
        list(microbatches)
        if len(asked) > 1:
            break
    assert asked == [12, 12]


@given(st.integers(0, 60), worlds, st.integers(1, 4))
def test_sizes_of_microbatches_are_known_without_them(samples: int, world_size: int, accumulation: int) -> None:
    for rank in range(world_size):
        parts = sampler.microbatches(torch.arange(samples), rank, world_size, accumulation)
        assert sampler.microbatch_sizes(samples, rank, world_size, accumulation) == [len(part) for part in parts]


def test_the_order_of_an_epoch_is_that_of_64_bit_numbers() -> None:
    order = sampler.epoch_order(100_003, seed=1, epoch=2)
    generator = torch.Generator().manual_seed(1_000_005)
    assert order.dtype == torch.int32
    assert torch.equal(order.long(), torch.randperm(100_003, generator=generator))


def test_data_is_read_only_when_a_microbatch_is_asked_for() -> None:
    batches = _batches(24, 0, 1, 2)
    microbatches = next(iter(batches))
    assert batches.position == 0
    next(microbatches)
    assert batches.position == 0, "half a step is not done"
    next(microbatches)
    assert batches.position == 12


@given(sizes, st.integers(1, 50), worlds)
@settings(max_examples=30, deadline=None)
def test_evaluation_sees_every_sample_once_in_batches_that_do_not_depend_on_ranks(
    size: int, batch_size: int, world_size: int
) -> None:
    def batches(rank: int, world_size: int) -> list[list[int]]:
        loaded = list(evaluation_batches(_split(size), batch_size, rank, world_size, CPU))
        return [batch.inputs.flatten().tolist() if batch.valid else [] for batch in loaded]

    alone = batches(0, 1)
    assert list(itertools.chain(*alone)) == list(range(size))
    ranks = [batches(rank, world_size) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1, "ranks would wait for each other"
    assert sorted(batch for rank in ranks for batch in rank if batch) == sorted(alone)
