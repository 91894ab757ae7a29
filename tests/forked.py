"""Imported by the server that ranks and programs are forked from (`tests/harness.py`): what each would do again."""

from __future__ import annotations

import torch._dynamo
import torch._inductor  # noqa: F401
import torchvision.datasets  # noqa: F401

import fsdp2.models.vit
import fsdp2.train  # noqa: F401
import tests.harness  # noqa: F401
from fsdp2.data import digits

digits.table()
