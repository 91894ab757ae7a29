"""Options: defaults, files, and every refusal, in one line that names the flag and the fix."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.config import Config, parse, parser
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import to_flags
from fsdp2.parallel.prefetch import groups_ahead
from fsdp2.run.preflight import preflight
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.compilers import check_compiler
from fsdp2.run.process.runtime import World

TWO = World(rank=0, world_size=2, local_rank=0, local_world_size=2)
FOUR = World(rank=0, world_size=4, local_rank=0, local_world_size=4)


def test_defaults_are_the_main_job() -> None:
    config = parse([])
    assert (config.model, config.model_size, config.dataset) == ("vit", "seed", "digits")
    assert (config.epochs, config.batch_size, config.lr, config.gamma, config.seed) == (12, 64, 1e-3, 0.85, 1)
    assert (config.strategy, config.resume, config.keep) == ("fsdp2", "auto", 3)
    assert parse(["--model", "transformer"]).dataset == "source-text"
    assert parse(["--model", "transformer"]).model_size == "debug"


def test_bare_flags_have_a_value() -> None:
    config = parse(["--mixed-precision", "--explicit-prefetching", "--clip-grad-norm", "--activation-checkpointing"])
    assert config.mixed_precision == "bf16"
    assert groups_ahead(config) == (2, 2)
    assert config.clip_grad_norm == 1.0
    assert config.activation_checkpointing == "block"
    assert groups_ahead(parse(["--explicit-prefetching", "--backward-prefetch", "1"])) == (2, 1)


def test_off_is_off_and_not_unset(tmp_path: Path) -> None:
    config = parse(["--explicit-prefetching", "--forward-prefetch", "off"])
    assert groups_ahead(config) == (None, 2)
    assert groups_ahead(parse(["--explicit-prefetching", "3", "--backward-prefetch=off"])) == (3, None)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"flags": to_flags(config)}))
    assert parse(["--config", str(file)]) == config
    # What asks for nothing is no reason to refuse: it may undo what a file says.
    parse(["--strategy", "ddp", "--forward-prefetch", "off"])
    # Nowhere does `off` mean unset while unset means something else.
    fields = [field for field in dataclasses.fields(Config) if "unset = " in field.metadata["help"]]
    assert [field.name for field in fields if parsed(field.metadata["parse"], "off") is None] == []


def parsed(parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except ValueError as error:
        return error


def test_language_is_evaluated_in_the_batches_of_training() -> None:
    assert parse([]).test_batch_size == parse(["--model=cnn", "--batch-size=8"]).test_batch_size == 1000
    assert parse(["--model=transformer"]).test_batch_size == 64
    assert parse(["--model=transformer", "--batch-size=8"]).test_batch_size == 8
    assert parse(["--model=transformer", "--test-batch-size=100"]).test_batch_size == 100


def test_the_guides_commands_parse() -> None:
    for flags in (["--explicit-prefetching"], ["--mixed-precision"], ["--dcp-api"]):
        parse(flags)
    parse(["--explicit-prefetching", "--mixed-precision", "--dcp-api"])


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("2", 2), ("auto", None)], ids=["true", "false", "2", "auto"]
)
def test_reshard_values(text: str, value: Any) -> None:
    assert parse(["--reshard-after-forward", text]).reshard_after_forward is value


def test_help_says_of_each_flag_what_it_takes_under_a_title() -> None:
    first, *sections = re.split(r"^(?=\S.*:$)", parser().format_help(), flags=re.MULTILINE)
    assert first.startswith("usage: python -m fsdp2.train [--config FILE] [flags]")
    titles = [section.partition(":\n")[0] for section in sections]
    assert titles[:3] == ["options", "model and data", "steps and batches"]
    by_flag = {
        flag: title
        for title, text in zip(titles, sections, strict=True)
        for flag in re.findall(r"^  (--\S+)", text, re.M)
    }
    named = [flag_of(field.name) for field in dataclasses.fields(Config)]
    assert [flag.rstrip(",") for flag in by_flag][-len(named) :] == named
    assert by_flag["--lora"] == "fine-tuning"
    assert "--documents apart|together" in "".join(sections)
    assert "--reshard-after-forward true|false|N|auto" in "".join(sections)


def test_no_cuda_is_the_cpu() -> None:
    assert parse(["--no-cuda"]).device == "cpu"


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_the_command_line_wins_over_a_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"run.{suffix}"
    values = {"batch-size": 8, "mixed-precision": "bf16", "cpu-offload": True, "resume": 12, "freeze": ["a*", "b"]}
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())
    file.write_text(json.dumps(values) if suffix == "json" else toml)
    config = parse(["--config", str(file), "--mixed-precision", "off", "--no-cpu-offload"])
    assert (config.batch_size, config.mixed_precision, config.cpu_offload) == (8, None, False)
    assert (config.resume, config.freeze) == ("12", ("a*", "b"))


def test_config_json_reads_back_but_for_run_dir_and_resume(tmp_path: Path) -> None:
    config = Config(
        model="cnn", lr=0.5, run_dir="somewhere", resume="2", resume_partial=True, reshard_after_forward=True
    )
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"flags": to_flags(config), "environment": {}}))
    again = parse(["--config", str(file)])
    assert again == Config(model="cnn", lr=0.5, reshard_after_forward=True)


@pytest.mark.parametrize("name", ["vit-fashion-mnist", "transformer", "cnn-mnist", "all-savers"])
def test_the_shipped_configurations_are_valid(name: str) -> None:
    parse(["--config", str(Path(__file__).parent.parent / "configs" / f"{name}.toml")])


BAD = [
    (["--model", "vti"], ["--model vti", "did you mean vit?"]),
    (["--model-size", "huge"], ["--model-size huge", "seed, tiny"]),
    (["--dataset", "cifar"], ["--dataset cifar", "digits"]),
    (["--modle", "vit"], ["--modle: no such flag", "did you mean --model?"]),
    (["--epoch", "3"], ["--epoch: no such flag", "--epochs"]),
    (["--lr", "-1"], ["--lr -1", "above 0"]),
    (["--lr", "fast"], ["--lr fast", "number"]),
    (["--lr", "nan"], ["--lr nan", "finite"]),
    (["--gamma", "2"], ["--gamma 2", "at most 1"]),
    (["--batch-size", "0"], ["--batch-size 0", "1 or more"]),
    (["--batch-size", "1.5"], ["--batch-size 1.5", "whole number"]),
    (["--epochs", "many"], ["--epochs many", "whole number"]),
    (["--clip-grad-norm", "0"], ["--clip-grad-norm 0", "above 0"]),
    (["--fused-optimizer", "--optimizer", "sgd"], ["--fused-optimizer with --optimizer sgd", "drop --fused-optimizer"]),
    (["--optimizer-state", "4bit"], ["--optimizer-state 4bit", "bf16, 8bit"]),
    (["--optimizer-state", "8bit", "--optimizer", "sgd"], ["--optimizer-state 8bit with --optimizer sgd", "adamw"]),
    (["--optimizer-state", "8bit", "--optimizer", "adadelta"], ["with --optimizer adadelta", "drop --optimizer-state"]),
    (["--optimizer-state", "8bit", "--fused-optimizer"], ["with --fused-optimizer", "drop one"]),
    (["--optimizer-state", "bf16"], ["a second beta of 0.999", "--betas 0.9,0.95"]),
    (
        ["--optimizer-state", "8bit", "--strategy", "fsdp1"],
        ["--optimizer-state with --strategy fsdp1", "--strategy fsdp2"],
    ),
    (["--optimizer-state", "8bit", "--strategy", "ddp"], ["--optimizer-state with --strategy ddp"]),
    (["--optimizer-state", "8bit", "--strategy", "zero3"], ["--optimizer-state with --strategy zero3"]),
    (["--float8", "tensorwise"], ["--float8 tensorwise with --mixed-precision off", "--mixed-precision bf16"]),
    (["--float8", "rowwise", "--mixed-precision", "fp16"], ["--float8 rowwise with --mixed-precision fp16"]),
    (
        ["--model=llama", "--dataset=random-tokens", "--float8=tensorwise", "--mixed-precision", "--lora=4"],
        ["--float8 tensorwise with --lora", "drop one"],
    ),
    (["--float8", "all", "--mixed-precision"], ["--float8 all", "tensorwise, rowwise"]),
    (
        ["--float8", "tensorwise", "--mixed-precision", "--strategy", "ddp"],
        ["--float8 with --strategy ddp", "--strategy fsdp2"],
    ),
    (["--dataset", "source-text"], ["--dataset source-text with --model vit", "fashion-mnist"]),
    (["--model", "transformer", "--dataset", "digits"], ["takes language data", "source-text"]),
    (["--data-root", "x"], ["--data-root with --dataset digits", "fashion-mnist"]),
    (["--strategy", "ddp", "--cpu-offload"], ["--cpu-offload with --strategy ddp", "--strategy fsdp2"]),
    (["--strategy", "none", "--replicas", "2"], ["--replicas with --strategy none"]),
    (["--strategy", "ddp", "--explicit-prefetching"], ["--explicit-prefetching with --strategy ddp"]),
    (["--strategy", "ddp", "--inspect"], ["--inspect with --strategy ddp"]),
    (["--strategy", "ddp", "--reshard-after-forward", "true"], ["--reshard-after-forward with --strategy ddp"]),
    (["--reshard-after-forward", "off"], ["--reshard-after-forward off: must be true, false", "auto for torch's rule"]),
    (["--strategy", "ddp", "--shard-granularity", "layer"], ["--shard-granularity with --strategy ddp"]),
    (["--strategy", "fsdp1", "--dcp-api"], ["--dcp-api with --strategy fsdp1", "drop --dcp-api"]),
    (["--profile", "--memory-snapshot"], ["--profile with --memory-snapshot", "use one after the other"]),
    (["--memory-limit", "lots"], ["--memory-limit lots: must be a number of bytes such as 500MB"]),
    (["--strategy", "zero4"], ["--strategy zero4", "did you mean zero3?"]),
    (["--shard-granularity", "root", "--explicit-prefetching"], ["nothing to prefetch"]),
    (["--shard-granularity", "block"], ["--shard-granularity block", "layer or root"]),
    (["--reshard-after-forward", "1"], ["--reshard-after-forward 1", "true, false"]),
    (["--reduce-dtype", "fp16"], ["--reduce-dtype fp16", "add --mixed-precision fp16"]),
    (["--strategy", "ddp", "--mixed-precision", "--reduce-dtype", "bf16"], ["--reduce-dtype bf16 with --strategy ddp"]),
    (["--mixed-precision", "fp8"], ["--mixed-precision fp8", "bf16, fp16"]),
    (["--grad-accumulation-sync", "last"], ["--grad-accumulation-sync last", "--grad-accumulation 1", "N"]),
    (["--grad-accumulation", "2", "--grad-accumulation-sync", "replica"], ["--replicas 1", "add --replicas R"]),
    (
        ["--strategy", "ddp", "--grad-accumulation", "2", "--grad-accumulation-sync", "last"],
        ["--grad-accumulation-sync with --strategy ddp", "use --strategy fsdp2 or drop"],
    ),
    (
        ["--activation-checkpointing", "op", "--shard-granularity", "layer"],
        ["--activation-checkpointing op with --shard-granularity layer", "use --activation-checkpointing block"],
    ),
    (["--config", "nowhere.toml"], ["--config nowhere.toml", "cannot be read"]),
]


@pytest.mark.parametrize(("flags", "parts"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_a_wrong_command_line_is_refused_in_one_line(flags: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"batch_size": 3}', "batch_size is not a flag; did you mean --batch-size?"),
        ('{"batch-size": "many"}', "--batch-size many: must be a whole number"),
        ('{"cpu-offload": "yes"}', "--cpu-offload yes: is either true or false"),
        ("[1]", "must hold a table"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"^--") as caught:
        parse(["--config", str(file)])
    assert part in str(caught.value)


def _refused(config: Config, world: World = TWO) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(config, world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


MACHINE: list[tuple[dict[str, Any], World, list[str]]] = [
    ({"replicas": 3}, FOUR, ["--replicas 3", "world size 4", "1, 2, 4"]),
    ({"reshard_after_forward": 3}, FOUR, ["--reshard-after-forward 3", "2 or true"]),
    ({"reshard_after_forward": 2}, TWO, ["--reshard-after-forward 2", "use true"]),
    ({"reshard_after_forward": 2, "replicas": 2}, FOUR, ["--reshard-after-forward 2", "the 2 ranks"]),
    ({"strategy": "none"}, TWO, ["--strategy none with 2 ranks", "--strategy ddp or fsdp2"]),
    ({"global_batch_size": 3, "grad_accumulation": 2}, TWO, ["--global-batch-size 3", "use 4 or more"]),
    ({"freeze": ("nothing.*",)}, TWO, ["--freeze nothing.*", "no parameter"]),
    ({"freeze": ("*",)}, TWO, ["--freeze *", "nothing to train"]),
    ({"dataset": "mnist", "data_root": "/nowhere"}, TWO, ["--data-root /nowhere", "train-images-idx3-ubyte"]),
    ({"run_dir": "memory://run"}, TWO, ["--run-dir memory://run with 2 ranks", "inside one process"]),
    ({"run_dir": "nowhere://run"}, TWO, ["--run-dir nowhere://run", "use a folder, s3:// or gs://"]),
]


@pytest.mark.parametrize(("flags", "world", "parts"), MACHINE, ids=[str(flags) for flags, _, _ in MACHINE])
def test_what_this_machine_cannot_do_is_refused(
    flags: dict[str, Any], world: World, parts: list[str], tmp_path: Path
) -> None:
    message = _refused(Config(**{"run_dir": str(tmp_path / "run"), **flags}), world)
    for part in parts:
        assert part in message
    assert not (tmp_path / "run").exists(), "a refused run leaves nothing behind"


def test_reshard_fits_where_it_divides(tmp_path: Path) -> None:
    with preflight(Config(run_dir=str(tmp_path / "run"), reshard_after_forward=2), FOUR).hold:
        pass


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = _refused(Config(run_dir=str(tmp_path / "file" / "run")))
    assert "can't be written" in message
    assert "--run-dir" in message


def test_a_run_directory_in_use(tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path / "run"))
    with preflight(config, TWO).hold:
        assert "in use by a run" in _refused(config)
    with preflight(config, TWO).hold:
        pass  # free again


def test_gpu_wanted_and_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"--device cuda: torch sees no GPU"):
        runtime.pick_device("cuda", TWO)
    assert runtime.pick_device("auto", TWO) == torch.device("cpu")


def test_fewer_gpus_than_ranks_is_not_silently_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks and 1 GPU"):
        runtime.pick_device("auto", TWO)
    assert runtime.pick_device("auto", World(1, 2, 0, 1)) == torch.device("cuda", 0)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert "torch 2.10.1+cpu is installed and 2.11 is the oldest" in _refused(Config(run_dir=str(tmp_path / "run")))
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    one_group = Config(run_dir=str(tmp_path / "run"), model="llama", tp=2, shard_granularity="root")
    assert "root: fails before torch 2.13; install that" in _refused(one_group)


def test_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install -e '.[tensorboard]'" in _refused(Config(run_dir=str(tmp_path / "run"), tensorboard=True))


@pytest.mark.parametrize("gpu", [False, True])
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    refused = {"auto": "--compile: torch needs a C++ compiler", "cpu": "--compile: torch needs a C++ compiler"}
    if gpu:
        refused["auto"] = "--compile: triton needs a C compiler on a GPU, too; install gcc or set CC"
    for device, message in refused.items():
        assert message in _refused(Config(run_dir=str(tmp_path / "run"), compile=True, device=device))


def test_a_compiler_for_gpus_needs_triton_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("gcc", "c++-of-mine"):
        (tmp_path / program).write_text("")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "c++-of-mine -O1")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="triton, which isn't installed; install it, or drop --compile"):
        check_compiler("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    with pytest.raises(ConfigError, match=r"has no Python\.h; install them .*, or drop --compile"):
        check_compiler("cuda")
    (tmp_path / "Python.h").write_text("")
    check_compiler("cuda")
    monkeypatch.setenv("CC", "absent")
    with pytest.raises(ConfigError, match="install gcc or set CC, or drop --compile"):
        check_compiler("cuda")
    check_compiler("cpu")
    monkeypatch.setenv("CXX", "absent")
    with pytest.raises(ConfigError, match=r"install g\+\+ or set CXX, or drop --compile"):
        check_compiler("cpu")


@pytest.mark.parametrize("value", ["missing.pt", "text.pt"])
def test_init_from_what_is_no_model(tmp_path: Path, value: str) -> None:
    (tmp_path / "text.pt").write_text("not a model")
    message = _refused(Config(run_dir=str(tmp_path / "run"), init_from=str(tmp_path / value)))
    assert "--init-from" in message
    assert "can't be loaded" in message


def test_init_from_another_model_names_what_differs(tmp_path: Path) -> None:
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "cnn.pt")
    message = _refused(Config(run_dir=str(tmp_path / "run"), init_from=str(tmp_path / "cnn.pt")))
    assert "is of another model" in message
    assert "class_token: only in the model" in message


@pytest.mark.parametrize("resume", ["7", "elsewhere"])
def test_resume_from_where_nothing_is_committed(tmp_path: Path, resume: str) -> None:
    target = resume if resume.isdigit() else str(tmp_path / resume)
    message = _refused(Config(run_dir=str(tmp_path / "run"), resume=target))
    assert "--resume" in message
    assert "committed checkpoint" in message
    assert not (tmp_path / "run").exists()


def test_exit_status_is_two_and_only_rank_zero_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        with ending.exit_status():
            raise ConfigError("--lr 0: must be above 0")

    check: Callable[[], str] = lambda: capsys.readouterr().err  # noqa: E731
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "fsdp2: error: --lr 0: must be above 0\n")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(ending, "_ended_by_launcher", lambda: True)
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "")
    # Rank 0 had no such error, for example because its node has the data: then this rank must speak.
    monkeypatch.setattr(ending, "_ended_by_launcher", lambda: False)
    with pytest.raises(SystemExit) as caught:
        refuse()
    assert (caught.value.code, check()) == (2, "fsdp2: error: --lr 0: must be above 0\n")
