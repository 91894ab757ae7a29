"""Runs that record themselves: the same losses, the files, the pages, and what is said when memory is short."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp2.options.errors import ConfigError
from fsdp2_extra.allocations.ledger import KINDS, Allocation, Phase
from fsdp2_extra.allocations.profile import CPU, timeline_of
from fsdp2_extra.allocations.timeline import Timeline, file_name, load
from fsdp2_tools.memory import __main__ as memory
from fsdp2_tools.memory.page import page
from tests.harness import Ranks, losses, main_in_ranks, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.parametrize(
    "flags", ["", "--strategy=ddp --grad-accumulation=2", "--async-checkpoint --checkpoint-every=2"]
)
def test_recording_changes_no_loss(train: Train, tmp_path: Path, flags: str) -> None:
    plain = losses(train(*flags.split(), run="plain", steps=4))
    recorded = losses(train(*flags.split(), "--memory-snapshot", run="recorded", steps=4))
    assert recorded == plain
    for rank in range(2):
        line = load((tmp_path / "recorded" / file_name(rank)).read_bytes())
        assert line.facts["rank"] == rank
        assert line.facts["blocks"]
        steps = {phase.step for phase in line.phases if phase.name == "backward"}
        assert steps == {1, 2, 3, 4}
        assert {"data", "forward", "backward", "optimizer", "evaluation", "checkpoint"} <= {p.name for p in line.phases}


def test_profiling_changes_no_loss(train: Train, tmp_path: Path) -> None:
    plain = losses(train(run="plain", steps=8))
    assert losses(train("--profile", run="profiled", steps=8)) == plain
    for rank in range(2):
        content = json.loads(gzip.decompress((tmp_path / "profiled" / f"rank{rank}_trace.json.gz").read_bytes()))
        line = timeline_of(content, CPU, {"rank": rank})
        assert {phase.step for phase in line.phases if phase.name == "forward"} == {1, 2, 3, 4, 5, 6}
        # In each of the six steps memory rises through forward and is back where it was after backward.
        at, most = line.peak()
        assert line.phase_at(at).name in ("forward", "backward")
        assert line.by_kind(at)["activations"] > most / 2
        assert "Alive at the peak" in (tmp_path / "profiled" / f"rank{rank}_memory_profile.html").read_text()


def test_a_finished_run_has_nothing_to_profile_and_ends_well(train: Train, tmp_path: Path) -> None:
    train(run="run", steps=2)
    assert losses(train("--profile", run="run", steps=2)) == []
    assert (tmp_path / "run" / "rank0_memory_profile.html").is_file()


def test_the_summary_and_the_pages(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--memory-snapshot", run="run", steps=3)
    pages = memory.main([str(tmp_path / "run"), f"--out={tmp_path / 'pages'}"])
    assert [path.name for path in pages] == ["rank0_memory_timeline.html", "rank1_memory_timeline.html"]
    printed = capsys.readouterr().out
    for part in ("rank 0", "rank 1", "peak", "activations", "gathered parameters", "all-gather: 4 a step"):
        assert part in printed
    line = load((tmp_path / "run" / file_name(0)).read_bytes())
    largest = line.alive(line.peak()[0])[0]
    text = pages[0].read_text()
    assert "Alive at the peak" in text
    assert f"<td>{largest.module}</td>" in text
    assert "http://" not in text.replace("http://www.w3.org", "").partition("<script")[0]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to open the page in")
def test_the_page_opens_in_a_browser_without_a_network(tmp_path: Path) -> None:
    opened = in_browser(page(many_allocations(300), "a test"), tmp_path)
    assert opened.count('class="fills"') >= 1, "the curves were not drawn"
    assert "peak " in opened
    assert "<script>boom" not in opened, "a module's name is text"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to open the page in")
def test_the_page_of_very_many_events_opens_too(tmp_path: Path) -> None:
    line = many_allocations(100_000)
    assert len(json.dumps([[a.bytes, a.born, a.died, a.module, a.operation, a.kind] for a in line.allocations])) > 5e6
    text = page(line, "a test")
    assert len(text) < 10e6
    assert 'class="fills"' in in_browser(text, tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to open the page in")
@pytest.mark.parametrize("width", [500, 1200])
def test_on_a_phone_the_legend_stands_below_a_plot_of_the_page_s_width(tmp_path: Path, width: int) -> None:
    measure = (
        "<script>place().then(() => { const plot = charts[0]._fullLayout.xaxis._length;"
        "const [legend, drawn] = ['.legend', '.xy'].map((one) => charts[0].querySelector(one).getBoundingClientRect());"
        "const end = charts[0].parentElement.getBoundingClientRect().bottom;"
        "document.body.dataset.found = [innerWidth, plot, legend.top > drawn.bottom, legend.bottom <= end] })</script>"
    )
    opened = in_browser(page(many_allocations(300), "a test") + measure, tmp_path, f"--window-size={width},900")
    found = re.search(r'data-found="(\d+),([\d.]+),(true|false),(true|false)"', opened)
    assert found is not None
    window, plot, below = int(found[1]), float(found[2]), found[3] == "true"
    assert plot > 0.7 * min(window, 1200)
    assert below == (window <= 600)
    assert found[4] == "true", "the legend lies over what stands below the plot"


def many_allocations(count: int) -> Timeline:
    allocations = [
        Allocation(
            1000 + i % 777,
            i / 1000,
            1 + i * 60 // count,
            f"<script>boom{i % 50}",
            "mm.default",
            KINDS[i % len(KINDS)],
            i / 1000 + 1,
        )
        for i in range(count)
    ]
    names = ("data", "forward", "backward", "optimizer", "between")
    phases = [Phase(names[i % 5], 1 + i // 5, i * count / 60000) for i in range(61)]
    facts = {"rank": 0, "world_size": 2, "model": "vit", "strategy": "fsdp2", "device": "cpu"}
    return Timeline(facts, allocations, [Phase("start", 0, 0.0), *phases], [])


def in_browser(text: str, folder: Path, *more: str) -> str:
    """The document as Chromium has it after its scripts have run, with no network."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    path.write_text(text)
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--proxy-server=127.0.0.1:9",
        "--virtual-time-budget=20000",
        *more,
    ]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout


def test_a_run_without_a_recording_is_refused(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no rank0_memory_timeline.json.gz; train with --memory-snapshot"):
        memory.main([str(tmp_path)])
    (tmp_path / file_name(0)).write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"is not a timeline"):
        memory.main([str(tmp_path)])


def _limited(flags: list[str]) -> str:
    try:
        main_in_ranks(flags)
    except RuntimeError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "it went on"


def test_out_of_memory_says_what_was_alive_and_what_would_help(ranks: Ranks, tmp_path: Path) -> None:
    flags = small(tmp_path / "run", "--max-steps=3", "--memory-limit=900kB", "--memory-snapshot")
    said = ranks.run(_limited, flags)
    first = next(text for text in said if text.startswith("MemoryLimitReached"))
    assert "--memory-limit 900000: " in first
    assert "bytes of tensors with the " in first
    table = first.partition("at the peak ")[2]
    for part in ("activations", "optimizer", "parameters", "what would have saved some of it"):
        assert part in table
    remedies = [line.strip() for line in table.partition("at that moment:\n")[2].splitlines()]
    assert any(line.startswith("--activation-checkpointing") for line in remedies)
    assert any(line.startswith("--mixed-precision bf16") for line in remedies)
    # What it had until then is written all the same.
    assert (tmp_path / "run" / file_name(0)).is_file()
    assert (tmp_path / "run" / file_name(1)).is_file()


def test_a_limit_that_suffices_does_nothing(train: Train) -> None:
    assert len(losses(train("--memory-limit=1GB", steps=2))) == 2
