"""The ranks that tests run on: what is said of one that dies."""

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness import Ranks


def _die_of(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV])
def test_a_rank_that_dies_of_a_signal_is_named_with_it(number: signal.Signals, tmp_path: Path) -> None:
    pool = Ranks(tmp_path)
    try:
        with (
            pytest.warns(match="died of"),
            pytest.raises(pytest.fail.Exception, match=f"^rank 1 died of {number.name}") as failure,
        ):
            pool.run(_die_of, number)
    finally:
        pool.close()
    if number == signal.SIGSEGV:
        assert "Fatal Python error: Segmentation fault" in str(failure.value)
        assert "_die_of" in str(failure.value)
