"""Tensor and sequence parallelism beside FSDP2: gradients, runs, checkpoints. test_compositions has their pairs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples import tp_fsdp2
from fsdp2.checkpoint import full_model
from fsdp2.config import Config, parse
from fsdp2.data.pieces import piece_of
from fsdp2.models import get
from fsdp2.models.initial import reset_parameters
from fsdp2.options.errors import ConfigError
from fsdp2.parallel.mesh import make_mesh, of_fsdp, of_pieces
from fsdp2.parallel.sequence import split_sequences
from fsdp2.parallel.tensor import split_layers
from fsdp2.report import header
from fsdp2.run.preflight import check_world, preflight, torch_version
from fsdp2.run.process.runtime import World
from fsdp2_extra.allocations.timeline import load as load_timeline
from tests.harness import Ranks, full_files, losses, of_kind, relative, same

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

# 12 samples in a step divide unevenly over microbatches and shares; the norm is clipped from the first step on. Of the
# optimizers SGD alone makes of a small difference of gradients a small one of weights.
LLAMA = [
    "--model=llama",
    "--model-size=debug",
    "--dataset=random-tokens",
    "--seq-len=16",
    "--global-batch-size=12",
    "--lr=0.5",
]
LLAMA += ["--optimizer=sgd", "--clip-grad-norm=0.5", "--test-batch-size=64"]
QUICK = ["--checkpoint-every=never", "--save-model"]
SUMS = 1e-5  # relative: the ranks' sums are added in another order than one process's


@pytest.fixture(autouse=True)
def _new_processes(ranks: Ranks) -> Iterator[None]:
    """torch keeps what it has made of a mesh for the life of a process, and an equal mesh of other groups finds it."""
    yield
    ranks.close()


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """How far the farthest number is, relative to the largest of its tensor."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - one).abs().max() / one.abs().max()) for name, one in theirs.items())


def trained(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / "full_model" / "full-model.pt", weights_only=True)
    return found


# --- gradients, against plain autograd --------------------------------------------------------------------------------


def _gradients(tied: bool, tp: int, replicas: int, sp: int) -> dict[str, float]:
    """How far each parameter's gradient is from the whole model's on all samples, which torch alone computes."""
    torch.set_num_threads(1)
    spec, size = get("llama"), {**get("llama").sizes["debug"], "tied": tied}
    alone = spec.make(**size)
    reset_parameters(alone, spec.initial_values, 1)
    tokens = torch.randint(256, (6, 17), generator=torch.Generator().manual_seed(2))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, :5] = -100
    F.cross_entropy(alone(inputs).flatten(0, 1), targets.flatten(), reduction="sum").backward()

    from fsdp2.parallel.fully_sharded import FSDP2Engine, shard
    from fsdp2.parallel.groups import shard_groups
    from fsdp2.parallel.meta import allocate

    world = dist.get_world_size()
    mesh = make_mesh("cpu", world, replicas, tp)
    with torch.device("meta"):
        model = spec.make(**size)
    assert spec.splits is not None
    if tp > 1:
        split_layers(model, spec.splits(), mesh["tp"])
    if sp > 1:
        split_sequences(model, of_pieces("cpu", world, tp, sp).get_group())
    shard(model, shard_groups(model, spec.blocks(model)), mesh=of_fsdp(mesh))
    allocate(model, torch.device("cpu"))
    reset_parameters(model, spec.initial_values, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    engine = FSDP2Engine(model, None, scaler, early_unshard=False, splits_words=tp > 1)
    share = World(dist.get_rank(), world, 0, 1).share(tp, sp)
    mine = slice(*[6 * number // share.of for number in (share.index, share.index + 1)])
    with engine.losses():
        piece = piece_of(inputs[mine], share.piece, sp)
        loss = spec.loss(spec.call(model, SimpleNamespace(inputs=piece)), targets[mine].chunk(sp, dim=1)[share.piece])
        engine.backward(loss * share.of * sp, last_microbatch=True)
    found = {}
    for (name, parameter), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        gradient, wanted = parameter.grad, theirs.grad
        assert isinstance(gradient, DTensor)
        assert wanted is not None
        found[name] = float((gradient.full_tensor() - wanted).abs().max() / wanted.abs().max())
    return found


@pytest.mark.parametrize(
    ("tied", "tp", "replicas", "sp", "count"),
    [(False, 2, 1, 1, 2), (True, 2, 1, 1, 4), (False, 2, 3, 1, 6), (True, 1, 1, 2, 4), (False, 2, 1, 2, 4)],
)
def test_each_gradient_is_that_of_the_whole_model(
    ranks: Ranks, tied: bool, tp: int, replicas: int, sp: int, count: int
) -> None:
    for found in ranks.run(_gradients, tied, tp, replicas, sp, ranks=count):
        assert len(found) == 21 - tied
        assert max(found.values()) < SUMS, found


# --- runs, against one process ----------------------------------------------------------------------------------------

# What changes no number is left out of the one process's line.
SAME = (
    "--tp",
    "--sp",
    "--replicas",
    "--grad-accumulation-sync",
    "--reshard",
    "--explicit",
    "--check-replicas",
    "--cpu",
    "--shard",
)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--tp=2 --replicas=2 --check-replicas=2", 4),
        ("--tp=2 --replicas=2 --grad-accumulation=2 --grad-accumulation-sync=replica", 4),
        ("--tp=2 --activation-checkpointing=op --inspect", 4),
        ("--tp=2 --shard-granularity=layer --explicit-prefetching --reshard-after-forward=false", 4),
        ("--tp=2 --cpu-offload --ema=0.9 --on-nonfinite=skip", 4),
        pytest.param(
            "--tp=2 --dcp-api --shard-granularity=root",
            4,
            marks=pytest.mark.skipif(torch_version(torch.__version__) < (2, 13), reason="torch 2.11 fails"),
        ),
        ("--sp=2 --ema=0.9 --freeze=*.mlp.* --inspect", 4),
        ("--sp=4", 4),
    ],
)
def test_a_run_is_that_of_one_process(train: Train, tmp_path: Path, flags: str, count: int) -> None:
    words = flags.split()
    alone = [word for word in words if not word.startswith(SAME) and word != "--inspect"]
    theirs = train(*LLAMA, *QUICK, *alone, n=1, run="one")
    ours = train(*LLAMA, *QUICK, *words, n=count)
    assert len(losses(ours)) == 6
    assert losses(ours)[-1] != losses(ours)[0]
    assert relative(losses(ours), losses(theirs)) < SUMS
    norms, wanted = ([event["grad_norm"] for event in of_kind(events, "train")] for events in (ours, theirs))
    assert relative(norms, wanted) < SUMS
    assert min(norms) > 0.5, "nothing was clipped"
    for name in ("accuracy", "count"):
        assert of_kind(ours, "eval")[-1][name] == of_kind(theirs, "eval")[-1][name]
    assert relative([of_kind(ours, "eval")[-1]["loss"]], [of_kind(theirs, "eval")[-1]["loss"]]) < SUMS
    assert apart(trained(tmp_path / "run"), trained(tmp_path / "one")) < SUMS


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_first_step_in_half_precision_is_that_of_one_process(train: Train, dtype: str) -> None:
    flags = [*LLAMA, "--checkpoint-every=never", f"--mixed-precision={dtype}"]
    (ours,), (theirs,) = (
        of_kind(train(*flags, *more, n=n, run=f"{n}", steps=1), "train") for n, more in ((4, ["--tp=2"]), (1, []))
    )
    assert relative([ours["loss"]], [theirs["loss"]]) < 1e-3  # of numbers that are rounded to 8 bits
    assert relative([ours["grad_norm"]], [theirs["grad_norm"]]) < 1e-2


@pytest.mark.parametrize("dimension", ["--tp=2", "--sp=2"])
def test_documents_of_a_row_stay_apart(train: Train, tmp_path: Path, dimension: str) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"abcdefgh" * (i % 5 + 1)} {i}"}}\n' for i in range(400)))
    flags = [*LLAMA, "--checkpoint-every=never", f"--dataset=text:{tmp_path / 'text.jsonl'}"]
    ours, theirs = (losses(train(*flags, *more, n=n, run=f"{n}")) for n, more in ((4, [dimension]), (1, [])))
    assert relative(ours, theirs) < SUMS


# --- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["--tp=2", "--tp=2 --replicas=2", "--sp=2", "--tp=2 --sp=2"])
def test_what_travels_in_a_step(train: Train, tmp_path: Path, flags: str) -> None:
    """Of each dimension on 4 ranks the calls of a step and their bytes, by the formulas of docs/sharding.md."""
    tp, sp, replicas = ("--tp" in flags) + 1, ("--sp" in flags) + 1, ("--replicas" in flags) + 1
    shards = 4 // tp // replicas
    line = [*LLAMA, *flags.split(), "--checkpoint-every=never", "--memory-snapshot", "--reshard-after-forward=true"]
    train(*line, n=4, steps=2)
    timeline = load_timeline((tmp_path / "run" / "rank0_memory_timeline.json.gz").read_bytes())
    found = Counter((one.name, one.bytes) for one in timeline.collectives if one.step == 2)
    layers, dim, kv, hidden, words, tokens = 2, 64, 32, 176, 256, 12 // (4 // tp // sp) * 16
    block, root = 4 * (2 * dim * dim + 2 * dim * kv + 3 * dim * hidden + 2 * dim), 4 * (2 * dim * words + dim)
    wanted: Counter[tuple[str, int]] = Counter()
    # FSDP2: parameters twice, gradients once, of a rank's part of each layer. Norms are split too only over shards.
    norms = {block: 4 * 2 * dim, root: 4 * dim}
    shard, pairs = (" over shard", " over tp") if tp * replicas > 1 else ("", "")  # one dimension has no name
    for size, count in ((block, layers), (root, 1)):
        part = (size - norms[size]) // tp + norms[size]
        wanted["all-gather" + shard, part] += 2 * count * (shards > 1)
        wanted["reduce-scatter" + shard, part] += count * (shards > 1)
        wanted["all-reduce over replicate", part // shards] += count * (replicas - 1)
    # Tensor parallelism: the tokens of a rank's samples, into and out of attention, MLP, embedding and head, both ways.
    whole = 4 * tokens // sp * dim
    if tp > 1:
        wanted["all-gather" + pairs, whole] += 2 * (2 * layers + 1)
        wanted["reduce-scatter" + pairs, whole] += 2 * (2 * layers + 1)
    # Sequence parallelism: queries, keys, values and results, both ways. One key is sent to both of its ranks.
    if sp > 1:
        wanted["all-to-all over pieces", whole // tp] += 2 * 2 * layers
        wanted["all-to-all over pieces", 4 * tokens // sp * max(kv // tp, 16 * sp)] += 2 * 2 * layers
    assert +wanted == Counter({one: count for one, count in found.items() if one[1] > 4 * tokens // sp})
    sent = {one.operation.partition(" over ")[2] for one in timeline.allocations if one.kind == "communication"}
    assert sent >= ({"tp"} if tp > 1 else {"pieces"}), "a page can't tell what belongs to which dimension"


# --- checkpoints ------------------------------------------------------------------------------------------------------

ADAM = [flag for flag in LLAMA if not flag.startswith(("--optimizer", "--lr=", "--global-batch"))]
MESHES = {
    "one": (1, []),
    "dp 2": (2, []),
    "dp 4": (4, []),
    "hsdp 2 x 2": (4, ["--replicas=2"]),
    "tp 2": (2, ["--tp=2"]),
    "dp 2 x tp 2": (4, ["--tp=2"]),
    "hsdp 2 x 1 x tp 2": (4, ["--tp=2", "--replicas=2"]),
    "dp 2 x sp 2": (4, ["--sp=2"]),
    "tp 2 x sp 2": (4, ["--tp=2", "--sp=2"]),
}


@pytest.mark.parametrize("mesh", ["dp 2 x tp 2", "dp 2 x sp 2", "tp 2 x sp 2"])
def test_a_run_goes_on_bit_for_bit_on_its_mesh(train: Train, tmp_path: Path, mesh: str) -> None:
    flags = [*ADAM, *MESHES[mesh][1], "--checkpoint-every=3", "--async-checkpoint"]
    whole = losses(train(*flags, n=4, run="whole"))
    train(*flags, n=4, steps=3)
    rest = train(*flags, n=4)
    assert losses(rest) == whole[3:]
    assert "samples a step" not in str(of_kind(rest, "resume")[0]["note"])
    assert same(full_files(tmp_path / "run"), full_files(tmp_path / "whole"))


@pytest.mark.parametrize(("there", "here"), [("dp 2", "tp 2"), ("tp 2", "dp 2"), ("tp 2", "tp 2")])
def test_random_generators_go_on_where_the_same_ranks_draw_alike(
    train: Train, ranks: Ranks, there: str, here: str
) -> None:
    """Ranks that split layers drop the same of what each has whole, and ranks that have other samples don't."""
    train(*ADAM, *MESHES[there][1], n=2, steps=1)
    ranks.close()
    rest = train(*ADAM, *MESHES[here][1], n=2, steps=2)
    assert of_kind(rest, "resume")[0]["random_state_restored"] is (there == here)


READERS = ("tp 2", "dp 2 x tp 2", "tp 2 x sp 2", "one")  # the others read in these ways, and with `-m slow` themselves


@pytest.mark.parametrize(
    ("there", "readers"),
    [
        *((there, READERS) for there in MESHES if there not in ("dp 4", "hsdp 2 x 2")),
        *(pytest.param(there, tuple(MESHES), marks=pytest.mark.slow) for there in MESHES),
    ],
)
def test_each_mesh_reads_the_checkpoints_of_the_others(
    train: Train, ranks: Ranks, tmp_path: Path, there: str, readers: tuple[str, ...]
) -> None:
    """Model and optimizer, tensor by tensor: a run that has nothing left to do writes what it has read."""
    count, mesh = MESHES[there]
    train(*ADAM, *mesh, n=count, steps=2)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    for here in {*readers} - {there}:
        ranks.close()
        shutil.copytree(tmp_path / "run", tmp_path / here)
        count, mesh = MESHES[here]
        train(*ADAM, *mesh, n=count, steps=2, run=here)
        assert same(full_files(tmp_path / here), before), here


def test_a_run_starts_from_weights_and_is_used_without_its_mesh(train: Train, tmp_path: Path) -> None:
    train(*LLAMA, n=1, steps=2, run="start")
    weights = tmp_path / "start" / "full_model" / "full-model.pt"
    train(*LLAMA, "--tp=2", "--lr=1e-30", f"--init-from={weights}", n=4, steps=1)
    assert same(trained(tmp_path / "run"), trained(tmp_path / "start"))


def test_the_example_is_one_screen_and_its_losses_are_one_processs(ranks: Ranks) -> None:
    assert len(Path(tp_fsdp2.__file__).read_text().splitlines()) <= 80
    (alone,) = ranks.run(tp_fsdp2.train, torch.device("cpu"), ranks=1)
    for ours in ranks.run(tp_fsdp2.train, torch.device("cpu"), ranks=4):
        assert relative(ours, alone) < SUMS


@pytest.mark.parametrize(
    ("flags", "count", "picture"),
    [
        ({"tp": 2}, 4, "layers over 2 ranks: 0 1 | 2 3"),
        ({"sp": 2}, 4, "sequences over 2 ranks: 0 + 1 | 2 + 3"),
        (
            {"tp": 2, "sp": 2, "replicas": 2},
            8,
            "layers over 2 ranks and sequences over 2 ranks: 0 1 + 2 3 || 4 5 + 6 7",
        ),
    ],
)
def test_the_header_has_a_picture_of_the_ranks(flags: dict[str, int], count: int, picture: str) -> None:
    config = Config(model="llama", **flags)  # type: ignore[arg-type]
    assert header.mesh(config, count) == [f"mesh: {picture}"]
    shares = [World(rank, count, 0, 1).share(config.tp, config.sp) for rank in range(count)]
    assert [share.index for share in shares] == [rank // (config.tp * config.sp) for rank in range(count)]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--model=llama --tp=3", "doesn't divide heads 4, kv_heads 2, hidden 176, vocab_size 256, --seq-len"),
        ("--model=llama --tp=4", "doesn't divide kv_heads 2; use --tp 2"),
        ("--model=llama --tp=2 --seq-len=33", "doesn't divide --seq-len 33; drop --tp"),
        ("--model=llama --sp=3", "--sp 3 with --model-size debug: 3 doesn't divide heads 4, --seq-len"),
        (
            "--model=llama --sp=2 --tp=2 --seq-len=34",
            "--sp 2 x --tp 2 with --model-size debug: 4 doesn't divide --seq-len 34",
        ),
        ("--model=transformer --sp=2", "ranks can't exchange its heads for tokens"),
        ("--model=llama --sp=2 --compile", "--sp 2 with --compile: the exchange of heads would break"),
        ("--model=llama --sp=2 --strategy=fsdp1", "fsdp1 has whole sequences on each rank; use --strategy fsdp2"),
        ("--model=cnn --tp=2", "it has no plan for splitting its layers"),
        ("--model=llama --tp=2 --compile", "--tp 2 with --compile: a compiled block leaves"),
        ("--model=llama --tp=2 --strategy=ddp", "ddp splits no layers; use --strategy fsdp2"),
    ],
)
def test_what_does_not_combine_is_refused(flags: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        parse(flags.split())


@pytest.mark.parametrize(
    ("flags", "size", "says"),
    [
        ({"tp": 2}, 3, "--tp 2: doesn't divide the world size 3; use one of 1, 3"),
        ({"tp": 2, "replicas": 2}, 6, "--replicas 2: doesn't divide the world size 6 / 2; use one of 1, 3"),
        ({"tp": 2, "sp": 2}, 6, "--sp 2: doesn't divide the world size 6 / 2; use one of 1, 3"),
        ({"sp": 4}, 2, "--sp 4: doesn't divide the world size 2; use one of 1, 2"),
        ({"tp": 2, "global_batch_size": 1}, 4, "less than one sample for each of 2 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(flags: dict[str, int], size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_world(Config(model="llama", **flags), World(0, size, 0, size))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["runs/large", "memory://large"])
def test_a_large_model_that_all_ranks_write_has_whole_rows(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_model, "LARGEST_UNASKED", 1_000)
    config = Config(model="llama", tp=2, save_model=True, run_dir=place)
    with nullcontext() if "://" in place else pytest.raises(ConfigError, match="--save-model with --tp 2: a large"):
        check_world(config, World(0, 2, 0, 2))  # at a URL rank 0 gathers it


@pytest.mark.parametrize(("of_node", "said"), [(4, False), (2, False), (1, True), (3, True)])
def test_a_layer_across_nodes_is_said(tmp_path: Path, of_node: int, said: bool) -> None:
    config = parse([*LLAMA, "--tp=2", f"--run-dir={tmp_path / 'run'}"])
    job = preflight(config, World(0, 12, 0, of_node))
    with job.hold:
        assert ("--tp 2: its ranks are on several nodes" in (job.note or "")) == said
