"""Tensor parallelism: ranks split each layer between them, and exchange activations where FSDP2 exchanges weights.

    norm    a rank has some tokens of each row          all-gather of tokens
    q k v   a rank has some heads of all tokens         column: a rank's rows of the weight make its outputs
    o       from a rank's heads a part of each sum      row: a rank's columns of the weight; reduce-scatter of tokens

The plan, `splits` in a model's file, says which layer is split how, by torch's own styles. Where a rank ends with some
tokens alone, norms and the sums beside them are split too (sequence parallelism in the sense of the second source).

Sources: https://arxiv.org/abs/1909.08053, https://arxiv.org/abs/2205.05198 and
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from fsdp2.parallel.meta import share, shared_names


def split_layers(model: nn.Module, plan: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Split the layers of a model over a 1-D mesh, in place. No collective: on meta there is nothing to send.

    Args:
        model: on meta. Each rank keeps its part of each parameter, a DTensor of the mesh.
        plan: names of modules, with `*`, and how each is split. It must say something of each parameter.

    Raises ValueError for a parameter that the plan leaves whole: its gradient would be a part of the sum on each rank.
    """
    # torch gives each module parameters of its own: a tied head would be trained alone, and a frozen norm trained.
    tied = [names for names in shared_names(model) if len(names) > 1]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    share(model, tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise ValueError(f"the plan of tensor parallelism says nothing of {', '.join(whole)}")
