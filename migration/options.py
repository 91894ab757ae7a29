"""Every name, argument and member of FSDP1, and what it means in FSDP2: one table that everything else uses.

The page docs/migration-options.md is made from it.
"""

from __future__ import annotations

from migration.row import Row
from migration.rows_calls import AROUND, METHODS, STATE_DICTS
from migration.rows_code import IN_CODE, IN_CONFIGURATIONS
from migration.rows_settings import CONSTRUCTOR, OFFLOAD, POLICIES, PRECISION, PREFETCH, SHARDING

SECTIONS: dict[str, tuple[Row, ...]] = {
    "The constructor's arguments": CONSTRUCTOR,
    "Sharding strategies": SHARDING,
    "Mixed precision": PRECISION,
    "CPU offload": OFFLOAD,
    "Backward prefetch": PREFETCH,
    "Wrapping policies": POLICIES,
    "Methods": METHODS,
    "State dicts": STATE_DICTS,
    "Around it, and old names": AROUND,
    "In code": IN_CODE,
    "In configuration files": IN_CONFIGURATIONS,
}

TABLE = tuple(row for rows in SECTIONS.values() for row in rows)
