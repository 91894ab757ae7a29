"""Every code block of the documentation is run where it stands, or `NOT_RUN` says why it isn't."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sybil import Document, Example, Region
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp2.checkpoint import full_dtensor
from fsdp2.config import Config
from fsdp2_tools.plan.__main__ import main as plan_main
from fsdp2_tools.plan.__main__ import parser as plan_parser
from tests.docs.running import ROOT, Shell, commands, left_out, missing
from tests.harness import Ranks, small
from tests.others.common import save
from tests.remote import s3
from tests.test_chat import PLAIN, make_tokenizer
from tests.test_text import documents

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = re.compile(r"(\$ )?(git clone|torchrun|python3?|make|pip|bash|srun|sbatch|ray) ")

# Page and block, by what they begin with -> why it isn't run here.
NOT_RUN = {
    ("docs/clusters.md", "# on each of two nodes"): "needs two machines; run by tests/launchers/test_torchrun.py",
    ("docs/elastic.md", "# the same on each node"): "needs two machines; run by tests/launchers/test_elastic.py",
    ("docs/elastic.md", "export"): "needs two machines; run by tests/launchers/test_elastic.py",
    ("docs/elastic.md", "python -c"): "waits until it is ended",
    ("docs/clusters.md", "sbatch"): "needs SLURM; run by tests/slurm/test_slurm.py",
    ("docs/clusters.md", "export"): "needs a network first, and then SLURM",
    (
        "docs/own-models.md",
        "python -m fsdp2.checkpoint import checkpoint-500",
    ): "run by tests/others/test_accelerate.py",
    ("docs/own-models.md", "torchrun --nproc_per_node 2 examples"): "run by tests/others/test_examples.py",
    ("docs/own-models.md", "import torch"): "run by tests/test_plain_loop.py, on ranks",
    ("docs/state-dicts.md", "import torch"): "run by tests/test_pages_on_ranks.py, on ranks",
    ("docs/minimal.md", "torchrun"): "takes a minute; run by tests/test_minimal.py",
    (
        "docs/minimal.md",
        "",
    ): "is part of fsdp2/minimal.py, as test_reference.py checks, which tests/test_minimal.py runs",
    ("docs/doctor.md", "$ torchrun"): "says how the machine is, and ends its process at once; started by tests/doctor",
    ("docs/index.md", "$ git clone"): "needs a network",
    ("docs/contributing.md", "make"): "is this suite",
    ("docs/fine-tuning.md", "$ make eval"): "needs the extra eval; run by tests/commands/test_eval.py",
    ("*", "pip install"): "changes the environment in which the tests run",
    (
        "docs/migration-",
        "",
    ): "run by tests/migrate and tests/rewriter, with the programs and checkpoints that they need",
    ("docs/migration.md", ""): "run by tests/migrate/test_demo.py and tests/rewriter/test_commands.py",
    ("docs/notes/gpu.md", ""): "tests/gpu and benchmarks need a GPU",
    ("docs/notes/testing.md", "PYTEST_ADDOPTS"): "is this suite",
    ("*", "make compositions"): "takes minutes and writes its page; tests/test_compositions.py runs forty of its cells",
    ("*", "make chaos"): "takes half an hour; tests/test_chaos.py does ten of its kills",
    ("*", "make bench"): "takes minutes and writes a page of docs/",
    ("*", "make ray-train"): "needs Ray: run by tests/launchers, with the other tests on a cluster",
    ("*", "python -m launchers."): "needs Ray: run by tests/launchers",
    ("docs/ray.md", "from pathlib import Path"): "needs Ray: run by tests/launchers/test_ray_users.py",
    ("docs/ray.md", "from ray import tune"): "needs Ray: run by tests/launchers/test_ray_users.py",
    ("*", "python -m fsdp2.compare"): "takes minutes; run by tests/comparing",
    ("docs/plan.md", "python -m fsdp2.plan --model llama --model-size 70b"): "takes minutes; run by tests/plan",
    (
        "docs/plan.md",
        "python -m fsdp2.plan --model vit --ranks 2 --gpu cpu --calibration",
    ): "needs what a search has measured; run by tests/plan/test_calibration.py",
    ("docs/plan.md", "python -m fsdp2.plan --model llama --model-size 8b"): "takes minutes; run by tests/plan",
    (
        "docs/own-models.md",
        "$ python -m fsdp2.plan",
    ): "takes half a minute; run by tests/plan",
    ("docs/plan.md", "python -m fsdp2.plan --model llama --model-size 1b"): "takes minutes; run by tests/plan",
    ("*", "python -m fsdp2.tune"): "takes minutes; run by tests/tune",
}

# Pages whose trainings are as small as they are, and end with what the page shows.
WHOLE = ("docs/fine-tuning.md",)

# What a page's commands find when they begin: commands, and places on the reader's machine.
BEFORE = {
    "docs/remote.md": ["torchrun --nproc_per_node 2 -m fsdp2.train --run-dir s3://bucket/run --memory-snapshot"],
}


def _blocks(document: Document) -> Iterable[Region]:
    lexer = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[\w-]*)[^\n]*$\n", re.MULTILINE))
    for region in lexer(document):
        region.parsed = region.lexemes["source"]
        region.evaluator = _run
        yield region


def _why_not(page: str, source: str) -> str | None:
    for (name, begin), why in NOT_RUN.items():
        if page.startswith(name.replace("*", "")) and source.startswith(begin):
            _used.add((name, begin))
            return why
    return None


_used: set[tuple[str, str]] = set()


def _is_code(language: str, source: str) -> bool:
    return language in ("python", "bash", "console") or (not language and RUNNABLE.match(source) is not None)


def _run(example: Example) -> None:
    language, source = example.region.lexemes["language"], str(example.parsed)
    page: str = example.namespace["page"]
    if not _is_code(language, source) or _why_not(page, source) is not None:
        return
    if language == "python":
        example.namespace["python"](source)
        return
    shell: Shell = example.namespace["shell"]
    for command, shown in commands(source):
        fails = re.search(r"^fsdp2: (error|stopped|rank)", shown, re.MULTILINE) is not None
        status, printed = shell.run(f"{command} --max-steps 12" if fails else command, has_output=bool(shown))
        assert (status != 0) == fails, f"{command}\nended with {status}:\n{printed}"
        part = missing(shown, printed)
        assert part is None, f"{command}\ndidn't print\n{part}\nbut\n{printed}"
        assert left_out(shown, printed) == [], f"{command}\nprints more than\n{shown}"


def _python(ranks: Ranks, shell: Shell, source: str) -> None:
    ranks.run(run_python, source, str(shell.folder))


def run_python(source: str, folder: str) -> None:
    """A block of Python on a rank, with the names that pages leave to the reader."""
    from fsdp2.config import parse

    block, model = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.blocks(inputs)

    def initialise(model: nn.Module) -> None:
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)

    with chdir(folder):
        names: dict[str, Any] = {
            "torch": torch,
            "dist": dist,
            "nn": nn,
            "init_device_mesh": init_device_mesh,
            "fully_shard": fully_shard,
            "Model": Model,
            "initialise": initialise,
            "loss_of": nn.functional.mse_loss,
            "model": model,
            "block": block,
            "loader": [(torch.ones(2, 8), torch.zeros(2, 8))] * 2,
            "config": parse(small("runs/own", "--max-steps=2")),
            "average": torch.optim.swa_utils.AveragedModel(block),
            **{name: getattr(full_dtensor, name) for name in ("full_model_state", "full_optimizer_state")},
        }
        names["optimizer"] = torch.optim.AdamW(model.parameters())
        exec(compile(source.replace('"cuda"', '"cpu"'), "block", "exec"), names)


def document(page: Path) -> Document:
    return Document.parse(str(page), _blocks)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def has_code(page: Path) -> bool:
    name = name_of(page)
    return any(
        _is_code(region.lexemes["language"], str(region.parsed)) and _why_not(name, str(region.parsed)) is None
        for _, region in document(page).regions
    )


def _case(page: Path) -> Any:
    longer = [pytest.mark.timeout(900)] if name_of(page) in WHOLE else []
    return pytest.param(page, marks=longer, id=name_of(page))


@pytest.mark.parametrize("page", [_case(page) for page in PAGES if has_code(page)])
def test_the_code_of_a_page_runs(page: Path, ranks: Ranks, tmp_path: Path) -> None:
    with _store(page) as (places, environment):
        places |= _places(page, tmp_path)
        _run_page(page, Shell(ranks, tmp_path, places, environment, whole=name_of(page) in WHOLE), ranks)


@contextmanager
def _store(page: Path) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Of a page that names a bucket, one on a server of its own, and what the environment has to say about it."""
    if "s3://bucket/run" not in page.read_text() or page.name != "remote.md":
        yield {}, {}
        return
    with s3.s3_server() as endpoint:
        yield {"s3://bucket/run": s3.Bucket(endpoint).url()}, s3.environment(endpoint)


def _run_page(page: Path, shell: Shell, ranks: Ranks) -> None:
    for command in BEFORE.get(name_of(page), []):
        status, printed = shell.run(command, has_output=False)
        assert status == 0, printed
    read = document(page)
    read.namespace |= {"page": name_of(page), "shell": shell, "python": functools.partial(_python, ranks, shell)}
    for example in read.examples():
        example.evaluate()


def _places(page: Path, folder: Path) -> dict[str, str]:
    """Of paths on the reader's machine, the ones that stand in for them."""
    text = page.read_text()
    places: dict[str, str] = {}
    if "/models/qwen" in text:
        places["/models/qwen"] = save("llama", folder / "reader" / "model").removeprefix("hf:")
    if "/models/chat" in text:
        model = save("llama", folder / "reader" / "chat", vocab_size=300).removeprefix("hf:")
        places["/models/chat"] = str(make_tokenizer(Path(model), PLAIN))
        lines = ({"question": one, "answer": one[::-1]} for one in documents(300))
        (folder / "reader" / "qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        places["/data/qa.jsonl"] = str(folder / "reader" / "qa.jsonl")
        roles = ("user", "assistant")
        for name, count in (("train", 300), ("dev", 40)):
            talks = ([one, one[::-1]] for one in documents(count))
            rows = (
                {"messages": [{"role": role, "content": one} for role, one in zip(roles, talk, strict=True)]}
                for talk in talks
            )
            (folder / "reader" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            places[f"/data/{name}.jsonl"] = str(folder / "reader" / f"{name}.jsonl")
    for place, words in (("notes", "To be, or not to be: that is the question. "), ("books", "Call me Ishmael. ")):
        if f"/data/{place}" in text:
            there = folder / "reader" / place
            there.mkdir(parents=True)
            (there / "a.txt").write_text(words * 400)
            places[f"/data/{place}"] = str(there)
    return places


def test_the_flags_of_a_plan_on_a_page_are_there_and_go_together() -> None:
    """Of each plan, run or not."""
    commands = re.findall(r"^(?:\$ )?python -m fsdp2\.plan (.*)", "\n".join(map(Path.read_text, PAGES)), re.MULTILINE)
    assert len(commands) > 5
    names = {field.name for field in dataclasses.fields(Config)}
    for command in commands:
        given = vars(plan_parser().parse_args(shlex.split(command, comments=True)))
        if str(given.get("model")).startswith("hf:"):  # a folder of the reader's
            given["model"] = "llama"
        Config(**{name: value for name, value in given.items() if name in names})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_figures_of_a_plan_on_a_page_are_those_that_it_prints(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [one for _, region in document(page).regions for one in commands(str(region.parsed)) if one[1]]
    plans = [one for one in shown if one[0].startswith("python -m fsdp2.plan ") and "hf:" not in one[0]]
    if not plans:
        pytest.skip("shows no plan")
    for command, output in plans:
        plan_main(shlex.split(command)[3:])
        printed = capsys.readouterr().out
        assert [line for line in output.splitlines() if line not in printed and line != "…"] == []


def test_each_reason_is_that_of_a_block() -> None:
    _used.clear()
    for page in PAGES:
        for _, region in document(page).regions:
            if _is_code(region.lexemes["language"], str(region.parsed)):
                _why_not(name_of(page), str(region.parsed))
    assert set(NOT_RUN) - _used == set()
