"""`--compile`: how many graphs the blocks of a model become, when, and that the losses stay what they are.

The graphs are counted with a backend that runs a graph's operators as they are, so nothing here needs a compiler, and
losses have to be equal bit for bit.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import train
from fsdp2.models import llama
from fsdp2.parallel.activation_checkpointing import checkpoint_activations
from fsdp2.parallel.compiling import Compiled, compile_blocks, compiled
from fsdp2.report.console import Console
from tests.harness import LEAVES_NOTHING, Ranks, losses, main_in_ranks, of_kind
from tests.others.common import save

Events = list[tuple[str, dict[str, Any]]]

VIT = ("--model=vit", "--model-size=tiny", "--batch-size=256")  # 6 steps in an epoch; the last has 157 of 256 images
LLAMA = ("--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--batch-size=4")
WORDS = ("--seq-len=32", "--test-batch-size=1000")


class Graphs:
    """A backend that compiles nothing and counts what it is given, and which of it has sizes that vary."""

    def __init__(self) -> None:
        self.varying: list[bool] = []

    @property
    def count(self) -> int:
        return len(self.varying)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.varying.append(any(isinstance(one, torch.SymInt) for one in inputs))
        return graph.forward

    def counted(self, function: Any, found: list[int]) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            before = self.count
            result = function(*args, **kwargs)
            found.append(self.count - before)
            return result

        return counting


def _compiled(flags: list[str]) -> tuple[Events, list[int], list[int], list[bool]]:
    """The events of a run with `--compile`, how many graphs came with each step and with each evaluation, and of each
    graph whether it is for sizes that vary."""
    graphs = Graphs()
    steps: list[int] = []
    evaluations: list[int] = []
    tried: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for place in ("fsdp2.parallel.compiling", "fsdp2_extra.baselines.starting"):
            patch.setattr(f"{place}.compile_blocks", partial(compile_blocks, backend=graphs))
        patch.setattr(train, "train_step", graphs.counted(train.train_step, steps))
        patch.setattr(train, "evaluate", graphs.counted(train.evaluate, evaluations))
        patch.setattr(train, "try_out", graphs.counted(train.try_out, tried))
        events = main_in_ranks(["--compile", *flags])
    assert tried == [0]
    return events, steps, evaluations, graphs.varying


def _text(folder: Path) -> str:
    lines = [" ".join(f"word{number * other % 7}" for other in range(number % 19 + 1)) for number in range(300)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    return f"--dataset=text:{folder}/text.txt"


def _check(ranks: Ranks, folder: Path, flags: tuple[str, ...], kinds: int, count: int = 1) -> list[list[int]]:
    """The graphs of each step on each rank. Fails if the losses aren't those of the same run without `--compile`."""
    line = [*flags, "--threads=1", "--device=cpu", "--lr=0.01"]
    alone = [*line, f"--run-dir={folder / 'plain'}", *LEAVES_NOTHING]
    plain = losses(ranks.run(main_in_ranks, alone, ranks=count)[0])
    assert len(set(plain)) == len(plain)
    found = []
    results = ranks.run(_compiled, [*line, f"--run-dir={folder / 'compiled'}"], ranks=count)
    for events, steps, evaluations, varying in results:
        assert losses(events) == plain
        assert steps[0] == kinds
        assert not any(varying[:kinds]), "graphs for sizes that vary are slower"
        (report,) = of_kind(events, "compiled")
        assert (report["step"], report["graphs"], report["left_out"]) == (1, kinds, [])
        # Evaluation is without gradients, and has batches of one size and a short one.
        assert 0 < sum(evaluations) <= 2 * kinds
        found.append(steps)
    return found


def test_an_epoch_with_a_short_last_batch_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    # Two kinds, though the layers are equal: the first gets its input from the patches' convolution, in its layout.
    for steps in _check(ranks, tmp_path, (*VIT, "--max-steps=4", "--activation-checkpointing=block"), kinds=2, count=2):
        # The short batch has graphs of its own, once and for all.
        assert steps == [2, 0, 2, 0]


CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "llama": (LLAMA, 1),
    "block": ((*LLAMA, "--activation-checkpointing"), 1),
    "op": ((*LLAMA, "--activation-checkpointing=op"), 1),
    "bf16": ((*LLAMA, "--mixed-precision=bf16", "--chunked-loss=8"), 1),
    "fp16": ((*LLAMA, "--mixed-precision=fp16", "--activation-checkpointing=op"), 1),
    "float8": ((*LLAMA, "--mixed-precision=bf16", "--float8=tensorwise", "--activation-checkpointing=op"), 1),
    "ddp": ((*LLAMA, "--strategy=ddp", "--activation-checkpointing"), 1),
    "vit": (VIT, 2),
    "transformer": (("--model=transformer", *LLAMA[1:], "--activation-checkpointing"), 1),
    "cnn": (("--model=cnn", "--model-size=tiny", "--batch-size=256"), 4),  # each of its blocks is one of torch's own
    "cnn-block": (("--model=cnn", "--model-size=tiny", "--batch-size=256", "--activation-checkpointing"), 4),
}


@pytest.mark.parametrize("case", CASES)
def test_equal_blocks_share_a_graph(ranks: Ranks, tmp_path: Path, case: str) -> None:
    flags, kinds = CASES[case]
    assert _check(ranks, tmp_path, (*flags, "--max-steps=3"), kinds) == [[kinds, 0, 0]]


@pytest.mark.parametrize("documents", ["apart", "together"])
def test_documents(ranks: Ranks, tmp_path: Path, documents: str) -> None:
    flags = (*LLAMA[:2], _text(tmp_path), f"--documents={documents}", *WORDS, "--batch-size=4")
    assert _check(ranks, tmp_path, (*flags, "--activation-checkpointing=op", "--max-steps=3"), 1) == [[1, 0, 0]]


def test_adapters(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters are peft's layers")
    base = tmp_path / "base"
    ranks.run(main_in_ranks, [*LLAMA, f"--run-dir={base}", "--max-steps=1", "--threads=1", "--device=cpu"], ranks=1)
    flags = (*LLAMA, f"--init-from={base}", "--lora=4", "--activation-checkpointing", "--max-steps=3")
    # The first block's input is of an embedding that isn't trained, so it has no gradient: for torch another kind.
    assert _check(ranks, tmp_path, flags, 2) == [[2, 0, 0]]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_models_of_transformers(ranks: Ranks, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="the models are its own")
    flags = (f"--model={save(name, tmp_path / 'model')}", *LLAMA[2:], "--activation-checkpointing=op", "--max-steps=3")
    assert _check(ranks, tmp_path, flags, 1) == [[1, 0, 0]]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.wide(self.narrow(x).relu())


def _graphs(widths: list[int], mode: str) -> list[int]:
    """How many graphs there are after each of four steps and an evaluation of a model that has these blocks."""
    blocks, graphs, found = [_Block(width) for width in widths], Graphs(), []
    if mode != "off":
        checkpoint_activations(blocks, mode)
    compile_blocks(blocks, graphs)
    for size in (4, 4, 3, 4):
        x = torch.ones(size, 8)
        for block in blocks:
            x = block(x)
        x.sum().backward()
        found.append(graphs.count)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
    return [*found, graphs.count]


@pytest.mark.parametrize("mode", ["off", "op"])
def test_torchs_limit_is_for_each_kind_of_block(ranks: Ranks, mode: str) -> None:
    # Equal blocks are far from the limit of 8 graphs of a function; 9 different ones of one class aren't.
    # The first block's input has no gradient, and for torch that is another kind of input.
    assert ranks.run(_graphs, [8] * 12, mode, ranks=1) == [[2, 2, 4, 4, 6]]
    assert ranks.run(_graphs, list(range(8, 17)), mode, ranks=1) == [[9, 9, 18, 18, 27]]


@torch.compiler.disable
def _hook(*_: Any) -> None:
    pass


@pytest.mark.parametrize("mode", ["block", "op"])
def test_a_recomputed_block_with_hooks_has_a_frame_to_trace(mode: str) -> None:
    # As a program has it that takes activation_checkpointing.py alone, and compiles as torch's pages do.
    block, graphs = _Block(8), Graphs()
    checkpoint_activations([block], mode)
    block.register_forward_pre_hook(_hook)
    block.compile(backend=graphs)
    block(torch.ones(2, 8)).sum().backward()
    assert graphs.count == 1


class _Branching(_Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(x).relu()
        return x + self.wide(y if y.sum() > 0 else -y)


class _Disabled(_Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class _Numbered(_Block):
    def __init__(self, width: int) -> None:
        super().__init__(8)
        self.number = width  # for torch a constant of the graph, though the blocks seem to be equal

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.number


def _said(kind: type[_Block], mode: str, count: int) -> str:
    blocks = [kind(width) for width in range(8, 8 + count)]
    if mode != "off":
        checkpoint_activations(blocks, mode)
    with torch._dynamo.config.patch(recompile_limit=8):  # as it is where nothing has run before
        compile_blocks(blocks, Graphs())
        for block in blocks:
            block(torch.ones(2, 8))
        return str(compiled())


NOTHING = "nothing was compiled, and the model runs as without it"
LEFT_OUT: dict[str, tuple[type[_Block], str, str]] = {
    "none": (_Block, "off", "2 graphs"),
    "break": (_Branching, "off", "4 graphs; parts of blocks are not compiled: Data-dependent branching"),
    "break in what is recomputed": (_Branching, "block", f"{NOTHING}: Data-dependent branching"),
    "disabled": (_Disabled, "off", f"{NOTHING}: Skip "),  # and then each torch's own words
    "limit": (_Numbered, "op", "16 graphs; parts of blocks are not compiled: Dynamo recompile limit exceeded"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_is_said(ranks: Ranks, case: str) -> None:
    kind, mode, said = LEFT_OUT[case]
    (found,) = ranks.run(_said, kind, mode, 17 if kind is _Numbered else 2, ranks=1)
    assert found.startswith(f"--compile: {said}")
    assert len(found.splitlines()) == 1
    assert ("TORCH_LOGS" in found) == (kind is not _Block)


def _untraceable(flags: list[str]) -> Events:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.Block, "forward", torch.compiler.disable(llama.Block.forward))
        return _compiled(flags)[0]


def test_a_run_that_compiled_nothing_says_so_and_why(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*LLAMA, f"--run-dir={tmp_path / 'run'}", "--max-steps=3", "--threads=1", "--device=cpu"]
    (events,) = ranks.run(_untraceable, line, ranks=1)
    (report,) = of_kind(events, "compiled")
    written = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one | {"time": 0} for one in written if one["kind"] == "compiled"] == [
        {"kind": "compiled", **report, "time": 0}
    ]
    assert report["graphs"] == 0
    assert "disable()" in report["left_out"][0]
    Console(0, 1, 1)("compiled", report)
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith("--compile: nothing was compiled, and the model runs as without it: ")
    assert report["left_out"][0] in said


def test_why_nothing_is_compiled_without_a_word_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(Compiled(0, ())).endswith("torch names no reason")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert str(Compiled(0, ())).endswith("TORCHDYNAMO_DISABLE is set")
