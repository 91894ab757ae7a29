"""A language model with policies chosen by a configuration, mixed precision, clipping and a checkpoint."""
import argparse
import os
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


@dataclass
class fsdp_config:
    mixed_precision: bool = True
    use_bf16: bool = True
    cpu_offload: bool = False
    clip: float = 100.0


bfSixteen = MixedPrecision(
    param_dtype=torch.bfloat16,
    # Gradient communication precision.
    reduce_dtype=torch.bfloat16,
    # Buffer precision.
    buffer_dtype=torch.bfloat16,
)
fp32_policy = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
fullstate_save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class DecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.full((16, 16), -1e4).triu(1), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        n = x.shape[1]
        weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + self.mask[:n, :n]).softmax(-1)
        return x + self.out(weights @ v)


class Transformer(nn.Module):
    def __init__(self, vocab=40, dim=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([DecoderLayer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def get_policies(cfg):
    """Establish current policies for mixed precision and wrapping."""
    mixed_precision_policy = None
    if cfg.mixed_precision:
        if cfg.use_bf16:
            mixed_precision_policy = bfSixteen
        else:
            mixed_precision_policy = fp32_policy
    wrapping_policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
    return mixed_precision_policy, wrapping_policy


def save_model_checkpoint(model, rank, path):
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, fullstate_save_policy
    ):
        cpu_state = model.state_dict()

    print(f"saving process: rank {rank} done with the state dict")
    if rank == 0:
        torch.save(cpu_state, path)
        print(len(cpu_state), sum(value.double().abs().sum().item() for value in cpu_state.values()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    cfg = fsdp_config()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = Transformer()
    mixed_precision_policy, wrapping_policy = get_policies(cfg)
    model = FSDP(
        model,
        auto_wrap_policy=wrapping_policy,
        mixed_precision=mixed_precision_policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        cpu_offload=CPUOffload(offload_params=True) if cfg.cpu_offload else None,
        device_id=torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu"),
        limit_all_gathers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(args.steps):
        tokens = torch.randint(0, 40, (4, 12))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(cfg.clip)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(step, loss.item())
    save_model_checkpoint(model, rank, os.path.join(os.environ.get("SCRATCH", "."), "transformer.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
