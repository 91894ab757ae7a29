"""The data that a training would read: the same on all ranks, or samples would be repeated and left out."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp2.data.errors import NotHere
from fsdp2.run.dataset import open_data
from fsdp2_tools.doctor.asking import Here
from fsdp2_tools.doctor.judging import BAD, Hosts, Row, same


def measure(here: Here) -> str | None:
    """A hash of this rank's samples; None if the training has to download or tokenise them first."""
    config = here.config
    here.doing = f"reading --dataset {config.dataset}"
    try:
        dataset = open_data(config, fetch=False)
    except NotHere:
        return None
    return f"{dataset.train.content} {dataset.test.content}"


def rows(found: Mapping[int, str | None], hosts: Hosts, dataset: str) -> list[Row]:
    """Judge all ranks' answers."""
    if not found:
        return []
    there = {rank: content for rank, content in found.items() if content is not None}
    text = f"{dataset}, read by {len(there)} ranks" if there else f"{dataset} isn't on these hosts yet"
    fix = "give it the same files as the others"
    return same("data", there, hosts, BAD, fix) or [Row("data", text, "the same on all ranks that have it")]
