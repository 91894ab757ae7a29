"""The strategies that FSDP2 is compared with, one file each."""
