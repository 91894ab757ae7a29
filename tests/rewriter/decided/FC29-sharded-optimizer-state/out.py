"""A checkpoint's sharded optimizer state, read as torch's documentation of FSDP1 has it."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made():
    torch.manual_seed(0)
    model = fully_shard(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save(model, optimizer, folder):
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder))


def load(model, optimizer, folder):
    state = {"model": get_model_state_dict(model)}
    dist_cp.load(state, storage_reader=dist_cp.FileSystemReader(folder))
    set_model_state_dict(model, state["model"])
    optim_state = {"optim": get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.load(optim_state, storage_reader=dist_cp.FileSystemReader(folder))
    set_optimizer_state_dict(model, optimizer, optim_state["optim"])


def main():
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box)
    model, optimizer = made()
    losses = train(model, optimizer)
    save(model, optimizer, box[0])
    model, optimizer = made()
    load(model, optimizer, box[0])
    losses += train(model, optimizer)
    dist.barrier()
    shutil.rmtree(box[0], ignore_errors=True)
    return losses
