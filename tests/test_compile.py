"""`--compile`: how many graphs the blocks of a model become, when, and that the losses stay what they are.

The graphs are counted with a backend that runs a graph's operators as they are, so nothing here needs a compiler, and
losses have to be equal bit for bit.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import train
from fsdp2.parallel.activation_checkpointing import checkpoint_activations
from fsdp2.parallel.compiling import compile_blocks
from tests.harness import Ranks, losses, main_in_ranks

VIT = ("--model=vit", "--model-size=tiny", "--batch-size=256")  # 6 steps in an epoch; the last has 157 of 256 images
LLAMA = ("--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=16", "--batch-size=4")
WORDS = ("--seq-len=32", "--test-batch-size=1000")
RECOMPUTED = ("off", "block", "op")


class Graphs:
    """A backend that compiles nothing and counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.count += 1
        return graph.forward

    def counted(self, function: Any, found: list[int]) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            before = self.count
            result = function(*args, **kwargs)
            found.append(self.count - before)
            return result

        return counting


def _compiled(flags: list[str]) -> tuple[list[float], list[int], list[int]]:
    """The losses of a run with `--compile`, and how many graphs came with each step and with each evaluation."""
    graphs = Graphs()
    steps: list[int] = []
    evaluations: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for place in ("fsdp2.parallelize", "fsdp2.parallel.baselines.start"):
            patch.setattr(f"{place}.compile_blocks", partial(compile_blocks, backend=graphs))
        patch.setattr(train, "train_step", graphs.counted(train.train_step, steps))
        patch.setattr(train, "evaluate", graphs.counted(train.evaluate, evaluations))
        events = main_in_ranks(["--compile", *flags])
    return losses(events), steps, evaluations


def _text(folder: Path) -> str:
    lines = [" ".join(f"word{number * other % 7}" for other in range(number % 19 + 1)) for number in range(300)]
    (folder / "text.txt").write_text("\n\n".join(lines))
    return f"--dataset=text:{folder}/text.txt"


def _check(ranks: Ranks, folder: Path, flags: tuple[str, ...], kinds: int, count: int = 1) -> list[list[int]]:
    """The graphs of each step on each rank. Fails if the losses aren't those of the same run without `--compile`."""
    line = [*flags, "--threads=1", "--device=cpu", "--lr=0.01"]
    plain = losses(ranks.run(main_in_ranks, [*line, f"--run-dir={folder / 'plain'}"], ranks=count)[0])
    assert len(set(plain)) == len(plain)
    found = []
    for compiled, steps, evaluations in ranks.run(_compiled, [*line, f"--run-dir={folder / 'compiled'}"], ranks=count):
        assert compiled == plain
        assert steps[0] == kinds
        # Evaluation is without gradients, and its batches have other sizes.
        assert 0 < sum(evaluations) <= 2 * kinds
        found.append(steps)
    return found


def test_an_epoch_with_a_short_last_batch_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    # Two kinds, though the layers are equal: the first gets its input from the patches' convolution, in its layout.
    for steps in _check(ranks, tmp_path, (*VIT, "--max-steps=4", "--activation-checkpointing=block"), kinds=2, count=2):
        # The short batch makes the size a variable, once and for all.
        assert steps == [2, 0, 2, 0]


CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "llama": (LLAMA, 1),
    "block": ((*LLAMA, "--activation-checkpointing"), 1),
    "op": ((*LLAMA, "--activation-checkpointing=op"), 1),
    "bf16": ((*LLAMA, "--mixed-precision=bf16", "--chunked-loss=8"), 1),
    "fp16": ((*LLAMA, "--mixed-precision=fp16", "--activation-checkpointing=op"), 1),
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


@pytest.mark.parametrize("mode", RECOMPUTED)
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
