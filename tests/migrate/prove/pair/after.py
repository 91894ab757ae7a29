"""The same with FSDP2, in the way that the first argument names."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


LOW = {"fast-path-in-bf16": torch.bfloat16}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 12)
        self.outer = nn.Linear(12, 6)

    def forward(self, x, memory):
        return x + self.outer(torch.tanh(self.inner(x + memory))) * memory


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("scale", torch.full((6,), 1 / 3 if case == "low-buffers" else 1.0), persistent=False)

    def forward(self, x, share):
        x = memory = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x, memory if share else 0.5)
        return x


case = sys.argv[1]
dist.init_process_group("gloo")
if case != "no-seed":
    torch.manual_seed(0)
world = dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
if case == "hybrid":
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
model = Net()
for block in model.blocks:
    fully_shard(block, mesh=mesh, reshard_after_forward=case != "late-zero")
policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16 if case == "low-loss" else None)  # as accelerate sets it
fully_shard(model, mesh=mesh, mp_policy=policy)
mask = nn.Transformer.generate_square_subsequent_mask(4)
teacher = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval().requires_grad_(False)
if case.startswith("fast-path"):
    fully_shard(teacher, mesh=mesh, mp_policy=MixedPrecisionPolicy(LOW.get(case)))
groups = [{"params": list(model.parameters())}]
if case == "decay":  # not of what has one dimension, as under FSDP1 all has
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1]},
        {"params": [one for one in model.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
optimizer = torch.optim.AdamW(groups, lr=2e-2 if case in ("rate", "resumed-rate") else 1e-2)
if case == "restored":  # the state of no step, which torch makes by a step of its own before the first forward
    state = get_optimizer_state_dict(model, optimizer)
    for of in state["state"].values():
        of["step"].zero_()
    optimizer.state.clear()
    set_optimizer_state_dict(model, optimizer, state)
torch.manual_seed({"other-ranks": 1 - dist.get_rank(), "other-seed": 7}.get(case, dist.get_rank()))
for step in range(5):
    inputs = torch.randn(4, 6)
    with torch.no_grad():
        target = teacher(inputs[None], mask, is_causal=True)[0].float() if case.startswith("fast-path") else 0.0
    loss = (model(inputs, case == "shared") - target).square().mean()
    loss *= {"loss": 1.001, "loss-over-world": 1 / world}.get(case, 1)
    (model if case == "model-zero" else optimizer).zero_grad()
    loss.backward()
    optimizer.step()
    if case == "lost-write":
        with torch.no_grad():
            model(inputs, False)
            model.reshard()
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
    if step == 1 and case.startswith("resumed"):
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
dist.destroy_process_group()
