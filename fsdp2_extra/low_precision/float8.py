"""Linear layers that multiply in float8, by torchao's modules (extra torchao).

A matrix product of float8 operands takes about half the time of one in bf16 on the GPUs that have it. Each operand has
8 bits and a scale, which torchao computes from the values at hand: of inputs and weights in forward, of gradients in
backward. What is kept stays as it is without this: parameters in fp32, activations in bf16. So the optimizer,
checkpoints and exports know nothing of float8, and any run reads what they write.

With one scale for a tensor, weights can be gathered in float8, too: each rank casts its shard by the scale of the whole
weight, and half as many bytes travel as in bf16.

Source: https://arxiv.org/abs/2209.05433 and https://github.com/pytorch/ao/tree/main/torchao/float8
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2.parallel.groups import may_be_experts
from fsdp2.units import install

MULTIPLE = 16  # of both sizes of a weight, which the kernels need


def gathers(recipe: str | None, reshard_after_forward: bool | int | None, cpu_offload: bool) -> bool:
    """Return whether FSDP2 can gather the weights of these layers in float8.

    Not with a scale for each row, since backward needs those of the columns; nor where FSDP2 has no place for another
    form of a shard: it moves offloaded shards to the GPU first, and an int reshards what was gathered.
    """
    to_fewer_ranks = reshard_after_forward is not None and not isinstance(reshard_after_forward, bool)
    return recipe == "tensorwise" and not cpu_offload and not to_fewer_ranks


def compute_in_float8(
    model: nn.Module, blocks: Sequence[nn.Module], recipe: str, device_type: str, *, gather: bool = False
) -> None:
    """Replace each linear layer in the blocks that float8 can compute by torchao's. Parameters and names stay.

    Args:
        blocks: and not the whole model, since embeddings and the head lose most by few bits.
        recipe: one of `fsdp2.parallel.FLOAT8`: a scale for each tensor, or for each of its rows, which takes
            more time and rounds less.
        device_type: on `cpu` the same rounding is emulated in the dtype of the activations, which is slow.
        gather: gather the weights in float8, see `gathers`; not those that several modules share. Their parameters
            become torchao's until `keep_plain_shards`.

    A product over a number of tokens that is no multiple of 16, such as those of an epoch's short last batch, is padded
    with zeros. Raises ImportError, naming the extra, without torchao.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(f"--float8: {error}; {install('torchao')}") from error
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=device_type == "cpu"
    )
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    chosen = set(layers(blocks))
    alone = {layer for layer in chosen if gather and uses[id(layer.weight)] == 1}
    for block in blocks:
        convert_to_float8_training(block, config=settings, module_filter_fn=lambda one, _: one in chosen - alone)
        if alone:
            gathering = dataclasses.replace(settings, enable_fsdp_float8_all_gather=True)
            convert_to_float8_training(block, config=gathering, module_filter_fn=lambda one, _: one in alone)


def converted(model: nn.Module) -> Iterator[Any]:
    """torchao's layers of a model."""
    from torchao.float8.float8_linear import Float8Linear

    return (module for module in model.modules() if isinstance(module, Float8Linear))


def described(model: nn.Module, recipe: str, device_type: str) -> str:
    """The number of layers in float8, for the header of a run."""
    layers = list(converted(model))
    count = sum(layer.config.enable_fsdp_float8_all_gather for layer in layers)  # not those that are shared
    gathered = f", weights{f' of {count}' * (count < len(layers))} gathered so" if count else ""
    return f", {len(layers)} linear layers in float8 ({recipe}{gathered}{', emulated' * (device_type == 'cpu')})"


def keep_plain_shards(model: nn.Module) -> None:
    """Give a model that was just sharded, on meta, plain shards in place of torchao's.

    That form of a shard is a tensor subclass. Averages, checkpoints and exports would hold it, and nobody without
    torchao could read them. FSDP2 needs it only here, to prepare for shards that are gathered in another form.
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for parameter in model.parameters():
        shard = _shard(parameter)
        if isinstance(shard, WeightWithDynamicFloat8CastTensor):
            _shard(parameter, shard._tensor)


def _shard(parameter: Any, new: Tensor | None = None) -> Any:
    """The tensor that FSDP2 takes for a parameter's shard, after it was replaced if there is a new one."""
    # Private: the public to_local gives another view in each call, and nothing public replaces a shard.
    if new is not None:
        parameter._local_tensor = new
    return parameter._local_tensor


def gather_in_float8(model: nn.Module) -> None:
    """Let FSDP2 gather the weights that were made so in float8, from the plain shards of an allocated model.

    FSDP2 asks a shard for `fsdp_pre_all_gather` and `fsdp_post_all_gather`, and a plain tensor can have these as
    attributes. Where that fails, more bytes travel, and the test that counts them fails. Each gather reduces the
    largest value of a weight over the ranks that share it, so a scale is never that of earlier values.

    Source: https://github.com/pytorch/pytorch/blob/main/torch/distributed/fsdp/_fully_shard/_fsdp_param.py
    """
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for module in converted(model):
        if module.config.enable_fsdp_float8_all_gather:
            shard = _shard(module.weight)
            dtype = module.config.cast_config_weight.target_dtype
            in_float8 = functools.partial(
                WeightWithDynamicFloat8CastTensor, linear_mm_config=module.linear_mm_config, dtype=dtype
            )
            shard.fsdp_pre_all_gather = functools.partial(_cast, weakref.ref(shard), in_float8)
            shard.fsdp_post_all_gather = in_float8(shard.new_empty(0)).fsdp_post_all_gather  # of any, for it isn't read


def _cast(
    shard: weakref.ref[Tensor],
    in_float8: Callable[[Tensor], Any],
    mesh: DeviceMesh,
    size: torch.Size,
    stride: tuple[int, ...],
    module: nn.Module,
    policy: object,
) -> tuple[tuple[Tensor, ...], Any]:
    """A shard in float8, padded to the rows that each rank sends, and its scale."""
    plain = cast(Tensor, shard())
    missing = -(-size[0] // mesh.size()) - plain.size(0)
    return in_float8(F.pad(plain, (0, 0, 0, missing)) if missing else plain).fsdp_pre_all_gather(mesh)


def layers(blocks: Sequence[nn.Module]) -> Iterator[nn.Linear]:
    """The linear layers that float8 can compute, before they are replaced.

    Left out are experts, whose number of tokens is another one in each step and may be 0; layers whose weight is
    frozen, since torchao would compute its gradient all the same; and subclasses of nn.Linear, such as the projection
    of torch's attention, which is never called.
    """
    for block in blocks:
        experts = {one for module in block.modules() if may_be_experts(module) for one in module.modules()}
        for module in block.modules():
            if type(module) is not nn.Linear or module in experts or not module.weight.requires_grad:
                continue
            if module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0:
                yield module
