"""The token at which a model that has learned conversations stops, in the file that generators read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from fsdp2.data.errors import UnusableText
from fsdp2.units import printable
from fsdp2_extra.text.chat import has_template
from fsdp2_extra.text.prompts import ends_of_an_answer

FILE = "generation_config.json"


def name_ends(folder: Path, base: Mapping[str, bytes]) -> str:
    """Let generation_config.json name each token that ends an answer by a folder's chat template.

    The tokenizer of a base model often names another one, and then transformers, vLLM and others, which read that
    file, would write on behind each answer.

    Args:
        folder: of an export, with its tokenizer.
        base: name -> content of the files beside the base's weights, for a folder of adapters, which has no such file.

    Returns a line about it, or "" where nothing was to be done.
    """
    if not has_template(str(folder)):
        return ""
    file = folder / FILE
    try:
        ends = ends_of_an_answer(str(folder))
        said = json.loads(file.read_bytes() if file.exists() else base.get(FILE) or base.get("config.json", b"{}"))
        known = said.get("eos_token_id", said.get("text_config", {}).get("eos_token_id"))
    except (UnusableText, ValueError, AttributeError, RecursionError) as error:
        return f"{FILE} is left as it is, since it, or where an answer ends, can't be read ({error})"
    known = known if isinstance(known, list) else [] if known is None else [known]
    new = [token for token in ends if token not in known]
    if not new:
        return ""
    names, said["eos_token_id"] = " and ".join(printable(ends[token]) for token in new), [*known, *new]
    if not file.exists():
        return f"an answer ends with {names}, which the base doesn't name: generate with eos_token_id={[*known, *new]}"
    with open(file, "w") as stream:
        stream.write(json.dumps(said, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    return f"its {FILE} names {names} too, which ends an answer"
