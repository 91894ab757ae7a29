"""Tensor parallelism of the models beside `llama`, and of a folder's: against one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.config import Config, parse
from fsdp2.models import get
from fsdp2.models.initial import reset_parameters
from fsdp2.options.errors import ConfigError
from fsdp2.parallelize import parallelize
from fsdp2.run.process.runtime import World
from tests.harness import Ranks, full_files, losses, of_kind, relative, same
from tests.test_dimensions import QUICK, SAME, SUMS, apart, trained

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

STEPS = ["--global-batch-size=12", "--optimizer=sgd", "--clip-grad-norm=0.05", "--test-batch-size=64"]
MODELS = {
    "vit": ["--model=vit", "--model-size=tiny", "--dataset=digits", "--lr=0.5"],
    "transformer": ["--model=transformer", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--lr=0.5"],
}


@pytest.fixture(autouse=True)
def _new_processes(ranks: Ranks) -> Iterator[None]:
    """torch keeps what it has made of a mesh for the life of a process, and an equal mesh of other groups finds it."""
    yield
    ranks.close()


def _batch(name: str) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    if name == "vit":
        return torch.randn(6, 1, 28, 28, generator=draw), torch.randint(10, (6,), generator=draw)
    targets = torch.randint(256, (6, 16), generator=draw)
    targets[0, :5] = -100
    return torch.randint(256, (6, 16), generator=draw), targets


@torch.no_grad()
def _moved(model: Any) -> None:
    """Numbers in what begins with zeros and ones, which hide errors: a bias that counts twice is 0 once, too."""
    for name, parameter in model.named_parameters():
        whole = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        if isinstance(parameter, DTensor):
            whole = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter += whole


def _gradients(name: str, size: str, tp: int) -> dict[str, float]:
    """How far each parameter's gradient is from the whole model's on all samples, which torch alone computes."""
    torch.set_num_threads(1)
    spec, (inputs, targets) = get(name), _batch(name)
    alone = spec.make(**spec.sizes[size])
    reset_parameters(alone, spec.initial_values, 1)
    _moved(alone)
    logits = alone(inputs)
    F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.flatten(), reduction="sum").backward()

    config = Config(model=name, model_size=size, tp=tp, optimizer="sgd")
    world = dist.get_world_size()
    engine = parallelize(
        config,
        build=lambda: spec.on_meta(size),
        blocks_of=spec.blocks,
        set_weights=lambda model: reset_parameters(model, spec.initial_values, 1),
        device=torch.device("cpu"),
        world_size=world,
        splits=spec.splits,
    )
    _moved(engine.model)
    share = World(dist.get_rank(), world, 0, 1).share(tp)
    mine = slice(*[6 * number // share.of for number in (share.index, share.index + 1)])
    with engine.losses():
        loss = spec.loss(spec.call(engine.model, SimpleNamespace(inputs=inputs[mine])), targets[mine])
        engine.backward(loss * share.of, last_microbatch=True)
    found = {}
    for (own, parameter), theirs in zip(engine.model.named_parameters(), alone.parameters(), strict=True):
        gradient, wanted = parameter.grad, theirs.grad
        assert isinstance(gradient, DTensor)
        assert wanted is not None
        found[own] = float((gradient.full_tensor() - wanted).abs().max() / wanted.abs().max())
    return found


@pytest.mark.parametrize(("name", "size"), [("vit", "tiny"), ("transformer", "debug")])
@pytest.mark.parametrize(("tp", "count"), [(2, 2), (2, 4), (4, 4)])
def test_each_gradient_is_that_of_the_whole_model(ranks: Ranks, name: str, size: str, tp: int, count: int) -> None:
    for found in ranks.run(_gradients, name, size, tp, ranks=count):
        assert len(found) == len(list(get(name).described(size).parameters()))
        assert max(found.values()) < SUMS, found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--tp=2", 2),
        ("--tp=2 --replicas=2 --grad-accumulation=3 --activation-checkpointing=block", 4),
        ("--tp=2 --shard-granularity=layer --ema=0.9 --freeze=*norm1.* --freeze=*ln_1.* --cpu-offload --inspect", 4),
    ],
)
def test_a_run_is_that_of_one_process(train: Train, tmp_path: Path, name: str, flags: str, count: int) -> None:
    words = [one for one in flags.split() if not one.startswith(f"--freeze=*{'ln' if name != 'vit' else 'norm'}")]
    alone = [word for word in words if not word.startswith(SAME) and word != "--inspect"]
    theirs = train(*MODELS[name], *STEPS, *QUICK, *alone, n=1, run="one")
    ours = train(*MODELS[name], *STEPS, *QUICK, *words, n=count)
    assert losses(ours)[-1] != losses(ours)[0]
    assert relative(losses(ours), losses(theirs)) < SUMS
    norms, wanted = ([event["grad_norm"] for event in of_kind(events, "train")] for events in (ours, theirs))
    assert relative(norms, wanted) < SUMS
    assert of_kind(ours, "eval")[-1]["accuracy"] == of_kind(theirs, "eval")[-1]["accuracy"]
    assert apart(trained(tmp_path / "run"), trained(tmp_path / "one")) < SUMS


@pytest.mark.parametrize("name", MODELS)
def test_a_run_goes_on_bit_for_bit_and_on_one_rank(train: Train, tmp_path: Path, name: str) -> None:
    flags = [*MODELS[name], "--lr=0.01", "--checkpoint-every=3", "--tp=2"]
    whole = losses(train(*flags, n=4, run="whole"))
    train(*flags, n=4, steps=3)
    rest = train(*flags, n=4)
    assert losses(rest) == whole[3:]
    before = full_files(tmp_path / "run")
    assert same(before, full_files(tmp_path / "whole"))
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    train(*flags, "--tp=1", n=1)
    assert same(full_files(tmp_path / "run"), before)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--model=vit --model-size=tiny --tp=3", "doesn't divide mlp_dim 64; use --tp 2, 4, 8"),
        ("--model=transformer --tp=3", "doesn't divide dim 64, vocab_size 256, --seq-len"),
        ("--model=cnn --tp=2", "it has no plan for splitting its layers"),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(flags.split())
