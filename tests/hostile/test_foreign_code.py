"""A stranger's model folder names code and places: none of it is run, imported or fetched without the flag."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2 import models
from fsdp2_extra.foreign.code import ForeignCode, installed_code_only
from tests.harness import forget_models
from tests.others.common import save

CODE = "from pathlib import Path\nPath({mark!r}).touch()\n"
CLASSES = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that hostile code would make. Modules that a library copies have a cache of this test's own."""
    for module in ("transformers.utils.hub", "transformers.dynamic_module_utils"):
        monkeypatch.setattr(f"{module}.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget_models()
    return tmp_path / "ran"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Addresses that something has tried to reach."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **named: Any) -> Any:
        asked.append(arguments[:2])
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def _change(file: Path, **values: Any) -> None:
    kept = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**kept, **values}))


def _folder(tmp_path: Path, mark: Path, kind: str = "llama") -> Path:
    folder = tmp_path / "model"
    save(kind, folder)
    (folder / "theirs.py").write_text(CODE.format(mark=str(mark)) + CLASSES)
    for place in ("custom_generate", "sentencepiece"):
        (folder / place).mkdir()
        for name in ("generate.py", "__init__.py"):
            (folder / place / name).write_text(CODE.format(mark=str(mark)))
    return folder


def _auto_map(prefix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        classes = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model", "AutoModelForMaskedLM": "Model"}
        _change(
            folder / "config.json",
            architectures=["TheirModel"],
            auto_map={auto: f"{prefix}theirs.{name}" for auto, name in classes.items()},
        )

    return change


def _only_the_model(prefix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _auto_map(prefix)(folder)
        kept = json.loads((folder / "config.json").read_text())
        del kept["auto_map"]["AutoConfig"]
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def _says_trust(folder: Path) -> None:
    _auto_map("")(folder)
    _change(folder / "config.json", trust_remote_code=True)


def _tokenizer(prefix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        _change(
            folder / "tokenizer_config.json",
            auto_map={"AutoTokenizer": [f"{prefix}theirs.Tokenizer", f"{prefix}theirs.Tokenizer"]},
            tokenizer_class="TheirTokenizer",
            trust_remote_code=True,
        )

    return change


def _kernel(folder: Path) -> None:
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        _change(folder / "config.json", **{key: "stranger/attention"})


def _adapter(folder: Path) -> None:
    _change(folder / "adapter_config.json", base_model_name_or_path="stranger/model", peft_type="LORA")


def _generation(folder: Path) -> None:
    _change(folder / "generation_config.json", custom_generate="stranger/generate", trust_remote_code=True)


HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "auto_map to a file beside it": ("llama", _auto_map("")),
    "auto_map to a repository": ("llama", _auto_map("stranger/model--")),
    "auto_map of the model alone": ("llama", _only_the_model("")),
    "auto_map of the model alone, in a repository": ("llama", _only_the_model("stranger/model--")),
    "a configuration that trusts itself": ("llama", _says_trust),
    "a tokenizer's class beside it": ("bert", _tokenizer("")),
    "a tokenizer's class in a repository": ("bert", _tokenizer("stranger/model--")),
    "a kernel in a repository": ("llama", _kernel),
    "adapters of a model elsewhere": ("llama", _adapter),
    "a generation of its own": ("llama", _generation),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_folder_names_is_run_or_fetched(
    name: str, tmp_path: Path, mark: Path, no_network: list[Any]
) -> None:
    kind, change = HOSTILE[name]
    folder = _folder(tmp_path, mark, kind)
    change(folder)
    message = ""
    try:
        spec = models.get(f"hf:{folder}")
        model = spec.on_meta("own")
        assert type(model).__module__.startswith("transformers.models.")
        assert spec.load is not None
        spec.load(folder, read=True)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    assert not mark.exists()
    assert no_network == []


def test_the_flag_runs_the_code_of_the_folder(tmp_path: Path, mark: Path) -> None:
    """The corpus above is hostile indeed: what is refused there runs here."""
    folder = _folder(tmp_path, mark)
    _only_the_model("")(folder)
    # In a process of its own: a module that is imported stays.
    process = multiprocessing.get_context("fork").Process(target=_trusted, args=(folder, tmp_path / "other"))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert mark.exists()


def _trusted(folder: Path, other: Path) -> None:
    spec = models.get(f"hf:{folder}", trust_remote_code=True)
    assert type(spec.on_meta("own")).__name__ == "Model"
    # And nobody has trusted the next folder.
    name = save("llama", other)
    _change(other / "config.json", architectures=["TheirModel"])
    assert type(models.get(name).on_meta("own")).__name__ == "LlamaForCausalLM"


def test_a_known_architecture_with_code_of_its_own_has_the_librarys_class(tmp_path: Path, mark: Path) -> None:
    """As MPT's folders are published: the class is spelt differently, and its code lies beside it."""
    folder = _folder(tmp_path, mark)
    _only_the_model("")(folder)
    spec = models.get(f"hf:{folder}")
    assert (spec.task, type(spec.on_meta("own")).__name__) == ("causal", "LlamaForCausalLM")


def test_the_door_sees_what_a_library_hides(tmp_path: Path, mark: Path) -> None:
    """A library that catches the refusal and goes on doesn't get away with it."""
    (tmp_path / "theirs_hidden.py").write_text(CODE.format(mark=str(mark)))
    sys.path.insert(0, str(tmp_path))

    def library() -> None:
        with installed_code_only(tmp_path), contextlib.suppress(ValueError):
            __import__("theirs_hidden")

    with pytest.raises(ForeignCode, match=r"theirs_hidden\.py"):
        library()
    assert not mark.exists()
    __import__("theirs_hidden")  # outside of the region the same import runs
    assert mark.exists()


def test_the_door_is_open_for_what_is_installed_below_the_folder(tmp_path: Path) -> None:
    """A model's folder may be the current one, with a virtual environment in it."""
    site = tmp_path / ".venv" / "site-packages"
    site.mkdir(parents=True)
    (site / "installed_below.py").write_text("value = 3\n")
    sys.path.append(str(site))
    try:
        with installed_code_only(tmp_path):
            assert __import__("installed_below").value == 3
    finally:
        sys.path.remove(str(site))


def test_no_connection_is_opened(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ForeignCode, match="network"), installed_code_only(tmp_path):
            socket.create_connection(listener.getsockname())
        socket.create_connection(listener.getsockname()).close()
