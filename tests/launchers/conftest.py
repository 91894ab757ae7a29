from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator

import pytest

from launchers import ray_train


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """One cluster on this machine for all tests: starting one takes longer than training."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'fsdp2-reference[ray]'")
    ray_train.prepare()
    import ray  # and not before: it reads its settings when it is imported

    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    yield
    ray.shutdown()
