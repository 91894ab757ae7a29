from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _there_is_a_gpu() -> None:
    """Of the tests beside these: they need one, and these bring their own."""
