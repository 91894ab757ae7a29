"""Well hashed and wrong: whatever a checkpoint's values are, a resume ends in one line on every rank."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2.checkpoint.archive import parse_archive
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.pickles import Unread, unpickle
from fsdp2.checkpoint.refusal import Refused
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.store import read_marker, says_finite
from fsdp2.run import restoring
from fsdp2_tools.checkpoint.__main__ import main
from migration.__main__ import main as migrate
from tests.harness import Ranks
from tests.hostile.common import change_values, checkpoint_of, resume, vouch

STEP = re.compile(r"app\.optim\.state\..*\.step")
GROUP = "app.optim.param_groups.class_token."
FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "step is text": (lambda s: s.update({"app.progress.step": "1"}), "app.progress.step can't be read"),
    "another step": (
        lambda s: s.update({"app.progress.step": 7}),
        "is of step 1, and its files of another",
    ),
    "no place in the metrics": (lambda s: s.update({"app.progress.metrics_position": -1}), "metrics_position is -1"),
    "no place in the data": (lambda s: s.update({"app.batches.position": 1 << 40}), "sample 1099511627776 of epoch"),
    "no rate": (lambda s: s.update({name: "fast" for name in s if name.endswith(".lr")}), "is a str of another kind"),
    "a rate that is none": (
        lambda s: s.update({name: float("nan") for name in s if name.endswith(".lr")}),
        "an optimizer with its settings can't be made (Invalid learning rate: nan)",
    ),
    "climbs": (
        lambda s: s.update({name: True for name in s if name.endswith(".maximize")}),
        "its optimizer has other settings than its flags: maximize True",
    ),
    "another decay": (
        lambda s: s.update({name: 0.7 for name in s if name.endswith(".eps")}),
        "its optimizer has other settings than its flags: eps 0.7",
    ),
    "three betas": (
        lambda s: s.update({name: (0.1, 0.2, 0.3) for name in s if name.endswith(".betas")}),
        "is a tuple of another kind",
    ),
    "random state": (
        lambda s: s.update({"app.rng.rank1.torch": torch.zeros_like(s["app.rng.rank1.torch"])}),
        "random state of rank1: can't be set",
    ),
    "fewer steps than none": (
        lambda s: s.update({name: torch.tensor(-5.0) for name in s if STEP.fullmatch(name)}),
        "its optimizer has counted -5 steps of a weight",
    ),
    "no count": (lambda s: s.update({"app.scheduler.last_epoch": True}), "app.scheduler.last_epoch can't be read"),
}


def test_forged_values_end_in_one_line_on_every_rank(finished: Path, ranks: Ranks, tmp_path: Path) -> None:
    runs = []
    for number, (change, _) in enumerate(FORGED.values()):
        runs.append(str(shutil.copytree(finished, tmp_path / str(number))))
        change_values(checkpoint_of(tmp_path / str(number)), change)
    for answers in ranks.run(resume, *runs):
        for (_, part), answer in zip(FORGED.values(), answers, strict=True):
            assert answer.startswith("ConfigError: --resume: "), answer
            assert part in answer
            assert "weights_only" not in answer
            assert "\n" not in answer


def test_a_tensor_with_a_hole_is_refused_and_not_trained_on(finished: Path, ranks: Ranks, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    checkpoint, name = checkpoint_of(run), "app.model.conv_proj.weight"
    metadata: Any = SafeReader(checkpoint).read_metadata()
    metadata.state_dict_metadata[name].chunks.pop()
    checkpoint.write(".metadata", pickle.dumps(metadata))
    vouch(checkpoint)
    for (answer,) in ranks.run(resume, str(run)):
        assert answer.startswith("ConfigError: --resume: "), answer
        assert f"{name}: its chunks have " in answer


def test_verify_refuses_the_step_that_a_resume_refuses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_values(checkpoint_of(run), FORGED["another step"][0])
    assert main(["verify", str(checkpoint_of(run))]) == 1
    assert FORGED["another step"][1] in capsys.readouterr().err


def test_weights_that_are_no_numbers_are_called_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_values(checkpoint_of(run), lambda s: s["app.model.class_token"].fill_(float("nan")))
    assert main(["verify", str(run)]) == 0
    assert "1 tensor holds NaN or infinity: app.model.class_token" in capsys.readouterr().out


def test_weights_that_are_no_numbers_are_never_copied_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])}
    torch.save(state, tmp_path / "model.pt")
    assert main(["import", str(tmp_path / "model.pt"), str(tmp_path / "imported")]) == 0
    assert "1 tensor holds NaN or infinity: bad" in capsys.readouterr().out
    assert not says_finite(read_marker(LocalFiles(tmp_path / "imported")))
    migrate(["checkpoint", str(tmp_path / "model.pt"), str(tmp_path / "migrated")])
    assert "1 tensor holds NaN or infinity: bad" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "model.pt"), str(tmp_path / "half"), "--format=pt"]) == 0
    assert "1 tensor holds NaN or infinity: bad" in capsys.readouterr().out
    torch.save({"good": torch.ones(3)}, tmp_path / "good.pt")
    assert main(["import", str(tmp_path / "good.pt"), str(tmp_path / "fine")]) == 0
    assert "NaN" not in capsys.readouterr().out
    assert says_finite(read_marker(LocalFiles(tmp_path / "fine")))


# --- pickles ---------------------------------------------------------------------------------------------


def saved(value: Any) -> memoryview:
    file = io.BytesIO()
    torch.save(value, file)
    return memoryview(bytearray(file.getvalue()))


def with_pickle(pickled: bytes) -> memoryview:
    """An archive of torch.save with another pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved({"a": torch.zeros(2)}))) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return memoryview(bytearray(file.getvalue()))


def _laughs() -> dict[str, Any]:
    tree: Any = "ha" * 100
    for _ in range(60):
        tree = [tree, tree]
    return {"a": tree}


def _deep() -> Any:
    tree: Any = 1
    for _ in range(120):
        tree = [tree]
    return tree


NAMED = b"cx\ny\n"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (saved(_laughs()), "far larger than its file"),
        (saved(_deep()), "nested deeper than 100"),
        (
            with_pickle(b"\x80\x02c__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x10\x00\x85R."),
            "not a complete pickle",
        ),
        (with_pickle(b"\x80\x02N" + b"r\xff\xff\xff\x0f" + b"0."), "the pickle opcode b'0'"),
        (with_pickle(b"\x80\x02X\xff\xff\xff\x7fab."), "it ends in the middle"),
        (
            with_pickle(b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns."),
            "a dictionary has a key that is unhashable",
        ),
        (with_pickle(b"\x80\x02ctorch\nTensor\n(N}X\x01\x00\x00\x00aK\x01stb."), "attributes of a function or class"),
        (with_pickle(b"\x80\x02cos\nsystem\n."), "holds a os.system, and only plain tensors"),
        (with_pickle(b"\x80\x05\x97."), "the pickle opcode b'\\x97'"),
    ],
)
def test_a_pickle_takes_what_its_size_allows_and_changes_nothing(content: memoryview, part: str) -> None:
    with pytest.raises(Refused, match=re.escape(part)) as caught:
        parse_archive(content)
    assert "\n" not in str(caught.value)
    assert not hasattr(torch.Tensor, "a")


def test_names_cannot_be_put_together_without_end() -> None:
    # getattr(getattr(x.y, "aaa…"), "aaa…") and so on, each text written once and referred to again.
    text, again = b"X\x64\x00\x00\x00" + b"a" * 100 + b"q\x00", b"h\x00"
    calls = b"c__builtin__\ngetattr\n" * 6 + NAMED
    calls += b"".join((again if number else text) + b"\x86R" for number in range(6))
    with pytest.raises(Refused, match="a name in it is too long"):
        parse_archive(with_pickle(b"\x80\x02" + calls + b"."), objects=True)
    with pytest.raises(Refused, match="a name in it is too long"):
        unpickle(b"\x80\x02c" + b"a" * 600 + b"\nb\n.", {}, is_allowed=lambda name: True)


def test_what_checkpoints_hold_comes_out_as_it_went_in() -> None:
    value: dict[str, Any] = {
        "a": [1, -5, 1 << 70, 1.5, None, True, "é", b"\xff", {1, "x"}, (1, (2,))],
        "d": torch.float16,
    }
    assert parse_archive(saved(value)) == value
    for protocol in (2, 3, 4):
        assert unpickle(pickle.dumps(value["a"][:7], protocol), {}, is_allowed=lambda name: False) == value["a"][:7]
    stand_in = unpickle(pickle.dumps(Path("/a"), 4), {}, is_allowed=lambda name: True)
    assert isinstance(stand_in, Unread)
    assert (stand_in.named.split(".")[0], stand_in.arguments) == ("pathlib", ("/", "a"))


def test_a_place_that_holds_two_archives_is_none() -> None:
    """The directory of a zip stands at its end: of two tensors of one shape the second would be read for the first."""
    first, second = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(3), first)
    torch.save(torch.ones(3), second)
    assert torch.equal(parse_archive(memoryview(first.getvalue())), torch.zeros(3))
    with pytest.raises(Refused, match="has bytes before it, of another archive perhaps"):
        parse_archive(memoryview(first.getvalue() + second.getvalue()))


@pytest.mark.parametrize(
    "forged",
    [
        {"scale": float("inf")},
        {"scale": -2.0},
        {"scale": float("nan")},
        {"_growth_tracker": 1 << 40},
        {"_growth_tracker": -1},
        {"growth_factor": -1.0},
        {"backoff_factor": 1e30},
    ],
)
def test_a_gradient_scaler_that_no_run_has_is_told(forged: dict[str, float]) -> None:
    ours = torch.amp.GradScaler("cpu").state_dict()
    assert restoring._unlike(ours, {**ours, "scale": 2.0, "_growth_tracker": 1999}) == ""
    ((name, value),) = forged.items()
    assert restoring._unlike(ours, {**ours, **forged}) == f"{name} {value}"
