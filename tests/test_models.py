"""Models: built on meta, completely initialised, and the same on any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import models
from fsdp2.config import Config, parse
from fsdp2.models.initial import fill_for, normal, ones, reset_parameters, zeros
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.meta import check_initialised, poison
from fsdp2.parallelize import parallelize
from tests.harness import Ranks, main_in_ranks, make_engine, small

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", models.NAMES)
def test_every_tensor_of_every_size_has_an_initial_value(name: str) -> None:
    spec = models.get(name)
    assert (spec.name, "tiny" in spec.sizes or "debug" in spec.sizes) == (name, True), "tests need a size that is small"
    for size in spec.sizes:
        with torch.device("meta"):
            model = spec.build(size)
        tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        assert all(tensor.is_meta for tensor in tensors.values())
        for tensor_name in tensors:
            fill_for(spec.initial_values, tensor_name)
        assert len(spec.blocks(model)) > 1


@pytest.mark.parametrize("name", models.NAMES)
def test_a_loss_is_a_sum_over_targets(name: str) -> None:
    """The loop divides it by the targets of all ranks and microbatches, so a mean would count small ones as large."""
    spec, generator = models.get(name), torch.Generator().manual_seed(0)
    sequence = (6,) if spec.kind == "language" else ()
    logits = torch.randn(5, *sequence, 10, dtype=torch.float64, generator=generator)
    targets = torch.randint(10, (5, *sequence), generator=generator)
    whole, parts = spec.loss(logits, targets), [spec.loss(logits[rows], targets[rows]) for rows in ([0], [1, 2, 3, 4])]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)  # sums in another order


def test_the_seed_sizes_are_the_seeds_models() -> None:
    counts = {}
    for name in ("vit", "cnn", "transformer"):
        with torch.device("meta"):
            counts[name] = sum(p.numel() for p in models.get(name).build("seed").parameters())
    # The ViT of the Ray Train tutorials, the network of the MNIST example and the guide's transformer.
    assert counts == {"vit": 1_006_090, "cnn": 1_199_882, "transformer": 17_343_248}


@pytest.mark.parametrize("name", ["vit", "cnn", "transformer"])
def test_initial_values_have_the_scale_of_torchs_own(name: str) -> None:
    spec = models.get(name)
    own, ours = spec.build("seed"), spec.build("seed")
    reset_parameters(ours, spec.initial_values, seed=1)
    for (tensor_name, theirs), mine in zip(own.named_parameters(), ours.parameters(), strict=True):
        if tensor_name.endswith("bias") or theirs.numel() < 1000:
            continue  # biases are zero here; small tensors scatter
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.1), tensor_name


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    spec = models.get("vit")
    first, again, other = (spec.build("tiny") for _ in range(3))
    for model, seed in ((first, 1), (again, 1), (other, 2)):
        torch.manual_seed(seed * 99)  # the global generator plays no part
        reset_parameters(model, spec.initial_values, seed)
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.std() > 0 and "ln" not in name:
            assert not torch.equal(a, c)
    layers = [block.self_attention.in_proj_weight for block in spec.blocks(first)]  # type: ignore[union-attr]
    assert not torch.equal(layers[0], layers[1])  # type: ignore[arg-type]


def _full_model(strategy: str, name: str) -> dict[str, Tensor]:
    size = "tiny" if "tiny" in models.get(name).sizes else "debug"
    engine = make_engine(f"--model={name} --model-size={size} --strategy={strategy}")
    state = engine.model.state_dict()
    full = {k.removeprefix("module."): v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    return {k: v.detach().clone() for k, v in full.items()} if dist.get_rank() == 0 else {}


@pytest.mark.parametrize("name", models.NAMES)
def test_the_same_model_on_any_number_of_ranks(ranks: Ranks, name: str) -> None:
    alone = ranks.run(_full_model, "none", name, ranks=1)[0]
    assert alone
    for world_size in (1, 2, 3, 4):
        sharded = ranks.run(_full_model, "fsdp2", name, ranks=world_size)[0]
        assert sharded.keys() == alone.keys()
        assert all(torch.equal(sharded[key], alone[key]) for key in alone)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_the_same_model_for_every_strategy(ranks: Ranks, strategy: str) -> None:
    alone = ranks.run(_full_model, "none", "vit", ranks=1)[0]
    other = ranks.run(_full_model, strategy, "vit", ranks=2)[0]
    assert other.keys() == alone.keys()
    assert all(torch.equal(other[key], alone[key]) for key in alone)


@pytest.mark.slow
def test_the_same_model_on_eight_ranks(tmp_path: Path) -> None:
    eight = Ranks(tmp_path)
    try:
        alone = eight.run(_full_model, "none", "vit", ranks=1)[0]
        sharded = eight.run(_full_model, "fsdp2", "vit", ranks=8, timeout=280)[0]
    finally:
        eight.close()
    assert all(torch.equal(sharded[key], alone[key]) for key in alone)


class WithBuffers(nn.Module):
    """Buffers that a state dict has, and that it hasn't: both hold garbage after to_empty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("positions", torch.arange(3.0), persistent=False)


TABLE = {"*.weight": normal(1.0), "*.bias": zeros, "kept": ones, "positions": ones}


def _initialise(table: dict[str, object]) -> nn.Module:
    with torch.device("meta"):
        model = WithBuffers()
    model.to_empty(device="cpu")
    poison(model)
    reset_parameters(model, table, seed=1)  # type: ignore[arg-type]
    return model


def test_buffers_are_initialised_too() -> None:
    model = _initialise(dict(TABLE))
    check_initialised(model)
    assert torch.equal(model.get_buffer("positions"), torch.ones(3))


def everything(name: str) -> bool:
    return True


def test_what_no_checkpoint_holds_is_set_on_resume_too() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    model.to_empty(device="cpu")
    poison(model)
    with pytest.raises(RuntimeError, match="1 of 1 tensors were not initialised: positions"):
        check_initialised(model, brought=everything)
    reset_parameters(model, TABLE, seed=1, brought=everything)
    check_initialised(model, brought=everything)
    assert torch.equal(model.get_buffer("positions"), torch.ones(3))
    assert model.inner.weight.isnan().all()  # a checkpoint brings it
    assert model.get_buffer("kept").isnan().all()


@pytest.mark.parametrize("missing", ["*.bias", "kept", "positions"])
def test_a_tensor_that_the_table_forgets_is_an_error(missing: str) -> None:
    with pytest.raises(KeyError, match="no entry in"):
        _initialise({pattern: fill for pattern, fill in TABLE.items() if pattern != missing})


def test_what_is_left_unset_or_on_meta_is_named() -> None:
    with torch.device("meta"):
        model = WithBuffers()
    with pytest.raises(RuntimeError, match=r"4 tensors were left on meta: inner\.weight"):
        check_initialised(model)
    model.to_empty(device="cpu")
    poison(model)
    nn.init.ones_(model.inner.weight)
    model.get_buffer("kept").fill_(1)
    with pytest.raises(RuntimeError, match=r"2 of 4 tensors were not initialised: inner\.bias, positions"):
        check_initialised(model)


def _forgetful(world_size: int) -> str:
    """Weights that are only half set, on a sharded model."""
    spec = models.get("vit")

    def set_some(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if "mlp" not in name:
                nn.init.zeros_(parameter)

    try:
        parallelize(
            Config(model_size="tiny"), build=lambda: spec.on_meta("tiny"), blocks_of=spec.blocks,
            set_weights=set_some, device=CPU, world_size=world_size,
        )  # fmt: skip
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_a_sharded_model_is_checked_at_run_time(ranks: Ranks) -> None:
    for message in ranks.run(_forgetful, 2):
        assert "8 of 32 tensors were not initialised" in message
        assert "encoder.layers.encoder_layer_0.mlp.0.weight" in message


def _described_after_a_run(line: list[str]) -> tuple[Any, ...]:
    config = parse(line)
    made = config.spec.described(config.model_size)
    main_in_ranks(line)
    assert config.spec.described(config.model_size) is made
    return tuple(
        [(name, one.shape, one.requires_grad, one.is_meta) for name, one in model.named_parameters()]
        for model in (made, config.spec.on_meta(config.model_size))
    )


def test_a_run_changes_nothing_of_what_describes_its_model(ranks: Ranks, tmp_path: Path) -> None:
    for described, fresh in ranks.run(
        _described_after_a_run, small(tmp_path / "run", "--freeze=heads*", "--max-steps=1")
    ):
        assert described == fresh


def test_a_tied_weight_is_frozen_by_the_name_that_it_has() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(ValueError, match=r"head\.weight is tied to embedding\.weight; name that, which freezes both"):
        freeze(model, ["head.weight"])
    freeze(model, ["embedding*"])
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["head.bias"]
