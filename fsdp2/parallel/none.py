"""Strategy `none`: one process, nothing distributed. What the others are compared with."""

from __future__ import annotations

from fsdp2.parallel.engine import AutocastEngine


class NoneEngine(AutocastEngine):
    strategy = "none"
