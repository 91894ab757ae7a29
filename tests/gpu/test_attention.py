"""Attention on a GPU: each kernel trains, FlexAttention is the mask and needs less memory; segments of memory grow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp2.models import attention
from fsdp2.run.process.settings import ALLOCATOR
from tests.gpu import harness
from tests.gpu.harness import DEVICE, ON_GPU, Events, Ranks, losses, of_kind

COMMON = ["--model=llama", "--batch-size=4", "--max-steps=4", f"--device={DEVICE}", "--no-save-model"]


def _text(folder: Path, documents: int = 300) -> Path:
    file = folder / "text.txt"
    lines = [f"Document {number}: {'words and ' * (number % 7)}its end." for number in range(documents)]
    file.write_text("\n\n".join(lines))
    return file


def _train(gpus: Ranks, folder: Path, name: str, *flags: str) -> Events:
    events: Events = gpus.run(harness.train, [*COMMON, f"--run-dir={folder / name}", *flags])[0]
    return events


def _line(events: Events, begins: str) -> str:
    return next(line for line in of_kind(events, "start")[0]["header"] if line.startswith(begins))


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "flex"])
def test_each_kernel_trains_as_all_scores_in_memory_do(gpus: Ranks, tmp_path: Path, kernel: str) -> None:
    if not ON_GPU:
        pytest.skip("kernels of GPUs")
    flags = ["--dataset=random-tokens", "--seq-len=256", "--mixed-precision"]
    if kernel == "efficient":  # which takes as many keys as queries
        flags += ["--model-size=160m"]
    chosen = _train(gpus, tmp_path, kernel, *flags, f"--attention={kernel}")
    plain = _train(gpus, tmp_path, "math", *flags, "--attention=math")
    assert _line(chosen, "attention") == f"attention: {kernel}"
    assert losses(chosen) == pytest.approx(losses(plain), rel=2e-2)  # bf16


@pytest.mark.parametrize("more", [[], ["--activation-checkpointing=block"], ["--activation-checkpointing=op"]])
def test_documents_apart_are_so_without_a_mask(gpus: Ranks, tmp_path: Path, more: list[str]) -> None:
    flags = [f"--dataset=text:{_text(tmp_path)}", "--seq-len=256", *more]
    chosen = _train(gpus, tmp_path, "auto", *flags)
    masked = _train(gpus, tmp_path, "math", *flags, "--attention=math")
    flex = ON_GPU and attention.missing() is None
    assert _line(chosen, "attention") == ("attention: flex" if flex else "attention: as torch chooses")
    # fp32, whose products FlexAttention may compute in TF32, with 10 bits of mantissa.
    assert losses(chosen) == pytest.approx(losses(masked), rel=1e-3)


def test_a_model_of_transformers_keeps_documents_apart_without_a_mask(gpus: Ranks, tmp_path: Path) -> None:
    if not ON_GPU or attention.missing() is not None:
        pytest.skip("FlexAttention is compiled for a GPU")
    pytest.importorskip("transformers")
    from tests.others.common import save

    flags = [f"--dataset=text:{_text(tmp_path)}", "--seq-len=256", "--tokenizer=bytes", "--bos=never"]
    flags += [f"--model={save('llama', tmp_path / 'model', max_position_embeddings=256)}"]
    chosen = _train(gpus, tmp_path, "flex", *flags, "--attention=flex")
    masked = _train(gpus, tmp_path, "auto", *flags)
    assert _line(chosen, "attention") == "attention: flex"
    assert _line(masked, "attention") == "attention: as torch chooses"
    assert losses(chosen) == pytest.approx(losses(masked), rel=1e-3)  # as above


def _peak(gpus: Ranks, folder: Path, name: str, *flags: str) -> int:
    events = _train(gpus, folder, name, *flags)
    peak: int = max(step["peak_memory_bytes"] for step in of_kind(events, "train"))
    return peak


def test_long_rows_of_documents_need_no_memory_for_pairs(gpus: Ranks, tmp_path: Path) -> None:
    if not ON_GPU or attention.missing() is not None:
        pytest.skip("FlexAttention is compiled for a GPU")
    flags = [f"--dataset=text:{_text(tmp_path, 3000)}", "--seq-len=2048", "--mixed-precision"]
    scores = 4 * 4 * 2048 * 2048 * 2  # of a layer's four heads, bf16
    apart, masked = _peak(gpus, tmp_path, "auto", *flags), _peak(gpus, tmp_path, "math", *flags, "--attention=math")
    assert masked > apart + scores


def test_a_compiled_block_takes_flex_in(gpus: Ranks, tmp_path: Path) -> None:
    if not ON_GPU or attention.missing() is not None:
        pytest.skip("FlexAttention is compiled for a GPU")
    flags = [f"--dataset=text:{_text(tmp_path)}", "--seq-len=256", "--mixed-precision"]
    eager, compiled = (_train(gpus, tmp_path, name, *flags, *more) for name, more in (("e", []), ("c", ["--compile"])))
    assert losses(compiled) == pytest.approx(losses(eager), rel=2e-2)  # bf16


def test_segments_of_memory_grow(tmp_path: Path) -> None:
    fresh = Ranks()  # an allocator reads its settings once
    line = _line(_train(fresh, tmp_path, "run", "--dataset=random-tokens", "--seq-len=16"), "memory")
    fresh.close()
    said = [name for name in ALLOCATOR if name in os.environ]
    assert line.endswith("segments of GPU memory grow") == (ON_GPU and not said)
