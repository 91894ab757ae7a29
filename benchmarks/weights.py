"""Growth of a rank's memory while weights are loaded:  python -m benchmarks.weights

A Llama of 2 GB in fp32 is written once in each form. For each number of ranks a torchrun loads it into a model that
FSDP2 shards, on the CPU. The peak is the kernel's (VmHWM): it counts the pages of a mapped file too, which the kernel
takes back when memory is short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.tables import machine
from fsdp2 import models
from fsdp2.checkpoint.full_dtensor import load_full_model_state
from fsdp2.checkpoint.state import plain_names
from fsdp2.checkpoint.weights import load_weights
from fsdp2.models.initial import slices_of
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.meta import allocate, shared_names
from fsdp2.parallel.shards import local
from fsdp2_tools.checkpoint.export import export

SIZE = {"dim": 1536, "layers": 14, "heads": 12, "kv_heads": 4, "hidden": 6144, "vocab_size": 32_000}


def status(name: str) -> float:
    """MB of a figure of this process that the kernel keeps."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def load(place: str, through_rank_0: bool) -> dict[str, float]:
    """Load on this rank of a torchrun: MB of its shard and its largest tensor, growth at the peak, and seconds."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    spec = models.get("llama")
    with torch.device("meta"):
        model = spec.make(**SIZE)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for group in shard_groups(model, spec.blocks(model), 1):
        fully_shard(group, mesh=mesh)
    fully_shard(model, mesh=mesh)
    allocate(model, torch.device("cpu"), cpu_offload=False)
    targets = plain_names(model)
    shard = sum(local(tensor).nbytes for tensor in targets.values()) / 1e6
    largest = max(tensor.numel() * tensor.itemsize for tensor in targets.values()) / 1e6
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    # The shards are in memory already: what the peak has above this is what loading takes beside them.
    before, began = status("VmRSS"), time.perf_counter()
    if through_rank_0:
        load_full_model_state(model, Path(place))
    else:
        load_weights(place, targets, slices_of, shared_names(model), partial=False)
    seconds = time.perf_counter() - began
    beside = status("VmHWM") - before
    rank = dist.get_rank()
    time.sleep(0.1)  # a process that ends while gloo gives back its last collective aborts (pytorch 190489)
    dist.destroy_process_group()
    return {"rank": rank, "shard": shard, "largest": largest, "beside": beside, "seconds": seconds}


def measured(place: str, ranks: int, through_rank_0: bool) -> list[dict[str, float]]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    line += ["-m", "benchmarks.weights", f"--load={place}", *(["--through-rank-0"] if through_rank_0 else [])]
    printed = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = [json.loads(one) for one in printed.splitlines() if one.startswith("{")]
    return sorted(found, key=lambda one: one["rank"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", help="load this on a rank of torchrun, and print what it took")
    parser.add_argument("--through-rank-0", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.load:
        line = json.dumps(load(given.load, given.through_rank_0))
        os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once: other ranks print too
        return
    with tempfile.TemporaryDirectory() as folder:
        state = models.get("llama").make(**SIZE).state_dict()
        size = sum(tensor.nbytes for tensor in state.values()) / 1e6
        one, full, many = (str(Path(folder) / name) for name in ("one.safetensors", "full-model.pt", "many"))
        save_file(state, one)
        torch.save(state, full)
        del state
        export(full, many, "safetensors", max_shard_size=500_000_000)
        print(f"`llama` of {size:,.0f} MB in fp32; torch {torch.__version__}; {machine()}; gloo, one thread a rank.")
        print(f"MB: the most of all ranks and {given.rounds} rounds; seconds: the least.\n")
        print("| form | ranks | shard, MB | beside it at the peak, rank 0 | other ranks | s |")
        print("|---|---:|---:|---:|---:|---:|")
        forms = (
            ("safetensors, 500 MB each", many, False),
            ("one safetensors file", one, False),
            ("`full-model.pt`", full, False),
            ("`full-model.pt`, scattered by rank 0", full, True),
        )
        for ranks in (1, 2, 4):
            for name, place, through in forms:
                rounds = [measured(place, ranks, through) for _ in range(given.rounds)]
                first = max(found[0]["beside"] for found in rounds)
                others = max((one["beside"] for found in rounds for one in found[1:]), default=None)
                seconds = min(max(one["seconds"] for one in found) for found in rounds)
                rest = "" if others is None else f"{others:.0f}"
                shard = rounds[0][0]["shard"]
                print(f"| {name} | {ranks} | {shard:.0f} | {first:.0f} | {rest} | {seconds:.1f} |", flush=True)
        print(f"\nThe largest tensor has {rounds[0][0]['largest']:.0f} MB.")


if __name__ == "__main__":
    main()
