"""Is each gradient that of one process?  torchrun --nproc_per_node 2 examples/gradient_scales.py

`scales` is for a loop of your own; `fsdp2.migrate prove --against-one --parameters` leaves a program as it is."""

import copy
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def scales(model: nn.Module, alone: nn.Module) -> Iterator[tuple[str, float, float, str]]:
    """After `backward()` of the same global batch in both, of each parameter: how many times as large its gradient is
    as one process's, how far it is from exactly that (a share of its norm), and its dtypes. A collective call."""
    for (name, parameter), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        found, expected = parameter.grad, whole.grad
        assert found is not None, name
        assert expected is not None, name
        found = found.full_tensor() if isinstance(found, DTensor) else found
        factor = (found.norm() / expected.norm()).item()
        off = ((found - factor * expected).norm() / found.norm()).item()
        yield name, factor, off, f"stored {parameter.dtype}, gradient {found.dtype}"


def main() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model, rows = copy.deepcopy(alone), torch.randn(8, 16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    alone(rows).square().mean().backward()
    mine = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    model(mine).float().square().mean().backward()  # divided by the ranks once more, each gradient were half as large
    for name, factor, off, dtypes in scales(model, alone):
        if dist.get_rank() == 0:
            print(f"{name}: {factor:.3f} times one process's, {off:.0e} off; {dtypes}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
    dist.destroy_process_group()
