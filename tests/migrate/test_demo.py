"""docs/migration/demo.sh: what `make migrate-demo` runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness import python_environment

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow  # four starts of torchrun
def test_the_demonstration_moves_a_script_and_its_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    done = subprocess.run(
        ["bash", ROOT / "docs/migration/demo.sh", out],
        cwd=ROOT,
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rewritten script: bit-equal in 20 steps" in done.stdout
    assert "proven:" in done.stdout
    assert "FullyShardedDataParallel" in (out / "before.py").read_text()
    after = (out / "after.py").read_text().partition('"""\n\n')[2]
    assert "FSDP(" not in after
    assert "fully_shard(model" in after
