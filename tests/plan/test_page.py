"""The page of plans: what its sliders choose among, and that a browser draws it without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp2.config import parse
from fsdp2.units import size
from fsdp2_tools.plan.__main__ import main
from fsdp2_tools.plan.page import batches
from tests.memory.test_runs import CHROMIUM, in_browser
from tests.plan.test_command import LLAMA


def test_the_batch_sizes_of_a_page() -> None:
    assert batches(parse(["--batch-size=8"])) == [2, 4, 8, 16, 32]
    assert batches(parse(["--batch-size=3"])) == [3, 6, 12]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to open the page in")
def test_the_page_draws_memory_exchanges_and_sliders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    plans = main([*LLAMA, "--batch-size=1", "--ranks=2,8", "--gpu=h100", f"--html={file}"])
    text = file.read_text()
    found = re.search(r"^const plans = (.*);$", text, re.MULTILINE)
    assert found is not None
    data = json.loads(found[1].replace("<\\/", "</"))
    assert data["ranks"] == [2, 8]
    assert data["sizes"] == [1, 2, 4]
    assert len(data["cells"]) == 6
    assert sum(data["cells"]["8 1"]["x"]) == plans[1].bytes
    opened = in_browser(text, tmp_path)
    assert opened.count('class="main-svg"') >= 3
    assert f"{size(plans[0].bytes)} a rank" in opened  # which the script has put there
    assert "all-gather" in opened
