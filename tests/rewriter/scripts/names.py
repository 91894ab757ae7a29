"""Prefixes, custom entry points, isinstance, summon_full_params for reading, ignored modules."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x):
        return torch.sin(self.lin(x))


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        for p in self.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.lin(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.name = "m"
        self.teacher = Teacher()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        t = self.teacher(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x + t)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Block]), ignored_modules=[model.teacher],
                 device_id=torch.device("cpu"), use_orig_params=True)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        loss = model(torch.randn(5, 6)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0:
            print(loss.item())
    names = [n.replace("_fsdp_wrapped_module.", "") for n, _ in model.named_parameters()]
    wrapped = [m for m in model.modules() if isinstance(m, FSDP)]
    with FSDP.summon_full_params(model, writeback=False):
        total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    if dist.get_rank() == 0:
        print(names, len(wrapped), len(FSDP.fsdp_modules(model)), model.module.name, total)
    dist.destroy_process_group()


main()
