"""Load what a run left and predict, or let it write:  python -m fsdp2.infer RUN [--prompt TEXT]

Loads full_model/full-model.pt into a plain model in a plain process. With `--sharded`, under torchrun, it
loads the newest sharded checkpoint instead, and no rank ever holds a full copy.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp2 import data
from fsdp2.data.loader import evaluation_batches
from fsdp2.data.splits import Dataset
from fsdp2.evaluate import evaluate
from fsdp2.generate import generate
from fsdp2.models import NAMES
from fsdp2.options.errors import ConfigError, flag_of, require
from fsdp2.options.parser import Parser
from fsdp2.options.values import Parse, checked, dataset_name, location, model_name, number, one_of, text, whole
from fsdp2.report.console import in_words
from fsdp2.report.predictions import context_of, draw, samples_of, shown
from fsdp2.run.dataset import load_data, tokenizer_of
from fsdp2.run.directory.rundir import RunDir
from fsdp2.run.preflight import check_data
from fsdp2.run.process import ending, runtime
from fsdp2.run.trained import open_run
from fsdp2.units import printable, short

SAMPLES = 10
# The flags with a value: its word, default, check and meaning.
FLAGS: dict[str, tuple[str, str | None, Parse, str]] = {
    "data_root": ("FOLDER", None, location, "folder that holds the data in torchvision's layout, if it isn't embedded"),
    "json": ("FILE", None, location, "also write the result to this file"),
    "model": ("NAME", None, model_name(NAMES), "the run's model if it is code, or on a hub: neither is used unnamed"),
    "dataset": (
        *("NAME", None, dataset_name(data.NAMES, data.OWN)),
        "the run's data if it is at a URL, or to be downloaded: neither is opened unnamed",
    ),
    "eval_dataset": ("NAME", None, dataset_name((), data.OWN), "the same of the run's --eval-dataset"),
    "init_from": ("PLACE", None, location, "where the run's --init-from is, if at a URL: it isn't opened unnamed"),
    "prompt": ("TEXT", None, text, "let a language model continue this text, instead of predicting"),
    "prompt_as": (
        *("chat|text", None, one_of("chat", "text")),
        "chat = the prompt is a user's message, by the chat template; unset = of a run on chat:, else text",
    ),
    "system": ("TEXT", None, text, "with --prompt as chat, the system message before it"),
    "new_tokens": ("N", "200", whole(1, 10**6), "with --prompt, how many tokens to add (default: 200)"),
    "temperature": ("T", "0.8", number(0, 100), "with --prompt, of sampling; 0 = the likeliest token (default: 0.8)"),
    "seed": ("N", "1", whole(0, 2**63 - 1), "with --prompt, of sampling (default: 1)"),
}


def main(place: Path | str, *, sharded: bool = False, **named: Any) -> dict[str, Any]:
    """Predict ten test samples and measure loss and accuracy on the whole test set.

    `named` is `model`, `trust_remote_code`, `dataset`, `eval_dataset`, `data_root` and `init_from`: see `read_config`.

    Returns {"loss": mean, "accuracy": 0–1, "count": targets, "samples": ten of {sample, predicted, actual, correct},
    "weights": where they come from and what vouches for them}, and of a language model its "perplexity". Raises
    ConfigError if the run, its model or its data can't be used.
    """
    with open_run(place, sharded=sharded, **named) as run:
        check_data(run.config)
        spec = run.config.spec
        dataset = load_data(run.config, run.world)
        with torch.no_grad():
            batch = next(evaluation_batches(dataset.test, SAMPLES, 0, 1, run.device))
            samples = samples_of(spec.logits(run.forward(batch)), batch.targets, dataset)
            result = evaluate(run.forward, dataset.test, run.config, run.world, run.device)
        if run.world.rank == 0:
            show(samples, shown(batch.inputs, batch.targets), dataset, run.run)
            print(f"test loss: {result['loss']:.4f}")
            print(f"{in_words(result)} of {result['count']}")
    return {**result, "samples": samples, "weights": run.weights}


def show(samples: Sequence[dict[str, Any]], inputs: Sequence[Tensor], dataset: Dataset, run: RunDir) -> None:
    """Print predictions, and draw them into the run's local folder."""
    for sample, one in zip(samples, inputs, strict=True):
        mark = "✓" if sample["correct"] else "✗"
        after = "" if one.dim() == 3 else f" after …{context_of(one, dataset)}"
        predicted, actual = sample["predicted"], sample["actual"]
        print(f"{mark} sample {sample['sample']}: predicted {predicted:<12} actual {actual:<12}{after}")
    right = sum(sample["correct"] for sample in samples)
    print(f"{right} of {len(samples)} {'samples' if inputs[0].dim() == 3 else 'tokens'} right")
    picture = run.path / "predictions.png"
    try:
        require("matplotlib", "plots", "picture")
        picture.parent.mkdir(parents=True, exist_ok=True)  # a URL's
        draw(samples, inputs, dataset, picture)
        print(f"picture: {short(picture)}")
    except ConfigError as error:
        print(error)
    except OSError as error:  # somebody else's run
        print(f"picture: none, since {short(picture)} can't be written ({error.strerror})")


def go_on(
    place: Path | str,
    prompt: str,
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    prompt_as: str | None = None,
    system: str | None = None,
    sharded: bool = False,
    **named: Any,
) -> dict[str, Any]:
    """Let a language model go on with a text, or answer a message, and print what it writes while it does.

    For `named` see `main`, and for `prompt_as` and `system` the flags.

    Returns {"prompt", "text": what follows, "weights"}. Raises ConfigError as `main` does, and for a model that isn't
    trained to predict the next token of a text.
    """
    with open_run(place, sharded=sharded, **named) as run:
        config, spec = run.config, run.config.spec
        if spec.kind != "language" or spec.task != "causal" or config.dataset == "random-tokens":
            raise ConfigError(f"--prompt: {config.model} wasn't trained to continue a text; drop --prompt")
        from fsdp2_extra.text.prompts import asked_of

        asked = asked_of(prompt, config.dataset, tokenizer_of(config), config.bos, prompt_as, system)
        begin = torch.tensor(asked.tokens.astype("int64"), device=run.device)
        positions = spec.positions if config.weights is not None else None  # else none behind --seq-len was trained
        window = max(config.seq_len, positions or 0)
        if len(begin) > window:
            raise ConfigError(f"--prompt: has {len(begin)} tokens, and the model sees the last {window}; shorten it")
        settings: dict[str, Any] = {"new_tokens": new_tokens, "temperature": temperature, "seed": seed}
        found = generate(run.forward, spec, begin, window=window, ends=asked.ends, **settings)

        def say(text: str) -> None:
            if run.world.rank == 0:
                print(printable(text, "\n\t"), end="", flush=True)

        say(f"temperature {temperature:g}, seed {seed}; --temperature 0 takes the likeliest\n" if temperature else "")
        number = itertools.count()
        text = asked.answer((token for token, _ in zip(found, number, strict=False)), say)
        if len(begin) + next(number) - 1 > window:  # the last one is made from those before it
            say(f"the model sees {window} tokens at a time: it wrote the end without the beginning of the prompt\n")
        return {"prompt": prompt, "text": text, "weights": run.weights}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line. Raises ConfigError."""
    parser = Parser(
        prog="python -m fsdp2.infer",
        description="Predict the test set with the model of a run, or continue a text.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder or URL of a run")
    for name, (word, default, _, meaning) in FLAGS.items():
        parser.add_argument(flag_of(name), metavar=word, default=default, help=meaning)
    parser.add_argument("--sharded", action="store_true", help="load the newest sharded checkpoint (under torchrun)")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the Python files that come with the run's model"
    )
    arguments = parser.parse_args(argv)
    checked("RUN", arguments.run, location)
    for name, (_, _, check, _) in FLAGS.items():
        if (value := getattr(arguments, name)) is not None:
            setattr(arguments, name, checked(flag_of(name), value, check))
    return arguments


def cli() -> None:
    with ending.exit_status():
        arguments = parse()
        names = ["model", "trust_remote_code", "dataset", "eval_dataset", "data_root", "init_from", "sharded"]
        if arguments.system is not None and arguments.prompt is None:
            raise ConfigError("--system without --prompt: nothing is asked; add --prompt, or drop it")
        if arguments.prompt is not None:
            names += ["prompt", "prompt_as", "system", "new_tokens", "temperature", "seed"]
        given = {name: getattr(arguments, name) for name in names}
        result = (main if arguments.prompt is None else go_on)(arguments.run, **given)
        if arguments.json is not None and runtime.world().rank == 0:
            try:
                Path(arguments.json).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n")
            except OSError as error:
                raise ConfigError(f"--json {arguments.json}: isn't writable ({error.strerror}); give another") from None


if __name__ == "__main__":
    cli()
