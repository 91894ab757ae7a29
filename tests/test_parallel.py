"""Each sharding flag changes what it claims: placements, dtypes, groups, collectives and their order."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import models
from fsdp2.config import parse
from fsdp2.models.initial import reset_parameters
from fsdp2.parallel import fsdp2 as fsdp2_engine
from fsdp2.parallel import precision
from fsdp2.parallel.engine import Engine
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.inspect import check_dtypes, check_sharded, groups_of
from fsdp2.parallel.optimizer import make_optimizer
from fsdp2.parallelize import parallelize
from tests.harness import Ranks

CPU = torch.device("cpu")
Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def make(flags: str) -> Engine:
    config = parse(["--model-size=tiny", *flags.split()])
    spec = models.get(config.model)
    return parallelize(
        config,
        build=lambda: spec.build(config.model_size),
        blocks_of=spec.blocks,
        set_weights=lambda model: reset_parameters(model, spec.initial_values, config.seed),
        device=CPU,
        world_size=dist.get_world_size(),
    )


def batch(last: bool = True) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return SimpleNamespace(inputs=torch.randn(4, 1, 28, 28, generator=generator), last=last)


def loss_of(engine: Engine, last: bool = True) -> Tensor:
    return nn.functional.cross_entropy(engine.forward(batch(last)).float(), torch.arange(4))


def counts(body: Callable[[], Any]) -> dict[str, int]:
    """Collectives that `body` issues, by name."""
    with CommDebugMode() as mode:
        body()
    names = {"_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "allreduce_": "all-reduce"}
    found: dict[str, int] = {}
    for op, count in mode.get_comm_counts().items():
        name = str(op).rpartition(".")[2]
        found[names.get(name, name)] = count
    return found


# --- collectives --------------------------------------------------------------------------------------


def _collectives(flags: str) -> dict[str, dict[str, int]]:
    engine = make(flags)
    kept: dict[str, Tensor] = {}

    def forward() -> None:
        kept["loss"] = loss_of(engine)

    return {
        "forward": counts(forward),
        "backward": counts(lambda: engine.backward(kept["loss"], True)),
        "state dict": counts(engine.model.state_dict),
    }


@pytest.mark.parametrize(
    ("flags", "groups", "gathered_again"),
    [
        ("", 3, 2),  # two blocks and the root; torch's rule keeps the root gathered
        ("--reshard-after-forward=true", 3, 3),
        ("--reshard-after-forward=false", 3, 0),
        ("--shard-granularity=2", 2, 1),
        ("--shard-granularity=root", 1, 0),
        ("--shard-granularity=layer", 11, 10),  # per block two norms, attention and two linear layers
    ],
)
def test_groups_and_reshard_policy_decide_the_collectives(
    ranks: Ranks, flags: str, groups: int, gathered_again: int
) -> None:
    for result in ranks.run(_collectives, flags):
        assert result["forward"] == {"all-gather": groups}
        again = {"all-gather": gathered_again} if gathered_again else {}
        assert result["backward"] == {**again, "reduce-scatter": groups}
        assert result["state dict"] == {}, "a sharded state dict needs no communication"


def _accumulation(flags: str) -> list[dict[str, int]]:
    engine = make(flags)

    def microbatch(last: bool) -> dict[str, int]:
        return counts(lambda: engine.backward(loss_of(engine, last), last))

    return [microbatch(last) for last in (False, False, True)]


@pytest.mark.parametrize(
    ("flags", "name", "last"),
    [("", "reduce-scatter", 3), ("--strategy=fsdp1", "reduce-scatter", 3), ("--strategy=ddp", "all-reduce", 1)],
)
def test_accumulation_exchanges_gradients_once_a_step(ranks: Ranks, flags: str, name: str, last: int) -> None:
    for microbatches in ranks.run(_accumulation, flags):
        assert [counted.get(name, 0) for counted in microbatches] == [0, 0, last]


def _sync_after_an_error() -> int:
    engine = make("")
    loss = loss_of(engine, last=False)
    loss.register_hook(_explode)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss, last_microbatch=False)
    groups_of(engine.model)[0].reshard()
    engine = make("")
    engine.backward(loss_of(engine, last=False), last_microbatch=False)
    return counts(lambda: nn.functional.cross_entropy(engine.model(batch().inputs), torch.arange(4)).backward())[
        "reduce-scatter"
    ]


def _explode(gradient: Tensor) -> None:
    raise ZeroDivisionError


def test_a_microbatch_leaves_gradient_exchange_on(ranks: Ranks) -> None:
    # A backward outside of the engine, after one that didn't exchange: it must exchange again.
    assert ranks.run(_sync_after_an_error) == [3, 3]


class Record(TorchDispatchMode):
    """Notes the all-gathers as they are issued, between marks that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


def _note(events: list[str], event: str, module: nn.Module, inputs: Any) -> None:
    events.append(event)


def _order(flags: str) -> list[str]:
    engine = make(flags)
    blocks = models.get("vit").blocks(engine.model)
    with Record() as record:
        for index, block in enumerate(blocks):
            # After FSDP's own hooks, which were registered first.
            block.register_forward_pre_hook(partial(_note, record.events, f"forward {index}"))
            block.register_full_backward_pre_hook(partial(_note, record.events, f"backward {index}"))
        engine.begin_step()
        record.events.append("data")
        engine.backward(loss_of(engine), True)
    return record.events


def test_prefetch_moves_all_gathers_forward(ranks: Ranks) -> None:
    implicit = ranks.run(_order, "--reshard-after-forward=true")[0]
    assert implicit[:6] == ["data", "gather", "gather", "forward 0", "gather", "forward 1"]
    explicit = ranks.run(_order, "--reshard-after-forward=true --explicit-prefetching=1")[0]
    # The root before the data is there; with block 0 also block 1.
    assert explicit[:6] == ["gather", "data", "gather", "gather", "forward 0", "forward 1"]
    assert implicit.count("gather") == explicit.count("gather") == 6


def test_backward_prefetch_alone_leaves_forward_as_it_was(ranks: Ranks) -> None:
    flags = "--reshard-after-forward=true --model-size=seed --shard-granularity=1"
    backward = ranks.run(_order, f"{flags} --backward-prefetch=3", timeout=200)[0]
    plain = ranks.run(_order, flags, timeout=200)[0]
    early = backward.index("gather") < backward.index("data")
    assert early, "any explicit prefetch gathers the root early"
    forward_part = [event for event in backward[: backward.index("backward 9")] if event != "data"]
    plain_part = [event for event in plain[: plain.index("backward 9")] if event != "data"]
    assert [e for e in forward_part if e.startswith("f")] == [e for e in plain_part if e.startswith("f")]
    # At the first backward of a block, three groups ahead of it have been asked for.
    gathers = backward[backward.index("forward 9") : backward.index("backward 8")].count("gather")
    assert gathers > plain[plain.index("forward 9") : plain.index("backward 8")].count("gather")


# --- placements, dtypes and groups ----------------------------------------------------------------------


def _placements(flags: str) -> dict[str, Any]:
    engine = make(flags)
    parameters = dict(engine.model.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    return {
        "placements": {str(parameter.placements) for parameter in parameters.values()},  # type: ignore[attr-defined]
        "mesh": parameters["conv_proj.weight"].device_mesh.mesh.tolist(),  # type: ignore[attr-defined]
        "local": tuple(parameters["conv_proj.weight"].to_local().shape),  # type: ignore[attr-defined]
        "class": [type(engine.model).__name__, isinstance(engine.model, FSDPModule)],
    }


def test_one_dimensional_sharding(ranks: Ranks) -> None:
    for result in ranks.run(_placements, ""):
        assert result["placements"] == {str((Shard(0),))}
        assert result["local"] == (16, 1, 7, 7)
        assert result["class"] == ["FSDPVisionTransformer", True]


def test_hsdp_replicates_and_shards(ranks: Ranks) -> None:
    for result in ranks.run(_placements, "--replicas=2", ranks=4):
        assert result["placements"] == {str((Replicate(), Shard(0)))}
        assert result["mesh"] == [[0, 1], [2, 3]]
        assert result["local"] == (16, 1, 7, 7)


def test_hsdp_all_reduces_between_replicas(ranks: Ranks) -> None:
    for result in ranks.run(_collectives, "--replicas=2", ranks=4):
        assert result["backward"]["all-reduce"] == 3
        assert result["backward"]["reduce-scatter"] == 3


def _dtypes(flags: str) -> dict[str, Any]:
    engine = make(flags)
    dtype = parse(flags.split()).mixed_precision
    found = check_dtypes(engine.model, precision.DTYPES[dtype] if dtype else None)
    seen: dict[str, torch.dtype] = {}
    block = models.get("vit").blocks(engine.model)[0]
    block.register_forward_pre_hook(lambda module, args: seen.update(activation=args[0].dtype))
    engine.backward(loss_of(engine), True)
    gradients = {p.grad.dtype for p in engine.model.parameters() if p.grad is not None}
    return {"dtypes": set(found.values()), "gradients": gradients, **seen}


@pytest.mark.parametrize(
    ("flags", "compute"),
    [("", torch.float32), ("--mixed-precision", torch.bfloat16), ("--mixed-precision=fp16", torch.float16)],
)
def test_precision_changes_what_is_gathered_and_not_what_is_kept(
    ranks: Ranks, flags: str, compute: torch.dtype
) -> None:
    for result in ranks.run(_dtypes, flags):
        assert result["dtypes"] == {(torch.float32, compute)}
        assert result["activation"] == compute
        assert result["gradients"] == {torch.float32}


def test_reduce_dtype_is_always_set() -> None:
    assert precision.fsdp2_policy(None, "fp32").reduce_dtype == torch.float32
    assert precision.fsdp2_policy("bf16", "bf16").reduce_dtype == torch.bfloat16
    assert precision.fsdp2_policy("bf16", "fp32").param_dtype == torch.bfloat16


def test_offload_pins_only_for_a_gpu() -> None:
    assert fsdp2_engine.offload_policy(True, "cpu") == CPUOffloadPolicy(pin_memory=False)
    assert fsdp2_engine.offload_policy(True, "cuda") == CPUOffloadPolicy(pin_memory=True)
    assert not isinstance(fsdp2_engine.offload_policy(False, "cuda"), CPUOffloadPolicy)


def _offloaded() -> list[str]:
    taken: list[str] = []
    real = fsdp2_engine.fully_shard

    def spy(module: Any, **settings: Any) -> Any:
        taken.append(repr(settings["offload_policy"]))
        return real(module, **settings)

    fsdp2_engine.fully_shard = spy
    try:
        make("--cpu-offload")
    finally:
        fsdp2_engine.fully_shard = real
    return taken


def test_offload_reaches_every_group(ranks: Ranks) -> None:
    assert ranks.run(_offloaded)[0] == [repr(CPUOffloadPolicy(pin_memory=False))] * 3


def test_groups_hold_every_block_once() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(5)]
    assert [len(group) for group in shard_groups(blocks, 2)] == [2, 2, 1]
    assert shard_groups(blocks, "root") == []
    layers = shard_groups(blocks, "layer")
    assert len(layers) == 10
    assert all(isinstance(group[0], nn.Linear) for group in layers)


def test_attention_is_one_layer_because_it_reads_its_childs_weight() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert shard_groups([nn.Sequential(nn.LayerNorm(4), attention)], "layer")[1] == [attention]


def _inspection_catches() -> list[str]:
    plain = nn.Linear(2, 2)
    engine = make("")
    messages = []
    for model, plain_type, placements in (
        (plain, nn.Linear, (Shard(0),)),
        (engine.model, nn.Linear, (Shard(0),)),
        (engine.model, nn.Module, (Replicate(), Shard(0))),
    ):
        try:
            check_sharded(model, plain_type, placements)
        except RuntimeError as error:
            messages.append(str(error))
    try:
        check_dtypes(engine.model, torch.bfloat16)
    except RuntimeError as error:
        messages.append(str(error))
    return messages


def test_inspection_fails_on_what_is_not_so(ranks: Ranks) -> None:
    messages = ranks.run(_inspection_catches)[0]
    assert len(messages) == 4
    assert "not both an FSDPModule and a Linear" in messages[0]
    assert "is placed (Shard(dim=0),) and not" in messages[2]
    assert "float32 gathered, not float32 and torch.bfloat16" in messages[3]


@pytest.mark.parametrize("flags", ["--inspect", "--inspect --mixed-precision", "--inspect --replicas=2"])
def test_inspect_trains_on_as_if_it_had_not_looked(train: Train, flags: str) -> None:
    plain = flags.replace("--inspect", "").split()
    n = 4 if "replicas" in flags else 2
    looked = [d["loss"] for kind, d in train(*flags.split(), run="looked", n=n, steps=2) if kind == "train"]
    assert looked == [d["loss"] for kind, d in train(*plain, run="plain", n=n, steps=2) if kind == "train"]


class Count(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] = self.found.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def _recomputed(flags: str) -> dict[str, int]:
    engine = make(flags)
    loss = loss_of(engine)
    with Count() as count:
        engine.backward(loss, True)
    return count.found


def test_activation_checkpointing_recomputes_blocks_or_only_what_is_cheap(ranks: Ranks) -> None:
    plain, block, op = (
        ranks.run(_recomputed, flags)[0]
        for flags in ("", "--activation-checkpointing", "--activation-checkpointing=op")
    )
    gelu, linear = "aten.gelu.default", "aten.addmm.default"
    assert [count.get(gelu, 0) for count in (plain, block, op)] == [0, 2, 2]
    assert plain.get(linear, 0) == op.get(linear, 0) == 0
    assert block[linear] > 0


# --- the optimizer, clipping and the gradient scaler -----------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "adadelta", "sgd"])
def test_optimizer_state_exists_at_step_zero_and_changes_nothing(name: str) -> None:
    def trained(materialised: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        before = layer.weight.detach().clone()
        optimizer = make_optimizer(name, layer.parameters(), lr=0.1)
        assert torch.equal(layer.weight, before)
        assert len(optimizer.state) == 2
        assert all(float(s["step"]) == 0 for s in optimizer.state.values() if "step" in s)
        assert layer.weight.grad is None
        if not materialised:
            optimizer.state.clear()
        for _ in range(3):
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return layer.weight.detach()

    assert torch.equal(trained(True), trained(False))


def _clipped(flags: str) -> tuple[float, float]:
    engine = make(flags)
    engine.backward(loss_of(engine), True)
    before = float(engine.clip(0.01))
    return before, float(engine.clip(None))


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--strategy=fsdp1", "--cpu-offload"])
def test_clipping_bounds_the_norm_on_every_rank(ranks: Ranks, flags: str) -> None:
    results = ranks.run(_clipped, flags)
    assert results[0] == results[1]
    before, after = results[0]
    assert before > 0.1
    assert after == pytest.approx(0.01, rel=1e-4)  # torch adds 1e-6 to the norm that it divides by


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _overflow_on_one_rank(flags: str) -> list[Any]:
    engine = make(flags)
    results: list[Any] = []
    for overflow in (True, False):
        before = [p.detach().clone() for p in engine.model.parameters()]
        loss = loss_of(engine)
        if overflow and dist.get_rank() == 1:
            loss = loss * math.inf
        engine.backward(loss, True)
        engine.clip(None)
        updated, scale = engine.step(), engine.scaler.get_scale()
        after = list(engine.model.parameters())
        unchanged = all(torch.equal(local(a), local(b)) for a, b in zip(before, after, strict=True))
        results.append((updated, scale, unchanged))
    return results


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "ddp"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Ranks, strategy: str) -> None:
    first, second = ranks.run(_overflow_on_one_rank, f"--mixed-precision=fp16 --strategy={strategy}")
    for skipped, done in (first, second):
        assert skipped == (False, 32768.0, True)
        assert done[:2] == (True, 32768.0)
    # The head starts at zero, so at first it alone has a gradient; with FSDP1 only one rank holds it.
    assert not (first[1][2] and second[1][2])


def test_a_skipped_step_is_in_the_metrics(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    events = train("--mixed-precision=fp16", "--optimizer=sgd", "--lr=900", steps=12)
    records = [data for kind, data in events if kind == "train"]
    assert all("loss_scale" in record for record in records)
    assert any(record["skipped"] for record in records), "a learning rate of 900 overflows fp16"


def _compiled() -> tuple[bool, list[float]]:
    engine = make("--compile --model=cnn")
    losses = []
    for _ in range(2):
        loss = loss_of(engine)
        engine.backward(loss, True)
        engine.step()
        losses.append(float(loss.detach()))
    compiled = [block._compiled_call_impl is not None for block in models.get("cnn").blocks(engine.model)]
    return all(compiled), losses


@pytest.mark.slow
def test_compile_each_block(ranks: Ranks) -> None:
    for compiled, losses in ranks.run(_compiled, timeout=280):
        assert compiled
        assert losses[1] != losses[0]
        assert all(map(math.isfinite, losses))
