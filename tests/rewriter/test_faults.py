"""Faults of FSDP1 that a program may have met, named by check and rewrite where they see them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rewriter.test_commands import run

AVERAGED = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

live, shadow = FSDP(net), FSDP(copy.deepcopy(net){only})
for p, q in zip(live.parameters(), shadow.parameters()):
    q.mul_(0.9)
"""


@pytest.mark.parametrize(("only", "named"), [(".requires_grad_(False)", True), ("", False)])
def test_an_average_that_is_only_evaluated_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str, named: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(AVERAGED.format(only=only) + "FSDP.optim_state_dict(*sys.argv)\n")
    run("rewrite", path)
    assert (f"{path}:6:5: a fault of FSDP1" in capsys.readouterr().err) == named


FAULTY = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

model = FSDP(net, sharding_strategy=ShardingStrategy.{strategy}, use_orig_params={own}, device_id=torch.device("cpu"))
for batch in batches:
    {before}
    loss = model(batch).sum()
    {between}
    loss.backward()
torch.save(FSDP.{saved}(model, optimizer), "optimizer.pt")
"""
CLEAR, PASS = "model.zero_grad()", "pass"


@pytest.mark.parametrize(
    ("kinds", "named"), [((), True), (("SHARDED",), False), (("FULL",), True), (("FULL", "SHARDED"), True)]
)
def test_a_sharded_state_of_an_optimizer_has_both_moments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kinds: tuple[str, ...], named: bool
) -> None:
    path = tmp_path / "train.py"
    faulty = FAULTY.format(strategy="FULL_SHARD", own=True, before=PASS, between=PASS, saved="optim_state_dict")
    path.write_text(
        faulty + "".join(f"FSDP.set_state_dict_type(model, StateDictType.{one}_STATE_DICT)\n" for one in kinds)
    )
    run("check", path)
    assert ("a fault of FSDP1" in capsys.readouterr().err) == named


@pytest.mark.parametrize(
    ("body", "named"), [("model.state_dict()", False), ("save()", True), ("FSDP.optim_state_dict(model, o)", True)]
)
def test_a_gathered_model_says_nothing_of_the_optimizers_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, named: bool
) -> None:
    """Where a program sets the sharded kind once."""
    path = tmp_path / "train.py"
    faulty = FAULTY.format(strategy="FULL_SHARD", own=True, before=PASS, between=PASS, saved="optim_state_dict")
    *lines, save = faulty.splitlines()
    text = "\n".join([*lines, "FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)", "def save():"])
    export = f"with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n    {body}\n"
    path.write_text(f"{text}\n    {save}\n{export}")
    run("check", path)
    assert ("one tensor for both moments" in capsys.readouterr().err) == named


@pytest.mark.parametrize(
    ("kind", "named"), [("SHARDED_STATE_DICT", False), ("FULL_STATE_DICT", True), ("of(args)", True)]
)
@pytest.mark.parametrize("where", ["with FSDP.state_dict_type(model, StateDictType.{}):", "def save(kind='{}'):"])
def test_the_kind_of_a_save_is_the_one_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, named: bool, where: str
) -> None:
    """Though the program gathers the model's state elsewhere."""
    path = tmp_path / "train.py"
    faulty = FAULTY.format(strategy="FULL_SHARD", own=True, before=PASS, between=PASS, saved="optim_state_dict")
    *lines, save = faulty.splitlines()
    other = (
        "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):\n    torch.save(model.state_dict(), 'm.pt')\n"
    )
    path.write_text("\n".join([*lines, where.format(kind), f"    {save}", other]))
    run("check", path)
    assert ("one tensor for both moments" in capsys.readouterr().err) == named


@pytest.mark.parametrize(
    ("read", "named"),
    [("ShardingStrategy[name]", True), ("getattr(ShardingStrategy, name)", True), ("ShardingStrategy(1)", True),
     ("ShardingStrategy.FULL_SHARD", False)],
)  # fmt: skip
def test_a_strategy_of_a_configuration_may_be_the_one_with_the_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], read: str, named: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy\n"
        f"def make(net, name: dict[str, ShardingStrategy]):\n    return FSDP(net, sharding_strategy={read})\n"
    )
    for command in ("check", "rewrite"):
        run(command, path)
        assert ("if it is HYBRID_SHARD (FS04)" in capsys.readouterr().err) == named


@pytest.mark.parametrize(
    ("strategy", "own", "before", "between", "saved", "named"),
    [
        (
            "SHARD_GRAD_OP",
            True,
            PASS,
            CLEAR,
            "full_optim",
            ["10:5: a fault of FSDP1", "12:12: a fault"],
        ),
        ("SHARD_GRAD_OP", False, PASS, CLEAR, "optim", []),
        ("SHARD_GRAD_OP", True, CLEAR, PASS, "sharded_optim", []),
        ("SHARD_GRAD_OP", True, PASS, "optimizer.zero_grad()", "sharded_optim", []),
        ("FULL_SHARD", True, PASS, CLEAR, "sharded_optim", []),
        ("HYBRID_SHARD", False, PASS, PASS, "optim", ["6:37: a fault of FSDP1"]),
    ],
)
def test_a_fault_of_fsdp1_is_named_where_its_losses_may_be_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    strategy: str,
    own: bool,
    before: str,
    between: str,
    saved: str,
    named: list[str],
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        FAULTY.format(strategy=strategy, own=own, before=before, between=between, saved=f"{saved}_state_dict")
    )
    for command in ("check", "rewrite"):
        run(command, path)
        printed = capsys.readouterr().err
        assert printed.count("a fault of FSDP1, which") == len(named)
        assert [name for name in named if f"{path}:{name}" not in printed] == []
    assert ("losses may differ by a fault of FSDP1" in printed) == bool(named)
