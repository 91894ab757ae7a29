"""The name of `torch.distributed.fsdp.sharded_grad_scaler`."""

from fsdp1_interface import ShardedGradScaler as ShardedGradScaler
