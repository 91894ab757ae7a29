"""`python -m fsdp2.plan` as a user types it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.units import size
from fsdp2_tools.plan import advice
from fsdp2_tools.plan.__main__ import main, parser

LLAMA = ["--model=llama", "--model-size=debug", "--batch-size=4", "--seq-len=96", "--no-save-model"]


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, wasted = [""], advice.wasted

    def advised(*given: Any) -> Any:
        before[0] = capsys.readouterr().out
        return wasted(*given)

    monkeypatch.setattr(advice, "wasted", advised)
    main([*LLAMA, "--ranks=2,8", "--gpu=h100"])
    printed = before[0] + capsys.readouterr().out
    assert "8 ranks: fits" in before[0], "the plan stands there before others are made for advice"
    for word in (
        "parameters",
        "activations",
        "logits and loss",
        "CUDA context",
        "nccl's buffers",
        "8 ranks: fits",
        "alone, each of these fits too and is faster:",
    ):
        assert word in printed


# Planned in half the time.
CNN = ["--model=cnn", "--model-size=tiny", "--batch-size=4", "--test-batch-size=16", "--no-save-model"]
# So that little is left to be advised: each piece of advice is a plan of its own.
SPARING = ["--mixed-precision", "--batch-size=1", "--reshard-after-forward=true", "--ranks=2"]


def test_advice_is_drawn_from_plans(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*LLAMA, *SPARING, "--chunked-loss", "--json"]
    (wanted,) = main(flags)
    capsys.readouterr()
    budget = f"--budget={wanted.bytes - 1}"
    main([*flags, budget])
    content = json.loads(capsys.readouterr().out)
    assert not content["plans"][0]["fits"]
    assert content["advice"]["plan"]["fits"]
    advised = [word for flag in content["advice"]["flags"] for word in flag.split()]
    main([*flags, budget, *advised])
    assert json.loads(capsys.readouterr().out)["plans"][0]["bytes"] == content["advice"]["plan"]["bytes"]


def test_fewer_samples_in_a_microbatch_leave_a_global_batch_as_it_is() -> None:
    flags = [flag for flag, _ in advice.changes(parse(["--batch-size=8", "--global-batch-size=32"]))]
    assert [flag for flag in flags if "batch-size" in flag] == ["--batch-size 4", "--batch-size 1"]


def test_what_a_plan_that_fits_could_do_without(capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that holds the plan without recomputation, and the same plan by a byte."""
    sparing = [*LLAMA, "--ranks=2", "--activation-checkpointing=block", "--json"]
    sparing += ["--shard-granularity=root", "--reshard-after-forward=false"]  # each saver left is a plan of its own
    (own,) = main(sparing)
    (without,) = main([*sparing, "--activation-checkpointing=off"])
    assert own.bytes < without.bytes
    found = {}
    for budget in (without.bytes, own.bytes):
        capsys.readouterr()
        main([*sparing, f"--budget={budget}"])
        found[budget] = {one["flags"]: one["plan"] for one in json.loads(capsys.readouterr().out)["wasted"]}
    assert found[without.bytes]["--activation-checkpointing off"]["bytes"] == without.bytes
    assert all(plan["fits"] for plan in found[without.bytes].values())
    assert not found[own.bytes]


def test_a_budget_below_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    main([*CNN, *SPARING, "--activation-checkpointing=block", "--budget=1kB"])
    assert "no setting fits in 1.0 kB: the least is" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu=h1000"], "--gpu h1000: must be one of .*did you mean h100"),
        (["--gpu=a100"], "did you mean a100-"),
        (["--gpu=none.toml"], "--gpu none.toml: cannot be read"),
        (["--ranks=0"], "--ranks"),
        (["--ranks=2,x"], "--ranks"),
        (["--budget=much"], "--budget"),
        (["--budget=0"], "--budget 0: must be a number of bytes"),
        (["--search"], "--search: ranks settings by their time, which needs a --gpu whose speed is known"),
        (["--search", "--gpu=h100", "--ranks=2,4"], "--search: is for one number of ranks"),
        (["--html=/nowhere/x.html"], "--html /nowhere/x.html: there is no folder /nowhere"),
        (["--out=here"], "--out here: only a search leaves results"),
        (["--ranks=3", "--replicas=2"], "--replicas 2: doesn't divide the world size 3"),
        (["--freeze=nonsense"], "--freeze nonsense"),
        (["--shard-modules=nonsense"], "--shard-modules"),
    ],
)
def test_bad_input_is_refused_in_one_line(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        main([*LLAMA, *flags])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[mine]\n", "sets no memory"),
        ('[mine]\nmemory = "lots"\n', "memory must be a number of bytes"),
        ('[mine]\nmemory = "8GB"\nflops = 3\n', "flops must be one of"),
        ("mine = 3\n", "sets no memory"),
        ("[", "is not valid TOML"),
        ("x = " + "[" * 2000 + "]" * 2000, "nests tables or lists deeper"),
        ('[mine]\nmemory = "8GB"\ntflops = nan\n', "holds nan, which is no finite number"),
        (None, "is not a regular file"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is None:
        os.mkfifo(tmp_path / "gpu.toml")
    else:
        (tmp_path / "gpu.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        main([*LLAMA, f"--gpu={tmp_path / 'gpu.toml'}"])


def test_a_table_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "gpu.toml").write_text('\ufeff[mine]\nmemory = "8GB"\n', "utf-8")  # as Windows writes it
    (there,) = main([*CNN, "--ranks=2", f"--gpu={tmp_path / 'gpu.toml'}"])
    assert there.budget == 8_000_000_000


def test_the_parser_is_a_parent() -> None:
    assert "--help" not in parser(add_help=False).format_help()


def test_a_search_leaves_a_file_for_config_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: [{name: value} for value in values] for name, values in FEW.items()}
    monkeypatch.setattr("fsdp2_tools.plan.__main__.choices", lambda config, ranks, gpu: few)
    flags = [*LLAMA, "--ranks=2", "--gpu=h100", "--search", f"--out={tmp_path / 'out'}"]
    plans = main(flags)
    printed = capsys.readouterr().out
    assert "4 settings were planned, 4 fit" in printed
    times = [one.time.milliseconds for one in plans if one.time is not None]
    assert times == sorted(times)
    (told,) = [line for line in printed.splitlines() if line.startswith("train with the first: ")]
    assert parse([f"--config={told.split()[-1]}"]) == plans[0].config
    assert (tmp_path / "out" / "frontier.png").read_bytes().startswith(b"\x89PNG")
    main([*flags, "--budget=1kB", f"--out={tmp_path / 'none'}"])
    least = min(plans, key=lambda one: one.bytes)
    assert f"no setting fits in 1.0 kB: the least is {size(least.bytes)}, with " in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


FEW = {"shard_granularity": (1, "root"), "activation_checkpointing": (None, "block")}


def test_a_plan_that_barely_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    line = [*CNN, "--ranks=2", "--gpu=h100", "--no-advice"]
    (there,) = main(line)
    for part, barely in ((1.02, True), (1.1, False)):
        capsys.readouterr()
        main([*line, f"--budget={int(part * there.bytes)}"])
        assert ("but barely: published runs took up to 5% more than planned" in capsys.readouterr().out) == barely


def test_without_advice_a_plan_is_alone_and_says_what_its_ranks_are(capsys: pytest.CaptureFixture[str]) -> None:
    main([*CNN, "--ranks=2", "--budget=1kB", "--no-advice"])
    printed = capsys.readouterr()
    assert "does not fit" in printed.out
    with pytest.raises(ConfigError, match="--no-advice with --search"):
        main([*CNN, "--ranks=2", "--gpu=h100", "--search", "--no-advice"])
    assert "would save" not in printed.out
    assert "trying" not in printed.err
    assert "on CPUs, with gloo; for GPUs name one, such as --gpu h100" in printed.out


def test_moments_in_few_bits_are_planned_on_a_gpu_too() -> None:
    """There a fused kernel would be the default, which has none such."""
    pytest.importorskip("torchao")
    line = [*CNN, "--ranks=2", "--gpu=h100", "--optimizer=adamw", "--no-advice"]
    (usual,), (few,) = main(line), main([*line, "--optimizer-state=8bit"])
    assert few.memory.optimizer_bytes < usual.memory.optimizer_bytes
    assert "--optimizer-state 8bit" in [flag for flag, _ in advice.changes(usual.config)]
