"""The record of a rule that takes a use of FSDP1."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from migration.rewriter.module import Module

MOVED = "moved"
KEPT = "works as it is"
MARKED = "to decide"
BLOCKS = "to decide first"
WAITS = "waits for a decision"


@dataclass(frozen=True)
class Taken:
    code: str
    node: cst.CSTNode
    module: Module
    outcome: str = MOVED
    why: str = ""
