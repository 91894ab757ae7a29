"""list, verify, show and diff: what they say about good, dead, damaged and superseded checkpoints."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.sources.dcp_tensors import DcpTensors, misses
from fsdp2.checkpoint.store import HASH, MARKER, fingerprint, read_marker, verify, write_marker
from fsdp2_tools.checkpoint.safetensors_write import write_safetensors
from tests.commands.common import Cli, change_metadata, checkpoint, refusal


def vouch(directory: Path) -> None:
    """A marker whose hashes are right again, of the files that it lists."""
    files = LocalFiles(directory)
    marker = {key: value for key, value in read_marker(files).items() if key != HASH}
    write_marker(files, {**marker, "files": {name: fingerprint(files, name) for name in marker["files"]}})
    verify(files)


# --- list ------------------------------------------------------------------------------------------------


def test_list_tells_committed_dead_damaged_and_superseded(mixed: Path, cli: Cli) -> None:
    status, out, _ = cli("list", mixed)
    title, *lines = out.splitlines()
    assert status == 0
    assert title.split() == ["checkpoint", "step", "eval", "loss", "when", "size", "ranks", "committed", "verified"]
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == ["step-00000004", "step-00000005", "step-00000006", "superseded-1-step-00000002"]
    assert rows["step-00000004"].endswith("2  yes              __1_0.distcp differs from what was committed")
    assert rows["step-00000005"].endswith("2  yes              ok")
    assert rows["step-00000006"].endswith("no, a dead save")
    assert rows["superseded-1-step-00000002"].endswith("2  superseded       ok")
    size = sum(path.stat().st_size for path in checkpoint(mixed).iterdir())
    assert f" {size / 1000:.1f} kB " in rows["step-00000005"]


def test_list_has_the_evaluations_of_steps_that_are_there(mixed: Path, cli: Cli) -> None:
    records = [
        {"kind": "eval", "step": step, "epoch": 0, "loss": loss} for step, loss in ((2, 4.0), (4, 0.5), (5, 0.25))
    ]
    (mixed / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records) + '{"kind": "eval"}\n')
    rows = {line.split()[0]: line.split()[2] for line in cli("list", mixed)[1].splitlines()}
    assert (rows["step-00000004"], rows["step-00000005"]) == ("0.5", "0.25")
    assert "4" not in rows.values()  # of another step 2 than the superseded one


def test_list_quick_compares_sizes_and_says_so(mixed: Path, cli: Cli) -> None:
    (checkpoint(mixed) / "__0_0.distcp").unlink()
    _, out, _ = cli("list", mixed, "--quick")
    lines = out.splitlines()
    assert lines[0].endswith("verified (sizes alone)")
    assert lines[1].endswith("yes              ok")  # a byte of step 4 has changed
    assert lines[2].endswith("__0_0.distcp is missing")


def test_list_of_no_run_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert "holds no checkpoints; give the folder of a run" in refusal(cli("list", tmp_path))


# --- verify ----------------------------------------------------------------------------------------------


def test_verify_finds_all_good(finished: Path, cli: Cli) -> None:
    status, out, err = cli("verify", finished)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [str(checkpoint(finished, step)) for step in (2, 4, 5)] + [
        str(finished / "full_model")
    ]
    assert all(line.startswith("ok: ") and " files, " in line for line in lines)
    assert cli("verify", checkpoint(finished))[:2] == (0, lines[2] + "\n")
    assert cli("verify", finished / "full_model")[0] == 0


def test_verify_names_what_is_bad_and_goes_on(mixed: Path, cli: Cli) -> None:
    status, out, err = cli("verify", mixed)
    assert status == 1
    assert err == f"bad: {checkpoint(mixed, 4)}: __1_0.distcp differs from what was committed\n"
    assert out.startswith(f"ok: {checkpoint(mixed, 5)}: ")
    assert "was never committed" in cli("verify", checkpoint(mixed, 6))[2]


def test_verify_of_a_run_without_a_committed_checkpoint_is_bad(cli: Cli, tmp_path: Path) -> None:
    assert cli("verify", tmp_path) == (1, "", f"{tmp_path}: holds no committed checkpoint ({'no ' + MARKER})\n")


BIAS = "app.model.conv_proj.bias"  # 32 numbers, 16 from each rank


def _lose_a_chunk(metadata: Metadata) -> None:
    del metadata.state_dict_metadata[BIAS].chunks[1]  # type: ignore[union-attr]


def _overlap(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[BIAS]
    entry.chunks = [ChunkStorageMetadata(torch.Size([start]), torch.Size([8])) for start in (0, 4, 16, 24)]


def _say_more(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata[BIAS]
    entry.size = torch.Size([1 << 60])
    entry.chunks = [ChunkStorageMetadata(torch.Size([0]), entry.size)]


def _forget_where(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == BIAS]:
        del metadata.storage_data[index]


def _point_elsewhere(metadata: Metadata) -> None:
    for index, info in metadata.storage_data.items():
        if index.fqn == BIAS:
            info.offset += 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_lose_a_chunk, "its chunks have 16 of 32 elements"),
        (_overlap, "its chunks overlap"),
        (_say_more, "needs 4611686018427387904 bytes, and its files have"),
        (_forget_where, "is not in .metadata's list of what is where"),
        (_point_elsewhere, "can't be read"),
    ],
)
def test_verify_reads_every_chunk(run: Path, cli: Cli, change: Callable[[Metadata], None], found: str) -> None:
    change_metadata(checkpoint(run), change)
    vouch(checkpoint(run))
    status, out, err = cli("verify", checkpoint(run))
    assert (status, out) == (1, "")
    assert f"{checkpoint(run)}: {BIAS} " in err
    assert found in err
    assert ";" not in err  # and nothing else


def test_verify_wants_every_file_that_is_read_in_the_marker(run: Path, cli: Cli) -> None:
    directory = checkpoint(run)
    shutil.copy(directory / "__0_0.distcp", directory / "other.distcp")

    def move(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == BIAS and info.relative_path == "__0_0.distcp":
                info.relative_path = "other.distcp"

    change_metadata(directory, move)
    vouch(directory)
    assert cli("verify", directory)[2] == f"bad: {directory}: other.distcp is read and not listed in {MARKER}\n"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_missing_and_overlapping_chunks_are_told_from_a_whole_tensor(data: st.DataObject) -> None:
    size = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    cuts = [sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=2))}) for length in size]
    boxes = [
        (tuple(start for start, _ in box), tuple(end - start for start, end in box))
        for box in itertools.product(*(list(itertools.pairwise(cut)) or [(0, 0)] for cut in cuts))
    ]
    assert misses(size, boxes) is None
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=1))  # the same twice is no harm
    if data.draw(st.booleans()):
        boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    moves: bool = data.draw(st.booleans())
    if boxes and moves:
        at = data.draw(st.integers(0, len(boxes) - 1))
        shift = [data.draw(st.integers(-1, 1)) for _ in size]
        boxes[at] = tuple(map(sum, zip(boxes[at][0], shift, strict=True))), boxes[at][1]
    inside = all(
        start >= 0 and start + length <= whole
        for offsets, sizes in boxes
        for start, length, whole in zip(offsets, sizes, size, strict=True)
    )
    count = torch.zeros(size)
    for offsets, sizes in set(boxes) if inside else set():
        count[tuple(slice(start, start + length) for start, length in zip(offsets, sizes, strict=True))] += 1
    assert (misses(size, boxes) is None) == (inside and bool((count == 1).all()))


# --- show ------------------------------------------------------------------------------------------------


def test_show_reads_no_tensor(finished: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DcpTensors, "_allocate", lambda *_: pytest.fail("a tensor was read"))
    status, out, _ = cli("show", finished)
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith(f"{checkpoint(finished)}: step 5, by 2 ranks, ")
    assert lines[2].split() == ["app.model.class_token", "[1,", "1,", "32]", "float32", "128"]
    assert "app.progress.step = 5" in lines
    assert "  app.model: 32 tensors, 78.6 kB" in lines
    assert "  app.optim: 96 tensors, 157.4 kB" in lines


def test_show_of_each_kind_of_file(finished: Path, cli: Cli, tmp_path: Path) -> None:
    full = finished / "full_model" / "full-model.pt"
    for form, options in {"dcp": (), "safetensors": (), "sharded": ("--max-shard-size=30kB",)}.items():
        target = "safetensors" if form == "sharded" else form
        assert cli("export", finished, tmp_path / form, "--format", target, *options)[0] == 0
    one = tmp_path / "safetensors" / "model.safetensors"
    tables = [cli("show", place)[1].splitlines()[1:] for place in (full, tmp_path / "dcp")]
    assert tables[0] == tables[1]
    assert tables[0][-1] == "32 tensors, 19,658 elements, 78.6 kB; 0 plain values"
    for place in (tmp_path / "safetensors", one, tmp_path / "sharded"):
        assert sorted(cli("show", place)[1].splitlines()[1:]) == sorted(tables[0])
    assert "  state: 96 tensors, 157.4 kB\n" in cli("show", full.with_name("full-optimizer.pt"))[1]
    assert "full-model.pt is there, give that if it is meant" in refusal(cli("show", full.parent))


def test_writers_of_shards_read_one_after_the_other(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((4,), float(number)) for number in range(8)}
    reading: list[str] = []

    def read(name: str) -> torch.Tensor:
        assert not reading, "a source has one position in each of its files"
        reading.append(name)
        time.sleep(0.005)  # time for another thread
        reading.clear()
        return tensors[name]

    write_safetensors(LocalFiles(tmp_path), tensors, read, max_shard_size=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 8


def test_names_cannot_write_to_the_terminal(cli: Cli, tmp_path: Path) -> None:
    torch.save({"a\x1b[2Jb\nc": torch.zeros(1), "d": "\x1b]0;title\x07"}, tmp_path / "m.pt")
    out = cli("show", tmp_path / "m.pt")[1]
    assert "\x1b" not in out
    assert "a\\x1b[2Jb\\nc" in out


# --- diff ------------------------------------------------------------------------------------------------


def test_diff_of_a_checkpoint_and_its_full_model(finished: Path, cli: Cli) -> None:
    full = finished / "full_model" / "full-model.pt"
    equal = (0, "model weights: 32 of 32 tensors are equal; both are verified\n", "")
    assert cli("diff", finished, full) == equal
    assert cli("diff", full, checkpoint(finished)) == equal
    status, out, _ = cli("diff", checkpoint(finished, 4), full)
    assert status == 1
    assert out.endswith("model weights: 0 of 32 tensors are equal; 32 differences; both are verified\n")


def test_diff_of_two_checkpoints_compares_everything(finished: Path, run: Path, cli: Cli) -> None:
    assert cli("diff", finished, run) == (0, "138 of 138 tensors are equal; both are verified\n", "")
    status, out, _ = cli("diff", checkpoint(finished, 4), finished)
    assert status == 1
    lines = out.splitlines()
    assert "app.progress.step: 4 and 5" in lines
    assert "app.optim.state.class_token.step: 1 of 1 values differ, by at most 1" in lines
    assert not any(line.startswith("app.rng.rank0.python:") for line in lines)


def test_diff_names_and_measures(cli: Cli, tmp_path: Path) -> None:
    a = {"same": torch.tensor([1.0, float("nan"), float("inf")]), "only a": torch.zeros(1), "type": torch.zeros(2)}
    a |= {"many": torch.arange(3_000_000), "few": torch.tensor([1.0, 2.0, float("nan")]), "bool": torch.tensor([True])}
    b = {"same": a["same"].clone(), "only b": torch.zeros(1), "type": torch.zeros(2, dtype=torch.bfloat16)}
    b |= {"many": a["many"].clone(), "few": torch.tensor([1.5, 2.0, 3.0]), "bool": torch.tensor([False])}
    b["many"][-1] += 7
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    status, out, _ = cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    no = f"unverified: no {MARKER}"
    assert status == 1
    assert out.splitlines() == [
        f"only in {tmp_path}/a.pt: only a",
        f"only in {tmp_path}/b.pt: only b",
        "type: float32 [2] and bfloat16 [2]",
        "many: 1 of 3000000 values differ, by at most 7",
        "few: 2 of 3 values differ, by at most nan",
        "bool: 1 of 1 values differ, by at most 1",
        "1 of 7 tensors are equal; 6 differences" + "".join(f"; {tmp_path}/{x}.pt is {no}" for x in "ab"),
    ]


def test_diff_of_plain_values(cli: Cli, tmp_path: Path) -> None:
    """A NaN is like itself, also within a list; 1, 1.0 and True are three values; tensors in a list are compared."""
    nan, same = float("nan"), {"weight": torch.zeros(1)}
    a = {"nan": nan, "nans": [nan, {"x": nan}], "one": 1, "true": 1, "list": [1], "inside": [torch.ones(2)]}
    b = {"nan": nan, "nans": [nan, {"x": nan}], "one": 1.0, "true": True, "list": [True], "inside": [torch.zeros(2)]}
    torch.save({**same, **a}, tmp_path / "a.pt")
    torch.save({**same, **b}, tmp_path / "b.pt")
    status, out, _ = cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    differing = {line.partition(":")[0] for line in out.splitlines()[:-1]}
    assert (status, differing) == (1, {"one", "true", "list", "inside.0"})
    torch.save({**same, **a}, tmp_path / "b.pt")
    assert cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 0


def test_diff_leaves_out_where_metrics_end(cli: Cli, tmp_path: Path) -> None:
    """Its lines hold times, so that it differs between two runs that are equal."""
    for name, place, step in (("a", 100, 3), ("b", 101, 3), ("c", 100, 4)):
        progress = {"metrics_position": place, "step": step}
        torch.save({"app": {"model": {"w": torch.zeros(1)}, "progress": progress}}, tmp_path / f"{name}.pt")
    assert cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 0
    assert "app.progress.step: 3 and 4\n" in cli("diff", tmp_path / "a.pt", tmp_path / "c.pt")[1]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64, torch.complex64, torch.bfloat16]
)
def test_diff_knows_every_type(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"x": torch.tensor([1, 2, 3]).to(dtype)}, tmp_path / "a.pt")
    torch.save({"x": torch.tensor([1, 2, 5]).to(dtype)}, tmp_path / "b.pt")
    assert cli("diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0
    assert "x: 1 of 3 values differ, by at most 2\n" in cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]


def test_pairs_of_numbers_of_4_bits_are_compared_and_copied(cli: Cli, tmp_path: Path) -> None:
    for name, last in (("a", 0x7F), ("b", 0x4F)):  # 6 and -6 in a byte, and 2 and -6
        packed = torch.tensor([0x00, 0x12, last], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        torch.save({"x": packed}, tmp_path / f"{name}.pt")
    assert cli("diff", tmp_path / "a.pt", tmp_path / "a.pt")[0] == 0
    assert "x: 1 of 3 values differ, by at most 4\n" in cli("diff", tmp_path / "a.pt", tmp_path / "b.pt")[1]
    for form in ("pt", "dcp"):
        assert cli("export", tmp_path / "a.pt", tmp_path / form, "--format", form)[0] == 0
        assert cli("diff", tmp_path / "a.pt", tmp_path / form)[0] == 0


# --- places ----------------------------------------------------------------------------------------------


def test_a_run_at_a_url(mixed: Path, cli: Cli, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    remote: Any = open_files(url)
    for path in mixed.rglob("*.*"):
        if path.is_file():
            remote.put(str(path), path.relative_to(mixed).as_posix())
    lines = [line.split() for line in cli("list", url)[1].splitlines()]
    local = [line.split() for line in cli("list", mixed)[1].splitlines()]
    dead = local[3]
    del dead[2:4]  # there is no time of an object store's folder
    assert lines == local
    assert cli("verify", url)[0] == 1
    assert cli("verify", f"{url}/checkpoints/step-00000005")[0] == 0
    at_url, here = cli("show", url)[1], cli("show", mixed)[1]
    assert at_url.splitlines()[1:] == here.splitlines()[1:]
    for place in ("", "/checkpoints/step-00000005", "/full_model/full-model.pt"):
        assert cli("diff", url + place, mixed)[0] == 0
    assert cli("export", url, tmp_path / "m.pt", "--format", "pt")[0] == 0
    assert cli("diff", tmp_path / "m.pt", mixed / "full_model" / "full-model.pt")[0] == 0
    assert "is a URL; write to a local path" in refusal(cli("export", url, f"{url}/x", "--format", "pt"))
    assert "is a URL; write to a local path" in refusal(cli("import", url, f"{url}/x"))
