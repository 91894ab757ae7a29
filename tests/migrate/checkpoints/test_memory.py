"""One tensor at a time: a conversion takes the memory of a tensor, and not of the model and its optimizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.peaks import peaks_of

MEMORY = """
from pathlib import Path
from fsdp2_tools.checkpoint.dcp_write import write_dcp
from fsdp2.checkpoint.files import LocalFiles
from fsdp2.checkpoint.sources.pt_file import write_pt
from migration.__main__ import main

def command(*line):
    main(["checkpoint", *line])

names = [f"layer{i}" for i in range(10)]
paths = {f"model.{name}": ("model", name) for name in names}
kinds = ("exp_avg", "exp_avg_sq")
paths |= {f"optim.{kind}.{name}": ("optim", "state", name, kind) for name in names for kind in kinds}
metas = {name: torch.empty(1_000_000, device="meta") for name in paths}
make = lambda name: torch.full((1_000_000,), float(name[-1]))
groups = [{"lr": 0.1, "params": names}]

def nested(state):
    tree = {"model": {}, "optim": {"state": {name: {} for name in names}, "param_groups": groups}}
    for name, tensor in state.items():
        node = tree
        for part in paths[name][:-1]:
            node = node[part]
        node[paths[name][-1]] = tensor
    return tree

torch.save({"a": torch.zeros(1)}, "small.pt")  # what torch loads late it loads now
main(["checkpoint", "small.pt", "small"])
main(["checkpoint", "small", "again.pt", "--to", "fsdp1-full"])
write_pt(Path("full.pt"), metas, make, nested)
os.mkdir("sharded")
write_dcp(LocalFiles("sharded"), metas, {"groups": groups}, {**paths, "groups": ("optim", "param_groups")}, make)
peak_of("full.pt", "one")
peak_of("sharded", "two")
peak_of("one", "back.pt", "--to", "fsdp1-full")
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures as Linux does")
def test_memory_is_bounded_by_a_tensor(tmp_path: Path) -> None:
    printed, peaks = peaks_of(MEMORY, tmp_path)
    assert printed.count("proven: 10 tensors of the model (10,000,000 values), 20 of the optimizer and") == 3
    assert len(peaks) == 3
    # 120 MB in 30 tensors. One is read: into its bytes, a tensor of a chunk, and the tensor; 16 to 36 MB were seen,
    # since the allocator keeps some of what is freed. Model and optimizer, or the model alone on both sides, are more.
    assert [line for size, line in peaks if size > 60_000_000] == [], peaks
