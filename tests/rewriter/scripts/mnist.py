# The FSDP tutorial's script (torch 1.12), mended where it didn't do what it says: the wrapping policy is passed on, each
# rank sets the seed, --no-cuda is used, the loss is a mean, and the data needs no download.
import os
import argparse
import functools
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    CPUOffload,
    BackwardPrefetch,
)
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    enable_wrap,
    wrap,
)


def setup(rank, world_size, args):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'

    # Initialize the process group
    dist.init_process_group("gloo" if args.no_cuda else "nccl", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(1152, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.conv1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = F.relu(x)
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = self.fc1(x)
        x = F.relu(x)
        x = self.dropout2(x)
        x = self.fc2(x)
        output = F.log_softmax(x, dim=1)
        return output


def train(args, model, device, train_loader, optimizer, epoch, sampler=None):
    model.train()
    ddp_loss = torch.zeros(2).to(device)
    if sampler:
        sampler.set_epoch(epoch)
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item() * len(data)
        ddp_loss[1] += len(data)

    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print('Train Epoch: {} \tLoss: {!r}'.format(epoch, (ddp_loss[0] / ddp_loss[1]).item()))


def test(model, device, test_loader):
    model.eval()
    ddp_loss = torch.zeros(3).to(device)
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            ddp_loss[0] += F.nll_loss(output, target, reduction='sum').item()
            pred = output.argmax(dim=1, keepdim=True)
            ddp_loss[1] += pred.eq(target.view_as(pred)).sum().item()
            ddp_loss[2] += len(data)

    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if dist.get_rank() == 0:
        print('Test set: Average loss: {!r}, Accuracy: {}/{}'.format(
            (ddp_loss[0] / ddp_loss[2]).item(), int(ddp_loss[1]), int(ddp_loss[2])))


def digits(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 1, 28, 28, generator=generator)
    return TensorDataset(images, (images.mean((1, 2, 3)) * 1000).long() % 10)


def fsdp_main(rank, world_size, args):
    setup(rank, world_size, args)
    torch.manual_seed(args.seed)

    dataset1, dataset2 = digits(96, 1), digits(32, 2)
    sampler1 = DistributedSampler(dataset1, rank=rank, num_replicas=world_size, shuffle=True)
    sampler2 = DistributedSampler(dataset2, rank=rank, num_replicas=world_size)
    train_loader = torch.utils.data.DataLoader(dataset1, batch_size=args.batch_size, sampler=sampler1)
    test_loader = torch.utils.data.DataLoader(dataset2, batch_size=args.test_batch_size, sampler=sampler2)

    # Set up auto-wrap policy (shard layers with >100 parameters)
    my_auto_wrap_policy = functools.partial(
        size_based_auto_wrap_policy, min_num_params=100
    )
    device = torch.device("cpu") if args.no_cuda else torch.device("cuda", rank)
    if not args.no_cuda:
        torch.cuda.set_device(rank)

    # Create and wrap model with FSDP
    model = Net().to(device)
    model = FSDP(model, auto_wrap_policy=my_auto_wrap_policy, device_id=device)

    # Set up optimizer and scheduler
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch, sampler=sampler1)
        test(model, device, test_loader)
        scheduler.step()

    # Save model (requires calling state_dict on each rank)
    if args.save_model:
        dist.barrier()  # Ensure all ranks complete training
        states = model.state_dict()
        if rank == 0:
            torch.save(states, os.path.join(args.folder, "mnist_cnn.pt"))
            print({name: value.double().sum().item() for name, value in states.items()})

    cleanup()


if __name__ == '__main__':
    # Training settings
    parser = argparse.ArgumentParser(description='PyTorch MNIST Example')
    parser.add_argument('--batch-size', type=int, default=16, metavar='N')
    parser.add_argument('--test-batch-size', type=int, default=100, metavar='N')
    parser.add_argument('--epochs', type=int, default=2, metavar='N')
    parser.add_argument('--lr', type=float, default=1.0, metavar='LR')
    parser.add_argument('--gamma', type=float, default=0.7, metavar='M')
    parser.add_argument('--no-cuda', action='store_true', default=not torch.cuda.is_available())
    parser.add_argument('--seed', type=int, default=1, metavar='S')
    parser.add_argument('--save-model', action='store_true', default=True)
    parser.add_argument('--folder', default=os.environ.get("SCRATCH", "."))
    args = parser.parse_args()

    # Launch distributed training
    WORLD_SIZE = 2 if args.no_cuda else torch.cuda.device_count()
    mp.spawn(fsdp_main,
             args=(WORLD_SIZE, args),
             nprocs=WORLD_SIZE,
             join=True)
