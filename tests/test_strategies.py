"""What each strategy honours, refuses, and does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import parallel
from fsdp2.config import Config, parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.strategies import PARTICULAR, STRATEGIES, rules_of
from fsdp2.parallel.optimizer import CLASSES
from fsdp2.parallel.precision import DTYPES
from fsdp2.run.preflight import check_world
from fsdp2.run.process.runtime import World
from fsdp2.train import main
from fsdp2_extra.baselines.fsdp1 import PREFETCH, SHARDING
from tests.harness import Ranks, loss_of, losses, make_engine, of_kind, one_step, peak_at_start

Train = Callable[..., list[tuple[str, dict[str, Any]]]]
Reference = Callable[..., list[float]]
HYBRIDS = [name for name in SHARDING if name.startswith("hybrid")]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"strategy": "fsdp2", "bucket_mb": 5}, "--bucket-mb with --strategy fsdp2: fsdp2 doesn't reduce gradients in"),
        ({"strategy": "fsdp1", "bucket_mb": 5}, "use --strategy ddp or drop --bucket-mb"),
        ({"strategy": "ddp", "fsdp1_sharding": "no-shard"}, "--fsdp1-sharding with --strategy ddp: ddp isn't FSDP1"),
        ({"strategy": "fsdp2", "min_wrap_params": 100}, "--min-wrap-params with --strategy fsdp2"),
        ({"strategy": "fsdp2", "fsdp1_backward_prefetch": "post"}, "--fsdp1-backward-prefetch with --strategy fsdp2"),
        (
            {"strategy": "fsdp1", "reshard_after_forward": False},
            "--reshard-after-forward with --strategy fsdp1: fsdp1 chooses this by its sharding strategy "
            "(--fsdp1-sharding shard-grad-op is false); use --strategy fsdp2 or drop --reshard-after-forward",
        ),
        ({"strategy": "fsdp1", "explicit_prefetching": 2}, "--fsdp1-backward-prefetch is its own"),
        ({"strategy": "fsdp1", "shard_granularity": "layer"}, "use 1 (each block), root, or --min-wrap-params N"),
        ({"strategy": "fsdp1", "shard_granularity": "root", "min_wrap_params": 9}, "both say what is wrapped"),
        ({"strategy": "fsdp1", "fsdp1_sharding": "hybrid-shard"}, "a hybrid has 2 replicas or more"),
        ({"strategy": "fsdp1", "replicas": 2}, "only hybrid-shard and hybrid-shard-zero2 replicate"),
        ({"strategy": "fsdp1", "fsdp1_sharding": "full"}, "must be one of full-shard, shard-grad-op, no-shard"),
        ({"compile": True, "shard_granularity": "layer"}, "--shard-granularity 1), or drop --compile"),
        ({"strategy": "ddp", "bucket_mb": 0}, "--bucket-mb 0: must be above 0"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(values: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fsdp1_offloads_on_a_gpu_alone(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="FSDP1 offloads through pinned memory, which needs a GPU's driver; use --str"
    ):
        main(Config(strategy="fsdp1", cpu_offload=True, device="cpu", run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def _memory_of_ddps_gradients() -> tuple[int, int]:
    """How many pieces of memory hold the gradients, and how many gradients there are."""
    engine = make_engine("--strategy=ddp")
    for _ in range(2):  # the buckets are made new after the first backward
        one_step(engine)
    engine.backward(loss_of(engine), last_microbatch=True)
    gradients = engine.gradients()
    return len({gradient.untyped_storage().data_ptr() for gradient in gradients}), len(gradients)


def test_ddps_gradients_are_in_its_buckets_and_not_in_memory_twice(ranks: Ranks) -> None:
    buckets, gradients = ranks.run(_memory_of_ddps_gradients)[0]
    assert (buckets, gradients) == (1, 32)


def test_every_sharding_strategy_and_prefetch_of_fsdp1_has_a_name() -> None:
    assert (tuple(SHARDING), tuple(PREFETCH)) == (parallel.FSDP1_SHARDING, parallel.FSDP1_PREFETCH)
    assert set(SHARDING.values()) == set(ShardingStrategy)
    assert set(PREFETCH.values()) == {*BackwardPrefetch, None}


def _units(flags: str) -> list[tuple[str, ShardingStrategy]]:
    engine = make_engine(f"--strategy=fsdp1 {flags}")
    one_step(engine)
    assert isinstance(engine.model, FullyShardedDataParallel)
    return [
        (name.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", ""), unit.sharding_strategy)
        for name, unit in engine.model.named_modules()
        if isinstance(unit, FullyShardedDataParallel)
    ]


def test_fsdp1_wraps_as_it_is_told(ranks: Ranks) -> None:
    def names(flags: str) -> list[str]:
        return [name for name, _ in ranks.run(_units, flags)[0]]

    blocks = names("")
    assert blocks[0] == ""
    assert len(blocks) == 3, "the root and two blocks"
    assert names("--shard-granularity=root") == [""]
    # The seed's two sizes: nothing in so small a model has 20000 parameters, and much has 100.
    assert names("--min-wrap-params=20000") == [""]
    assert len(names("--min-wrap-params=100")) > len(blocks)


def test_every_name_that_a_flag_takes_has_its_entry_in_a_table_of_torchs() -> None:
    assert (tuple(CLASSES), tuple(DTYPES)) == (parallel.OPTIMIZERS, parallel.DTYPES)


def test_each_option_of_a_strategy_is_one_that_the_others_refuse() -> None:
    honoured = {option for name in STRATEGIES for option in rules_of(name).honours}
    assert honoured == set(PARTICULAR)
    assert {option for name in STRATEGIES for option in rules_of(name).instead} <= set(PARTICULAR)


def test_fsdp1_never_holds_more_than_its_shards_and_one_whole_unit(ranks: Ranks) -> None:
    whole, peak = ranks.run(peak_at_start, "--strategy=ddp")[0]
    assert peak >= whole
    unit = max(ranks.run(_bytes_of_units)[0])
    for whole, peak in ranks.run(peak_at_start, "--strategy=fsdp1"):
        assert peak <= whole / 2 + unit


def _bytes_of_units() -> list[int]:
    """Bytes of each unit's parameters when they are whole, and of the root's buffers."""
    engine = make_engine("--strategy=fsdp1 --fsdp1-sharding=no-shard")
    units = [unit for unit in engine.model.modules() if isinstance(unit, FullyShardedDataParallel)]
    held = [sum(p.nbytes for p in unit.parameters()) for unit in units]
    return [held[0] - sum(held[1:]), *held[1:]]


@pytest.mark.parametrize("sharding", ["full-shard", "no-shard"])
def test_fsdp1_starts_from_a_file_as_fsdp2_does(train: Train, tmp_path: Path, sharding: str) -> None:
    train(run="first", steps=2)
    file = f"--init-from={tmp_path / 'first' / 'full_model' / 'full-model.pt'}"
    expected = losses(train(file, "--no-save-model", run="fsdp2", steps=3))
    assert losses(train(file, "--strategy=fsdp1", f"--fsdp1-sharding={sharding}", run="fsdp1", steps=3)) == expected


@pytest.mark.parametrize("sharding", ["full-shard", "shard-grad-op", "no-shard"])
def test_fsdp1_shards_as_it_is_told(ranks: Ranks, sharding: str) -> None:
    for units in ranks.run(_units, f"--fsdp1-sharding={sharding}"):
        assert {strategy for _, strategy in units} == {SHARDING[sharding]}


@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp1-sharding=shard-grad-op",
        "--fsdp1-sharding=no-shard",
        "--shard-granularity=root",
        "--min-wrap-params=100",
        "--fsdp1-backward-prefetch=post",
        "--fsdp1-backward-prefetch=never",
    ],
)
def test_no_option_of_fsdp1_changes_a_loss(train: Train, reference: Reference, flags: str) -> None:
    assert losses(train("--strategy=fsdp1", *flags.split(), steps=4)) == reference(steps=4)


@pytest.mark.parametrize("sharding", HYBRIDS)
def test_fsdp1s_hybrids_train_as_hsdp(train: Train, reference: Reference, sharding: str) -> None:
    hybrid = train("--strategy=fsdp1", "--replicas=2", f"--fsdp1-sharding={sharding}", n=4, steps=4)
    assert losses(hybrid) == reference("--replicas=2", n=4, steps=4)


def _lines(n: int) -> list[str]:
    """Command lines of each strategy on n ranks, with each `--replicas` that divides them."""
    one_mesh = ["--strategy=ddp", "--strategy=none"] if n == 1 else ["--strategy=ddp"]
    degrees = [degree for degree in range(1, n + 1) if n % degree == 0]
    hybrids = [f"--strategy=fsdp1 --fsdp1-sharding={one} --replicas={n_}" for one in HYBRIDS for n_ in degrees[1:]]
    flat = [f"--strategy=fsdp1 --fsdp1-sharding={one}" for one in SHARDING if one not in HYBRIDS]
    return [*one_mesh, *flat, *hybrids, *(f"--replicas={degree}" for degree in degrees)]


def _norms(lines: list[str]) -> dict[str, list[float] | str]:
    """Gradient norms of three steps on the same eight samples, which the ranks divide among them; or the refusal."""
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(8, 1, 28, 28, generator=generator), torch.arange(8)
    n, rank = dist.get_world_size(), dist.get_rank()
    share = SimpleNamespace(inputs=inputs.tensor_split(n)[rank], last=True)
    found: dict[str, list[float] | str] = {}
    for line in lines:
        try:
            check_world(parse(line.split()), World(rank, n, rank, n))
        except ConfigError as refusal:
            found[line] = str(refusal)
            continue
        engine = make_engine(line)
        norms = []
        for _ in range(3):
            engine.begin_step()
            loss = nn.functional.cross_entropy(engine.forward(share), targets.tensor_split(n)[rank])
            engine.backward(loss, last_microbatch=True)
            norms.append(float(engine.clip(None)))
            engine.step()
        found[line] = norms
    return found


@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_degree_of_replication_averages_gradients_over_all_ranks(ranks: Ranks, n: int) -> None:
    expected = ranks.run(_norms, ["--strategy=none"], ranks=1)[0]["--strategy=none"]
    refused = {f"--strategy=fsdp1 --fsdp1-sharding={one} --replicas={n}" for one in HYBRIDS} if n > 1 else set()
    for found in ranks.run(_norms, _lines(n), ranks=n):
        assert {line for line, norms in found.items() if isinstance(norms, str)} == refused
        for line, norms in found.items():
            if isinstance(norms, str):
                assert "use --fsdp1-sharding no-shard without --replicas" in norms
            else:  # sums over ranks are taken in another order
                assert norms == pytest.approx(expected, rel=1e-4), line


@pytest.mark.parametrize(
    "flags",
    [
        "--fsdp1-sharding=no-shard",
        "--fsdp1-sharding=shard-grad-op",
        "--min-wrap-params=100",
        "--shard-granularity=root",
    ],
)
def test_each_kind_of_fsdp1_resumes_and_is_resumed(train: Train, reference: Reference, flags: str) -> None:
    train("--strategy=fsdp1", *flags.split(), run="a", steps=2)
    train("--strategy=fsdp2", "--no-save-model", run="a", steps=4)
    rest = losses(train("--strategy=fsdp1", "--no-save-model", *flags.split(), run="a", steps=6))
    assert rest == reference(steps=6)[4:]


def _buckets(flags: str) -> int:
    engine = make_engine(f"--strategy=ddp {flags}")
    assert isinstance(engine.model, DistributedDataParallel)
    seen: set[int] = set()

    # No annotations: DDP compares them, and not with what they are named here.
    def reduce(state, bucket):
        seen.add(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    engine.model.register_comm_hook(None, reduce)
    one_step(engine)
    one_step(engine)  # the first has another order of buckets
    return len(seen)


def test_ddp_reduces_in_buckets_of_the_size_that_was_asked_for(ranks: Ranks) -> None:
    assert set(ranks.run(_buckets, "")) == {1}
    assert min(ranks.run(_buckets, "--bucket-mb=0.02")) >= 3


@pytest.mark.losses_alone
def test_buckets_change_no_loss(train: Train, reference: Reference) -> None:
    assert losses(train("--strategy=ddp", "--bucket-mb=0.02", steps=4)) == reference("--strategy=ddp", steps=4)


@pytest.mark.losses_alone
@pytest.mark.parametrize(
    ("flags", "sharding"),
    [
        ("--strategy=ddp", "DistributedDataParallel, 32 parameters in full on each rank"),
        ("--strategy=fsdp1", "FullyShardedDataParallel, 3 units, FULL_SHARD"),
        ("--strategy=fsdp1 --fsdp1-sharding=shard-grad-op", "FullyShardedDataParallel, 3 units, SHARD_GRAD_OP"),
        ("--strategy=fsdp2", "FSDPVisionTransformer, 3 groups, 32 of 32 parameters are DTensors"),
    ],
)
def test_the_header_says_what_is_sharded(train: Train, flags: str, sharding: str) -> None:
    header = of_kind(train(*flags.split(), steps=1), "start")[0]["header"]
    assert any(line.startswith(f"sharding: {sharding}") for line in header), header
