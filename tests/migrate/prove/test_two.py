"""Two programs: the known causes, each shown on a pair, what has none, and what the rewriter makes of its scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from migration.prove.cli import text, two
from migration.prove.compare import DIFFERENT, EQUAL, FAULT, ROUNDING, Verdict
from tests.harness import Ranks
from tests.migrate.prove.in_pool import InPool
from tests.rewriter.test_scripts import OLD, SCRIPTS, moved

PAIR = Path(__file__).parent / "pair"


def proven(ranks: Ranks, folder: Path, case: str) -> Verdict:
    before, after = (InPool(PAIR / f"{name}.py", [case], 2, 60, pool=ranks) for name in ("before", "after"))
    verdict = two(before, after, 4, folder)
    print(text(verdict))
    return verdict


def fast_path_apart() -> float:
    """How far torch's fast path in evaluation is from its other one, in fp32 and one process."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval().requires_grad_(False)
    inputs, mask, found = torch.randn(4, 6), nn.Transformer.generate_square_subsequent_mask(4), []
    before = torch.backends.mha.get_fastpath_enabled()
    for enabled in (True, False):
        torch.backends.mha.set_fastpath_enabled(enabled)
        found.append(layer(inputs[None], mask, is_causal=True))
    torch.backends.mha.set_fastpath_enabled(before)
    return float((found[0] - found[1]).abs().max())


@pytest.mark.parametrize(
    ("case", "verdict", "cause"),
    [
        ("plain", EQUAL, None),
        ("restored", EQUAL, None),
        ("shared", ROUNDING, "several FSDPBlock get one input"),
        ("late-zero", FAULT, "SHARD_GRAD_OP with use_orig_params=True and zero_grad() between forward and backward"),
        ("no-seed", FAULT, "sets no seed on its ranks: each draws other weights"),
        ("hybrid", FAULT, "HYBRID_SHARD with shards of one rank never synchronises its replicas"),
        ("fast-path-in-fp32", FAULT, "TransformerEncoderLayer has a fast path in evaluation"),
        ("fast-path-in-bf16", FAULT, "TransformerEncoderLayer has a fast path in evaluation"),
        ("resumed", FAULT, "one tensor for both moments; without it bit-equal"),
        ("resumed-rate", DIFFERENT, None),
        ("loss-over-world", DIFFERENT, "passes to backward() is 0.5 times that of BEFORE: the number of ranks"),
        ("other-ranks", DIFFERENT, "all ranks together get the same samples, each other ones"),
        ("other-seed", DIFFERENT, "the ranks get other samples"),
        ("decay", DIFFERENT, "settings weight_decay of blocks.0.inner.bias: 0.01 before, 0.0 after"),
        ("model-zero", DIFFERENT, "model.zero_grad() between forward and backward doesn't reach parameters"),
        ("rate", DIFFERENT, None),
        ("low-loss", DIFFERENT, "AFTER's loss is of 16 bits, BEFORE's isn't: FSDP2's output_dtype"),
        ("low-buffers", DIFFERENT, "BEFORE's buffers are of 16 bits, AFTER's aren't (scale)"),
        ("lost-write", DIFFERENT, "a fault of FSDP1 (FC27): what is written after an evaluation is lost"),
        ("loss", DIFFERENT, None),
    ],
)
def test_the_cause_is_named(ranks: Ranks, tmp_path: Path, case: str, verdict: str, cause: str | None) -> None:
    if OLD and case.startswith("resumed"):
        pytest.skip("FSDP1 gathers to a CPU from torch 2.15 on")
    found = proven(ranks, tmp_path, case)
    if case == "fast-path-in-fp32" and found.verdict == ROUNDING:
        # On some processors both paths differ by roundings alone, as plain torch says; in bf16 they never do.
        assert fast_path_apart() <= 1e-6
        return
    assert found.verdict == verdict
    assert ("both moments" in (found.cause or "")) == (case == "resumed")
    assert cause is None or cause in f"{found.first and found.first.line()}; {found.cause}"
    assert found.status == (1 if verdict == DIFFERENT else 0)


WRAPPED = {
    "nothing": "nn.parallel.DistributedDataParallel(plain)",
    "fsdp1": 'FullyShardedDataParallel(plain, device_id=torch.device("cpu"))',
    "fsdp2": "fully_shard(plain)",
}
PLAIN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
plain = nn.Linear(4, 2)
model = WRAPPED
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(2, 4)).square().sum().backward()
optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("before", "after", "verdict", "lacks"),
    [
        (
            "nothing",
            "nothing",
            "bit-equal, and no move to FSDP2",
            ["BEFORE has no unit of FSDP1", "AFTER has no group"],
        ),
        ("fsdp1", "fsdp1", "bit-equal, and no move to FSDP2", ["AFTER has no group of FSDP2, but units of FSDP1"]),
        ("nothing", "fsdp1", "bit-equal, and no move to FSDP2", ["BEFORE has no unit", "of FSDP2, but units of FSDP1"]),
        ("fsdp1", "nothing", "bit-equal", ["AFTER has no group of FSDP2"]),
        ("nothing", "fsdp2", "bit-equal", ["BEFORE has no unit of FSDP1"]),
        ("fsdp1", "fsdp2", "bit-equal", []),
    ],
)
def test_a_proof_without_fsdp_is_none(
    ranks: Ranks, tmp_path: Path, before: str, after: str, verdict: str, lacks: list[str]
) -> None:
    """As of a script of accelerate that is started without the variables of its launcher."""
    programs = []
    for name, how in (("before", before), ("after", after)):
        (tmp_path / f"{name}.py").write_text(PLAIN.replace("WRAPPED", WRAPPED[how]))
        programs.append(InPool(tmp_path / f"{name}.py", [], 2, 60, pool=ranks))
    (tmp_path / "records").mkdir()
    found = two(programs[0], programs[1], 1, tmp_path / "records")
    assert (found.verdict, found.status) == (verdict, int(verdict != "bit-equal"))
    assert len(found.lacks) == len(lacks)
    assert all(words in line and f"note: {line}" in text(found) for words, line in zip(lacks, found.lacks, strict=True))


# The others are bit-equal.
CLIPPED = "summed in another order"
ROUNDED = {
    "function_imports": "microbatches are added up in FSDP2's reduce_dtype",
    **dict.fromkeys(
        ("method_on_one_rank", "optional", "scaler_or_ddp", "table_of_strategies", "trainer_class", "transformer"),
        CLIPPED,
    ),
}


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one.name != "mnist.py"], ids=lambda one: one.stem)
def test_what_the_rewriter_makes_is_proven(ranks: Ranks, tmp_path: Path, script: Path) -> None:
    if OLD and re.search(r"FULL_STATE_DICT|\.state_dict\(\)|summon_full_params", script.read_text()):
        pytest.skip("FSDP1 gathers to a CPU from torch 2.15 on")
    before, after = (InPool(path, [], 2, 60, pool=ranks) for path in (script, moved(script, tmp_path)))
    verdict = two(before, after, 4, tmp_path)
    print(text(verdict))
    assert verdict.status == 0
    assert ROUNDED.get(script.stem, "") in (verdict.cause or "")
    assert (verdict.verdict == "bit-equal") == (script.stem not in ROUNDED)
