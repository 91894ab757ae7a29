"""Sharding flags decide placements, dtypes and groups, and --inspect notices where they don't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp2 import models
from fsdp2.config import parse
from fsdp2.models import transformer
from fsdp2.models.initial import reset_parameters
from fsdp2.parallel import fully_sharded, precision
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.inspect import check_dtypes, check_sharded
from fsdp2.parallel.mesh import make_mesh
from fsdp2.parallel.shards import summary
from tests.harness import Ranks, loss_of
from tests.harness import make_engine as make

Train = Callable[..., list[tuple[str, dict[str, Any]]]]


def _early_optimizer() -> list[bool]:
    model = nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard(model)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    changed = []
    for optimizer in (early, late):
        before = [parameter.to_local().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        after = [parameter.to_local() for parameter in model.parameters()]  # type: ignore[attr-defined]
        changed.append(any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)))
    return changed


def test_an_optimizer_made_before_sharding_updates_nothing(ranks: Ranks) -> None:
    """What docs/troubleshooting.md says of it, and nothing tells."""
    assert ranks.run(_early_optimizer) == [[False, True]] * 2


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
    assert fully_sharded.offload_policy(True, "cpu") == CPUOffloadPolicy(pin_memory=False)
    assert fully_sharded.offload_policy(True, "cuda") == CPUOffloadPolicy(pin_memory=True)
    assert not isinstance(fully_sharded.offload_policy(False, "cuda"), CPUOffloadPolicy)


def _offloaded() -> list[str]:
    taken: list[str] = []
    real = fully_sharded.fully_shard

    def spy(module: Any, **settings: Any) -> Any:
        taken.append(repr(settings["offload_policy"]))
        return real(module, **settings)

    fully_sharded.fully_shard = spy
    try:
        make("--cpu-offload")
    finally:
        fully_sharded.fully_shard = real
    return taken


def test_offload_reaches_every_group(ranks: Ranks) -> None:
    assert ranks.run(_offloaded)[0] == [repr(CPUOffloadPolicy(pin_memory=False))] * 3


def test_groups_hold_every_block_once() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(5)]
    model = nn.ModuleList(blocks)
    assert [len(group) for group in shard_groups(model, blocks, 2)] == [2, 2, 1]
    assert shard_groups(model, blocks, "root") == []
    layers = shard_groups(model, blocks, "layer")
    assert len(layers) == 10
    assert all(isinstance(group[0], nn.Linear) for group in layers)


def test_attention_is_one_layer_because_it_reads_its_childs_weight() -> None:
    attention = nn.MultiheadAttention(4, 2)
    block = nn.Sequential(nn.LayerNorm(4), attention)
    assert shard_groups(nn.Sequential(block), [block], "layer")[1] == [attention]


def test_an_embedding_and_a_head_of_a_blocks_size_are_groups_of_their_own() -> None:
    spec = models.get("transformer")
    with torch.device("meta"):
        model = spec.build("seed")
        assert isinstance(model, transformer.Transformer)
        blocks = spec.blocks(model)
        assert shard_groups(model, blocks, 3) == [[model.tok_embeddings], list(blocks), [model.output]]
        assert len(shard_groups(model, blocks, "layer")) == 2 + 3 * 5
        assert shard_groups(model, blocks, "root") == []
        # A smaller one isn't worth a collective of its own, and a tied one is needed at both ends of the model.
        small, vit = spec.build("debug"), models.get("vit")
        image = vit.build("tiny")
        assert shard_groups(small, spec.blocks(small), 1) == [[block] for block in spec.blocks(small)]
        assert len(shard_groups(image, vit.blocks(image), 1)) == 2
        model.output.weight = model.tok_embeddings.weight
        assert shard_groups(model, blocks, 1) == [[block] for block in blocks]


def _large_layers(tied: bool) -> dict[str, Any]:
    """What stays gathered while the blocks compute, and the losses of three steps, by granularity."""
    spec = models.get("transformer")
    found: dict[str, Any] = {}
    for granularity in (1, "root"):
        model = transformer.Transformer(vocab_size=300, dim=16, num_layers=2)
        reset_parameters(model, spec.initial_values, 1)
        if tied:
            model.output.weight = model.tok_embeddings.weight
        groups = shard_groups(model, list(model.layers), granularity)
        settings: dict[str, Any] = {"mesh": make_mesh("cpu", 2), "precision": precision.fsdp2_policy(None, "fp32")}
        fully_sharded.shard(
            model, groups, **settings, offload=fully_sharded.offload_policy(False, "cpu"), reshard_after_forward=None
        )
        # Embedding, two blocks and the head leave the root of this model nothing.
        assert f", {4 if (granularity, tied) == (1, False) else len(groups) + 1} groups, " in summary(model)
        gathered: set[str] = set()
        model.layers[1].register_forward_pre_hook(
            lambda module, args, model=model, gathered=gathered: gathered.update(
                name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)
            )
        )
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        tokens = torch.arange(24).view(2, 12) + dist.get_rank()
        for _ in range(3):
            loss = spec.loss(model(tokens), tokens + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        found[str(granularity)] = (len(groups), gathered, losses)
    return found


def test_large_layers_are_not_gathered_while_blocks_compute(ranks: Ranks) -> None:
    ends = {"tok_embeddings.weight", "output.weight", "output.bias"}
    for found in ranks.run(_large_layers, False):
        (count, gathered, losses), (_, everything, expected) = found["1"], found["root"]
        assert count == 4
        assert gathered
        assert not gathered & ends
        assert ends <= everything
        assert losses == expected
        assert losses[-1] != losses[0]
    for found in ranks.run(_large_layers, True):
        assert found["1"][0] == 2
        assert found["1"][2] == found["root"][2]


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


def _after_evaluation(flags: str) -> list[int]:
    """On how many ranks each parameter is after an evaluation; 1 if this rank has it whole."""
    engine = make(flags)
    with engine.evaluating():
        loss_of(engine)
    found = list(engine.model.parameters())
    return [one.device_mesh.size() if isinstance(one, DTensor) else 1 for one in found]


@pytest.mark.parametrize("flags", ["", "--reshard-after-forward=2", "--reshard-after-forward=false"])
def test_after_an_evaluation_only_shards_are_left(ranks: Ranks, flags: str) -> None:
    for found in ranks.run(_after_evaluation, flags, ranks=4):
        assert set(found) == {4}
