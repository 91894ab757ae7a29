"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`."""

from fsdp2.migrate.shim import *  # noqa: F403
