"""A stranger's tokenizer, template, configuration or table is a program: whatever it asks for ends in one line."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest

from fsdp2.config import parse
from fsdp2.data.errors import UnusableText
from fsdp2.options.errors import ConfigError
from fsdp2.run.preflight import check_data
from fsdp2_extra.foreign import bounds
from fsdp2_extra.foreign.bounds import Foreign, in_bounds, run_in_bounds
from fsdp2_extra.models import hf
from fsdp2_extra.text.chat import open_chat
from fsdp2_extra.text.places import find
from fsdp2_extra.text.reading import rows_of
from fsdp2_extra.text.text import encoder_of
from fsdp2_extra.text.tokenizer_file import open_tokenizer
from fsdp2_tools.data.__main__ import cli
from fsdp2_tools.plan.__main__ import main as plan
from tests.harness import forget_models
from tests.hostile.common import one_line
from tests.others.common import save
from tests.others.tiny import tiny
from tests.test_chat import PLAIN, encoded, make_tokenizer, talk

SMALL = 200 << 20
FOREIGN = Foreign("file", UnusableText, "give another")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are reached soon."""
    monkeypatch.setattr(bounds, "SECONDS", 2.0)
    monkeypatch.setattr(bounds, "MEMORY", SMALL)
    monkeypatch.setattr(bounds, "ANSWER", 4 << 20)
    monkeypatch.setattr(hf, "MEMORY", SMALL)
    forget_models()


# --- the door --------------------------------------------------------------------------------------------


def _endless(*kept: bytes) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("function", "part"),
    [
        (_endless, "file: takes more than 2 seconds of a processor; give another"),
        (lambda: _endless(b"x" * (SMALL + (32 << 20))), "file: takes more than 0.2 GiB of memory"),
        (lambda: b"x" * (1 << 50), "file: takes more than 0.2 GiB of memory"),
        (lambda: bytes(8 << 20), "file: makes more than 4 MiB; give another"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ends the library that reads it (exit code -11); "),
        (lambda: 1 / 0, "the library that reads it gives up (ZeroDivisionError: division by zero); give another"),
    ],
)
def test_a_bound_ends_in_one_line(function: Callable[[], Any], part: str) -> None:
    with pytest.raises(UnusableText, match=re.escape(part)) as caught:
        run_in_bounds(function, FOREIGN)
    one_line(caught.value)


@pytest.mark.parametrize("stuck", [1, 3])
def test_a_child_that_never_begins_is_made_again(stuck: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forked, fork = list[int](), os.fork

    def forking() -> int:
        forked.append(fork())
        while forked[-1] == 0 and len(forked) <= stuck:
            signal.pause()
        return forked[-1]

    monkeypatch.setattr(os, "fork", forking)
    monkeypatch.setattr(bounds, "BEGINS", 3.0)
    with pytest.raises(UnusableText, match="none of 3 processes for it began") if stuck == 3 else nullcontext():
        assert run_in_bounds(lambda: len(forked), FOREIGN) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in forked)


class Counter:
    """Something with attributes and methods."""

    step = 2

    def __init__(self) -> None:
        self.count = 0

    def up(self, *, times: int = 1) -> Iterator[int]:
        for _ in range(times):
            self.count += self.step
            yield self.count


def test_memory_that_is_left_alone_is_not_counted() -> None:
    size = 4 * SMALL
    assert run_in_bounds(lambda: numpy.empty(size, numpy.uint8).nbytes, FOREIGN) == size


class Keeping:
    """Keeps memory of each request, as an allocator does."""

    def take(self, given: bytes) -> int:
        self.kept = b"x" * (SMALL + len(given))
        return len(self.kept)

    def rest(self) -> None:
        time.sleep(10 * bounds.LOOK)  # the parent looks meanwhile


def test_what_a_large_request_was_granted_is_granted_to_those_after_it() -> None:
    keeping = in_bounds(Keeping, FOREIGN)
    assert keeping.take(b"x" * (2 << 20)) > SMALL
    keeping.rest()


def test_what_is_in_bounds_is_used_like_the_object_itself() -> None:
    counter = in_bounds(Counter, FOREIGN)
    assert (counter.step, list(counter.up(times=2)), list(counter.up()), counter.count) == (2, [2, 4], [6], 6)


def test_the_child_ends_with_what_stands_for_it_and_keeps_nothing_open() -> None:
    read, write = os.pipe()
    made = in_bounds(lambda: os.getpid, FOREIGN)
    os.close(write)
    assert os.read(read, 1) == b""  # else the child has the other end
    os.close(read)
    pid = made()
    os.kill(pid, 0)
    del made
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_child_of_a_process_that_is_killed_ends_too() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        made = in_bounds(lambda: os.getpid, FOREIGN)
        os.write(write, str(made()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(os.read(read, 20))
    os.waitpid(parent, 0)
    for descriptor in (read, write):
        os.close(descriptor)
    while _runs(child):  # the suite's limit of time ends a test that waits for ever
        time.sleep(0.02)


class _Stop(BaseException):
    """What a signal's handler raises."""


def test_a_request_that_is_interrupted_ends_the_child() -> None:
    def stop(*_: object) -> None:
        raise _Stop

    made = in_bounds(lambda: lambda endless: _endless() if endless else os.getpid(), FOREIGN)
    pid: Any = made(False)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(_Stop):
            made(True)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(UnusableText, match="file: what works with it has been ended before"):
        made(False)


def test_what_goes_beyond_its_bounds_is_refused_at_each_use() -> None:
    made = in_bounds(lambda: _endless, FOREIGN)
    for part in ("takes more than 2 seconds of a processor", "what works with it has been ended before"):
        with pytest.raises(UnusableText, match=part):
            made()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # of one that nobody has waited for yet
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


# --- tokenizers ------------------------------------------------------------------------------------------


def _tokenizer(folder: Path, **parts: Any) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for name, part in parts.items():
        setattr(made, name, part)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def _backtracking(folder: Path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    pattern = tokenizers.Regex(r"(x+x+)+y")
    return _tokenizer(folder, pre_tokenizer=tokenizers.pre_tokenizers.Split(pattern, "isolated"))


def _growing(folder: Path) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    each = tokenizers.normalizers.Replace("x", "x" * 100)
    return _tokenizer(folder, normalizer=tokenizers.normalizers.Sequence([each] * 4))


TOKENIZERS: dict[Callable[[Path], str], str] = {
    _backtracking: "the library that reads it gives up (PanicException",
    _growing: "GiB of memory, or ends the library that reads it (",
}


@pytest.mark.parametrize("make", TOKENIZERS)
def test_a_tokenizer_that_asks_for_too_much(
    make: Callable[[Path], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "tokenizer")
    with pytest.raises(UnusableText) as caught:
        open_tokenizer(folder).encode(["x" * 2000])
    one_line(caught.value, f"{folder}/tokenizer.json: ", TOKENIZERS[make], "; give another with --tokenizer")
    (tmp_path / "a.txt").write_text("x" * 2000)
    command = ["prepare", str(tmp_path / "a.txt"), f"--tokenizer={folder}", f"--out={tmp_path / 'out'}"]
    assert cli(command) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"fsdp2.data: error: {folder}/tokenizer.json: ")
    assert len(shown.err.splitlines()) == 1  # the library's own words of its panic aren't among them
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"],
)
def test_a_file_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_tokenizer(tmp_path / "tokenizer", PLAIN)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    (tmp_path / "a.jsonl").write_text(json.dumps(talk("hello", "hi")))
    for kind in ("text", "chat") if name != "chat_template.jinja" else ("chat",):
        config = parse(["--model=llama", f"--dataset={kind}:{tmp_path / 'a.jsonl'}", f"--tokenizer={folder}"])
        with pytest.raises(ConfigError) as caught:
            check_data(config)
        one_line(caught.value, f"{folder / name}: is no regular file; put a copy of its content there")


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "chat_template.jinja", "old_chat_template", "additional_chat_templates/a.jinja"]
)
def test_a_file_beside_a_tokenizer_that_leads_nowhere_or_holds_terabytes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = make_tokenizer(tmp_path / "tokenizer", PLAIN) / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(file.name)
    with pytest.raises(UnusableText) as caught:
        open_chat(str(tmp_path / "tokenizer"))
    one_line(caught.value, f"{file}: is no regular file; put a copy of its content there")
    file.unlink()
    with file.open("wb") as sparse:  # the bounds of what reads it grow with its size
        sparse.truncate(2 << 40)
    with pytest.raises(UnusableText) as caught:
        open_chat(str(tmp_path / "tokenizer"))
    one_line(caught.value, f"{file}: has more than 256 MiB")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_model_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save("bert", tmp_path / "model")  # whose mask its tokenizer names
    os.mkfifo(tmp_path / "model" / name)
    with pytest.raises(ConfigError) as caught:
        parse([f"--model=hf:{tmp_path / 'model'}"])
    one_line(caught.value, f"{tmp_path / 'model' / name}: is no regular file; put a copy of its content there")


def test_a_configuration_that_names_a_file_of_this_machine_is_refused(tmp_path: Path) -> None:
    """timm reads the weights that it names, whatever they are."""
    pytest.importorskip("transformers")
    save("llama", tmp_path / "model")
    (tmp_path / "weights.pt").write_bytes(b"x")
    file = tmp_path / "model" / "config.json"
    for outside in (str(tmp_path / "weights.pt"), f"{tmp_path}/model/../weights.pt"):
        named = {"model_args": {"checkpoints": [outside]}}
        file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
        with pytest.raises(ConfigError) as caught:
            parse([f"--model=hf:{tmp_path / 'model'}"])
        one_line(caught.value, f"{file}: names a file, {outside}, of which a model would be made; drop it there")


# --- templates -------------------------------------------------------------------------------------------

LOOPS = "{% for i in range(99999) %}" * 3 + "PRINTED" + "{% endfor %}" * 3
TEMPLATES = {
    "prints": (LOOPS.replace("PRINTED", "{{ 'x' * 50000 ~ i }}"), "GiB of memory, or ends the library that reads it ("),
    "goes on": (LOOPS.replace("PRINTED", ""), "takes more than 2 seconds of a processor ("),
    "multiplies": ("{{ 'x' * 1000000000 }}", "GiB of memory, or ends the library that reads it ("),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_that_asks_for_too_much(case: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    template, part = TEMPLATES[case]
    folder = str(make_tokenizer(tmp_path / case, PLAIN + template))
    encoder: Any = encoder_of("chat", folder)
    with pytest.raises(UnusableText) as caught:
        encoded(encoder, talk("hello", "hi"))
    one_line(caught.value, f"{folder}: ", part, "; give another with --tokenizer")


# --- tables and prepared text ----------------------------------------------------------------------------


@pytest.mark.parametrize("repeated", [False, True])
def test_a_table_of_some_kilobytes_that_holds_gigabytes(repeated: bool, tmp_path: Path) -> None:
    """One text, or a dictionary of one that each row names."""
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    content = "x" * (2 << 20 if repeated else 64 << 20)
    rows = pyarrow.array([0] * (256 if repeated else 1))
    column = pyarrow.DictionaryArray.from_arrays(rows, pyarrow.array([content]))
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": column}), file, compression="zstd")
    assert file.stat().st_size < 100_000
    (found,) = find(str(file))
    # Which of its bounds comes first depends on what memory this process has left over.
    with pytest.raises(UnusableText, match=re.escape(f"{file}: ") + "(takes|makes) more than") as caught:
        list(rows_of(found, "text"))
    one_line(caught.value, "; write it again with smaller texts, or as .jsonl")


# --- models ----------------------------------------------------------------------------------------------


# A model of transformers, the numbers that somebody has put into its configuration, and what is said of them.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads": ("llama", {"num_key_value_heads": 3}, r"fails \(RuntimeError: The size of tensor"),
    "dropout": ("llama", {"attention_dropout": math.inf}, "dropout probability has to be between 0 and 1"),
    "no number": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "theta is NaN"),
    "patch": ("vit", {"patch_size": 64}, "Kernel size can't be greater"),
    "dropout of a picture": ("vit", {"attention_probs_dropout_prob": math.inf}, "dropout probability"),
    "pixels": ("resnet", {"image_size": 10**6}, r"fails \(makes a tensor of [\d,]+ GiB\)"),
    "no pixels": ("resnet", {"image_size": -5}, "a forward of the model fails"),
    "text for pixels": ("resnet", {"image_size": "a"}, "a forward of the model fails"),
    "window": ("longformer", {"attention_window": [10**8, 10**8]}, r"makes a tensor of [\d,]+ GiB"),
    "one layer, often": ("albert", {"num_hidden_layers": 10**7}, "takes more than 2 seconds of a processor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_forward_that_no_step_could_hold(what: str, tmp_path: Path) -> None:
    """Parameters are few in all of them; each ended in a traceback of the first step, or didn't end."""
    transformers = pytest.importorskip("transformers")
    name, numbers, said = WRONG[what]
    tiny(transformers.CONFIG_MAPPING[name]).save_pretrained(tmp_path)
    assert hf.spec(str(tmp_path)).weights == tmp_path
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **numbers}))
    with pytest.raises(ValueError, match=said) as caught:
        hf.spec(str(tmp_path))
    one_line(caught.value, str(file))


@pytest.mark.parametrize(
    "numbers", [{"num_hidden_layers": 10**7}, {"num_hidden_layers": 10**13}, {"hidden_size": 10**9, "head_dim": 64}]
)
def test_a_configuration_that_asks_for_too_much(numbers: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **numbers}))
    with pytest.raises(ValueError, match=r"takes more|can't make the model") as caught:
        _ = parse([f"--model=hf:{tmp_path / 'model'}"]).spec
    one_line(caught.value, str(file))
    with pytest.raises(ConfigError) as refused:
        plan([f"--model=hf:{tmp_path / 'model'}", "--ranks=2"])
    one_line(refused.value, str(file))
