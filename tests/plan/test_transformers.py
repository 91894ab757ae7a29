"""Models of transformers, which decide by values whether they need a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2_extra.models import hf
from fsdp2_tools.plan import fake
from tests.harness import Ranks
from tests.others.common import save
from tests.plan.taken import planned, run_settled, taken

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 30, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("family", ["mistral", "gemma"])
def test_a_plan_takes_what_a_run_takes(ranks: Ranks, tmp_path: Path, family: str) -> None:
    transformers.AutoConfig.for_model(family, **SIZES, **HEADS).save_pretrained(tmp_path / "model")
    line = [f"--model=hf:{tmp_path / 'model'}", "--init-from=scratch", "--batch-size=2", "--seq-len=32"]
    line += ["--dataset=random-tokens", "--test-batch-size=16", "--threads=1", "--device=cpu", "--no-save-model"]
    line += ["--max-steps=2", "--memory-snapshot", f"--run-dir={tmp_path / 'run'}"]
    ranks.run(run_settled, line)
    assert planned(" ".join(line)).peak.bytes == taken(tmp_path / "run", 0)


def test_a_model_is_tried_once_whatever_flags_change_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters and a loss in chunks it was tried in the midst of a plan, where tensors are fake, and refused."""
    pytest.importorskip("peft")
    model = save("llama", tmp_path / "model")
    tried: list[str] = []
    run = hf.run_in_bounds

    def counted(function: Any, bounds: Any) -> None:
        tried.append(bounds.name)
        run(function, bounds)

    monkeypatch.setattr(hf, "run_in_bounds", counted)
    line = f"--model={model} --lora=4 --chunked-loss=16 --dataset=random-tokens --seq-len=32"
    assert planned(line).peak.bytes > 0
    assert tried == [f"{tmp_path}/model/config.json"]


def test_flex_plans_no_mask_for_each_pair(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("mistral", **{**SIZES, "vocab_size": 256}, **HEADS).save_pretrained(
        tmp_path / "model"
    )
    text, length = tmp_path / "text.txt", 512
    text.write_text("A first text.\n\nAnother one, which is longer than the first.\n" * 200)
    line = f"--model=hf:{tmp_path / 'model'} --init-from=scratch --dataset=text:{text} --tokenizer=bytes"
    line += f" --batch-size=2 --seq-len={length} --no-save-model --attention="
    by_mask, by_flex = (planned(line + way, gpu=True).peak.bytes for way in ("auto", "flex"))
    assert by_mask - by_flex > 2 * length * length  # a byte for each pair of a row


def test_values_that_follow_from_no_batch_are_known() -> None:
    values = fake.Values(lambda: True)
    with fake.fake_mode(), values:
        positions = torch.arange(5).unsqueeze(0) + 1
        assert values.knows(positions)
        assert (positions.diff() == 1).all()  # as a run would answer
        batch = torch.empty(1, 5, dtype=torch.int64)
        assert not values.knows(batch + positions)
        positions.add_(batch)
        assert not values.knows(positions)
        with pytest.raises(fake.data_dependent()):
            bool((positions == 1).all())


def test_transformers_still_asks_where_it_is_answered() -> None:
    from transformers.utils.import_utils import is_tracing

    values = fake.Values(lambda: True)
    with fake.fake_mode(), values:
        known, unknown = torch.arange(3), torch.empty(3)
        assert is_tracing(known)
        with fake.seen_by_transformers(values):
            assert not is_tracing(known)
            assert is_tracing(unknown)
        assert is_tracing(known)
