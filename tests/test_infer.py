"""Inference gives the accuracy that the run measured, from the full file and from shards."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from fsdp2 import infer
from fsdp2.data.splits import IGNORED
from fsdp2.options.errors import ConfigError
from fsdp2.report.predictions import context_of, samples_of
from fsdp2.run import trained
from fsdp2.units import install, printable
from tests.harness import Ranks, flip_a_bit, main_in_ranks, of_kind, small

Train = Callable[..., list[tuple[str, dict[str, Any]]]]

RUNS = [
    "",
    "--model=cnn",
    "--model=transformer --model-size=debug --dataset=random-tokens --seq-len=8",
    "--mixed-precision",
    "--mixed-precision=fp16 --cpu-offload",
    "--strategy=ddp --mixed-precision",
    "--strategy=fsdp1 --mixed-precision",
]


Trained = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def trained_once(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of flags on two ranks, and its last evaluation: one for all tests that only read it.

    Enough steps to be right about something, and the test set in batches that 2 ranks share unevenly.
    """
    runs: dict[str, tuple[Path, dict[str, Any]]] = {}

    def of(flags: str) -> tuple[Path, dict[str, Any]]:
        if flags not in runs:
            run = tmp_path_factory.mktemp("trained") / "run"
            line = small(run, "--test-batch-size=100", "--max-steps=25", *flags.split())
            runs[flags] = run, of_kind(ranks.run(main_in_ranks, line)[0], "eval")[-1]
        return runs[flags]

    return of


@pytest.mark.parametrize("flags", RUNS)
def test_accuracy_is_that_of_the_last_evaluation(trained_once: Trained, ranks: Ranks, flags: str) -> None:
    run, evaluation = trained_once(flags)
    result = ranks.run(infer.main, run, ranks=1)[0]
    assert (result["accuracy"], result["count"]) == (evaluation["accuracy"], evaluation["count"])
    assert len(result["samples"]) == 10
    assert all(sample["correct"] == (sample["predicted"] == sample["actual"]) for sample in result["samples"])
    assert (run / "predictions.png").read_bytes().startswith(b"\x89PNG")


def _without_matplotlib(run: Path) -> tuple[str, bool]:
    """The last line about the picture that a user of the core sees, and whether there is one."""
    real, printed = importlib.util.find_spec, io.StringIO()
    importlib.util.find_spec = lambda name, *rest: None if name == "matplotlib" else real(name, *rest)
    try:
        with contextlib.redirect_stdout(printed):
            infer.main(run)
    finally:
        importlib.util.find_spec = real
    (line,) = (line for line in printed.getvalue().splitlines() if "picture" in line)
    return line, (run / "predictions.png").exists()


def test_the_core_predicts_without_a_picture_and_names_the_extra(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train(steps=1)
    [(line, drawn)] = ranks.run(_without_matplotlib, tmp_path / "run", ranks=1)
    assert line == f"picture: matplotlib isn't installed; {install('plots')}"
    assert not drawn


def _sharded(run: Path) -> dict[str, Any]:
    return infer.main(run, sharded=True)


@pytest.mark.parametrize("flags", ["", "--mixed-precision"])
@pytest.mark.parametrize("n", [1, 3])
def test_sharded_inference_on_another_number_of_ranks(trained_once: Trained, ranks: Ranks, flags: str, n: int) -> None:
    run, evaluation = trained_once(flags)
    for result in ranks.run(_sharded, run, ranks=n):
        assert (result["accuracy"], result["count"]) == (evaluation["accuracy"], 360)


def test_sharded_inference_of_an_hsdp_run_on_one_rank(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    evaluation = of_kind(train("--replicas=2", "--no-save-model", n=4, steps=3), "eval")[-1]
    assert ranks.run(_sharded, tmp_path / "run", ranks=1)[0]["accuracy"] == evaluation["accuracy"]


def test_a_damaged_checkpoint_is_not_used(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train("--no-save-model", steps=1)
    shard = tmp_path / "run" / "checkpoints" / "step-00000001" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-7])
    for message in ranks.run(_refused_shards, tmp_path / "run"):
        assert "--sharded: the checkpoint is damaged" in message
        assert "__0_0.distcp" in message


def _refused_shards(run: Path) -> str:
    try:
        infer.main(run, sharded=True)
    except ConfigError as error:
        return str(error)
    return "read a damaged checkpoint"


def _refused(run: Path, sharded: bool = False) -> str:
    try:
        infer.main(run, sharded=sharded)
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_full_model_is_compared_with_its_marker(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train(steps=2)
    folder = tmp_path / "run" / "full_model"
    assert ranks.run(infer.main, tmp_path / "run", ranks=1)[0]["weights"].endswith("full-model.pt, verified, step 2")
    train("--no-save-model", steps=3)  # outdates the full model, as a resumed run that is killed does
    [stale] = ranks.run(_refused, tmp_path / "run", ranks=1)
    assert "no marker beside it says of which step it is, and the newest checkpoint is of step 3" in stale
    assert stale.endswith("or use --sharded for its newest checkpoint")
    train(steps=3)  # which writes it again
    shutil.copytree(folder, tmp_path / "kept")
    train("--no-save-model", steps=4)
    shutil.rmtree(folder)
    (tmp_path / "kept").rename(folder)
    assert "full-model.pt: is of step 3, and the newest" in ranks.run(_refused, tmp_path / "run", ranks=1)[0]
    # One that was taken out of its run, with what tells its flags, has nothing to be compared with.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    flip_a_bit(folder / "full-model.pt")
    assert "full-model.pt differs from what was committed" in ranks.run(_refused, tmp_path / "run", ranks=1)[0]
    flip_a_bit(folder / "full-model.pt")
    (folder / "COMMIT.json").unlink()
    assert "unverified" in ranks.run(infer.main, tmp_path / "run", ranks=1)[0]["weights"]


def test_weights_that_are_no_numbers_are_called_so(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train("--optimizer=sgd", "--lr=900", "--on-nonfinite=continue", steps=6)
    for sharded, n in ((False, 1), (True, 2)):
        for message in ranks.run(_refused, tmp_path / "run", sharded, ranks=n):
            assert "holds NaN" in message
            assert "32 of 32 tensors (class_token, " in message


def _shards_only(run: Path) -> float:
    """The largest share of a parameter that a rank holds when the weights are loaded."""
    from fsdp2.run.directory.rundir import RunDir, read_config
    from fsdp2.run.process import runtime

    found = {}
    real = trained.parallelize

    def spy(*args: Any, **kwargs: Any) -> Any:
        engine = found["engine"] = real(*args, **kwargs)
        return engine

    trained.parallelize = spy
    try:
        config = read_config(RunDir(run))
        checkpoint = RunDir(run).store.checkpoint(RunDir(run).store.committed()[-1])
        trained.load_sharded(config, trained.from_checkpoint(config, checkpoint), runtime.world(), torch.device("cpu"))
    finally:
        trained.parallelize = real
    parameters = list(found["engine"].model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    assert len(sharded) == len(parameters)
    return sum(p.to_local().numel() for p in sharded) / sum(p.numel() for p in sharded)


def test_sharded_inference_holds_no_full_copy(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    train(steps=1)
    for share in ranks.run(_shards_only, tmp_path / "run"):
        assert 0.45 < share < 0.55


def test_language_samples_show_their_context(train: Train, ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("To be, or not to be: that is the question. " * 400)
    train("--model=transformer", "--model-size=debug", f"--dataset=text:{tmp_path / 'notes'}", "--seq-len=32", steps=2)
    result = ranks.run(infer.main, tmp_path / "run", ranks=1)[0]
    assert result["count"] % 32 == 0
    assert all(len(sample["actual"]) >= 1 for sample in result["samples"])


def test_refusals(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        infer.main(tmp_path)
    train("--no-save-model", "--strategy=ddp", steps=1)
    with pytest.raises(ConfigError, match=r"has no full-model\.pt"):
        infer.main(tmp_path / "run")
    with pytest.raises(ConfigError, match="the run's strategy is ddp"):
        infer.main(tmp_path / "run", sharded=True)
    with pytest.raises(ConfigError, match="--data-root with --dataset digits"):
        infer.main(tmp_path / "run", data_root="somewhere")
    with pytest.raises(ConfigError, match=r"--shard: no such flag; did you mean --sharded\?"):
        infer.parse(["run", "--shard"])


def test_a_class_that_the_data_do_not_name_is_shown_by_its_number() -> None:
    # Of a model whose embedding has more rows than the tokenizer has tokens, as most have.
    dataset: Any = SimpleNamespace(classes=["a", "b"])
    (sample,) = samples_of(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([1]), dataset)
    assert (sample["predicted"], sample["actual"]) == ("<2>", "b")
    # All of its documents are of one token, and the first of a document is no target.
    (sample,) = samples_of(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[IGNORED]]), dataset)
    assert (sample["predicted"], sample["actual"], sample["correct"]) == ("a", "nothing", False)


def test_tokens_of_a_strangers_tokenizer_do_nothing_to_the_terminal() -> None:
    dataset: Any = SimpleNamespace(classes=["a\x1b]0;b\x07", "\n"])
    (sample,) = samples_of(torch.tensor([[0.0, 1.0]]), torch.tensor([0]), dataset)
    assert (sample["predicted"], sample["actual"]) == (r"\n", r"a\x1b]0;b\x07")
    assert context_of(torch.tensor([0, 1]), dataset) == r"a\x1b]0;b\x07\n"
    assert printable("a\n\tb\x1b[2J", "\n\t") == "a\n\tb\\x1b[2J"
