import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
import functools


class Bottle(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.bn = nn.BatchNorm2d(c)
        self.register_buffer("scale", torch.full((1,), 0.37))

    def forward(self, x):
        return x + torch.relu(self.bn(self.conv(x))) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.body = nn.ModuleList(Bottle(8) for _ in range(2))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for b in self.body:
            x = b(x)
        return self.fc(x.mean((2, 3)))


dist.init_process_group("gloo")
torch.manual_seed(0)
model = FSDP(
    Net(),
    auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Bottle)),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16),
    device_id=torch.device("cpu"),
)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    loss = nn.functional.cross_entropy(model(torch.randn(4, 3, 10, 10)).float(), torch.randint(5, (4,)))
    loss.backward()
    opt.step()
    opt.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item())
dist.destroy_process_group()
