"""Distribute a model: mesh, sharding groups, prefetch, precision, recomputation, and one small engine
for each strategy. Every file takes plain arguments and can be copied out.

Here are the names that flags of sharding and optimizers choose from; torch isn't loaded to check them.
"""

from __future__ import annotations

OPTIMIZERS = ("adam", "adamw", "adadelta", "sgd")
# Adadelta has no fused form; SGD's can't take DTensors: torch has no sharding rule for aten._fused_sgd_.
FUSED = ("adam", "adamw")

# What `--optimizer-state` has beside the parameters' dtype, and of which optimizers. See `low_bit.py`.
STATES = ("bf16", "8bit")
IN_FEW_BITS = ("adam", "adamw")
# bf16 rounds away a change of less than 1/512 of a number, and an average of squares loses at most 1 - beta2 of itself
# in a step: with 0.999 it would rise and never fall again.
LARGEST_BETA2 = 0.99

DTYPES = ("fp32", "bf16", "fp16")
FLOAT8 = ("tensorwise", "rowwise")  # recipes of `--float8`; see `float8.py`
FLOAT8_CAPABILITY = (8, 9)  # of the first GPUs that multiply in it: Ada, Hopper and later

# When the microbatches of a step exchange their gradients: `every` reduce-scatters each, `last` exchanges the sum of
# all once, `replica` reduce-scatters each inside the shard group and all-reduces over replicas once.
ACCUMULATION_SYNC = ("every", "last", "replica")

FSDP1_SHARDING = ("full-shard", "shard-grad-op", "no-shard", "hybrid-shard", "hybrid-shard-zero2")
FSDP1_PREFETCH = ("pre", "post", "never")
