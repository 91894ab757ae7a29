"""Bad input: each settings file, command line and value that makes no sense ends in one line that says what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import infer
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_extra.baselines.deepspeed_settings import settings
from fsdp2_tools.checkpoint import __main__ as checkpoint
from fsdp2_tools.compare.options import parse as parse_comparison
from fsdp2_tools.compare.variants import rows
from fsdp2_tools.memory.__main__ import main as show_memory
from launchers.ray_options import parse as parse_ray
from launchers.ray_options import place
from launchers.ray_search import example_config, parse_search
from launchers.ray_tune import refuse_another_search
from migration.__main__ import main as migrate
from tests.fuzz.common import one_line

DIGITS = "7" * 5000


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    one_line(str(caught.value))
    return str(caught.value)


FILES: list[tuple[str, str, bytes, str]] = [
    ("not UTF-8", "run.json", b'{"model": "\xff"}', "is not UTF-8 text (byte 11"),
    ("not UTF-8, TOML", "run.toml", b"\xff\xfe", "is not UTF-8 text (byte 0"),
    ("deep lists", "run.json", b"[" * 100_000, "nests tables or lists deeper than 50"),
    ("deep tables", "run.json", b'{"lr":' * 60 + b"1" + b"}" * 60, "nests tables or lists deeper than 50"),
    ("deep TOML", "run.toml", b"lr = " + b"[" * 100_000, "nests tables or lists deeper than 50"),
    ("dotted keys", "run.toml", b".".join([b"a"] * 200_000) + b" = 1", "nests tables or lists deeper than 50"),
    ("long number", "run.json", f'{{"epochs": {DIGITS}}}'.encode(), "holds a number of hundreds of digits; write"),
    ("long number, TOML", "run.toml", f"epochs = {DIGITS}".encode(), "holds a number of hundreds of digits; write"),
    ("hexadecimal", "run.toml", b"epochs = 0x" + b"f" * 5000, "holds a number of hundreds of digits; write"),
    ("1e400", "run.json", b'{"lr": 1e400}', "holds 1e400, which is no finite number"),
    ("NaN", "run.json", b'{"lr": NaN}', "holds NaN, which is no finite number"),
    ("inf", "run.toml", b"lr = inf", "holds inf, which is no finite number"),
    ("key twice", "run.json", b'{"lr": 1, "lr": 2}', "has lr twice in one table; drop one of them"),
    ("no table", "run.json", b"3", "must hold a table"),
    ("flags no table", "run.json", b'{"flags": [1]}', "flags must be a table"),
    ("beside flags", "run.json", b'{"flags": {}, "environment": {}, "lr": 3}', "has lr beside flags"),
    ("too large", "run.json", b" " * (17 << 20), "has more than 16 MiB"),
    ("too large, TOML", "run.toml", b"\n" * (2 << 20), "has more than 1 MiB"),
    ("long key", "run.json", b'{"' + b"k" * 100_000 + b'": 1}', "kkk… is not a flag; the flags are those of"),
    ("surrogate", "run.json", b'{"run-dir": "\\ud800"}', "--run-dir \\ud800: has a character that no name can have"),
    ("lr true", "run.json", b'{"lr": true}', "--lr true: must be a number"),
    ("gamma null", "run.json", b'{"gamma": null}', "--gamma null: must be a number"),
    ("epochs true", "run.toml", b"epochs = true", "--epochs true: must be a whole number"),
    ("clip true", "run.toml", b"clip-grad-norm = true", "--clip-grad-norm true: must be a number"),
    ("freeze 5", "run.toml", b"freeze = 5", "--freeze 5: must be some text, or a list of texts"),
    ("resume true", "run.json", b'{"resume": true}', "--resume true: must be auto, never, a step, or the path"),
    ("half a byte", "run.toml", b"memory-limit = 0.5", "--memory-limit 0.5: must be a number of bytes"),
]


@pytest.mark.parametrize(("name", "content", "part"), [row[1:] for row in FILES], ids=[row[0] for row in FILES])
def test_a_settings_file(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert part in refusal(lambda: parse(["--config", str(file)]))


def test_what_is_no_file_hangs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), str(tmp_path), "/dev/zero"):
        assert "is not a regular file" in refusal(partial(parse, ["--config", name]))


@pytest.mark.parametrize("value", [[1], {"a": 1}, True, None, "\ud800", "\0", "x" * 5000, 10**400, 1e308, -1])
def test_no_flag_of_a_file_takes_every_type(tmp_path: Path, value: Any) -> None:
    file = tmp_path / "run.json"
    taken = set()
    for flag in to_flags(Config()):
        file.write_text(json.dumps({flag: value}))
        try:
            parse(["--config", str(file)])
            taken.add(flag)
        except ConfigError as error:
            one_line(str(error))
    unset = {field.name.replace("_", "-") for field in fields(Config) if field.default is None}
    switches = {flag for flag, default in to_flags(Config()).items() if isinstance(default, bool)}
    switches |= {"fused-optimizer", "reshard-after-forward", "save-model"}
    may: dict[str, set[str]] = {"True": switches, "None": {*unset, "clip-grad-norm"}}  # whose null is off
    assert taken <= may.get(str(value), set())


COMMANDS: list[tuple[list[str], str]] = [
    (["--config", ""], '--config "": is empty; give a value, or drop it'),
    (["--run-dir="], '--run-dir "": is empty; give a value, or drop it'),
    (["--threads", "100000"], "--threads 100000: must be 1024 or less"),
    (["--loader-workers", "999999999999"], "--loader-workers 999999999999: must be 256 or less"),
    (["--epochs", "9999999999"], "--epochs 9999999999: must be 2147483647 or less"),
    (["--seed", str(2**63)], "must be 9223372036854775807 or less"),
    (["--lr", "1e400"], "--lr 1e400: must be a finite number"),
    (["--lr", "9" * 500], "9…: must be a finite number"),
    (["--clip-grad-norm", "1e31"], "at most 1e+30"),
    (["--batch-size", "٣"], "--batch-size ٣: must be a whole number"),
    (["--memory-limit", "9" * 400], "9…: must be a number of bytes such as 500MB"),
    (["--run-dir", "n" * 256], "has a name of more than 255 bytes"),
    (["--init-from", "/".join(["n" * 99] * 40)], "is a path of more than 3840 bytes"),
    (["--resume", "/tmp/\udcff"], "--resume /tmp/\\udcff: has a character that no name can have"),
    (["--data-root", "a\0b"], "--data-root a\\x00b: has a character"),
    (["--model", "a\nb"], "--model a\\nb: must be one of vit"),
    (["--model", "m" * 5000], "m…: must be one of vit"),
    (["--model", "/tmp"], "--model /tmp: is a folder; give hf:/tmp"),
    (["--model", "gpt2"], "hf:DIR_OR_NAME, timm:NAME, MODULE:FUNCTION"),
    (["--dataset", "/tmp"], "--dataset /tmp: is a place; give chat:/tmp for conversations, or text:/tmp"),
    (["--dataset", "alpaca"], "text:PLACE, chat:PLACE"),
    (["--" + "f" * 5000], "f…: no such flag; see --help"),
    (["--profile=" + "p" * 5000], "--profile/--no-profile: ignored explicit argument"),
]


@pytest.mark.parametrize(("words", "part"), COMMANDS, ids=[" ".join(words)[:30] for words, _ in COMMANDS])
def test_a_command_line(words: list[str], part: str) -> None:
    message = refusal(lambda: parse(words))
    assert part in message
    assert len(message) < 300


def test_a_superscript_is_no_step(tmp_path: Path) -> None:
    made = Config(run_dir=str(tmp_path / "run"), resume="²")
    assert "--resume " in refusal(lambda: preflight(made, World(0, 1, 0, 1)))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "nests tables or lists deeper"),
        (b'{"flags": 3}', "flags must be a table"),
        (b'{"flags": {"lr": true}}', "--lr true: must be a number"),
        (b"null", "must hold a table"),
    ],
)
def test_infer_names_a_garbled_config_json(
    tmp_path: Path, content: bytes, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / ("a-run-whose-path-is-longer-than-a-refusal-shows-of-a-value-" + "x" * 80)
    run.mkdir()
    (run / "config.json").write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["infer", str(run)])
    with pytest.raises(SystemExit) as caught:
        infer.cli()
    printed = capsys.readouterr().err
    assert (caught.value.code, printed.count("\n")) == (2, 1)
    assert printed.startswith(f"fsdp2: error: {run}/config.json: ")
    assert part in printed


@pytest.mark.parametrize(
    ("action", "part"),
    [
        (lambda: infer.parse(["run", "--data-root", ""]), '--data-root "": is empty'),
        (lambda: infer.parse(["n" * 256]), "RUN nnn"),
        (lambda: show_memory(["run", "--out="]), '--out "": is empty'),
        (lambda: show_memory(["n" * 256]), "has a name of more than 255 bytes"),
        (lambda: parse_comparison(["--out", "n" * 256]), "--out nnn"),
        (lambda: parse_comparison(["--nproc", "9" * 30]), "must be 256 or less"),
        (lambda: migrate(["checkpoint", "a", "b", "--wrap", ""]), '--wrap "": is empty'),
        (lambda: migrate(["checkpoint", "n" * 256, "b"]), "SRC nnn"),
        (lambda: migrate(["check", "n" * 256]), "PATH nnn"),
        (lambda: parse_ray(["--num-workers", "9" * 30], "x"), "must be a whole number from 1 to 100000"),
        (lambda: parse_ray(["--resize-every", "1e300", "--num-workers", "1:2"], "x"), "at most 1e+07"),
        (lambda: place(*parse_ray(["--run-dir", "/"], "x")), "--run-dir /: is the root of everything"),
        (lambda: parse_search(["lr=choice(" + "-" * 20_000 + "1)"]), "must be one of uniform"),
        (lambda: parse_search(["lr=" + "(" * 20_000]), "must be one of uniform"),
        (lambda: parse_search(["lr=choice({[]: 1})"]), "takes numbers, words and quoted text"),
        (lambda: example_config(Config(), parse_search(["lr=uniform(1, 1e9)"])), "--lr 1000000000.0: must be above 0"),
    ],
)
def test_other_commands(action: Callable[[], Any], part: str) -> None:
    assert part in refusal(action)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["show", ""], 'show "": is empty'),
        (["show", "a\udcff"], "a\\udcff: is no UTF-8 text"),
        (["list", "x" * 5000], "File name too long"),
        (["nothing" * 500], "choose from"),
        (
            ["export", "a", "b", "--format", "safetensors", "--max-shard-size", "9" * 400 + "GB"],
            "must be a number of bytes",
        ),
    ],
)
def test_the_checkpoint_command(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.main(words) == 2
    line = capsys.readouterr().err.removesuffix("\n")
    assert part in line
    one_line(line)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "nests tables or lists deeper"),
        ('{"zero_optimization": 3}', "zero_optimization must be a table, and not 3"),
        ('{"bf16": null}', "bf16 must be a table, and not null"),
        ('{"zero_optimization": {"stage": {"a": 1}}}', "is for stage {'a': 1}"),
    ],
)
def test_deepspeeds_configuration(tmp_path: Path, content: str, part: str) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text(content)
    assert part in refusal(lambda: settings(Config(strategy="zero3", deepspeed_config=str(file)), "cpu"))


def test_a_garbled_search_is_refused(tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text("[1")
    assert "search.json: is not valid JSON" in refusal(lambda: refuse_another_search(str(tmp_path), {}))


def test_a_run_below_the_root_stays_there() -> None:
    storage, name, made = place(*parse_ray(["--run-dir", "/data"], "x"))
    assert (storage, name, made.run_dir) == ("/", "data", "/data")


def test_compare_multiplies_the_accumulation_as_a_number() -> None:
    options, training = parse_comparison(["--strategies", "none", "--grad-accumulation", "4"])
    (row,) = rows(options["strategies"], options["variants"], training, 2)
    assert row.config is not None
    assert row.config.grad_accumulation == 8
