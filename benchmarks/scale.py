"""Costs that grow with a job's ranks, beside the training: seconds and bytes for 2 to 4,096 of them, in one process.

    python benchmarks/scale.py

Other ranks are made up: their plans are rank 0's with other rows, their files have a byte each. What judges, reads and
writes for them is what a run has. The page goes to docs/scale.md: make scale
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tables import machine, write_within
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.fsdp import fully_shard

from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.metadata import load_metadata
from fsdp2.checkpoint.store import HASH, Store, read_marker, verify
from fsdp2.config import Config
from fsdp2.options.parser import Parser, to_flags
from fsdp2.run.process import agreement
from fsdp2.units import size as shown_size
from fsdp2_tools.checkpoint.show import list_checkpoints
from fsdp2_tools.doctor import judging, network
from fsdp2_tools.plan.fake import fake_group

PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
GPUS = 8  # of a node
MOST_PLANNED = 1024  # ranks whose plans fit into this process' memory, and into minutes
MOST_NODES = 128  # whose rendezvous ends in one process: see the page


@dataclasses.dataclass
class Timer:
    """Seconds without Python's garbage collection, which a run keeps for between its steps (`--gc-every`)."""

    seconds: float = 0.0

    def __enter__(self) -> Timer:
        gc.collect()
        gc.disable()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        gc.enable()


def main() -> None:
    """Measure, and write the page."""
    parser = Parser(prog="benchmarks/scale.py", description=__doc__)
    parser.add_argument("--ranks", default="2,16,64,256,1024,4096")
    parser.add_argument("--model-size", default="1b", help="of llama")
    parser.add_argument("--no-page", action="store_true", help="print the table alone")
    options = parser.parse_args()
    found: list[dict[str, str]] = []
    for ranks in map(int, options.ranks.split(",")):
        found.append({"ranks": f"{ranks:,}", **measured(ranks, options.model_size)})
        print(found[-1], flush=True)
    columns = [[name, *(row[name] for row in found)] for name in found[0]]
    lines = ["| " + " | ".join(column) + " |" for column in columns]
    table = "\n".join([lines[0], "|---" * len(columns[0]) + "|", *lines[1:]])
    model = Config(model="llama").spec.on_meta(options.model_size)
    tensors, parameters = 3 * len(list(model.parameters())), sum(one.numel() for one in model.parameters())
    table += f"\n\nCheckpoints are of Llama {options.model_size} with Adam ({tensors:,} tensors, "
    table += f"{parameters:,} parameters). {machine()}, torch {torch.__version__.partition('+')[0]}, "
    table += f"{time.strftime('%Y-%m-%d')}."
    print(table)
    if not options.no_page:
        write_within(PAGE, table)


def measured(ranks: int, model_size: str) -> dict[str, str]:
    """The column of so many ranks: name -> figure."""
    nodes = max(1, ranks // GPUS)
    found = {"rendezvous": rendezvous(nodes) if nodes <= MOST_NODES else "–", "agreement": agree(ranks)}
    with fake_group(0, ranks):
        with Timer() as timer:
            init_device_mesh("cpu", (nodes, min(ranks, GPUS)), mesh_dim_names=("node", "gpu"))
        found["mesh"] = shown(timer)
        own = rank_0s_plan(model_size)
    plans = ("plans at rank 0", ".metadata read by a rank")
    found |= dict(zip(plans, saved(own, ranks) if ranks <= MOST_PLANNED else ("–", "–"), strict=True))
    return found | files(ranks) | doctor(ranks)


def saved(own: SavePlan, ranks: int) -> tuple[str, str]:
    """Measure the plans of a save on rank 0, and the reading of `.metadata` on each rank."""
    sent = [pickle.dumps(dataclasses.replace(own, items=list(items_of(own, rank, ranks)))) for rank in range(ranks)]
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    with Timer() as timer:
        plans = [pickle.loads(one) for one in sent]
        plans, metadata = planner.create_global_plan(plans)
    merged = f"{shown_size(sum(map(len, sent)))}, {shown(timer)}"
    metadata.storage_data = {
        MetadataIndex(item.index.fqn, item.index.offset): _StorageInfo(f"__{rank}_0.distcp", 0, 1)
        for rank, plan in enumerate(plans)
        for item in plan.items
    }
    data = pickle.dumps(metadata)
    del plans, metadata, sent
    with Timer() as timer:
        load_metadata(data)
    return merged, f"{shown_size(len(data))}, {shown(timer)}"


def shown(timer: Timer) -> str:
    return f"{timer.seconds:.2g} s" if timer.seconds < 10 else f"{timer.seconds:.0f} s"


class Counting(C10dRendezvousBackend):
    """Torchrun's, which counts what a node exchanges with the store."""

    exchanges, bytes = 0, 0

    def get_state(self) -> tuple[bytes, Any] | None:
        found = super().get_state()
        self.exchanges += 1
        self.bytes += 0 if found is None else len(found[0])
        return found

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = super().set_state(state, token)
        self.exchanges += 1
        self.bytes += len(state) + (0 if found is None else len(found[0]))
        return found


def rendezvous(nodes: int) -> str:
    """Torchrun's c10d rendezvous of so many nodes that start at once, a thread each."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    backends, handlers = [], []
    for _ in range(nodes):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        backends.append(Counting(store, "scale"))
        handlers.append(
            dynamic_rendezvous.DynamicRendezvousHandler.from_backend("scale", store, backends[-1], nodes, nodes)
        )
    met: list[int] = []
    threads = [
        threading.Thread(target=lambda handler=handler: met.append(handler.next_rendezvous().world_size), daemon=True)
        for handler in handlers
    ]
    # It inspects the whole stack for each line of its log: milliseconds on a node of its own, but here all share an
    # interpreter.
    with mock.patch.object(dynamic_rendezvous, "get_method_name", return_value=""), Timer() as timer:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert met == [nodes] * nodes
    exchanges, bytes_ = (sum(getattr(one, name) for one in backends) for name in ("exchanges", "bytes"))
    for handler in handlers:
        handler.shutdown()
    return f"{exchanges:,} exchanges, {shown_size(bytes_)}, {shown(timer)}"


def agree(ranks: int) -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    facts = agreement.facts(to_flags(Config()), torch.device("cpu"), ranks)
    for rank in range(1, ranks):
        agreement.write({**facts, "host": f"node{rank // GPUS}"}, store, rank)
    with Timer() as timer:
        agreement.require_agreement(facts, store, 0, ranks, timedelta(minutes=1))
    return shown(timer)


def rank_0s_plan(model_size: str) -> SavePlan:
    """Of parameters and Adam's two averages, sharded over the group there is."""
    model = Config(model="llama").spec.on_meta(model_size)
    fully_shard(model)
    state = {
        f"app.{kind}.{name}": value
        for kind in ("model", "exp_avg", "exp_avg_sq")
        for name, value in model.named_parameters()
    }
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def items_of(own: SavePlan, rank: int, ranks: int) -> Iterator[WriteItem]:
    """Another rank's: the same tensors with its rows, as `torch.chunk` divides them."""
    for item in own.items:
        assert item.tensor_data is not None
        whole = item.tensor_data.size
        rows_of_each = math.ceil(whole[0] / ranks)
        start = min(rank * rows_of_each, whole[0])
        count = min(rows_of_each, whole[0] - start)
        offset, length = torch.Size([start, *[0] * (len(whole) - 1)]), torch.Size([count, *whole[1:]])
        chunk = dataclasses.replace(item.tensor_data.chunk, offsets=offset, sizes=length)
        data = dataclasses.replace(item.tensor_data, chunk=chunk)
        yield dataclasses.replace(item, index=MetadataIndex(item.index.fqn, offset), tensor_data=data)


def files(ranks: int) -> dict[str, str]:
    """The store's work with one file a rank."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(LocalFiles(folder).at("checkpoints"))
        entry = {"size": 1, HASH: "0" * 64}
        names: Sequence[str] = [f"__{rank}_0.distcp" for rank in range(ranks)]
        for step in (1, 2):
            store.begin(step)
            for name in names:
                store.checkpoint(step).write(name, b"0")
            with Timer() as marker:
                store.commit(step, dict.fromkeys(names, entry), {"world_size": ranks})
                read_marker(store.checkpoint(step))
        bytes_ = store.checkpoint(2).size("COMMIT.json") or 0
        with Timer() as steps:
            store.committed()
        with Timer() as listing, contextlib.redirect_stdout(io.StringIO()):
            list_checkpoints(folder, quick=True)
        with Timer() as sizes:
            verify(store.checkpoint(2), hashes=False)
        with Timer() as removal:
            store.retain(1)
    return {
        "COMMIT.json": f"{shown_size(bytes_)}, {shown(marker)}",
        "listing": f"{shown(steps)}, {shown(listing)}",
        "verify sizes": shown(sizes),
        "retention": shown(removal),
    }


def doctor(ranks: int) -> dict[str, str]:
    """The tournament of pairs, one of which is slow."""
    hosts = judging.Hosts(
        {rank: (f"node{rank // GPUS}", f"10.0.{rank // GPUS // 256}.{rank // GPUS % 256}") for rank in range(ranks)}
    )
    rounds = network.schedule(ranks)
    pairs = {pair: {"trip": 1e-4, "rate": 1e9, "lost": 0.0, "again": 0} for met in rounds for pair in met}
    pairs[0, 1]["trip"] = 1.0
    with Timer() as timer:
        network.rows(pairs, hosts, 1 << 20)
    return {"doctor": f"{len(rounds)} rounds, {shown(timer)}"}


if __name__ == "__main__":
    sys.exit(main())
