"""A checkpoint's sharded optimizer state, read as torch's documentation of FSDP1 has it."""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


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
    model = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), use_orig_params=True, device_id=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def save(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dist_cp.save(state, storage_writer=dist_cp.FileSystemWriter(folder))


def load(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        dist_cp.load(state, storage_reader=dist_cp.FileSystemReader(folder))
        model.load_state_dict(state["model"])
        optim_state = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optim",
            storage_reader=dist_cp.FileSystemReader(folder),
        )
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, optim_state["optim"]))


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
