"""Load what a run left and predict:  python -m fsdp2.infer RUN

Loads full_model/full-model.pt into a plain model in a plain process. With `--sharded`, under torchrun, it
loads the newest sharded checkpoint instead, and no rank ever holds a full copy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fsdp2.checkpoint.files import Files, LocalFiles
from fsdp2.checkpoint.full_file import plain_names, verdict, vouched_step
from fsdp2.checkpoint.places import open_files
from fsdp2.checkpoint.restore import read_weights
from fsdp2.checkpoint.store import DamagedCheckpoint
from fsdp2.checkpoint.weights import OtherWeights, load_weights
from fsdp2.config import Config
from fsdp2.data.loader import Batch, evaluation_batches
from fsdp2.data.splits import IGNORED, Dataset
from fsdp2.evaluate import evaluate
from fsdp2.models import ModelSpec
from fsdp2.models.initial import place_of
from fsdp2.options.errors import ConfigError
from fsdp2.options.parser import Parser, files_at
from fsdp2.options.strategies import STRATEGIES
from fsdp2.options.values import checked, location
from fsdp2.parallel.baselines.autocast import autocast
from fsdp2.parallel.meta import shared_names
from fsdp2.parallel.precision import DTYPES, with_inputs_in
from fsdp2.parallelize import parallelize
from fsdp2.report.console import short
from fsdp2.run import runtime
from fsdp2.run.adapters import elsewhere
from fsdp2.run.finite import require_finite
from fsdp2.run.preflight import check_data, checkpoint_at
from fsdp2.run.rundir import RunDir, read_config
from fsdp2.run.runtime import World
from fsdp2.run.start import InitialValues, StartWeights, blocks_of, load_data

SAMPLES = 10
# Strategies whose checkpoints are read into a sharded model.
SHARDED = [name for name, rules in STRATEGIES.items() if rules.reads_as_fsdp2]


def load_plain(config: Config, spec: ModelSpec, file: Path, device: torch.device) -> Callable[[Batch], Any]:
    """The full model in this process; a function from a batch to its outputs.

    It computes in the precision that the run evaluated in, so that the accuracy is the run's: FSDP casts the
    parameters, DDP and a single process use autocast.
    """
    model: nn.Module = spec.build(config.model_size)
    try:
        load_weights(str(file), model.state_dict(), place_of, shared_names(model), partial=False)
    except OtherWeights as error:
        raise ConfigError(
            f"{short(file)}: isn't of the model that config.json names: {error}; {other_ways(config)}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{short(file)}: can't be loaded ({error}); {other_ways(config)}") from None
    require_finite(plain_names(model), short(file))
    model.to(device).eval()
    casts = config.mixed_precision is not None and not STRATEGIES[config.strategy].autocasts
    dtype = DTYPES[config.mixed_precision] if config.mixed_precision and casts else torch.float32
    model.to(dtype)
    context = nullcontext() if casts else autocast(device.type, config.mixed_precision)

    def forward(batch: Batch) -> Any:
        with context:
            return spec.call(model, with_inputs_in(batch, dtype))

    return forward


def vouched(config: Config, run: RunDir) -> str:
    """In words, what vouches for the full model of a run.

    Raises ConfigError if it is damaged, or isn't known to be of the run's last state.
    """
    weights = run.full_weights or run.full_model
    file, newest = short(weights), max(run.store.committed(), default=None)
    try:
        step = vouched_step(LocalFiles(run.full_model.parent), None if weights.is_dir() else weights.name)
    except DamagedCheckpoint as error:
        raise ConfigError(f"{file}: is damaged: {error}; remove it, and then {other_ways(config)}") from None
    if newest is not None and (step is None or step < newest):
        state = "no marker beside it says of which step it is" if step is None else f"is of step {step}"
        raise ConfigError(
            f"{file}: {state}, and the newest checkpoint is of step {newest}: the run has gone on since, or was killed "
            f"while it wrote the file; {other_ways(config)}"
        )
    return verdict(step)


def other_ways(config: Config) -> str:
    """What to do about a full model that can't be used."""
    sharded = ", or use --sharded for its newest checkpoint" if config.strategy in SHARDED else ""
    return f"give the training's command again, which writes it at its end{sharded}"


def load_sharded(
    config: Config, spec: ModelSpec, checkpoint: Files, world: World, device: torch.device
) -> Callable[[Batch], Any]:
    """The model sharded over these ranks, filled from a sharded checkpoint of any number of ranks."""

    def load_weights(model: nn.Module) -> None:
        start = StartWeights(config, restoring=True)
        if start.wanted:
            start(model)
        try:
            read_weights(model, checkpoint, elsewhere(config))
        except (DamagedCheckpoint, ValueError) as error:
            raise ConfigError(
                f"--sharded: the checkpoint is damaged: {error}; drop --sharded to use full-model.pt, if there is one"
            ) from None
        require_finite(plain_names(model), f"--sharded: {short(str(checkpoint))}")

    def everything(name: str) -> bool:
        return True

    if config.strategy != "fsdp2":  # its checkpoints are FSDP2's
        config = Config(model=config.model, model_size=config.model_size, mixed_precision=config.mixed_precision)
    engine = parallelize(
        config,
        build=lambda: spec.on_meta(config.model_size),
        blocks_of=blocks_of(config),
        set_weights=InitialValues(config, brought=everything),
        load_weights=load_weights,
        device=device,
        world_size=world.world_size,
        training=False,
        brought=everything,
        methods=spec.methods,
    )
    engine.call = spec.call
    engine.model.eval()
    return engine.forward


def samples_of(logits: Tensor, targets: Tensor, dataset: Dataset) -> list[dict[str, Any]]:
    """Predicted and true class of each sample; for language, of the last token of each that is to be predicted."""
    if targets.dim() > 1:
        rows, last = torch.arange(len(targets)), last_target(targets)
        logits, targets = logits[rows, last], targets[rows, last]
    return [
        {
            "sample": i,
            "predicted": dataset.classes[int(predicted)],
            "actual": dataset.classes[int(actual)],
            "correct": bool(predicted == actual),
        }
        for i, (predicted, actual) in enumerate(zip(logits.argmax(dim=-1), targets, strict=True))
    ]


def last_target(targets: Tensor) -> Tensor:
    """(N, T) -> (N,): where in each sample the last target stands that isn't `IGNORED`."""
    places = torch.arange(targets.shape[1], device=targets.device)
    return torch.where(targets == IGNORED, 0, places).argmax(dim=1)


def shown(inputs: Any, targets: Tensor) -> list[Tensor]:
    """What a reader sees of each sample: an image, or the tokens up to the last target."""
    if isinstance(inputs, dict):
        inputs = inputs.get("decoder_input_ids", inputs["input_ids"])
    if targets.dim() == 1:
        return list(inputs)
    return [one[: last + 1] for one, last in zip(inputs, last_target(targets).tolist(), strict=True)]


def context_of(tokens: Tensor, dataset: Dataset) -> str:
    """The end of a sample of tokens, as text."""
    return "".join(dataset.classes[int(token)] for token in tokens[-24:])


def draw(samples: Sequence[dict[str, Any]], inputs: Sequence[Tensor], dataset: Dataset, path: Path) -> None:
    """A picture of the samples with predicted and true class."""
    import matplotlib  # here: it takes a second that `import fsdp2.infer` should not

    matplotlib.use("Agg")
    from matplotlib import pyplot

    images = inputs[0].dim() == 3
    figure, axes = pyplot.subplots(2, 5, figsize=(11, 5.2)) if images else pyplot.subplots(10, 1, figsize=(9, 5.5))
    for axis, sample, one in zip(axes.flat, samples, inputs, strict=False):
        colour = "tab:green" if sample["correct"] else "tab:red"
        mark = "✓" if sample["correct"] else "✗"
        axis.set_axis_off()
        if images:
            axis.imshow(one[0].float().cpu(), cmap="gray")
            axis.set_title(f"{mark} {sample['predicted']}\n(is {sample['actual']})", color=colour, fontsize=11)
        else:
            # No dollar signs as text: matplotlib would typeset what is between them.
            text = f"{mark} …{context_of(one, dataset)}  →  {sample['predicted']}   (is {sample['actual']})"
            axis.text(0, 0.5, text.replace("$", r"\$"), color=colour, family="monospace", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(place: Path | str, *, data_root: str | None = None, sharded: bool = False) -> dict[str, Any]:
    """Predict ten test samples and measure the accuracy on the whole test set.

    Returns {"accuracy": 0–1, "count": targets, "samples": ten of {sample, predicted, actual, correct}, "weights":
    where they come from and what vouches for them}. `place` is the run's folder or URL; the full model of a URL is
    copied to the run's local folder. Raises ConfigError if the run, its model or its data can't be used.
    """
    world = runtime.world()
    files_at(str(place), "RUN")  # refuses what is no URL that can be used
    run = RunDir(place)
    config = read_config(run)
    # One forward has no use for offload, replicas or a reshard policy, which may not fit these ranks.
    config = dataclasses.replace(
        config, data_root=data_root or config.data_root, cpu_offload=False, replicas=1, reshard_after_forward=None
    )
    check_data(config)
    spec = config.spec
    sharded = sharded or config.lora is not None  # adapters alone are in no full model
    if not sharded and world.world_size > 1:
        raise ConfigError(
            "fsdp2.infer under torchrun: one process loads the full model; add --sharded, or use python -m"
        )
    if sharded and config.strategy not in SHARDED:
        raise ConfigError(f"--sharded: the run's strategy is {config.strategy}, which has no shards; drop --sharded")
    if sharded:
        checkpoint = open_files(checkpoint_at(run.place))
        weights = f"{short(str(checkpoint))}, verified"
    else:
        checkpoint = None
        try:
            run.fetch_full_model()
        except (DamagedCheckpoint, OSError) as error:
            raise ConfigError(
                f"{run.place}: its full model can't be used ({error}); use --sharded, or finish it"
            ) from None
        if run.full_weights is None:
            raise ConfigError(
                f"{short(run.path)}: has no {run.full_model.name}, because the run hasn't finished, had "
                "--no-save-model, or its model is large; use --sharded, or finish it with --save-model"
            )
        weights = f"{short(run.full_weights)}, {vouched(config, run)}"
    device = runtime.pick_device(config.device, world)
    with runtime.process_group(world, device):
        runtime.set_threads(config.threads, world)
        dataset = load_data(config, spec, world)
        if checkpoint is not None:
            forward = load_sharded(config, spec, checkpoint, world, device)
        else:
            assert run.full_weights is not None
            forward = load_plain(config, spec, run.full_weights, device)
        with torch.no_grad():
            batch = next(evaluation_batches(dataset.test, SAMPLES, 0, 1, device))
            samples = samples_of(spec.logits(forward(batch)), batch.targets, dataset)
            inputs = shown(batch.inputs, batch.targets)
            result = evaluate(forward, spec, dataset.test, config.test_batch_size, world, device)
        if world.rank == 0:
            print(f"weights: {weights}")
            for sample, one in zip(samples, inputs, strict=True):
                mark = "✓" if sample["correct"] else "✗"
                after = "" if one.dim() == 3 else f" after …{context_of(one, dataset)}"
                predicted, actual = sample["predicted"], sample["actual"]
                print(f"{mark} sample {sample['sample']}: predicted {predicted:<12} actual {actual:<12}{after}")
            right = sum(sample["correct"] for sample in samples)
            print(f"{right} of {len(samples)} samples right")
            picture = run.path / "predictions.png"
            picture.parent.mkdir(parents=True, exist_ok=True)  # a URL's
            draw(samples, inputs, dataset, picture)
            print(f"picture: {short(picture)}")
            print(f"test accuracy: {result['accuracy']:.2%} of {result['count']}")
    return {"accuracy": result["accuracy"], "count": result["count"], "samples": samples, "weights": weights}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line. Raises ConfigError."""
    parser = Parser(prog="fsdp2.infer", description="Predict with the model of a run.", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", help="folder or URL of a run")
    parser.add_argument("--data-root", metavar="FOLDER", help="in torchvision's layout, if the data is not embedded")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write accuracy, count and samples here")
    parser.add_argument("--sharded", action="store_true", help="load the newest sharded checkpoint (under torchrun)")
    arguments = parser.parse_args(argv)
    for flag, value in (("RUN", arguments.run), ("--data-root", arguments.data_root), ("--json", arguments.json)):
        if value is not None:
            checked(flag, str(value), location)
    return arguments


def cli() -> None:
    with runtime.exit_status():
        arguments = parse()
        result = main(arguments.run, data_root=arguments.data_root, sharded=arguments.sharded)
        if arguments.json is not None and runtime.world().rank == 0:
            arguments.json.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    cli()
