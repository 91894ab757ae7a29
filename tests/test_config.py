"""Options: defaults, files, and every refusal, in one line that names the flag and the fix."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.config import Config, parse, parser
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import to_flags
from fsdp2.parallel.prefetch import groups_ahead


def test_defaults_are_the_main_job() -> None:
    config = parse([])
    assert (config.model, config.model_size, config.dataset) == ("vit", "seed", "digits")
    assert (config.epochs, config.batch_size, config.lr, config.gamma, config.seed) == (12, 64, 1e-3, 0.85, 1)
    assert (config.strategy, config.resume, config.keep) == ("fsdp2", "auto", 3)
    assert parse(["--model", "transformer"]).dataset == "source-text"
    assert parse(["--model", "transformer"]).model_size == "debug"


def test_rooms_that_do_not_import_the_configuration_name_its_flags_rightly() -> None:
    """To mypy their `Options` are Any."""
    known = {*dir(Config), *(field.name for field in dataclasses.fields(Config))}
    read, root = set(), Path(__file__).parents[1]
    for file in [*root.glob("fsdp2/**/*.py"), *root.glob("fsdp2_extra/**/*.py")]:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            options = {
                one.arg for one in function.args.args if one.annotation and ast.unparse(one.annotation) == "Options"
            }
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in options:
                    read.add((node.attr, file.name))
    assert len(read) > 100
    assert {(name, file) for name, file in read if name not in known} == set()


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
    (["--betas", "0.9", "0.95"], ["0.95: belongs to no flag", "several go by commas: --betas 0.9,0.95"]),
    (["lr", "3"], ["lr: belongs to no flag; did you mean --lr?"]),
    (["--modle", "vit"], ["--modle: no such flag", "did you mean --model?"]),
    (["--epoch", "3"], ["--epoch: no such flag", "--epochs"]),
    (["--optimizer", "AdamW"], ["--optimizer AdamW", "did you mean adamw?"]),
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
