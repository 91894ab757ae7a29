"""Training programs in `sound/`, and the fault that each has after a change of a line or two."""

from __future__ import annotations

from pathlib import Path

SOUND = Path(__file__).parent / "sound"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
# By program: the fault by the kind that names it, and the change that makes it, old to new.
FAULTS: dict[str, tuple[str, dict[str, str]]] = {
    "batch_norm": ("buffers", {"GroupNorm(2, 8": "BatchNorm1d(8"}),
    "buffer_never_set": ("never-set", {"nn.init.ones_(model.scale)\n": ""}),
    "decayed_norm": (
        "decayed-norms",
        {"one.ndim > 1": 'not name.endswith("bias")', "one.ndim <= 1": 'name.endswith("bias")'},
    ),
    "dropped_samples": (
        "dropped-samples",
        {
            "(loader):\n": "(loader):\n        if number % dist.get_world_size() != dist.get_rank():\n"
            "            continue\n"
        },
    ),
    "evaluation_in_training": ("evaluation", {"    model.eval()\n": ""}),
    "frozen_moves": ("frozen", {"True": "False"}),
    "gradients_averaged_twice": ("factor", {"print(parameter.grad.norm())": "parameter.grad /= world"}),
    "gradients_kept": ("kept-gradients", {"optimizer.zero_grad": "model.zero_grad"}),
    "loss_over_world": ("factor", {" 2)": " 2 / world)"}),
    "loss_times_world": ("factor", {"loss.backward": "(loss * dist.get_world_size()).backward"}),
    "lr_by_world": ("settings", {"lr=0.1)": "lr=0.1 * dist.get_world_size())"}),
    "mean_of_means": ("gradients", {"dist.all_reduce(count)\n    (loss * world": "(loss"}),
    "never_synchronised": ("never-synchronised", {"number % 2 == 1": "False"}),
    "norm_by_hand": ("norm-of-shards", {"    dist.all_reduce(norm)\n": ""}),
    "norm_of_shards": ("norm-of-shards", {"model.clip_grad_norm_(0": "nn.utils.clip_grad_norm_(model.parameters(), 0"}),
    "optimizer_before_sharding": (
        "not-in-the-optimizer",
        {
            f"fully_shard(model)\n{ADAMW}": "fully_shard(model)\n",
            "for layer in model:\n": f"{ADAMW}for layer in model:\n",
        },
    ),
    "optimizer_of_shards": ("updates", {"norm().full_tensor": "to_local().norm"}),
    "order_of_epochs": ("same-order", {"    sampler.set_epoch(epoch)\n": ""}),
    "own_order": (
        "repeated-samples",
        {
            "DistributedSampler, TensorDataset": "TensorDataset",
            "sampler = DistributedSampler(data)": "order = torch.Generator().manual_seed(dist.get_rank())",
            "sampler=sampler": "shuffle=True, generator=order",
            "    sampler.set_epoch(epoch)\n": "",
        },
    ),
    "padded": ("gradients", {"    dist.all_reduce(count)\n": "", "* dist.get_world_size() ": ""}),
    "partial_norm": (
        "drift",
        {"SequenceParallel, parallelize_module": "parallelize_module", '    "1": SequenceParallel(),\n': ""},
    ),
    "past_the_wrapper": ("drift", {"model(inputs": "model.module(inputs"}),
    "plateau": (
        "settings",
        {
            "    mean = loss.detach()\n    dist.all_reduce(mean)\n": "",
            "mean.item() / world": "loss.item()",
        },
    ),
    "repeated_samples": ("repeated-samples", {"* size": "* (size - 1)"}),
    "same_data": (
        "same-data",
        {
            "DistributedSampler, TensorDataset": "TensorDataset",
            "sampler=DistributedSampler(data, shuffle=True)": "shuffle=True",
        },
    ),
    "schedule_by_microbatch": ("schedule", {"    schedule": "schedule"}),
    "two_models": (
        "drift",
        {"generator = DistributedDataParallel(nn": "generator = nn", "nn.Linear(8, 6)))": "nn.Linear(8, 6))"},
    ),
    "uneven": (
        "dropped-samples",
        {
            "sampler = DistributedSampler(data)": "mine = [data[number] for number in range(dist.get_rank(), 48, "
            "dist.get_world_size())]\nsampler = DistributedSampler(mine)",
            "DataLoader(data": "DataLoader(mine",
        },
    ),
    "weights_by_rank": ("different-weights", {"True))\n": "True))\ntorch.manual_seed(dist.get_rank())\n"}),
}


def faulty(name: str) -> str:
    """The text of a program with its fault."""
    text = (SOUND / f"{name}.py").read_text()
    for old, new in FAULTS[name][1].items():
        assert text.count(old) == 1, f"{name}: {old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text
