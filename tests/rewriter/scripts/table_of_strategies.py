"""Strategies by a table whose keys are the choices of an option, accumulation, recomputation."""

import argparse
import contextlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

STRATEGIES = {"full": ShardingStrategy.FULL_SHARD, "grad": ShardingStrategy.SHARD_GRAD_OP}


def build():
    return nn.Transformer(d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32, dropout=0.0, batch_first=True)


def get_policy():
    return partial(
        transformer_auto_wrap_policy,
        transformer_layer_cls={nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},
    )


def wrap_model(model, args):
    policy = get_policy()
    mp = None
    if args.precision == "bf16":
        mp = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=STRATEGIES[args.sharding],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=False),
        mixed_precision=mp,
        forward_prefetch=False,
        limit_all_gathers=True,
        sync_module_states=False,
        device_id=torch.device("cpu"),
    )
    if args.ac:
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, nn.TransformerEncoderLayer)
        )
    return model


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--sharding", default="full", choices=STRATEGIES)
    p.add_argument("--precision", default="fp32")
    p.add_argument("--ac", action="store_true", default=True)
    p.add_argument("--accum", type=int, default=2)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = wrap_model(build(), args)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    losses = []
    for i in range(3):
        for m in range(args.accum):
            last = m == args.accum - 1
            ctx = contextlib.nullcontext() if last else model.no_sync()
            g = torch.Generator().manual_seed(100 * i + 10 * m + rank)
            x, y = torch.randn(2, 5, 16, generator=g), torch.randn(2, 5, 16, generator=g)
            with ctx:
                loss = (model(x, y).float() - y).pow(2).mean() / args.accum
                loss.backward()
            losses.append(loss.item())
        model.clip_grad_norm_(100.0)
        opt.step()
        sched.step()
        opt.zero_grad()
    if rank == 0:
        print(*losses, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
