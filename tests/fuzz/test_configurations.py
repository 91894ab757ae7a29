"""Command lines and settings files: each makes a Config that a file holds without loss, or is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2 import config, infer
from fsdp2.checkpoint.refusal import Refused
from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, flag_of
from fsdp2.options.parser import to_flags
from fsdp2.options.values import switch
from fsdp2.parallel.freeze import freeze
from fsdp2.run import preflight, start
from fsdp2.run.directory import rundir
from fsdp2.run.process.runtime import World
from fsdp2_extra.baselines.deepspeed_settings import settings
from fsdp2_tools.checkpoint import __main__ as checkpoint
from fsdp2_tools.compare import __main__ as comparison
from launchers.ray_options import RayOptions, parse_groups, place
from launchers.ray_search import example_config, parse_search
from launchers.ray_tune import TuneOptions
from tests.fuzz.common import refused, trials

FIELDS = {field.name.replace("_", "-"): field for field in dataclasses.fields(Config)}


def _written(number: float) -> str:
    return str(number) if isinstance(number, float) or abs(number) < 10**400 else "9" * 5000


NUMBERS = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 255, 256, 257, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**30, 10**310, 10**400]),
    st.integers(),
    st.floats(),
)
# With NULs, lone surrogates, digits of other scripts and line breaks.
TEXTS = st.one_of(
    st.text(alphabet=st.characters(), max_size=20),
    st.sampled_from(["", " ", "²", "٣", "1_0", "1e400", "nan", "-inf", "9" * 500, "x" * 256, "x/" * 3000, "\ud800"]),
    st.sampled_from(["a\nb", "\x1b[31m", "s3://", "://", "memory://x", "off", "auto", "never", "true", "..", "500MB"]),
    st.integers(0, 10**6).flatmap(lambda size: st.just("y" * size)),
)
WORDS = ["vit", "cnn", "transformer", "debug", "mnist", "sgd", "ddp", "fsdp1", "none", "zero3", "bf16", "fp16", "root"]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS, st.sampled_from(WORDS)),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(TEXTS, below, max_size=3)),
    max_leaves=6,
)
SCALARS = st.one_of(NUMBERS.map(_written), TEXTS, st.sampled_from(WORDS), st.integers(0, 9).map(str))
NAMES = st.one_of(st.sampled_from(sorted(FIELDS)), TEXTS)


def fitting(name: str) -> st.SearchStrategy[Any]:
    """Mostly a value that the flag takes: its default, one of its neighbours', a small number, or a word."""
    default = FIELDS[name].default
    if FIELDS[name].metadata["parse"] is switch:
        return st.booleans()
    return st.one_of(st.just(default if default != () else ["a*"]), st.integers(1, 9), st.sampled_from(WORDS))


@st.composite
def flags(draw: st.DrawFn) -> dict[str, Any]:
    """A table of flags, of which most are right."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
    table = {name: draw(fitting(name)) for name in names}
    for _ in range(draw(st.integers(0, 2))):
        table[draw(NAMES)] = draw(VALUES)
    return table


@st.composite
def command_lines(draw: st.DrawFn, names: Sequence[str] = tuple(FIELDS)) -> list[str]:
    words: list[str] = []
    for _ in range(draw(st.integers(0, 5))):
        flag = "--" + draw(st.one_of(st.sampled_from([*names, "config", "no-cuda"]), TEXTS))
        value = draw(st.one_of(st.none(), SCALARS))
        words += [flag] if value is None else [f"{flag}={value}"] if draw(st.booleans()) else [flag, value]
    return [word for word in words if word not in ("-h", "--help")]


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {as_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return "nil" if value is None else json.dumps(value).replace("NaN", "nan").replace("Infinity", "inf")


@st.composite
def files(draw: st.DrawFn, tables: st.SearchStrategy[Any] | None = None) -> tuple[str, bytes]:
    """Name and bytes of a settings file: right, nearly right, or anything."""
    table = draw(flags() if tables is None else tables)
    if draw(st.booleans()):
        beside = draw(st.dictionaries(st.sampled_from(["environment", "lr", "x"]), VALUES, max_size=1))
        table = {"flags": draw(st.one_of(st.just(table), VALUES)), **beside}
    suffix = draw(st.sampled_from([".json", ".toml", ""]))
    if suffix == ".json":
        text = json.dumps(table, ensure_ascii=draw(st.booleans()))
        if draw(st.integers(0, 9)) == 0:
            text = text.replace("{", '{"lr": 1, "lr": 2,', 1)
    else:
        text = "\n".join(f"{json.dumps(key)} = {as_toml(value)}" for key, value in table.items())
    data = text.encode(errors="surrogatepass")
    damage = draw(st.sampled_from(["none"] * 6 + ["cut", "flip", "insert", "bytes", "deep", "digits", "dots"]))
    at = draw(st.integers(0, len(data)))
    depth = draw(st.sampled_from([10, 49, 60, 1000, 100_000]))
    changed = {
        "none": data,
        "cut": data[:at],
        "flip": data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :],
        "insert": data[:at] + draw(st.binary(max_size=9)) + data[at:],
        "bytes": draw(st.binary(max_size=200)),
        "deep": b'{"lr": ' * depth if draw(st.booleans()) else b"lr = " + b"[" * depth + b"]" * depth,
        "digits": data.replace(b"1", b"7" * depth, 1),
        "dots": b".".join([b"a"] * depth) + b" = 1",
    }
    return f"run{suffix}", changed[damage]


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(folder: Path, file: tuple[str, bytes]) -> Path:
    path = folder / file[0]
    path.write_bytes(file[1])
    return path


def holds(made: Config, folder: Path) -> None:
    """A valid Config: a file of its flags makes an equal one, and what looks at it next has no surprise."""
    numbers = [value for value in vars(made).values() if isinstance(value, (int, float))]
    assert all(0 <= value <= (1e30 if isinstance(value, float) else 2**63 - 1) for value in numbers)
    assert (made.threads or 0) <= 1024
    assert made.loader_workers <= 256
    again = written(folder, ("again.json", json.dumps(to_flags(made)).encode()))
    assert config.parse(["--config", str(again)]) == made
    with torch.device("meta"):
        model = made.spec.build(made.model_size)
    refused(lambda: freeze(model, made.freeze), ValueError)
    refused(lambda: preflight.check_world(made, World(0, 2, 0, 2)), ConfigError)
    refused(lambda: preflight.check_data(made), ConfigError)
    if "://" not in made.resume:  # which would ask a network
        store = rundir.RunDir(folder / "no-run").store
        refused(lambda: start.find_origin(made, store), ConfigError)


@given(command_lines())
@trials(300)
def test_command_lines(folder: Path, words: list[str]) -> None:
    made = refused(lambda: config.parse(words), ConfigError)
    if made is not None:
        holds(made, folder)


@given(files())
@trials(300)
def test_files(folder: Path, file: tuple[str, bytes]) -> None:
    path = written(folder, file)
    made = refused(lambda: config.parse(["--config", str(path)]), ConfigError)
    if made is not None:
        holds(made, folder)


@given(files())
@trials(100)
def test_the_config_of_a_run(folder: Path, file: tuple[str, bytes]) -> None:
    written(folder, ("config.json", file[1]))
    refused(lambda: rundir.read_config(rundir.RunDir(folder)), ConfigError)


@given(st.sampled_from(sorted(FIELDS)), VALUES)
@trials(400)
def test_values_from_a_program(name: str, value: Any) -> None:
    """`Config(…)` takes anything that Python has."""
    refused(lambda: Config(**{FIELDS[name].name: value}), ConfigError)


DEEPSPEED = st.dictionaries(
    st.one_of(st.sampled_from(["zero_optimization", "bf16", "fp16", "train_batch_size", "optimizer"]), TEXTS),
    st.one_of(VALUES, st.dictionaries(st.sampled_from(["stage", "enabled"]), VALUES)),
    max_size=3,
)


@given(files(DEEPSPEED))
@trials(100)
def test_deepspeeds_configuration(folder: Path, file: tuple[str, bytes]) -> None:
    path = written(folder, ("deepspeed.json", file[1]))
    made = Config(strategy="zero3", deepspeed_config=str(path))
    refused(lambda: settings(made, "cpu"), ConfigError)


def _ray(words: list[str]) -> None:
    (tune, options), made = parse_groups(words, "fuzz", {"search": TuneOptions, "Ray": RayOptions})
    place(options, made)
    example_config(made, parse_search(tune.search))


OTHERS: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
    "ray": (_ray, [flag_of(f.name)[2:] for kind in (TuneOptions, RayOptions) for f in dataclasses.fields(kind)]),
    "compare": (comparison.parse, ["strategies", "variants", "nproc", "steps", "repeats", "budget", "out"]),
    "infer": (infer.parse, ["data-root", "json", "sharded"]),
    "checkpoint": (checkpoint.parse, ["max-shard-size", "format", "dtype", "from", "quick"]),
}


@pytest.mark.parametrize("name", OTHERS)
@given(st.data())
@trials(100)
def test_other_commands(name: str, data: st.DataObject) -> None:
    parse, names = OTHERS[name]
    words = data.draw(command_lines(names))
    if name in ("infer", "checkpoint"):
        words = [*data.draw(st.lists(st.one_of(TEXTS, st.sampled_from(["list", "export", "run"])), max_size=3)), *words]
    refused(lambda: parse([word for word in words if word not in ("-h", "--help")]), ConfigError, Refused)


SEARCHES = st.one_of(
    st.builds(
        "{}={}({})".format,
        NAMES,
        st.sampled_from(["uniform", "loguniform", "randint", "choice", "grid", "eval"]),
        st.lists(SCALARS, max_size=3).map(", ".join),
    ),
    st.integers(1, 50_000).map(lambda depth: "lr=" + "(" * depth),
    st.integers(1, 50_000).map(lambda depth: "lr=choice(" + "-" * depth + "1)"),
    TEXTS,
)


@given(st.lists(SEARCHES.filter(lambda text: not text.endswith(".py")), min_size=1, max_size=2))
@trials(200)
def test_searches(texts: list[str]) -> None:
    refused(lambda: example_config(Config(), parse_search(texts)), ConfigError)
