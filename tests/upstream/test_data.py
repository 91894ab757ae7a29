"""A place in the data that isn't found again: docs/upstream.md, "Data and launchers"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.upstream.common import still


def _loader(accelerator: Any, seedable: bool) -> tuple[Any, Any]:
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    of_cpu = accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
    return of_cpu, of_cpu.prepare(loader)


def _samples(loader: Any) -> list[list[int]]:
    return [batch.tolist() for (batch,) in loader]


@pytest.mark.parametrize("seedable", [False, True])
def test_a_resume_in_the_midst_of_an_epoch_gets_other_samples(tmp_path: Path, accelerator: Any, seedable: bool) -> None:
    from accelerate import skip_first_batches

    of_cpu, loader = _loader(accelerator, seedable)
    _samples(loader)
    rest = []
    for index, (batch,) in enumerate(loader):  # the second epoch
        if index >= 2:
            rest.append(batch.tolist())
        if index == 1:
            of_cpu.save_state(str(tmp_path))
    again, other = _loader(accelerator, seedable)
    again.load_state(str(tmp_path))
    found = _samples(skip_first_batches(other, 2))
    assert len(found) == len(rest) == 2
    still(found != rest, "huggingface/accelerate#2823")
    by_hand, loader = _loader(accelerator, seedable)
    by_hand.load_state(str(tmp_path))
    loader.set_epoch(1)
    assert (_samples(skip_first_batches(loader, 2)) == rest) == seedable, "docs/upstream.md says when set_epoch helps"
