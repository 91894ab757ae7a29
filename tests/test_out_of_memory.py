"""What is advised when memory is short follows from what was alive."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp2.config import Config
from fsdp2.units import byte_count, size
from fsdp2_extra.allocations.ledger import Allocation
from fsdp2_extra.allocations.out_of_memory import remedies, report

BLOCKS = ["layers.0", "layers.1"]


def alive(**sizes: int) -> list[Allocation]:
    return [Allocation(count, 0.0, 0, "", "", kind.replace("_", " ")) for kind, count in sizes.items()]


def found(config: dict[str, Any], there: list[Allocation], device: str = "cuda", ranks: int = 2) -> dict[str, int]:
    return dict(remedies(there, Config(**config), device, ranks, BLOCKS))


def test_largest_first_and_changed_by_the_numbers() -> None:
    state = list(found({}, alive(parameters=100, gradients=100, optimizer=200, activations=10)))
    assert state[0] == "--cpu-offload"
    computing = list(found({}, alive(parameters=1, activations=1000)))
    assert computing[0] in ("--mixed-precision bf16", "--batch-size 32 --grad-accumulation 2")


def test_bytes_by_arithmetic() -> None:
    there = alive(parameters=100, gradients=100, optimizer=200, activations=1000, gathered_parameters=80, data=20)
    assert found({}, there) == {
        "--cpu-offload": 400,
        "4 ranks instead of 2": 200,
        "--mixed-precision bf16": 540,
        "--batch-size 32 --grad-accumulation 2": 510,
        "--optimizer sgd, another training": 100,
    }
    assert found({"strategy": "ddp"}, there)["--strategy fsdp2"] == 200
    assert "--strategy fsdp2" not in found({"strategy": "none"}, there, ranks=1)
    assert found({"shard_granularity": "root"}, there)["--shard-granularity 1"] == 40
    assert found({"replicas": 2}, there, ranks=4)["--replicas 1"] == 200
    assert found({"global_batch_size": 512}, there)["--batch-size 32"] == 510  # 4 microbatches of 64 on each rank
    assert found({"global_batch_size": 13}, there)["--batch-size 3"] == 510  # one of 7 and one of 6
    assert not any("--batch-size" in flag for flag in found({"global_batch_size": 2}, there))


def test_what_is_set_already_is_not_advised() -> None:
    there = alive(parameters=100, gradients=100, optimizer=200, activations=1000)
    config = {"mixed_precision": "bf16", "cpu_offload": True, "batch_size": 1, "optimizer": "sgd"}
    assert list(found(config, there)) == ["4 ranks instead of 2"]
    assert "--cpu-offload" not in found({}, there, device="cpu")


def test_recomputing_and_resharding_look_at_the_blocks() -> None:
    there = [
        Allocation(100, 0.0, 0, "layers.0.mlp", "", "activations"),
        Allocation(300, 0.0, 0, "layers.1.mlp", "", "activations"),
        Allocation(50, 0.0, 0, "layers.1", "", "activations"),  # its output, which stays
        Allocation(60, 0.0, 0, "layers.10.mlp", "", "activations"),  # no block of that name
        Allocation(40, 0.0, 0, "layers.0", "", "gathered parameters"),
        Allocation(70, 0.0, 0, "layers.1", "", "gathered parameters"),
        Allocation(30, 0.0, 0, "", "", "gathered parameters"),
    ]
    advised = found({}, there)
    assert advised["--activation-checkpointing"] == 100
    assert advised["--reshard-after-forward true"] == 70
    text = report(there, Config(), "cpu", 2, BLOCKS)
    assert text.startswith("at the peak 650 B of tensors were alive on this rank:\n  activations")


@pytest.mark.parametrize(
    ("text", "count"),
    [("500MB", 500_000_000), ("2GiB", 2 << 30), ("1.5 kB", 1500), ("42", 42), (7, 7), ("3g", 3_000_000_000)],
)
def test_sizes_are_read(text: object, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1.2.3MB", "5XB", None])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes such as 500MB or 2GiB"):
        byte_count(text)


def test_sizes_are_written() -> None:
    assert [size(n) for n in (0, 999, 1000, 8_100_000, 5_000_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "8.1 MB",
        "5.0 TB",
    ]
