"""FSDP2 x tensor parallelism on one screen:  torchrun --nproc_per_node 4 examples/tp_fsdp2.py

Pairs of neighbours split each layer of a small Llama between them; FSDP2 shards what each of a pair has over the pairs.
The losses are those of one process: --nproc_per_node 1 prints the same, but for rounding."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp2.models.initial import reset_parameters
from fsdp2.models.llama import INITIAL_VALUES, SIZES, Llama

STEPS, ROWS, TOKENS = 10, 8, 32
TEXT = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, TOKENS + 1, 1)

# Between blocks a rank has some tokens of each row, and in a layer some of its rows (column) or columns (row) with all.
tokens, whole = Shard(1), Replicate()
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.self_attn": PrepareModuleInput(
        input_layouts=(tokens, None, None, None), desired_input_layouts=(whole, None, None, None)
    ),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),  # each rank has some heads
    "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "model.layers.*.mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=whole),
    "model.layers.*.mlp.[gu]*_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
}


def train(device: torch.device) -> list[float]:
    tp = 2 if dist.get_world_size() % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("shard", "tp"))
    with torch.device("meta"):
        model = Llama(**SIZES["debug"])
    if tp > 1:
        parallelize_module(model, mesh["tp"], PLAN, src_data_rank=None)  # on meta there is nothing to send
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    model.to_empty(device=device)
    reset_parameters(model, INITIAL_VALUES, seed=1)  # each rank draws its part of the same model
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(STEPS):
        rows = torch.randperm(len(TEXT), generator=torch.Generator().manual_seed(step))[:ROWS]
        # Both of a pair have the same rows.
        mine = TEXT[rows.tensor_split(mesh["shard"].size())[mesh["shard"].get_local_rank()]].to(device)
        with loss_parallel():  # of logits that stay split by words, forward and backward
            loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
            (loss * mesh["shard"].size() / (ROWS * TOKENS)).backward()  # FSDP2 averages over the pairs
        optimizer.step()
        optimizer.zero_grad()
        total = (loss.to_local() if isinstance(loss, DTensor) else loss).detach() / (ROWS * TOKENS)
        dist.all_reduce(total, group=mesh["shard"].get_group())
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(train(torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")))
    dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
    dist.destroy_process_group()
