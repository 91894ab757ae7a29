"""A step's memory by the ledger and by the CUDA allocator, and the saving of each memory saver.

    torchrun --nproc_per_node 1 benchmarks/memory.py

Each row is a training of its own in these processes: two steps, and a third that is recorded. The page in docs/ is
written after each row.
"""

from __future__ import annotations

import gc
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from step_page import versions
from tables import machine, write_page

from fsdp2.config import Config, parse
from fsdp2.data.loader import Batch
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser
from fsdp2.parallel.engine import Engine
from fsdp2.run.process import ending, runtime
from fsdp2.run.process.group import gather, process_group
from fsdp2.run.process.runtime import World
from fsdp2.train import make_engine, train_step
from fsdp2_extra.allocations.ledger import Ledger, by_kind
from fsdp2_tools.compare.report import markdown_table

PAGE = Path(__file__).parent.parent / "docs" / "notes" / "memory-benchmark.md"
MB = 1e6
ROWS = (
    "",
    "--reshard-after-forward=false",
    "--shard-granularity=root",
    "--explicit-prefetching",
    "--mixed-precision=bf16",
    "--mixed-precision=fp16",
    "--activation-checkpointing=block",
    "--activation-checkpointing=op",
    "--activation-checkpointing=op --mixed-precision=bf16",
    "--cpu-offload",
    "--cpu-offload --mixed-precision=bf16 --activation-checkpointing=block",
    "--no-fused-optimizer",
    "--strategy=ddp",
    "--strategy=fsdp1",
)
COLUMNS = (
    "parameters",
    "optimizer",
    "activations",
    "peak, ledger",
    "peak, allocator",
    "allocator ÷ ledger",
    "reserved",
)


def main() -> None:
    parser = Parser(prog="benchmarks/memory.py", allow_abbrev=False)
    parser.add_argument(
        "--flags", default="--model-size=base --batch-size=256", help="of the training: model and batch"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, help="begin no row after so many")
    parser.add_argument("--page", type=Path, default=PAGE)
    given = parser.parse_args()
    began = time.perf_counter()
    world = runtime.world()
    device = runtime.pick_device(given.device, world)
    warnings.simplefilter("ignore")
    runtime.set_threads(None, world)
    rows: list[tuple[str, ...]] = []
    with process_group(world, device):
        for flags in ROWS:
            if any(gather(given.seconds is not None and time.perf_counter() - began > given.seconds)):
                break
            cells = row([*given.flags.split(), *flags.split(), f"--device={device.type}"], world, device)
            rows.append((f"`{flags}`" if flags else "none", *cells))
            print("  ".join(rows[-1]), flush=True)
            if world.rank == 0:
                write_page(given.page, page(rows, given.flags, world, device))


def row(flags: list[str], world: World, device: torch.device) -> list[str]:
    try:
        return measured(parse(flags), world, device)
    except (ConfigError, torch.OutOfMemoryError) as error:
        return [str(error).partition("\n")[0][:120]]
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(config: Config, world: World, device: torch.device) -> list[str]:
    """A cell for each of COLUMNS, of this rank."""
    spec = config.spec
    engine = make_engine(config, spec, world, device, restoring=False)
    batch = made_up(config, world, device)

    def step() -> None:
        train_step(engine, iter([batch]), spec, config, world, [])

    for _ in range(2):  # what cuBLAS and nccl allocate, they allocate once
        step()
    counts = counted(engine, batch, step, device)
    names = ("parameters", "optimizer", "activations", "ledger")
    cells = [f"{counts[name] / MB:.1f}" for name in names]
    if device.type != "cuda":
        return [*cells, *["no GPU"] * 3]
    allocated, ledger = counts["allocated"], counts["ledger"]
    return [*cells, f"{allocated / MB:.1f}", f"{allocated / ledger:.3f}", f"{counts['reserved'] / MB:.1f}"]


def counted(engine: Engine, batch: Batch, step: Callable[[], None], device: torch.device) -> dict[str, int]:
    """Bytes of a further step: of kinds of tensors, `ledger` = the most at once, `allocated` = by the allocator, less
    what it had beside the ledger's tensors, and `reserved`; both 0 without a GPU."""
    # What is offloaded takes none of the device's memory.
    held = {kind: [t for t in tensors if t.device.type == device.type] for kind, tensors in engine.held().items()}
    activations, backward = 0, engine.backward

    def noting(loss: torch.Tensor, last_microbatch: bool) -> None:
        nonlocal activations
        ledger.phase("backward", 3)
        activations = by_kind(ledger.alive()).get("activations", 0)
        backward(loss, last_microbatch)

    vars(engine)["backward"] = noting
    others, gpu = 0, device.type == "cuda"
    with Ledger() as ledger:
        ledger.watch(engine.model, held)
        ledger.mark("data", [batch.inputs, batch.targets])
        state = by_kind(ledger.alive())
        if gpu:
            torch.cuda.synchronize(device)
            others = torch.cuda.memory_allocated(device) - ledger.live_bytes
            torch.cuda.reset_peak_memory_stats(device)
        ledger.phase("forward", 3)
        step()
    vars(engine)["backward"] = backward
    counts = {kind: state.get(kind, 0) for kind in ("parameters", "optimizer")}
    counts |= {"activations": activations, "ledger": ledger.peak_bytes, "allocated": 0, "reserved": 0}
    if gpu:
        torch.cuda.synchronize(device)
        counts["allocated"] = torch.cuda.max_memory_allocated(device) - others
        counts["reserved"] = torch.cuda.max_memory_reserved(device)
    return counts


def made_up(config: Config, world: World, device: torch.device) -> Batch:
    """A batch of random images or tokens: memory doesn't depend on what is in them."""
    if (vocabulary := config.spec.vocab_size(config.model_size)) is not None:
        inputs = targets = torch.randint(vocabulary, (config.batch_size, config.seq_len), device=device)
    else:
        inputs = torch.randn(config.batch_size, 1, 28, 28, device=device)
        targets = torch.randint(10, (config.batch_size,), device=device)
    ranks = world.world_size
    return Batch(inputs, targets, True, config.batch_size * ranks, targets.numel() * ranks, True)


def page(rows: list[tuple[str, ...]], flags: str, world: World, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else machine()
    return f"""\
# What a step takes of memory

Written by `benchmarks/memory.py`: rank 0's memory in the third step of a training, in MB. The ledger counts tensors
(`--memory-snapshot` does), offloaded ones too. The allocator's peak is `torch.cuda.max_memory_allocated`, less
what was there before beside its tensors. Reserved is what the process has taken from the device.

- Flags of all rows: `{flags}`; {world.world_size} ranks, device {device.type}
- Date: {time.strftime("%Y-%m-%d")}
- Machine: {where}
- Versions: Python {platform.python_version()}, {", ".join(versions())}
- Rows: {len(rows)} of {len(ROWS)}

{markdown_table(("flags", *COLUMNS), rows)}
"""


if __name__ == "__main__":
    with ending.exit_status():
        main()
