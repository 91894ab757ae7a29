"""Ranks initialise differently; the strategy comes from a table; precision is optional."""
import argparse
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from functools import partial

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
}


class EncoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.ff = nn.Linear(d, d)

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.ff(x)


class LM(nn.Module):
    def __init__(self, vocab=50, d=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([EncoderLayer(d) for _ in range(2)])
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def get_mp(args):
    if args.bf16:
        return MixedPrecision(
            # compute
            param_dtype=torch.bfloat16,
            # communicate
            reduce_dtype=torch.float32,
        )
    return None


def wrap_model(model, args):
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={EncoderLayer})
    mp = get_mp(args)
    return FSDP(model, policy_arg_is_not_used_here(), STRATEGIES[args.strategy], None, policy, mixed_precision=mp,
                device_id=torch.device("cpu"))


def policy_arg_is_not_used_here():
    return None


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--strategy", default="grad_op")
    p.add_argument("--bf16", action="store_true", default=True)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1234)
    model = wrap_model(LM(), args)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(4):
        ids = torch.randint(0, 50, (2, 9))
        logits = model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().reshape(-1, 50), ids[:, 1:].reshape(-1))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0:
            print(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
