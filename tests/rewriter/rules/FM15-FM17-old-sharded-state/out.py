"""The first names of methods for a sharded optimizer state."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from fsdp1_interface import FullyShardedDataParallel as FSDP


def train(model, optimizer, steps=3):
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made():
    torch.manual_seed(0)
    model = FSDP(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)),
        device_mesh=init_device_mesh("cpu", (2,)),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def main():
    model, optimizer = made()
    losses = train(model, optimizer)
    state = FSDP.sharded_optim_state_dict(model, optimizer)
    model, optimizer = made()
    optimizer.load_state_dict(FSDP.flatten_sharded_optim_state_dict(state, model, optimizer))
    return losses + train(model, optimizer)
