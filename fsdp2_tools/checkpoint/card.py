"""README.md beside exported weights: steps, losses, flags and versions, as the run's directory says them.

Its form is https://huggingface.co/docs/hub/model-cards. A run directory is data, and may be a stranger's: numbers are
taken as numbers, and texts are shown as code, cut, without the folders of whoever has trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsdp2.checkpoint.files import Files, LocalFiles, size_of
from fsdp2.config import Config
from fsdp2.options.errors import shown
from fsdp2.report.records import parse
from fsdp2.units import printable

NAME = "README.md"
METRICS = "metrics.jsonl"
AT_MOST = 1 << 20  # bytes of it, from its end
LEFT_OUT = ("run-dir", "resume")
VERSIONS = ("python", "torch", "git", "world_size", "machine", "gpu")  # of what `environment` of a run says
PIPELINES = {"causal": "text-generation", "masked": "fill-mask", "image": "image-classification"}  # the hub's
# Of a path that says where it begins, also of each in a --dataset; and what a URL may hold of whoever gives it.
_FOLDERS = re.compile(r"(^|[:,=\"])(?:~[^/,:]*|\.\.?)?/(?!/)(?:[^/,:]+/)*(?=[^/,:])")
_SECRETS = re.compile(r"(://)(?:[^/@\s]*@)?([^?#,\s]*)(?:[?#][^,\s]*)?")


def base_on_hub(flags: Mapping[str, Any]) -> str | None:
    """The hub's name of the model that a run began with; None if its weights came from elsewhere."""
    named = re.fullmatch(r"hf:(\w[\w.-]{0,95}/\w[\w.-]{0,95})", str(flags.get("model")), re.ASCII)
    return None if named is None or flags.get("init-from") is not None else named[1]


def card(
    run: Path,
    said: Mapping[str, Any],
    step: int | None,
    library: str,
    task: str | None,
    *,
    average: bool = False,
    by: str = "python -m fsdp2.train",
    defaults: Mapping[str, Any] | None = None,
) -> bytes:
    """The card of the weights after `step`, or those at the end of the run.

    Args:
        said: the run's config.json.
        library: that loads the weights, as the hub knows it.
        task: that of a model for language, or its kind.
        average: whether they are the average of the weights, which no loss is of.
        by: the program that trained.
        defaults: its flags; None: those of `fsdp2.train`.
    """
    flags, versions = (said.get(name) for name in ("flags", "environment"))
    flags = flags if isinstance(flags, dict) else {}
    facts = {"library_name": library, "pipeline_tag": PIPELINES.get(task or ""), "base_model": base_on_hub(flags)}
    facts |= {"base_model_relation": "adapter" if library == "peft" else "finetune"} if facts["base_model"] else {}
    lines = ["---", *(f"{key}: {value}" for key, value in facts.items() if value), "---"]
    lines += [f"# {_text(run.name)[1:-1]}", ""]
    lines += [f"Trained with FSDP2 by `{by}`. What the model is for, what it can't do, and under which"]
    lines += ["licence it may be used, nobody has written here yet.", ""]
    of_average = {"step": step, "weights": "their moving average"}
    lines += _table("result", of_average if average else _results(LocalFiles(run), step))
    lines += _table("flag", _chosen(flags, defaults or {field.name: field.default for field in fields(Config)}))
    lines += _table("version", {name: versions.get(name) for name in VERSIONS} if isinstance(versions, dict) else {})
    return "\n".join(lines).encode()


def _table(title: str, rows: Mapping[str, Any]) -> Iterator[str]:
    known = {name: value for name, value in rows.items() if value is not None}
    if known:
        yield from (f"| {title} | |", "|---|---|")
        yield from (f"| {_text(name)} | {_text(value)} |" for name, value in known.items())
        yield ""


def _chosen(flags: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flags of ours that aren't as by default."""
    known = {name.replace("_", "-"): default for name, default in defaults.items()}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
    return {
        name: flags[name]
        for name in known
        if name not in LEFT_OUT and name in flags and flags[name] not in (None, plain[name])
    }


def _results(run: Files, step: int | None) -> dict[str, Any]:
    """Figures of these weights alone: of the step that made them, and of an evaluation behind it."""
    last: dict[str, dict[str, Any]] = {}
    for record in _records(run):
        if record["kind"] in ("train", "eval") and step in (None, record.get("step")):
            last[record["kind"]] = record
    found: dict[str, Any] = {"step": last.get("train", {}).get("step") if step is None else step}
    for kind, names in (("train", ("loss",)), ("eval", ("loss", "perplexity", "accuracy"))):
        record = last.get(kind, {})
        if record.get("step") == found["step"]:
            known = (name for name in names if isinstance(record.get(name), float))
            found |= {f"{kind} {name}": float(f"{record[name]:.4g}") for name in known}
    return found


def evaluated(run: Files) -> dict[int, float]:
    """The loss of a run's evaluations, by the step behind which each was."""
    found = ((one.get("step"), one.get("loss")) for one in _records(run, 64 * AT_MOST) if one["kind"] == "eval")
    return {step: loss for step, loss in found if type(step) is int and isinstance(loss, float)}


def _records(run: Files, most: int = AT_MOST) -> Iterator[dict[str, Any]]:
    if (size := size_of(run, METRICS)) is None:
        return
    with run.open(METRICS) as file:
        file.seek(max(0, size - most))
        for line in file.read(most).splitlines(keepends=True):
            record = parse(line)
            if record is not None:
                yield record


def _text(value: Any) -> str:
    """A value as code in a cell, a path by its last name."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = _SECRETS.sub(r"\1\2", _FOLDERS.sub(r"\1", text))
    return f"`{shown(printable(text)).replace('`', chr(39)).replace('|', '/')}`"
