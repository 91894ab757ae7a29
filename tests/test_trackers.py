"""`--track`: what each tracker is told, offline and for real; a tracker that fails; what is refused before a group."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.checkpoint.places import open_files
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import to_flags
from fsdp2.run.preflight import preflight
from fsdp2.run.process.runtime import World
from fsdp2_extra.trackers import listeners as trackers
from tests.harness import LEAVES_NOTHING, Ranks, losses, main_in_ranks, of_kind, python_environment, small

for name in trackers.CLASSES:
    pytest.importorskip(name)

Events = list[tuple[str, dict[str, Any]]]
ALL = "--track=wandb,mlflow,tensorboard"


@pytest.fixture(autouse=True)
def _a_folder_may_be_mlflows_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def _internet_sockets(process: int | str) -> list[str]:
    """The entries of a process's sockets in the kernel's tables of TCP and UDP."""
    links = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # of a file that is closed since
            links.append(os.readlink(link))
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")]
    return [line for table in tables for line in table.splitlines()[1:] if line.split()[9] in own]


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # of a thread that has ended since
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _tracked(line: list[str], folder: Path) -> tuple[Events, list[Any], int]:
    """A run whose trackers work without a network; its events, what reached for one, and this rank's processes."""
    reached: list[Any] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("socket.connect", "socket.getaddrinfo") and not isinstance(arguments[1], str):
            reached.append((event, arguments[1:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", folder.as_uri())
        if dist.get_rank() == 0:
            sys.addaudithook(hook)
        events = main_in_ranks(line)
        children = _children()
        reached += [entry for child in children for entry in _internet_sockets(child)]
    watching = False
    return events, reached, len(children)


def _wandb_records(run: Path) -> list[Any]:
    """The records of all files that W&B has written offline, which have the form of LevelDB's log."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    records = []
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if at // 32768 != (at + 6) // 32768:  # the rest of a block is padding
                at += 32768 - at % 32768
            size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last piece
                records.append(protocol.Record.FromString(whole))
                whole = b""
    return records


def _wandb_history(run: Path) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in _wandb_records(run)
        if record.HasField("history")
    ]


def _mlflow_runs(folder: Path) -> list[Any]:
    import mlflow

    client = mlflow.MlflowClient(folder.as_uri())
    return list(client.search_runs([one.experiment_id for one in client.search_experiments()]))


def _mlflow_metric(folder: Path, name: str) -> list[tuple[int, float]]:
    import mlflow

    client, (run,) = mlflow.MlflowClient(folder.as_uri()), _mlflow_runs(folder)
    return [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]


def _board(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    return board


def test_each_tracker_has_flags_and_figures_and_training_is_the_same(
    ranks: Ranks, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tmp_path / "mlruns"
    line = small(run, *LEAVES_NOTHING, "--max-steps=6", ALL, "--run-name=mine", "--tag=kind=try out", "--tag=by=me")
    (events, reached, children), (_, _, of_other) = ranks.run(_tracked, line, folder)
    assert losses(events) == reference()
    assert (reached, of_other) == ([], 0)
    assert children > 0  # W&B's own process, whose sockets were looked at
    steps = dict(enumerate(losses(events), 1))
    (end,) = of_kind(events, "end")
    flags = to_flags(parse(line))

    (of_run,) = [record.run for record in _wandb_records(run) if record.HasField("run")]
    assert (of_run.display_name, list(of_run.tags)) == ("mine", ["kind=try out", "by=me"])
    config = {item.key: json.loads(item.value_json) for item in of_run.config.update}
    assert {flag: config[flag] for flag in flags} == flags
    history = _wandb_history(run)
    assert {row["step"]: row["train/loss"] for row in history if "train/loss" in row} == steps
    assert [row["eval/accuracy"] for row in history if "eval/accuracy" in row] == [end["accuracy"]]
    assert history[-1]["end/accuracy"] == end["accuracy"]

    (found,) = _mlflow_runs(folder)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {flag: str(value) for flag, value in flags.items()}
    assert {key: found.data.tags[key] for key in ("kind", "by")} == {"kind": "try out", "by": "me"}
    assert dict(_mlflow_metric(folder, "train/loss")) == steps
    assert found.data.metrics["end/accuracy"] == found.data.metrics["eval/accuracy"] == end["accuracy"]

    board = _board(run)
    assert {one.step: one.value for one in board.Scalars("train/loss")} == pytest.approx(steps)
    assert json.loads(board.Tensors("run/text_summary")[0].tensor_proto.string_val[0][8:-4])["flags"] == flags


KILLED = """
import os, sys, time
from fsdp2.config import parse
from fsdp2.train import main
def kill(kind, data):
    if (kind, data.get("step")) == ("train", 3):
        time.sleep(1)  # in which the trackers take the step
        os.kill(os.getpid(), 9)
main(parse(sys.argv[1:]), kill)
"""


def test_a_resume_after_a_kill_goes_on_in_the_same_runs_on_more_ranks(ranks: Ranks, tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "mlruns"
    line = small(run, "--no-save-model", "--checkpoint-every=2", "--global-batch-size=32", ALL)
    offline = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": folder.as_uri()}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *line, "--max-steps=6"],
        env={**python_environment(), **offline, "PYTHONPATH": os.getcwd()},
        timeout=120,
    )
    assert killed.returncode == -9
    known = (run / trackers.FILE).read_bytes()
    before = _mlflow_metric(folder, "train/loss")
    assert [step for step, _ in before] == [1, 2, 3]
    events = ranks.run(_tracked, [*line, "--max-steps=5"], folder)[0][0]
    assert of_kind(events, "resume")[0]["step"] == 2
    assert (run / trackers.FILE).read_bytes() == known
    after = [(step, loss) for step, loss in enumerate(losses(events), 3)]
    # Step 3 was done again: MLflow and W&B have both, TensorBoard the later one.
    assert sorted(_mlflow_metric(folder, "train/loss")) == sorted(before + after)
    (found,) = _mlflow_runs(folder)
    assert (found.info.status, found.data.params["max-steps"]) == ("FINISHED", "6")
    assert found.data.tags["fsdp2-max-steps"] == "5"
    ids = {record.run.run_id for record in _wandb_records(run) if record.HasField("run")}
    assert ids == {json.loads(known)["id"]}
    assert [row["step"] for row in _wandb_history(run) if "train/loss" in row][-3:] == [3, 4, 5]
    shown = _board(run).Scalars("train/loss")
    assert [one.step for one in shown] == [1, 2, 3, 4, 5]
    assert {one.step: one.value for one in shown} == pytest.approx(dict(before[:2] + after))

    ranks.run(_tracked, [*line, "--max-steps=1", "--resume=never"], folder)
    assert len(_mlflow_runs(folder)) == 2


class _Failing:
    """A tracker in which one thing fails, or waits for ever."""

    fix = "mend it"

    def __init__(self, moment: str) -> None:
        self._moment = moment
        self._at("import")

    def _at(self, moment: str) -> None:
        if self._moment == f"{moment} waits":
            threading.Event().wait()
        if self._moment == moment:
            raise SystemExit(3) if moment == "log" else OSError(f"no {moment}")

    def open(self, run: Any, step: int) -> str:
        self._at("open")
        return "here"

    def log(self, records: Any) -> None:
        self._at("log")

    def close(self, *, finished: bool) -> None:
        self._at("close")


MOMENTS = ("import", "open", "open waits", "log", "close")


def _failing(lines: list[list[str]]) -> list[tuple[list[float], str]]:
    """For each moment the losses of a run whose tracker fails then, and what the run has said."""
    found = []
    for moment, line in zip(MOMENTS, lines, strict=True):
        said = StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
            patch.setattr(trackers, "SECONDS", 0.3)
            patch.setitem(trackers.CLASSES, "mlflow", partial(_Failing, moment))
            found.append((losses(main_in_ranks(line)), said.getvalue()))
    return found


def test_a_run_goes_on_without_a_tracker_that_fails_and_says_so_once(
    ranks: Ranks, reference: Callable[..., list[float]], tmp_path: Path
) -> None:
    lines = [small(tmp_path / moment, *LEAVES_NOTHING, "--max-steps=6", "--track=mlflow") for moment in MOMENTS]
    first, second = ranks.run(_failing, lines)
    whys = (
        "OSError: no import",
        "OSError: no open",
        "it hasn't taken the last figures in 0 s",
        "SystemExit: 3",
        "OSError: no close",
    )
    for why, (numbers, said) in zip(whys, first, strict=True):
        assert numbers == reference()
        assert said.count("\n") == 1
        assert said.startswith(f"fsdp2: --track mlflow: left out from here on ({why}); metrics.jsonl has all figures; ")
    assert [said for _, said in second] == [""] * len(MOMENTS)


@pytest.mark.parametrize("place", ["folder", "memory://run-id"])
def test_the_id_is_kept_as_data(tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = open_files(place if "://" in place else str(tmp_path))
    kept = trackers.run_id(files, fresh=False)
    assert trackers.run_id(files, fresh=False) == kept
    assert (new := trackers.run_id(files, fresh=True)) != kept
    assert capsys.readouterr().err == ""
    for wrong in (
        b"",
        b"{}",
        b'{"id": "../../elsewhere"}\n',
        b'{"id": "0123456789abcdef", "project": "x"}\n',
        b"\0" * 99,
    ):
        files.write(trackers.FILE, wrong)
        assert (made := trackers.run_id(files, fresh=False)) != new
        assert trackers.run_id(files, fresh=False) == made
        assert capsys.readouterr().err.count("tracking.json") == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--track wandbb", "--track wandbb: must be one of wandb, mlflow, tensorboard; did you mean wandb?"),
        ("--track wandb,", "--track wandb,: must be one of wandb, mlflow, tensorboard"),
        (
            "--tag a=b",
            "--tag without --track: only a tracker shows it; add --track wandb|mlflow|tensorboard, or drop it",
        ),
        ("--run-name a", "--run-name without --track: "),
        ("--tensorboard --tag ab", "--tag ['ab']: must be KEY=VALUE, "),
        ("--tensorboard --tag =b", "--tag ['=b']: must be KEY=VALUE, "),
        ("--tensorboard --tag fsdp2-id=b", "--tag ['fsdp2-id=b']: must be KEY=VALUE, "),
        (f"--tensorboard --tag a={'b' * 63}", "--tag ['a="),
    ],
)
def test_wrong_words_are_refused(words: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(line)


def test_off_undoes_what_a_file_says(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"flags": to_flags(parse(["--track=mlflow", "--tag=a=b", "--tag=a=c", "--run-name=x"]))})
    )
    config = parse(["--config", str(file)])
    assert (config.track, config.tag, config.run_name) == (("mlflow",), ("a=c",), "x")
    config = parse(["--config", str(file), "--track=off", "--tag=off", "--run-name=off"])
    assert (config.track, config.tag, config.run_name) == ((), (), None)


def test_wandb_without_a_login_is_refused_and_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, home = Config(run_dir=str(tmp_path / "run"), track=("wandb",)), tmp_path / ".netrc"
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def check() -> None:
        preflight(config, World(0, 1, 0, 1)).hold.release(refused=True)

    for content in (None, "machine github.com login somebody password 1\n", "machine\n"):
        if content is not None:
            home.write_text(content)
        with pytest.raises(
            ConfigError, match=r"--track wandb: no login is known here.*; wandb login, set WANDB_API_KEY"
        ):
            check()
    home.write_text("machine api.wandb.ai\n  login user\n  password 1\n")
    check()
    home.unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check()
    preflight(config, World(1, 2, 1, 2)).hold.release(refused=True)  # another rank asks for nothing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--track wandb: wandb isn't installed; .*pip install -e '\.\[wandb\]'"):
        check()
