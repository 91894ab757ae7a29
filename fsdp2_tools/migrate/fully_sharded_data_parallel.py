"""The names of `torch.distributed.fsdp.fully_sharded_data_parallel`."""

from fsdp1_interface import *  # noqa: F403
