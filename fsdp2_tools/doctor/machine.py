"""Each rank's machine and software: facts that must agree, and those too small for the ranks."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from fsdp2.run.process.agreement import code
from fsdp2.run.process.limits import cpu_quota, free_memory
from fsdp2.units import size
from fsdp2_tools.doctor.asking import Here
from fsdp2_tools.doctor.judging import BAD, WORSE, Hosts, Row, beside_median, far_above, limit, same

# Set alike on all ranks, or some of them compute or communicate in another way.
PREFIXES = (
    "CUBLAS", "CUDA_", "CUDNN", "FI_", "GLOO_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH_",
    "UCX_",
)  # fmt: skip
# Ray gives each rank its own GPU, hosts may name their interfaces differently, and ranks may be bound to cores.
PER_RANK = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_PLACES",
)  # fmt: skip

CLOCK_LOWER = 1.25  # than the median GPU, at work; less is what GPUs of one model differ by
SHM_PER_RANK = 128 << 20  # nccl's and a data loader's segments; the 64 MB that Docker gives are known to fail
NOFILE_BASE, NOFILE_PER_RANK = 512, 4  # files of Python and torch; gloo's and nccl's connections to each other rank
GPU_QUERY = {
    "driver": "driver_version",
    "clock": "clocks.current.sm",
    "throttled": "clocks_throttle_reasons.active",
    "ecc": "ecc.errors.uncorrected.volatile.total",
    "width": "pcie.link.width.current",
    "most width": "pcie.link.width.max",
}
# nvidia-smi's bits of clocks_throttle_reasons that aren't idleness, a user's own setting or a display's.
THROTTLED = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def measure(here: Here) -> dict[str, Any]:
    """This rank's facts. `same` are those that have to agree between ranks."""
    gpu = gpu_facts(here.device) if here.device.type == "cuda" else {}
    same_on_all = {
        "torch": torch.__version__,
        "fsdp2": code(),
        "Python": "{}.{}".format(*platform.python_version_tuple()),
        "numpy": numpy.__version__,
        "device": here.device.type,
        "GPU": gpu.get("name"),
        "driver": gpu.get("driver"),
        "CUDA": torch.version.cuda if gpu else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else None,
    }
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "same": same_on_all,
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(PREFIXES) and name not in PER_RANK
        },
        "shm": [shm.total, shm.free] if shm else None,
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "infiniband": os.path.isdir("/dev/infiniband"),
        "memory": free_memory(),
        "quota": cpu_quota(),
        "cores": sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1)),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "loopback": resolves_to_loopback(),
    }


def resolves_to_loopback() -> bool:
    """Return whether gloo would listen where no other host reaches it: it listens at the address of the host's name."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return False
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return True  # gloo falls back to it
    return all(str(address[4][0]).startswith(("127.", "::1")) for address in found)


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Name and memory by torch, and what nvidia-smi says about this GPU, where there is one."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    facts: dict[str, Any] = {"name": properties.name, "free": free, "total": total}
    query = ["nvidia-smi", f"--id=GPU-{properties.uuid}", "--format=csv,noheader,nounits"]
    try:
        # The driver's clocks are those of a GPU at work only while it works.
        work = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16)
        for _ in range(200):
            work @ work
        done = subprocess.run([*query, f"--query-gpu={','.join(GPU_QUERY.values())}"], capture_output=True, timeout=8)
        torch.cuda.synchronize(device)
    except (OSError, subprocess.TimeoutExpired):
        return facts
    values = done.stdout.decode(errors="replace").strip().split(", ")
    return facts | dict(zip(GPU_QUERY, values, strict=True)) if len(values) == len(GPU_QUERY) else facts


def rows(found: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    """Judge all ranks' facts. What a host has in common is its first rank's that has answered."""
    if not found:
        return []
    local = {rank: len([one for one in hosts.ranks(hosts.of[rank]) if one in found]) for rank in found}
    firsts = {hosts.of[rank]: rank for rank in sorted(found, reverse=True)}.values()
    first = {rank: found[rank] for rank in sorted(firsts)}
    result = [*versions(found, hosts), *environment(found, hosts), *addresses(first, hosts)]
    shm = {rank: float(one["shm"][1]) for rank, one in first.items() if one["shm"]}  # macOS has none
    if shm:
        needed = {rank: float(SHM_PER_RANK * local[rank]) for rank in shm}
        result.append(limit("/dev/shm", shm, needed, size, hosts, "give the container more: docker run --shm-size=8g"))
    files = {rank: float(one["nofile"]) for rank, one in found.items() if one["nofile"] != -1}
    if files:
        least = {rank: float(NOFILE_BASE + NOFILE_PER_RANK * len(hosts.of)) for rank in files}
        result.append(limit("open files", files, least, "{:.0f}".format, hosts, "raise it: ulimit -n 65536"))
    locked = {rank: one["memlock"] for rank, one in found.items() if one["infiniband"]}
    if locked:
        held = [rank for rank, count in locked.items() if count != -1]
        text = "unlimited" if not held else size(min(locked[rank] for rank in held))
        fix = "InfiniBand pins memory: ulimit -l unlimited"
        result.append(Row("locked memory", text, "unlimited").judged(held, hosts, WORSE, fix))
    return [*result, *memory(first, hosts), *cores(found, local, hosts), *gpus(found, hosts)]


def versions(found: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    result = []
    for name in next(iter(found.values()))["same"]:
        verdict = BAD if name in ("torch", "fsdp2", "device", "nccl") else WORSE
        values = {rank: one["same"][name] for rank, one in found.items()}
        result += same(name, values, hosts, verdict, "install the same on each host, or leave that host out")
    shown = {key: value for key, value in next(iter(found.values()))["same"].items() if value is not None}
    text = ", ".join(f"{key} {value}" for key, value in shown.items())
    return result or [Row("versions", text, "the same on all ranks")]


def environment(found: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    result = []
    names = sorted({name for one in found.values() for name in one["environment"]})
    for name in names:
        values = {rank: one["environment"].get(name, "unset") for rank, one in found.items()}
        result += same(f"variable {name}", values, hosts, WORSE, "set it alike on all ranks")
    text = ", ".join(names[:6]) + (" …" if len(names) > 6 else "")
    return result or [Row("variables", text or "none of torch's, nccl's, gloo's", "the same on all ranks")]


def addresses(first: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    """gloo listens at the address of the host's own name."""
    hidden = [rank for rank, one in first.items() if one["loopback"]]
    if len(first) == 1 or not hidden:
        return []
    fix = "set GLOO_SOCKET_IFNAME to the interface between the hosts, or give the name its address in /etc/hosts"
    return [Row("host name", "none, or loopback", "an address that other hosts reach", BAD, hosts.named(hidden), fix)]


def memory(first: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    free = {rank: one["memory"] for rank, one in first.items() if one["memory"] is not None}
    if not free:
        return []
    low = far_above({rank: 1 / max(1, count) for rank, count in free.items()}, 2.0)
    row = Row("free memory", size(min(free.values())), "more than half of what other hosts have")
    fix = "look who uses it there; a job's own limit is its cgroup's (--mem of SLURM, limits of Kubernetes)"
    return [row.judged(low, hosts, WORSE, fix)]


def cores(found: Mapping[int, Mapping[str, Any]], local: Mapping[int, int], hosts: Hosts) -> list[Row]:
    """A row that compares threads of a host's ranks with their cores, by quota and by those they may run on."""
    have: dict[int, float] = {}
    need: dict[int, float] = {}
    for rank, one in found.items():
        mates = [other for other in hosts.ranks(hosts.of[rank]) if other in found]
        # Those that may run on the same cores share them.
        sharing = [other for other in mates if set(found[other]["cores"]) & set(one["cores"])]
        have[rank] = min(float(len(one["cores"])), one["quota"] or float("inf"))
        need[rank] = float(sum(found[other]["threads"] for other in sharing))
    fix = "give the task more cores (--cpus-per-task, a container's cpu limit), bind ranks apart, or lower --threads"
    return [limit("cores", have, need, "{:.4g}".format, hosts, fix)]


def gpus(found: Mapping[int, Mapping[str, Any]], hosts: Hosts) -> list[Row]:
    """Facts of the GPUs by nvidia-smi and torch; none without a GPU."""
    there = {rank: one["gpu"] for rank, one in found.items() if one["gpu"]}
    if not there:
        return []
    used = {rank: gpu["total"] - gpu["free"] for rank, gpu in there.items()}
    crowded = [rank for rank, count in used.items() if count > 0.1 * there[rank]["total"]]
    clocks = {rank: float(gpu["clock"]) for rank, gpu in there.items() if gpu.get("clock", "").isdigit()}
    reasons = {rank: throttle_reasons(gpu.get("throttled", "")) for rank, gpu in there.items()}
    text = ", ".join(sorted({name for names in reasons.values() for name in names}))
    throttled = [rank for rank, names in reasons.items() if names]
    broken = [rank for rank, gpu in there.items() if gpu.get("ecc", "0") not in ("0", "[N/A]")]
    narrow = [rank for rank, gpu in there.items() if gpu.get("width") != gpu.get("most width")]
    lanes = ", ".join(sorted({gpu.get("width", "unknown") for gpu in there.values()}))
    result = [
        Row("GPU memory in use", size(max(used.values())), "less than a tenth").judged(
            crowded, hosts, WORSE, "end the process that holds it: nvidia-smi lists them"
        ),
        Row("GPU throttled", text or "no reason", "no reason").judged(
            throttled, hosts, WORSE, "cool it, or give it power"
        ),
        Row("GPU memory errors", f"on {len(broken)} GPUs", "none uncorrected since the start").judged(
            broken, hosts, BAD, "reset or replace the GPU"
        ),
        Row("GPU PCIe lanes", lanes, "all").judged(narrow, hosts, WORSE, "seat the GPU again"),
    ]
    if clocks:
        slow = far_above({rank: 1 / max(1.0, clock) for rank, clock in clocks.items()}, CLOCK_LOWER)
        row = beside_median("GPU clock", clocks.values(), min, "{:.0f} MHz".format, "GPU")
        result.append(row.judged(slow, hosts, WORSE, "see its clocks and power limit: nvidia-smi -q -d CLOCK,POWER"))
    return result


def throttle_reasons(bits: str) -> list[str]:
    """Of nvidia-smi's hexadecimal number."""
    try:
        number = int(bits, 16)
    except ValueError:  # not supported there
        return []
    return sorted({name for bit, name in THROTTLED.items() if number & bit})
