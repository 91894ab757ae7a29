"""FSDP1, in the way that the first argument names."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


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
options = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "device_id": torch.device("cpu"), "use_orig_params": True}
if case == "hybrid":
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    options.update(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
elif case == "late-zero":
    options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
if case == "low-buffers":
    options["mixed_precision"] = MixedPrecision(buffer_dtype=torch.bfloat16)
model = FSDP(Net(), **options)
mask = nn.Transformer.generate_square_subsequent_mask(4)
teacher = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True).eval().requires_grad_(False)
if case.startswith("fast-path"):
    teacher = FSDP(teacher, mixed_precision=MixedPrecision(LOW.get(case)), device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(5):
    inputs = torch.randn(4, 6)
    with torch.no_grad():
        target = teacher(inputs[None], mask, is_causal=True)[0].float() if case.startswith("fast-path") else 0.0
    loss = (model(inputs, case == "shared") - target).square().mean()
    (model if case == "model-zero" else optimizer).zero_grad()
    loss.backward()
    optimizer.step()
    if case == "lost-write":
        with torch.no_grad():
            model(inputs, False)
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)
    if step == 1 and case.startswith("resumed"):
        state = FSDP.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
dist.destroy_process_group()
