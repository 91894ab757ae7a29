"""Linear layers that multiply in float8, by torchao's modules (extra torchao).

A matrix product of float8 operands takes about half the time of one in bf16 on the GPUs that have it. Each operand has
8 bits and a scale, which torchao computes from the values at hand: of inputs and weights in forward, of gradients in
backward. What is kept stays as it is without this: parameters in fp32, activations in bf16. Weights are gathered in
bf16. So the optimizer, checkpoints and exports know nothing of float8, and any run reads what they write.

torchao can gather weights in float8, too, by a tensor subclass in place of each parameter's shard. State dicts would
hold that subclass, and a checkpoint could be read by no one without torchao.

Source: https://arxiv.org/abs/2209.05433 and https://github.com/pytorch/ao/tree/main/torchao/float8
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import nn

from fsdp2.parallel.experts import is_experts

MULTIPLE = 16  # of both sizes of a weight, which the kernels need


def compute_in_float8(blocks: Sequence[nn.Module], recipe: str, device_type: str) -> None:
    """Replace each linear layer in the blocks that float8 can compute by torchao's. Parameters and names stay.

    Args:
        blocks: and not the whole model, since embeddings and the head lose most by few bits.
        recipe: one of `fsdp2.parallel.precision.FLOAT8`: a scale for each tensor, or for each of its rows, which takes
            more time and rounds less.
        device_type: on `cpu` the same rounding is emulated in the dtype of the activations, which is slow.

    A product over a number of tokens that is no multiple of 16, such as those of an epoch's short last batch, is padded
    with zeros. Raises ImportError, naming the extra, without torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(f"--float8: {error}; pip install 'fsdp2-reference[torchao]'") from error
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=device_type == "cpu"
    )
    chosen = set(layers(blocks))
    for block in blocks:
        convert_to_float8_training(block, config=settings, module_filter_fn=lambda module, _: module in chosen)


def layers(blocks: Sequence[nn.Module]) -> Iterator[nn.Linear]:
    """The linear layers that float8 can compute, before they are replaced.

    Left out are experts, whose number of tokens is another one in each step and may be 0; layers whose weight is
    frozen, since torchao would compute its gradient all the same; and subclasses of nn.Linear, such as the projection
    of torch's attention, which is never called.
    """
    for block in blocks:
        experts = {one for module in block.modules() if is_experts(module) for one in module.modules()}
        for module in block.modules():
            if type(module) is not nn.Linear or module in experts or not module.weight.requires_grad:
                continue
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                yield module
