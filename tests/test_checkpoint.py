"""Checkpoints: what is saved comes back bit for bit, what is dead is cleaned, what is damaged stops."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp2 import models
from fsdp2.checkpoint import full_dcp, full_dtensor
from fsdp2.checkpoint.safe_reader import SafeReader
from fsdp2.checkpoint.store import MARKER, DamagedCheckpoint, Store, fingerprint, read_marker, verify
from fsdp2.config import Config
from fsdp2.models.initial import reset_parameters
from fsdp2.options import ConfigError
from fsdp2.parallelize import parallelize
from fsdp2.preflight import preflight
from fsdp2.runtime import World
from tests.harness import Ranks, losses, of_kind

Events = list[tuple[str, dict[str, Any]]]
Train = Callable[..., Events]


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def full_files(run: Path) -> list[Any]:
    return [torch.load(run / "full_model" / name, weights_only=True) for name in ("full-model.pt", "full-optimizer.pt")]


def same(a: Any, b: Any) -> bool:
    """Equal trees with equal tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# --- resuming ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model=cnn --clip-grad-norm",  # dropout: the random state of each rank counts
        "--mixed-precision=fp16 --optimizer=adadelta --lr=0.5 --grad-accumulation=2",
        "--strategy=ddp --optimizer=sgd",
        "--strategy=fsdp1 --model=cnn",
        "--cpu-offload --freeze=conv_proj.* --explicit-prefetching",
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(train: Train, tmp_path: Path, flags: str) -> None:
    whole = losses(train(*flags.split(), run="whole", steps=9))
    # Steps 1 to 4 stop in the middle of an epoch and lose step 5 on, as a kill would make them.
    first = train(*flags.split(), "--checkpoint-every=4", steps=6)
    assert losses(first) == whole[:6]
    for step in (6,):
        (tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / MARKER).unlink()
    second = train(*flags.split(), steps=9)
    assert of_kind(second, "resume")[0]["step"] == 4
    assert losses(second) == whole[4:]
    steps = [record["step"] for record in metrics_of(tmp_path / "run") if record["kind"] == "train"]
    assert steps == list(range(1, 10)), "each step stands once in metrics.jsonl"
    assert same(full_files(tmp_path / "run"), full_files(tmp_path / "whole"))


def test_resuming_over_the_end_of_an_epoch(train: Train, tmp_path: Path) -> None:
    # 1,437 images in batches of 2 x 256: three steps an epoch, the last one short.
    flags = ["--batch-size=256", "--epochs=3"]
    whole = train(*flags, run="whole", steps=None)
    assert [event["samples"] for event in of_kind(whole, "train")][:3] == [512, 512, 413]
    assert [event["lr"] for event in of_kind(whole, "train")][2:4] == [1e-3, pytest.approx(0.85e-3)]
    train(*flags, steps=4)
    rest = train(*flags, steps=None)
    assert losses(rest) == losses(whole)[4:]
    kinds = [(r["kind"], r.get("step")) for r in metrics_of(tmp_path / "run") if r["kind"] in ("train", "eval")]
    assert kinds[-1] == ("eval", 9)
    # The interrupted run evaluated at step 4, because --max-steps ends a run properly.
    assert [kind for kind in kinds if kind != ("eval", 4)] == [
        (r["kind"], r["step"]) for r in metrics_of(tmp_path / "whole") if r["kind"] in ("train", "eval")
    ]


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (1, 4), (3, 2)])
def test_another_number_of_ranks_restores_the_same_state(train: Train, tmp_path: Path, saved: int, loaded: int) -> None:
    train("--global-batch-size=48", n=saved)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    # Nothing is left to do but to write the full model again, from the restored shards.
    again = train("--global-batch-size=48", n=loaded)
    assert of_kind(again, "end")[0]["reason"] == "already finished"
    assert of_kind(again, "resume")[0]["same_world_size"] is False
    assert same(full_files(tmp_path / "run"), before)
    # And it trains on with the same samples.
    more = train("--global-batch-size=48", n=loaded, steps=8)
    whole = train("--global-batch-size=48", n=saved, steps=8, run="whole")
    for ours, theirs in zip(losses(more), losses(whole)[6:], strict=True):
        assert abs(ours - theirs) / theirs < 1e-5  # sums over another number of ranks are rounded otherwise


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp2", 2), ("none", 1)),
        (("none", 1), ("fsdp2", 2)),
        (("ddp", 2), ("fsdp2", 2)),
        (("fsdp2", 2), ("ddp", 2)),
        (("fsdp2", 2), ("fsdp1", 2)),
        (("fsdp1", 2), ("fsdp2", 3)),
    ],
)
def test_strategies_read_each_others_checkpoints(
    train: Train, tmp_path: Path, first: tuple[str, int], second: tuple[str, int]
) -> None:
    train(f"--strategy={first[0]}", "--global-batch-size=32", n=first[1])
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    train(f"--strategy={second[0]}", "--global-batch-size=32", n=second[1])
    after = full_files(tmp_path / "run")
    assert same(after[0], before[0])
    assert same(after[1]["state"], before[1]["state"])


def test_hsdp_and_one_dimensional_meshes_read_each_others_checkpoints(train: Train, tmp_path: Path) -> None:
    train("--replicas=2", "--global-batch-size=32", n=4)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    train("--global-batch-size=32", n=2)
    assert same(full_files(tmp_path / "run"), before)


def test_a_finished_run_says_so(train: Train, tmp_path: Path) -> None:
    train(steps=3)
    before = (tmp_path / "run" / "full_model" / "full-model.pt").stat().st_mtime_ns
    again = train(steps=3)
    assert losses(again) == []
    assert of_kind(again, "end")[0]["reason"] == "already finished"
    assert (tmp_path / "run" / "full_model" / "full-model.pt").stat().st_mtime_ns == before


def test_resume_from_an_older_step_sets_the_newer_aside(train: Train, tmp_path: Path) -> None:
    first = train("--checkpoint-every=2", steps=6)
    again = train("--checkpoint-every=2", "--resume=2", steps=6)
    assert losses(again) == losses(first)[2:]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == [
        *(f"step-0000000{n}" for n in (2, 4, 6)),
        *(f"superseded-1-step-0000000{n}" for n in (4, 6)),
    ]


def test_resume_never_starts_again_and_loses_nothing(train: Train, tmp_path: Path) -> None:
    first = train(steps=3)
    again = train("--resume=never", steps=3)
    assert losses(again) == losses(first)
    assert "set aside" in of_kind(again, "start")[0]["note"]
    assert (tmp_path / "run" / "checkpoints" / "superseded-1-step-00000003" / MARKER).exists()
    assert [r["step"] for r in metrics_of(tmp_path / "run") if r["kind"] == "train"] == [1, 2, 3]


@pytest.mark.parametrize("path", ["first", "first/checkpoints/step-00000003"])
def test_resume_from_another_run(train: Train, tmp_path: Path, path: str) -> None:
    whole = losses(train(run="whole", steps=5))
    train(run="first", steps=3)
    assert losses(train(f"--resume={tmp_path / path}", run="second", steps=5)) == whole[3:]


def test_keep_removes_the_oldest(train: Train, tmp_path: Path) -> None:
    train("--checkpoint-every=1", "--keep=2", steps=5)
    assert Store(tmp_path / "run" / "checkpoints").committed() == [4, 5]


def test_checkpoints_are_written_each_epoch_unless_told(train: Train, tmp_path: Path) -> None:
    events = train("--batch-size=360", "--epochs=2", steps=None)
    assert [(e["step"], e["epoch"]) for e in of_kind(events, "checkpoint")] == [(2, 1), (4, 2)]
    assert [(e["step"], e["epoch"]) for e in of_kind(events, "eval")] == [(2, 0), (4, 1)]


# --- refusals before anything is started ---------------------------------------------------------------------

TWO = World(0, 2, 0, 2)


def _refusal(run: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(Config(**{"run_dir": str(run), "model_size": "tiny", "max_steps": 9, **flags}), TWO)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that tests only read, or copy."""
    from tests.harness import main_in_ranks

    run = tmp_path_factory.mktemp("finished") / "run"
    flags = ["--model-size=tiny", f"--run-dir={run}", "--batch-size=16", "--max-steps=3", "--threads=1"]
    ranks.run(main_in_ranks, [*flags, "--checkpoint-every=2"])
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_checkpoint_of_another_model_names_what_differs(finished: Path) -> None:
    message = _refusal(finished, model_size="seed")
    assert "is of another model" in message
    assert "class_token: [1, 1, 32] there, [1, 1, 128] here" in message
    assert "is of another model" in _refusal(finished, model="cnn")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"optimizer": "sgd"}, "--optimizer sgd"),
        ({"seed": 2}, "--seed 2"),
        ({"lr": 0.1}, "--lr 0.1"),
        ({"freeze": ("conv_proj.*",)}, "--freeze"),
        ({"mixed_precision": "fp16"}, "--mixed-precision fp16"),
        ({"resume": "1"}, "it has 2, 3"),
    ],
)
def test_a_resume_that_would_silently_differ_is_refused(finished: Path, flags: dict[str, Any], part: str) -> None:
    assert part in _refusal(finished, **flags)


def test_resume_path_into_a_run_with_checkpoints_is_refused(finished: Path, copy: Path) -> None:
    assert "has checkpoints of its own" in _refusal(copy, resume=str(finished))


# --- the store ------------------------------------------------------------------------------------------------


def test_the_marker_lists_every_file(finished: Path) -> None:
    directory = finished / "checkpoints" / "step-00000003"
    marker = read_marker(directory)
    others = {path.name for path in directory.iterdir()} - {MARKER}
    assert set(marker["files"]) == others == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    for name, entry in marker["files"].items():
        assert entry == fingerprint(directory / name)
    assert (marker["step"], marker["world_size"], marker["mesh"]) == (3, 2, {"replicate": 1, "shard": 2})
    assert marker["config"]["model-size"] == "tiny"
    assert marker["environment"]["torch"] == torch.__version__
    verify(directory)


def test_a_dead_save_is_cleaned_and_passed_over(copy: Path, train: Train) -> None:
    (copy / "checkpoints" / "step-00000003" / MARKER).unlink()
    events = train(steps=4)
    resume = of_kind(events, "resume")[0]
    assert resume["step"] == 2
    assert "step-00000003, a save that was never committed" in resume["note"]


def test_only_dead_saves_means_a_fresh_start_that_says_so(copy: Path, train: Train) -> None:
    for step in (2, 3):
        (copy / "checkpoints" / f"step-0000000{step}" / MARKER).unlink()
    start = of_kind(train(steps=1), "start")[0]
    assert "no checkpoint was ever committed here; starting fresh" in start["note"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "marker"])
def test_damage_stops_before_the_start_and_is_named(copy: Path, damage: str) -> None:
    directory = copy / "checkpoints" / "step-00000003"
    shard = directory / "__1_0.distcp"
    if damage == "missing":
        shard.unlink()
    elif damage == "shorter":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (directory / MARKER).write_text("{")
    message = _refusal(copy)
    assert "is damaged" in message
    assert ("COMMIT.json" if damage == "marker" else "__1_0.distcp") in message
    # The explicit way on.
    with preflight(Config(run_dir=str(copy), model_size="tiny", resume="2"), TWO) as job:
        assert job.restore is not None
        assert job.restore.name == "step-00000002"


def test_a_changed_byte_stops_the_resume_on_all_ranks(copy: Path, ranks: Ranks) -> None:
    shard = copy / "checkpoints" / "step-00000003" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    for message in ranks.run(_resume_fails, str(copy)):
        assert "damaged" in message
        assert "__1_0.distcp has another content than was committed" in message


def _resume_fails(run: str) -> str:
    from fsdp2.train import main

    try:
        main(Config(run_dir=run, model_size="tiny", batch_size=16, max_steps=4))
    except ConfigError as error:
        return str(error)
    return "resumed from a damaged checkpoint"


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.begin(1)
    store.commit(1, {}, {})
    with pytest.raises(FileExistsError, match="never overwritten"):
        store.begin(1)
    assert store.committed() == [1]


def test_without_a_marker_there_is_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.begin(7) / "__0_0.distcp").write_bytes(b"half")
    assert store.committed() == []
    assert [path.name for path in store.remove_dead()] == ["step-00000007"]
    with pytest.raises(DamagedCheckpoint, match=r"COMMIT\.json can't be read"):
        read_marker(store.directory(7))


class Payload:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/fsdp2-was-here"),))


def test_metadata_that_would_run_code_is_not_unpickled(copy: Path) -> None:
    directory = copy / "checkpoints" / "step-00000003"
    SafeReader(directory).read_metadata()
    (directory / ".metadata").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(pickle.UnpicklingError, match="which a checkpoint's metadata never holds"):
        SafeReader(directory).read_metadata()


def _strictness() -> list[str]:
    """Load checkpoints with too much, too little and other shapes."""
    import tempfile

    import torch.distributed.checkpoint as dcp

    from fsdp2.checkpoint.state import StrictLoadPlanner

    saved = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)}
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, src=0)
    dcp.save(saved, checkpoint_id=box[0])
    messages = []
    for target in (
        {"a": torch.ones(3), "b": torch.ones(2)},
        {**saved, "d": torch.ones(1)},
        {"a": torch.ones(4), "b": torch.ones(2, dtype=torch.int64), "c": torch.ones(1)},
    ):
        try:
            dcp.load(target, checkpoint_id=box[0], planner=StrictLoadPlanner())
            messages.append("loaded")
        except CheckpointException as error:
            messages.append(str(error))
    return messages


def test_restoring_is_strict_in_both_directions(ranks: Ranks) -> None:
    for extra, missing, shapes in ranks.run(_strictness):
        assert "c: in the checkpoint, and nothing to load it into" in extra
        assert "d: not in the checkpoint" in missing
        assert "a: torch.float32 (3,) in the checkpoint, torch.float32 (4,) here" in shapes
        assert "b: torch.float32 (2,) in the checkpoint, torch.int64 (2,) here" in shapes


# --- full state dicts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "--strategy=ddp", "--freeze=conv_proj.*"])
def test_both_apis_write_equal_files(train: Train, tmp_path: Path, flags: str) -> None:
    train(*flags.split(), run="dtensor", steps=3)
    train(*flags.split(), "--dcp-api", run="dcp", steps=3)
    dtensor, dcp = full_files(tmp_path / "dtensor"), full_files(tmp_path / "dcp")
    assert same(dtensor, dcp)
    plain = models.get("vit").build("tiny")
    plain.load_state_dict(dtensor[0])  # as the tutorials load it
    frozen = {name for name in dtensor[0] if flags.startswith("--freeze") and name.startswith("conv_proj")}
    assert dtensor[1]["state"].keys() == dtensor[0].keys() - frozen
    assert float(dtensor[1]["state"]["class_token"]["step"]) == 3


class Tricky(nn.Module):
    """A buffer of each kind beside a sharded parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("positions", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _load_full(api_name: str, path: str, replicas: int) -> dict[str, Any]:
    api = {"dtensor": full_dtensor, "dcp": full_dcp}[api_name]

    def set_weights(model: nn.Module) -> None:
        model.get_buffer("positions").fill_(5)
        api.load_full_model_state(model, Path(path))

    engine = parallelize(
        Config(replicas=replicas),
        build=Tricky,
        blocks_of=lambda model: [model.get_submodule("layer")],
        set_weights=set_weights,
        device=torch.device("cpu"),
        world_size=dist.get_world_size(),
    )
    assert isinstance(engine.model.get_parameter("layer.weight"), DTensor)
    return api.full_model_state(engine.model)


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
@pytest.mark.parametrize(("n", "replicas"), [(2, 1), (3, 1), (4, 2)])
def test_a_full_file_loads_into_a_sharded_model(ranks: Ranks, tmp_path: Path, api: str, n: int, replicas: int) -> None:
    plain = Tricky()
    plain.get_buffer("kept").fill_(3)
    torch.save(plain.state_dict(), tmp_path / "full.pt")
    results = ranks.run(_load_full, api, str(tmp_path / "full.pt"), replicas, ranks=n)
    assert same(results[0], dict(plain.state_dict()))
    assert all(result == {} for result in results[1:]), "only rank 0 may hold the full model"


def _largest_allocation(api_name: str, path: str) -> int:
    """Bytes of the largest tensor that this rank allocates while it loads a full file."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        total = 0
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                    self.most = max(self.most, tensor.untyped_storage().nbytes())
            return out

    spec = models.get("vit")
    api = {"dtensor": full_dtensor, "dcp": full_dcp}[api_name]
    engine = parallelize(
        Config(model_size="seed"), build=lambda: spec.build("seed"), blocks_of=spec.blocks,
        set_weights=lambda model: reset_parameters(model, spec.initial_values, 1),
        device=torch.device("cpu"), world_size=dist.get_world_size(),
    )  # fmt: skip
    with Largest() as largest:
        api.load_full_model_state(engine.model, Path(path))
    return largest.most


@pytest.mark.parametrize("api", ["dtensor", "dcp"])
def test_loading_a_full_file_holds_one_parameter_at_a_time(ranks: Ranks, tmp_path: Path, api: str) -> None:
    spec = models.get("vit")
    model = spec.build("seed")
    torch.save(model.state_dict(), tmp_path / "full.pt")
    largest_parameter = max(p.numel() * p.element_size() for p in model.parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    other = ranks.run(_largest_allocation, api, str(tmp_path / "full.pt"))[1]
    assert other <= 2 * largest_parameter < whole / 5


@pytest.mark.parametrize("api", ["", "--dcp-api"])
def test_init_from_starts_with_another_runs_weights(train: Train, tmp_path: Path, api: str) -> None:
    first = train(run="first", steps=4)
    file = tmp_path / "first" / "full_model" / "full-model.pt"
    second = train(f"--init-from={file}", *api.split(), run="second", steps=1)
    fresh = train(run="fresh", steps=1)
    assert losses(second)[0] != losses(fresh)[0]
    assert losses(second)[0] < losses(first)[0]
    assert of_kind(second, "train")[0]["step"] == 1


def _communication_free() -> int:
    spec = models.get("vit")
    engine = parallelize(
        Config(model_size="tiny"), build=lambda: spec.build("tiny"), blocks_of=spec.blocks,
        set_weights=lambda model: reset_parameters(model, spec.initial_values, 1),
        device=torch.device("cpu"), world_size=dist.get_world_size(),
    )  # fmt: skip
    from fsdp2.checkpoint.state import AppState

    with CommDebugMode() as mode:
        AppState(engine.model, engine.optimizer, {}).state_dict()
    return mode.get_total_counts()


def test_the_sharded_application_state_issues_no_collective(ranks: Ranks) -> None:
    assert ranks.run(_communication_free) == [0, 0]
