"""The name of `torch.distributed.fsdp.sharded_grad_scaler`."""

from fsdp2.migrate.shim import ShardedGradScaler as ShardedGradScaler
