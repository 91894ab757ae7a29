"""Predictions of samples, as text and as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2.checkpoint.files import LocalFiles, publish
from fsdp2.data.splits import IGNORED, Dataset
from fsdp2.units import printable


def samples_of(logits: Tensor, targets: Tensor, dataset: Dataset) -> list[dict[str, Any]]:
    """Predicted and true class of each sample; for language, of the middle one of each's targets."""
    if targets.dim() > 1:
        rows, middle = torch.arange(len(targets)), middle_target(targets)
        logits, targets = logits[rows, middle], targets[rows, middle]
    return [
        {
            "sample": i,
            "predicted": _class(int(predicted), dataset),
            "actual": _class(int(actual), dataset),
            "correct": bool(predicted == actual),
        }
        for i, (predicted, actual) in enumerate(zip(logits.argmax(dim=-1), targets, strict=True))
    ]


def _class(number: int, dataset: Dataset) -> str:
    """The name of a class. A model can have more than the data, such as rows of an embedding beyond the tokenizer's."""
    if number == IGNORED:  # all documents of the sample are of one token
        return "nothing"
    return printable(dataset.classes[number]) if number < len(dataset.classes) else f"<{number}>"


def middle_target(targets: Tensor) -> Tensor:
    """(N, T) -> (N,): where in each sample the middle one of the targets stands that aren't `IGNORED`.

    The last one of a conversation is what its chat template prints behind each answer.
    """
    counts = (targets != IGNORED).cumsum(dim=1)
    return (counts == (counts[:, -1:] + 1) // 2).int().argmax(dim=1)


def shown(inputs: Any, targets: Tensor) -> list[Tensor]:
    """A readable form of each sample: an image, or the tokens up to its middle target."""
    if isinstance(inputs, dict):
        inputs = inputs.get("decoder_input_ids", inputs["input_ids"])
    if targets.dim() == 1:
        return list(inputs)
    return [one[: middle + 1] for one, middle in zip(inputs, middle_target(targets).tolist(), strict=True)]


def context_of(tokens: Tensor, dataset: Dataset) -> str:
    """The end of a sample of tokens, as text."""
    return printable("".join(dataset.classes[int(token)] for token in tokens[-24:]))


def draw(samples: Sequence[dict[str, Any]], inputs: Sequence[Tensor], dataset: Dataset, path: Path) -> None:
    """A picture of the samples with predicted and true class."""
    import matplotlib  # here: it takes a second that `import fsdp2.infer` should not

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images = inputs[0].dim() == 3
    figure, axes = pyplot.subplots(2, 5, figsize=(11, 5.2)) if images else pyplot.subplots(10, 1, figsize=(9, 5.5))
    for axis, sample, one in zip(axes.flat, samples, inputs, strict=False):
        colour = "tab:green" if sample["correct"] else "tab:red"
        mark = "✓" if sample["correct"] else "✗"
        axis.set_axis_off()
        if images:
            axis.imshow(one[0].float().cpu(), cmap="gray")
            axis.set_title(f"{mark} {sample['predicted']}\n(is {sample['actual']})", color=colour, fontsize=11)
        else:
            # No dollar signs as text: matplotlib would typeset what is between them.
            text = f"{mark} …{context_of(one, dataset)}  →  {sample['predicted']}   (is {sample['actual']})"
            axis.text(0, 0.5, text.replace("$", r"\$"), color=colour, family="monospace", fontsize=11)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    pyplot.close(figure)
    publish(LocalFiles(path.parent), path.name, drawn.getvalue())  # not behind a link: the folder may be a stranger's
