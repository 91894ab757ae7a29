"""A test of whether a language model sees later tokens, by running a copy of its first blocks.

No attribute tells it: in a configuration of GPT-NeoX, which is causal, `is_decoder` is False.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdp2_extra.models.blocks import find_blocks

LENGTH, CHANGED = 13, 10  # tokens of a row, and the place of the one that differs; no model is 13 wide
FIRST = 6  # tokens of the first of two documents in a row
BLOCKS = 2
# Of the largest number. Rows of one forward go through the same sums; where one is rounded differently by its place in
# a matrix, it is by some 1e-7. A token that others see changes theirs by 1e-4 and more, also before training.
ROUNDING = 1e-5


Call: TypeAlias = Callable[[nn.Module, Any], Any]
Logits: TypeAlias = Callable[[Any], Tensor]


class _Enough(Exception):
    """The blocks that are looked at have run."""


def same(made: Tensor) -> bool:
    """True if the last of three rows (3, …) of one forward equals the others but for rounding. What is NaN doesn't.

    The first two had the same input. How far they differ is what the arithmetic rounds by itself: in bf16, and where
    experts add up their tokens in an order of chance, that is more than `ROUNDING`.
    """
    first, again, other = made.double()
    by_itself = 8 * (first - again).abs().max()
    return bool((first - other).abs().max() <= torch.maximum(by_itself, ROUNDING * first.abs().max()))


def sees_later(model: nn.Module, call: Call, logits: Logits) -> bool | None:
    """True if what a model makes of a token depends on a later one; None if its first blocks can't be run like this.

    Args:
        model: its parameters on `meta`, its buffers in memory. It is used up.
        call: (model, batch) -> outputs.
        logits: outputs -> (rows, tokens, classes), of a model that has no third block.
    """
    tokens = (torch.arange(LENGTH) % 7).repeat(3, 1)
    tokens[2, CHANGED] += 1
    return _changes(model, call, logits, tokens, tokens, 0, CHANGED)


def sees_documents(model: nn.Module, call: Call, logits: Logits) -> bool | None:
    """`sees_later` of what a model makes of a document, and of the document before it in the same row."""
    tokens = (torch.arange(LENGTH) % 7).repeat(3, 1)
    tokens[2, :FIRST] = tokens[0, :FIRST].flip(0)
    return _changes(model, call, logits, two_documents(tokens, FIRST), tokens, FIRST, LENGTH - FIRST)


def two_documents(tokens: Tensor, first: int) -> dict[str, Tensor]:
    """Inputs of rows (rows, length) int64 in which the second of two documents begins at a place."""
    rows, length = tokens.shape
    places = torch.cat([torch.arange(first), torch.arange(length - first)]).to(tokens.device).repeat(rows, 1)
    documents = (torch.arange(length, device=tokens.device) >= first).long().repeat(rows, 1)
    return {"input_ids": tokens, "position_ids": places, "document_ids": documents}


@torch.no_grad()
def _changes(
    model: nn.Module, call: Call, logits: Logits, inputs: Any, targets: Tensor, begin: int, count: int
) -> bool | None:
    """True if the last of three rows, which differs elsewhere, gets other numbers for `count` tokens from `begin` on.

    The rows go through the first two blocks, on a CPU, in fp32, with weights of no meaning. A model's own may hide what
    it sees: before training, a head or a projection of zeros makes the same of everything.
    """
    try:
        blocks = find_blocks(model.eval())
        _fill(model, blocks[BLOCKS:])
        made = _made_of(model, blocks, lambda: logits(call(model, SimpleNamespace(inputs=inputs, targets=targets))))
        along = made.shape.index(LENGTH)  # of a few models the first dimension
        part = made.narrow(along, begin, count).movedim(made.shape.index(3), 0)
        return not same(part) if bool(part.isfinite().all()) else None
    except Exception:  # whatever a stranger's code raises that wants a GPU, other inputs, or has no such dimension
        return None


def _made_of(model: nn.Module, blocks: list[nn.Module], forward: Callable[[], Tensor]) -> Tensor:
    """Catch the input of the block after those that are looked at, or the forward's result if there is none."""
    found: list[Tensor] = []

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.extend(one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.is_floating_point())
        raise _Enough

    for block in blocks[BLOCKS:]:
        block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        return forward()
    except _Enough:
        return found[0]


def _fill(model: nn.Module, left_out: list[nn.Module]) -> None:
    """Give parameters on `meta` values, but for those of modules that won't run."""
    numbers = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))  # no row of a matrix is that long
    unused = set(chain.from_iterable(module.modules() for module in left_out))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, parameter in _parameters(model):
        if owner in unused:
            continue
        if parameter not in made:
            values = torch.ones(parameter.shape)
            if parameter.dim() > 1:
                count = parameter.numel()
                repeated = numbers.repeat(-(-count // len(numbers)))[:count].view(parameter.shape)
                values = repeated.mul_(1 / math.sqrt(parameter.shape[-1]))
            made[parameter] = nn.Parameter(values, requires_grad=False)
        owner._parameters[name] = made[parameter]


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                yield owner, name, parameter
