import argparse, functools, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, CPUOffload, FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy, size_based_auto_wrap_policy
from torch.nn import TransformerEncoderLayer

def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--fsdp", action="store_true", default=True)
    p.add_argument("--zero2", action="store_true", default=False)
    p.add_argument("--amp", default="bf16")
    p.add_argument("--offload", action="store_true")
    return p.parse_args()

def get_strategy(args):
    if args.zero2:
        return ShardingStrategy.SHARD_GRAD_OP
    else:
        return ShardingStrategy.FULL_SHARD

def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = nn.TransformerEncoder(TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)
    if args.amp == "bf16":
        mp_policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    elif args.amp == "fp16":
        mp_policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    else:
        mp_policy = None
    if args.fsdp:
        model = FSDP(model, sharding_strategy=get_strategy(args), mixed_precision=mp_policy, cpu_offload=CPUOffload(offload_params=args.offload),
            auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerEncoderLayer}), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    torch.manual_seed(rank)
    for step in range(4):
        out = model(torch.randn(2, 5, 8))
        loss = out.float().pow(2).mean()
        loss.backward()
        if args.fsdp:
            total_norm = model.clip_grad_norm_(1e3)
        else:
            total_norm = nn.utils.clip_grad_norm_(model.parameters(), 1e3)
        optimizer.step(); lr_scheduler.step(); optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"{step} {loss.item()} {total_norm:.3f}")
    if args.fsdp:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
            cpu_state = model.state_dict()
    else:
        cpu_state = model.state_dict()
    if rank == 0:
        print(len(cpu_state), sum(v.double().sum().item() for v in cpu_state.values()))
    dist.destroy_process_group()

main()
