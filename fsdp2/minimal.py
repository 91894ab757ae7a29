"""FSDP2 on one screen:  torchrun --nproc_per_node 2 -m fsdp2.minimal [FOLDER]

A sharded ViT, with losses as `fsdp2.train --clip-grad-norm`. Run again, on any number of ranks, it goes on."""

import sys
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp2.models import vit
from fsdp2.models.initial import reset_parameters

BATCH, SEED = 64, 1  # samples a rank in each step


def digits():  # 1,437 training images, (N, 1, 28, 28) float32, and their labels, (N,) int64
    file = numpy.load(Path(__file__).parent / "data" / "digits.npz")
    small, labels = torch.tensor(file["images"]).float(), torch.tensor(file["labels"]).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[360:]  # the rest is for tests
    images = torch.nn.functional.interpolate(small[order, None], scale_factor=3)
    return torch.nn.functional.pad(images, [2] * 4).div(16).sub(0.2243).div(0.3494), labels[order]


def build(device, spec=vit.SPEC, size="seed"):  # a model with its initial values, sharded, and its optimizer
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):  # shapes without memory: the model may be larger than any device
        model = spec.build(size)
    blocks = spec.blocks(model)
    for block in blocks:  # a group: its parameters are gathered for its forward and its backward, and freed after
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the root comes last: it takes the parameters that no block has taken
    for i, block in enumerate(blocks):  # gather the next group while this one computes
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 2])
        block.set_modules_to_backward_prefetch(blocks[max(i - 1, 0) : i])
    model.to_empty(device=device)  # memory for this rank's shards alone, still garbage
    reset_parameters(model, spec.initial_values, SEED)  # the same model on any number of ranks
    return model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=device.type == "cuda")


def step(model, optimizer, loss_of, inputs, labels, count, clip=True):  # inputs: this rank's part of `count` samples
    loss = loss_of(model(inputs), labels)  # a sum, made a mean below, for FSDP averages gradients over ranks
    (loss * (dist.get_world_size() / count)).backward()
    if clip:  # each rank knows the norm of its shards; clipping needs that of all
        dist.all_reduce(squared := torch.nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()]) ** 2)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, squared.sqrt())
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def state_of(model, optimizer, schedule):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "schedule": schedule.state_dict()}


def train(folder: Path, device: torch.device, epochs: int = 6) -> list[float]:
    model, optimizer = build(device)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    if saved := sorted(folder.glob("epoch-*")):
        state = state_of(model, optimizer, schedule)
        dcp.load(state, checkpoint_id=saved[-1])  # each rank reads its shards, whatever number of ranks wrote them
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {schedule.last_epoch}/{epochs} epochs done", flush=True)
    losses, (x, y) = [], [tensor.to(device) for tensor in digits()]
    for epoch in range(schedule.last_epoch, epochs):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SEED * 1_000_003 + epoch))
        for samples in order.split(BATCH * dist.get_world_size()):  # the same on any number of ranks: a part for each
            mine = samples.tensor_split(dist.get_world_size())[dist.get_rank()]
            dist.all_reduce(total := step(model, optimizer, vit.loss, x[mine], y[mine], len(samples)).double())
            losses.append(total.item() / len(samples))
        schedule.step()
        dcp.save(state_of(model, optimizer, schedule), checkpoint_id=folder / "unfinished")
        if dist.get_rank() == 0:  # dcp.save returns when all ranks have written: only a whole checkpoint gets its name
            (folder / "unfinished").rename(folder / f"epoch-{epoch + 1:04d}")
            print(f"epoch {epoch + 1}/{epochs}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group()  # gloo, and nccl where there are GPUs; init_device_mesh makes this rank's the current one
    train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/minimal"), device)
    dist.barrier()  # gloo lets go of what the last exchange held; as Python ends, that aborts (pytorch 190489)
    dist.destroy_process_group()
