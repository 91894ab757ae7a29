"""A stranger's run folder is data: no tool that reads it imports what it names, but what the command line names too."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp2 import infer
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.own_model import code_flags
from fsdp2.report.console import Console
from fsdp2.run.directory.rundir import RunDir, read_config
from fsdp2_extra.allocations import out_of_memory
from fsdp2_tools.checkpoint.__main__ import main as checkpoint
from fsdp2_tools.compare.__main__ import main as compare
from fsdp2_tools.doctor.__main__ import main as doctor
from fsdp2_tools.memory.__main__ import main as memory
from fsdp2_tools.plan.__main__ import main as plan
from fsdp2_tools.tune.__main__ import main as tune
from launchers.ray_options import parse as ray_options
from tests.hostile.test_foreign_code import _folder, _only_the_model
from tests.hostile.test_foreign_code import mark as mark

MODULE = "strangers_module"
FUNCTION = f"{MODULE}:build"
CODE = """
from pathlib import Path
from torch import nn
Path({mark!r}).touch()
def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
"""


@pytest.fixture
def theirs(run: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder whose model is a module beside it, in the current folder, that makes `mark` when it is imported.

    Python's path holds the current folder already, as it does under `python -m`.
    """
    (run / f"{MODULE}.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.chdir(run)
    monkeypatch.syspath_prepend(str(run))
    _says(run, model=FUNCTION, model_size=None)
    return run


def _says(run: Path, **flags: Any) -> None:
    content = json.loads((run / "config.json").read_text())
    content["flags"] |= {name.replace("_", "-"): value for name, value in flags.items()}
    (run / "config.json").write_text(json.dumps(content))


READERS: dict[str, Callable[[Path], Any]] = {
    "infer": infer.main,
    "infer --sharded": lambda run: infer.main(run, sharded=True),
    "infer --prompt": lambda run: infer.go_on(run, "a", new_tokens=1, temperature=0, seed=1),
    "train": lambda run: parse([f"--config={run}/config.json", f"--run-dir={run}"]),
    "plan": lambda run: plan([f"--config={run}/config.json", "--ranks=1"]),
    "tune": lambda run: tune([f"--config={run}/config.json", "--nproc=1"]),
    "compare": lambda run: compare([f"--config={run}/config.json", "--nproc=1"]),
    "doctor": lambda run: doctor([f"--config={run}/config.json"]),
    "Ray's launchers": lambda run: ray_options([f"--config={run}/config.json"], "launchers.ray_train"),
}


@pytest.mark.parametrize("tool", READERS)
def test_a_function_that_a_run_names_is_not_imported(theirs: Path, mark: Path, tool: str) -> None:
    for content in (json.loads((theirs / "config.json").read_text()), {"model": FUNCTION}):  # with flags, and plain
        (theirs / "config.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError) as caught:
            READERS[tool](theirs)
        message = str(caught.value)
        assert f"{theirs}/config.json: its model is code, {FUNCTION}" in message
        assert message.endswith(f"add --model {FUNCTION}")
        assert "\n" not in message
    assert not mark.exists()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("tool", READERS)
@pytest.mark.parametrize("says", [True, "true", 1])
def test_a_run_does_not_trust_its_model_by_itself(theirs: Path, tool: str, says: Any) -> None:
    _says(theirs, model=f"hf:{theirs}/model", trust_remote_code=says)
    with pytest.raises(
        ConfigError, match=r"config\.json: its trust-remote-code runs its model's Python.* add --trust-rem"
    ):
        READERS[tool](theirs)


def test_what_reads_no_flags_imports_nothing(theirs: Path, mark: Path) -> None:
    for line in ("list", "verify", "show", "diff", "export", "import"):
        more = {"diff": ["."], "export": ["out.pt", "--format=pt"], "import": ["imported"]}.get(line, [])
        assert checkpoint([line, ".", *more]) == 0
    with pytest.raises(ConfigError, match="memory-snapshot"):
        memory(["."])
    assert not mark.exists()
    assert MODULE not in sys.modules


def test_a_model_that_the_command_names_is_imported(theirs: Path, mark: Path) -> None:
    """The folder above is hostile indeed: by name its code runs, from the run's flags and over them."""
    assert parse([f"--config={theirs}/config.json", f"--model={FUNCTION}"]).model == FUNCTION
    assert mark.exists()
    assert read_config(RunDir(theirs), model=FUNCTION).model == FUNCTION
    # Whoever names another model has that one, and the run's is not imported.
    assert parse([f"--config={theirs}/config.json", "--model=vit"]).model == "vit"
    # A settings file of one's own is no run's.
    (theirs / "own.toml").write_text(f'model = "{FUNCTION}"\n')
    assert parse([f"--config={theirs}/own.toml"]).model == FUNCTION


def test_the_command_line_of_infer_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def take(*places: str, **named: Any) -> dict[str, Any]:
        found.append(named)
        return {}

    monkeypatch.setattr(infer, "main", take)
    monkeypatch.setattr(infer, "go_on", take)
    for more in ([], ["--prompt=a"]):
        monkeypatch.setattr(sys, "argv", ["infer", "RUN", f"--model={FUNCTION}", "--trust-remote-code", *more])
        infer.cli()
        assert found.pop().items() >= {"model": FUNCTION, "trust_remote_code": True}.items()
        monkeypatch.setattr(sys, "argv", ["infer", "RUN", *more])
        infer.cli()
        assert found.pop().items() >= {"model": None, "trust_remote_code": False}.items()


def test_a_result_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(infer, "main", lambda *_, **__: {"loss": 1.0})
    for place in (tmp_path / "none" / "x.json", tmp_path):
        monkeypatch.setattr(sys, "argv", ["infer", "RUN", f"--json={place}"])
        with pytest.raises(SystemExit, match="2"):
            infer.cli()
        line = capsys.readouterr().err
        assert line.startswith(f"fsdp2: error: --json {place}: isn't writable (")
        assert line.count("\n") == 1


def test_a_folders_code_runs_only_by_name(tmp_path: Path, run: Path, mark: Path) -> None:
    folder = _folder(tmp_path, mark)
    _only_the_model("")(folder)
    _says(run, model=f"hf:{folder}", model_size="own", dataset="source-text", test_batch_size=1, seq_len=8)
    assert read_config(RunDir(run)).spec.task == "causal"  # the library's class
    assert not mark.exists()
    _says(run, trust_remote_code=True)
    with pytest.raises(ConfigError, match="add --trust-remote-code"):
        read_config(RunDir(run))
    assert not mark.exists()
    read_config(RunDir(run), trust_remote_code=True)
    assert mark.exists()


def test_commands_that_are_advised_name_the_code(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(model=FUNCTION)
    assert code_flags(config) == ["--model", FUNCTION]
    for reason in ("finished", "stopped"):
        end = {"run_dir": str(theirs), "reason": reason, "step": 1, "steps": 1, "seconds": 1.0, "nonfinite_steps": 0}
        Console(0, 1, 1, named=code_flags(config), to_read=code_flags(config, reads_copy=True))(
            "end", {**end, "left": "full model"}
        )
        following = capsys.readouterr().out.splitlines()[-1]
        assert following.startswith("next: ")
        assert f" --model {FUNCTION}" in following
    advised = out_of_memory.planning(config, torch.device("cpu"), 2, str(theirs))
    words = shlex.split(advised.splitlines()[-1])
    assert words[words.index("--model") + 1] == FUNCTION
    assert code_flags(Config()) == []


def test_who_reads_a_runs_copy_of_a_folder_names_no_hub(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole: Any = SimpleNamespace(
        model=HUB,
        lora=None,
        trust_remote_code=False,
        dataset="source-text",
        **dict.fromkeys(("eval_dataset", "init_from", "data_root")),
    )
    assert code_flags(whole) == ["--model", HUB]
    assert code_flags(whole, reads_copy=True) == []
    beside: Any = SimpleNamespace(**{**vars(whole), "lora": 8})
    assert code_flags(beside, reads_copy=True) == ["--model", HUB], "adapters go beside the hub's weights"
    end = {"run_dir": str(run), "reason": "finished", "step": 1, "steps": 1, "seconds": 1.0, "nonfinite_steps": 0}
    Console(0, 1, 1, export="hf")("end", {**end, "left": "full model"})
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"next: python -m fsdp2.infer {run}",
        f"next: python -m fsdp2.checkpoint export {run} model --format hf",
    ]


def test_a_picture_replaces_a_link_and_not_what_it_leads_to(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, picture = tmp_path / "victim", run / "predictions.png"
    victim.write_text("precious")
    picture.symlink_to(victim)
    infer.main(run)
    assert victim.read_text() == "precious"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    picture.with_name("predictions.png.tmp").symlink_to(victim)
    assert infer.main(run)["count"] > 0
    assert victim.read_text() == "precious"
    assert not picture.exists()
    assert "picture: none, since " in capsys.readouterr().out


def test_what_a_link_in_a_kept_model_leads_to_is_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    (tmp_path / "private").write_text("secret")
    (run / "model" / "tokenizer_more").symlink_to(tmp_path / "private")
    assert checkpoint(["export", str(run), str(tmp_path / "out"), "--format", "hf"]) == 2
    assert "tokenizer_more: is a link, which no run makes; remove it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="is a link, which no run makes"):
        read_config(RunDir(str(run)))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        pytest.fail("it connects")  # which no `except Exception` hides

    monkeypatch.setattr("socket.getaddrinfo", connect)
    monkeypatch.setattr("socket.socket.connect", connect)


HUB = "hf:nobody-here/no-such-model"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("tool", READERS)
def test_no_hub_is_asked_and_nothing_downloaded_that_a_run_names(
    run: Path, tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _says(run, dataset="fashion-mnist")
    with pytest.raises(ConfigError, match=r"its dataset is to be downloaded, fashion-mnist, .* add --dataset fashion"):
        READERS[tool](run)
    _says(run, model=HUB, model_size=None, dataset="source-text")
    with pytest.raises(ConfigError, match=rf"config\.json: its model is on a hub, {HUB}, .* add --model {HUB}$"):
        READERS[tool](run)


def test_what_is_on_this_machine_needs_no_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = Config(dataset="fashion-mnist")
    assert code_flags(config) == ["--dataset", "fashion-mnist"]
    _says(run, dataset="fashion-mnist")
    assert read_config(RunDir(run), data_root=str(tmp_path)).data_root == str(tmp_path)
    monkeypatch.setattr("fsdp2.data.mnist.missing_files", lambda *_: [])
    assert read_config(RunDir(run)).dataset == "fashion-mnist"
    assert code_flags(config) == []


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("tool", READERS)
def test_a_url_that_a_run_names_is_not_opened(run: Path, tool: str) -> None:
    _says(run, model="llama", model_size="debug", dataset="text:https://example.invalid/a.txt")
    with pytest.raises(ConfigError, match=r"config\.json: its dataset is at a URL, .* add --dataset text:https://exam"):
        READERS[tool](run)


def test_a_url_that_the_command_names_is_taken(run: Path) -> None:
    url = "text:https://example.invalid/a.txt"
    _says(run, model="llama", model_size="debug", dataset=url)
    config = read_config(RunDir(run), dataset=url)
    assert config.dataset == url
    assert code_flags(config) == ["--dataset", url]
    assert infer.parse([str(run), f"--dataset={url}"]).dataset == url
    with pytest.raises(ConfigError, match="--dataset text:"):
        infer.parse([str(run), "--dataset=text:"])


def test_weights_at_a_url_are_named_in_each_command_that_is_advised_or_started(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://example.invalid/weights.pt"
    _says(run, init_from=url)
    with pytest.raises(ConfigError, match=f"its init-from is at a URL, {url}, .* add --init-from {url}$"):
        infer.main(run)
    config = Config(init_from=url)
    assert code_flags(config) == ["--init-from", url]
    assert parse([f"--config={run}/config.json", *code_flags(config)]).init_from == url  # as comparisons start theirs
    found: list[Any] = []
    monkeypatch.setattr(infer, "main", lambda *_, **named: found.append(named))
    monkeypatch.setattr(sys, "argv", ["infer", str(run), *code_flags(config)])
    infer.cli()
    assert found[0]["init_from"] == url
