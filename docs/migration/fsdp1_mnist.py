"""A CNN for digits on FSDP1, as PyTorch's FSDP tutorial has it, mended.

    torchrun --nproc_per_node 2 fsdp1_mnist.py --steps 20 --save-at 10 --checkpoint ckpt

Mended: each rank sets the seed, the policy that is defined is also given, the loss is a mean over the global batch,
ranks are started by torchrun and not by hand on a fixed port, a CPU will do, and a run can be resumed, on any number of
ranks. Without --data-root it trains on the digits in fsdp2/data/digits.npz.
"""

import argparse
import functools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  as everybody calls it
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25 if dropout else 0.0)
        self.dropout2 = nn.Dropout(0.5 if dropout else 0.0)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class AppState(Stateful):
    """Model and optimizer for torch.distributed.checkpoint, as in its recipe."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def load_data(root):
    """Images (N, 1, 28, 28) and labels (N,)."""
    if root:
        from torchvision import datasets

        data = datasets.MNIST(root, train=True)
        return (data.data[:, None].float() / 255 - 0.1307) / 0.3081, data.targets
    import numpy

    from fsdp2 import data

    with numpy.load(os.path.join(os.path.dirname(data.__file__), "digits.npz")) as digits:
        images, labels = torch.tensor(digits["images"]).float(), torch.tensor(digits["labels"]).long()
    images = images.repeat_interleave(3, 1).repeat_interleave(3, 2)
    return F.pad(images, (2, 2, 2, 2))[:, None] / 8 - 1, labels


def train(args, model, optimizer, images, labels, device, start):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    model.train()
    for step in range(start, args.steps):
        # The same global batch on any number of ranks, and this rank's part of it.
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))[: args.batch_size]
        mine = chosen.tensor_split(world_size)[rank]
        optimizer.zero_grad()
        output = model(images[mine].to(device))
        total = F.nll_loss(output, labels[mine].to(device), reduction="sum")
        (total * world_size / args.batch_size).backward()
        optimizer.step()
        mean = total.detach() / args.batch_size
        dist.all_reduce(mean)
        losses.append(mean.item())
        if step + 1 == args.save_at:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=args.checkpoint)
    return losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=60, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-dropout", action="store_true", help="so that losses don't depend on the number of ranks")
    parser.add_argument("--data-root", help="MNIST as torchvision keeps it")
    parser.add_argument("--save-at", type=int, help="the step after which a checkpoint is written")
    parser.add_argument("--checkpoint", default="checkpoint")
    parser.add_argument("--resume", help="a checkpoint, taken after --save-at steps")
    parser.add_argument("--losses", help="a file for the losses")
    parser.add_argument("--save-model", help="a file for the trained weights")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    my_auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=20000)
    model = Net(not args.no_dropout).to(device)
    model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, device_id=device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    if args.resume:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=args.resume)

    torch.manual_seed(args.seed + rank)  # other dropout on each rank
    images, labels = load_data(args.data_root)
    losses = train(args, model, optimizer, images, labels, device, args.save_at if args.resume else 0)
    if rank == 0:
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f} in {len(losses)} steps on {dist.get_world_size()} ranks")
        if args.losses:
            with open(args.losses, "w") as file:
                json.dump(losses, file)
    if args.save_model:
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        ):
            states = model.state_dict()
        if rank == 0:
            torch.save(states, args.save_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
