"""--prove: FSDP1 from the source and FSDP2 from the result train with the same losses, or it is said where not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2.models.names import NAMES
from fsdp2.options.errors import ConfigError
from migration.__main__ import main
from migration.checkpoints import resume_runs
from migration.checkpoints.code import Code, optimizer_class
from migration.checkpoints.convert import Converted, convert
from migration.checkpoints.origin import Choice
from migration.checkpoints.prove import Differs
from migration.checkpoints.resume_runs import Task, compare_runs, resume_fsdp1, resume_fsdp2
from tests.harness import Ranks
from tests.migrate.checkpoints.conftest import Cli, Saved

HERE = __name__
VIT = Code("vit", "tiny")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.layer(x)))


def factory() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 1, bias=False))


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(torch.full((2, 4), 1.0 + step + rank)).square().mean()


def no_module() -> int:
    return 1


def task(saved: Saved, name: str, out: Path) -> Task:
    done: Converted = convert(saved.folder / name, str(out), Choice())
    adam = optimizer_class(None, done.groups, done.kinds)
    return Task(VIT, adam, done.groups, 3, saved.folder / name, Choice(), out)


def in_pool(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the ranks that are there; new processes are a test of their own."""
    monkeypatch.setattr(resume_runs, "_on_ranks", lambda side, task: ranks.run(side, task))


@pytest.mark.parametrize(("trained", "name"), [("flat", "full.pt"), ("orig", "sharded"), ("orig", "two")])
def test_both_sides_have_equal_losses(
    request: pytest.FixtureRequest,
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: str,
    name: str,
) -> None:
    in_pool(ranks, monkeypatch)
    job = task(request.getfixturevalue(trained), name, tmp_path / "out")
    losses = compare_runs(job)
    assert len(losses) == len(set(losses)) == 3
    assert job.optimizer == "Adam"


@pytest.mark.parametrize("what", ["the optimizer", "a setting", "a weight"])
def test_a_difference_is_told(
    orig: Saved, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A result of something else than the source: no comparison with what was read would notice."""
    in_pool(ranks, monkeypatch)
    state = torch.load(orig.folder / "full.pt", weights_only=True)
    if what == "the optimizer":
        for entries in state["optimizer"]["state"].values():
            entries["step"] += 1  # the trap
    elif what == "a setting":
        state["optimizer"]["param_groups"][1]["lr"] = 1e-4
    else:
        # One feature alone: a shift of all is what layer norm takes out.
        state["model"]["class_token"][..., 0] += 0.1
    other = tmp_path / "other.pt"
    torch.save(state, other)
    job = task(orig, "full.pt", tmp_path / "out")
    convert(other, str(tmp_path / "wrong"), Choice())
    first = {"a weight": 1}.get(what, 2)
    with pytest.raises(Differs, match=f"the losses from step {first} on: rank 0 has"):
        compare_runs(replace(job, result=tmp_path / "wrong"))


def test_a_users_own_model(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pool(ranks, monkeypatch)
    model = factory()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss(model, step, 0).backward()
        sgd.step()
        sgd.zero_grad()
    torch.save({"model": model.state_dict(), "optim": sgd.state_dict()}, tmp_path / "m.pt")
    code = Code(f"{HERE}:factory", wrap=("Block",), loss=f"{HERE}:loss")
    code.check(needs_loss=True)
    assert [type(unit).__name__ for unit in code.units(code.build())] == ["Block", "Block"]
    done = convert(tmp_path / "m.pt", str(tmp_path / "out"), Choice())
    job = Task(code, "SGD", done.groups, 3, tmp_path / "m.pt", Choice(), tmp_path / "out")
    assert len(compare_runs(job)) == 3


@pytest.mark.slow
def test_the_whole_command_in_processes_of_its_own(flat: Saved, cli: Cli, tmp_path: Path) -> None:
    arguments = ["--prove", "2", "--model", "vit", "--model-size", "tiny"]
    status, printed = cli(flat.folder / "full.pt", tmp_path / "out", *arguments)
    assert status == 0
    assert printed.splitlines()[-1].endswith(
        "; the losses of 2 steps are bit-equal, FSDP1 from the source and FSDP2 from the result"
    )


def broken(model: nn.Module, step: int, rank: int) -> Tensor:
    return loss(model, step, rank, 1)  # type: ignore[call-arg]


def says_much(model: nn.Module, step: int, rank: int) -> Tensor:
    raise ValueError("a first line\n  and a second")


def test_what_a_users_function_raises_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.save(factory().state_dict(), tmp_path / "m.pt")
    given = ("--model", f"{HERE}:factory", "--prove", "1", "--loss", f"{HERE}:broken")
    with pytest.raises(ConfigError) as caught:
        main(["checkpoint", str(tmp_path / "m.pt"), str(tmp_path / "out"), *given])
    said = str(caught.value)
    assert said.startswith("checkpoint: --prove: TypeError: loss() takes 3 positional arguments but 4 were given, at ")
    assert f"{Path(__file__).name}:" in said
    assert f"; {tmp_path / 'out'} is converted, and its losses aren't compared" in said
    assert "\n" not in said
    assert "Traceback" not in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"--prove: ValueError: a first line and a second, at .*py:[0-9]+; "):
        main(["checkpoint", str(tmp_path / "m.pt"), str(tmp_path / "2"), *given[:-1], f"{HERE}:says_much"])


def test_the_command_exits_with_1_and_says_what_differs(
    orig: Saved, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = {resume_fsdp1: [[1.0, 2.0], [1.0, 2.0]], resume_fsdp2: [[1.0, 2.0], [1.0, 2.5]]}
    monkeypatch.setattr(resume_runs, "_on_ranks", lambda side, task: sides[side])
    arguments = ["--prove", "2", "--model", "vit", "--model-size", "tiny"]
    status, printed = cli(orig.folder / "sharded", tmp_path / "out", *arguments)
    assert status == 1
    assert "proven" not in printed
    assert printed.splitlines()[-1] == (
        "differs: the losses from step 2 on: rank 1 has 2.0 with FSDP1 from the source and 2.5 with FSDP2 from the "
        "result, which is kept for inspection"
    )


def test_numbers_are_names_where_the_code_is_at_hand(cli: Cli, tmp_path: Path) -> None:
    model = factory()
    model.register_buffer("table", torch.zeros(4, 4))  # as a weight, which alone couldn't be told from it
    adam = torch.optim.Adam(model.parameters())
    loss(model, 0, 0).backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optim": adam.state_dict()}, tmp_path / "m.pt")
    assert "nothing shows which they are" in cli(tmp_path / "m.pt", tmp_path / "out")[1]
    assert (
        "table: (4, 4) there, absent in the code"
        in cli(tmp_path / "m.pt", tmp_path / "out", "--model", f"{HERE}:factory")[1]
    )
    assert cli(tmp_path / "m.pt", tmp_path / "out", "--model", f"{HERE}:with_table")[0] == 0


def with_table() -> nn.Module:
    model = factory()
    model.register_buffer("table", torch.zeros(4, 4))
    return model


def test_a_checkpoint_of_another_model_is_refused(orig: Saved, cli: Cli, tmp_path: Path) -> None:
    line = cli(orig.folder / "full.pt", tmp_path / "out", "--model", "cnn")[1]
    assert "is not of the model that --model makes; class_token: (1, 1, 32) there, absent in the code" in line


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prove"], "--prove without --model"),
        (["--wrap", "Block"], "--wrap without --model"),
        (["--model", "vit", "--loss", "a:b"], "it has its own; drop --loss"),
        (["--model", "vitt"], f"is none of {', '.join(NAMES)} and no module:factory"),
        (["--model", "vit", "--model-size", "huge"], "must be one of seed, tiny, small, base"),
        (["--model", f"{HERE}:factory", "--model-size", "tiny"], "the factory decides"),
        (["--model", f"{HERE}:factory", "--prove"], "give --loss module:function"),
        (["--model", f"{HERE}:no_module"], "returned a int and no module"),
        (["--model", f"{HERE}:absent"], "can't be imported"),
        (["--model", "no.such:thing"], "can't be imported"),
        (["--model", f"{HERE}:factory", "--wrap", "Bloc"], "--wrap Bloc: no module has that class; there are Block"),
        (["--model", "vit", "--prove", "0"], "--prove 0: must be 1 or more"),
        (["--model", "vit", "--optimizer-class", "Adam"], "--optimizer-class without --prove"),
    ],
)
def test_bad_arguments_are_one_line(cli: Cli, tmp_path: Path, arguments: list[str], part: str) -> None:
    torch.save(factory().state_dict(), tmp_path / "m.pt")
    status, line = cli(tmp_path / "m.pt", tmp_path / "out", *arguments)
    assert (status, part in line) == (2, True), line
    assert not (tmp_path / "out").exists()


def test_which_optimizer_it_was() -> None:
    moments: set[str] = {"exp_avg", "exp_avg_sq", "step"}
    groups: Any = [{"weight_decay": 0.1, "decoupled_weight_decay": True}]
    assert optimizer_class(None, groups, moments) == "AdamW"
    assert optimizer_class(None, [{"weight_decay": 0}], moments) == "Adam"
    assert optimizer_class("AdamW", [{"weight_decay": 0.1}], moments) == "AdamW"
    with pytest.raises(ConfigError, match="Adam or AdamW"):
        optimizer_class(None, [{"weight_decay": 0.1}], moments)
    with pytest.raises(ConfigError, match="give --optimizer-class"):
        optimizer_class(None, [{}], {"row", "column"})
    with pytest.raises(ConfigError, match="has no such class"):
        optimizer_class("Adamant", [{}], moments)
