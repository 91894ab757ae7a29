"""`--float8`: torchao's products as their definition says, losses near bf16's, and nothing of it in what is kept."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import infer
from fsdp2.config import parse
from fsdp2.options.errors import ConfigError
from fsdp2.options.strategies import check_device
from fsdp2.parallel import FLOAT8
from fsdp2.train import main
from fsdp2_extra.low_precision.float8 import compute_in_float8, converted, layers
from tests.harness import (
    AllGathers,
    Ranks,
    full_files,
    goes_on_bit_for_bit,
    loss_of,
    losses,
    main_in_ranks,
    make_engine,
    of_kind,
    same,
    small,
)
from tests.others.common import save

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the extra torchao")

Train = Callable[..., Any]
LLAMA = ["--model=llama", "--model-size=debug", "--dataset=random-tokens", "--seq-len=32", "--lr=0.01", "--threads=1"]
FLOAT8_IN_BF16 = ["--mixed-precision=bf16", "--float8=tensorwise"]
FLAGS = [*LLAMA, "--mixed-precision=bf16", "--test-batch-size=64"]


def rounded(tensor: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """What is left of a tensor in float8, with one scale or, by powers of two, with one along a dimension."""
    largest = tensor.abs().max() if dim is None else tensor.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double()).float()
    if dim is not None:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (tensor.float() * scale).to(dtype).float() / scale


@needs_torchao
@pytest.mark.parametrize("recipe", FLOAT8)
def test_a_layer_multiplies_what_float8_leaves_of_its_operands(recipe: str) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 48))
    parameters = dict(block.named_parameters())
    weight, bias = (one.detach().clone() for one in parameters.values())
    compute_in_float8(block, [block], recipe, "cpu")
    assert {name: id(one) for name, one in block.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    x = torch.randn(7, 3, 32, requires_grad=True)  # 21 tokens
    gradient = torch.randn(7, 3, 48)
    y = block(x)
    y.backward(gradient)

    rows = recipe == "rowwise"
    small, large = torch.float8_e4m3fn, torch.float8_e4m3fn if rows else torch.float8_e5m2
    # A scale is of what is summed together: rows of the one operand, columns of the other.
    along, across = (1, 0) if rows else (None, None)
    flat, upper = x.detach().reshape(-1, 32), gradient.reshape(-1, 48)
    expected = rounded(flat, small, along) @ rounded(weight, small, along).t() + bias
    of_input = rounded(upper, large, along) @ rounded(weight, small, across)
    of_weight = rounded(upper, large, across).t() @ rounded(flat, small, across)
    # Sums of equal products in another order; float8 itself is 2 % off, as the last line says.
    for ours, theirs in ((y, expected), (x.grad, of_input), (parameters["0.weight"].grad, of_weight)):
        assert ours is not None
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-4, atol=1e-5)
    exact = flat @ weight.t() + bias
    assert 0.005 < (y.reshape(exact.shape) - exact).norm() / exact.norm() < 0.05


def _gathered(flags: str) -> list[tuple[Tensor, Tensor]]:
    """What each rank multiplies by, of each layer in float8, and the weight from which it is made."""
    engine = make_engine(flags)
    found = []
    for block in cast(Any, engine.model).model.layers:
        wholes = {name: weight.full_tensor().detach() for name, weight in block.named_parameters()}
        block.unshard()
        for name, weight in block.named_parameters():
            if wholes[name].dim() == 2:
                found.append((weight._data.float() / weight._scale, wholes[name]))
        block.reshard()
    return found


@needs_torchao
@pytest.mark.parametrize(("flags", "count"), [("", 2), ("", 3), (" --replicas=2", 4)])
def test_weights_are_gathered_in_float8_with_the_scale_of_the_whole(ranks: Ranks, flags: str, count: int) -> None:
    for weights in ranks.run(_gathered, " ".join([*LLAMA, *FLOAT8_IN_BF16]) + flags, ranks=count):
        assert len(weights) == 14
        for gathered, whole in weights:
            assert torch.equal(gathered[: len(whole)], rounded(whole, torch.float8_e4m3fn, None))


def _bytes(flags: str) -> list[int]:
    engine = make_engine(f"--mixed-precision=bf16 {flags}")
    found: list[int] = []
    with AllGathers(found.append):
        engine.backward(loss_of(engine), True)
    return found


@needs_torchao
@pytest.mark.parametrize(
    ("recipe", "more", "saved"),
    [
        # A byte for each of the numbers in the two layers of a block of the smallest ViT.
        ("tensorwise", "", 2 * 32 * 64),
        ("tensorwise", "--reshard-after-forward=true", 2 * 32 * 64),
        ("tensorwise", "--reshard-after-forward=2", 0),
        ("tensorwise", "--cpu-offload", 0),
        ("rowwise", "", 0),
    ],
)
def test_half_the_bytes_of_bf16_travel(ranks: Ranks, recipe: str, more: str, saved: int) -> None:
    (ours, _), (theirs, _) = (ranks.run(_bytes, f"{flag} {more}") for flag in (f"--float8={recipe}", ""))
    # The root, which has no such layers, and two blocks; in backward the first block, or all three.
    blocks = [0, 1, 1, 1] if len(theirs) == 4 else [0, 1, 1, 0, 1, 1]
    assert [a - b for a, b in zip(theirs, ours, strict=True)] == [saved * block for block in blocks]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(16, 32)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.stages = nn.Sequential(nn.Linear(32, 16), nn.Linear(32, 16))


def test_which_layers() -> None:
    block = _Block()
    assert list(layers([block])) == [block.second, *block.stages]


@needs_torchao
def test_layers_that_are_left_out_stay_as_they_are() -> None:
    block = _Block()
    compute_in_float8(block, [block], "tensorwise", "cpu")
    replaced = [name for name, one in block.named_modules() if type(one).__name__ == "Float8Linear"]
    assert replaced == ["second", "stages.0", "stages.1"]


@needs_torchao
def test_weights_that_are_shared_stay_shared() -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))]
    model = nn.Sequential(*blocks)
    blocks[1][0].weight = blocks[0][0].weight
    compute_in_float8(model, blocks, "tensorwise", "cpu", gather=True)
    assert blocks[1][0].weight is blocks[0][0].weight
    assert [one.config.enable_fsdp_float8_all_gather for one in converted(model)] == [False, True, False]


@needs_torchao
@pytest.mark.parametrize("recipe", FLOAT8)
def test_a_run_is_near_bf16_and_resumes_bit_for_bit(train: Train, tmp_path: Path, recipe: str) -> None:
    line = [*FLAGS, f"--float8={recipe}"]
    plain = losses(train(*FLAGS, run="plain", steps=6))
    whole = goes_on_bit_for_bit(train, tmp_path, line)
    # Measured: 5e-4 at this high rate.
    assert whole != plain
    assert whole == pytest.approx(plain, rel=2e-3)


@needs_torchao
def test_what_is_kept_is_that_of_any_run(train: Train, tmp_path: Path) -> None:
    # Three ranks cut the rows of 16 and 48 unevenly.
    line = [*FLAGS, "--ema=0.9", "--activation-checkpointing=op"]
    reported = of_kind(train(*line, "--float8=tensorwise", n=3, steps=2), "eval")[-1]["loss"]
    train(*FLAGS, n=1, run="plain", steps=2)
    here, there = (full_files(tmp_path / name)[0] for name in ("run", "plain"))
    assert {name: (type(one), one.dtype, one.shape) for name, one in here.items()} == {
        name: (type(one), one.dtype, one.shape) for name, one in there.items()
    }
    # It computes in bf16 what the run computed in float8.
    assert infer.main(tmp_path / "run")["loss"] == pytest.approx(reported, rel=1e-3)
    before = full_files(tmp_path / "run")
    (tmp_path / "run" / "full_model" / "full-model.pt").unlink()
    again = train(*line, n=2, steps=2)
    assert of_kind(again, "end")[0]["reason"] == "already finished"
    assert same(full_files(tmp_path / "run"), before), "without the flag, on another number of ranks"
    assert len(losses(train(*line, n=2, steps=3))) == 1


@needs_torchao
def test_the_header_counts_layers_that_are_groups_of_their_own(train: Train) -> None:
    events = train(*FLAGS, "--float8=tensorwise", "--shard-granularity=layer", "--checkpoint-every=never", n=1, steps=1)
    header = "\n".join(of_kind(events, "start")[0]["header"])
    assert "14 linear layers in float8 (tensorwise, weights gathered so, emulated)" in header


@needs_torchao
def test_recomputation_changes_nothing(train: Train) -> None:
    line = [*FLAGS, "--float8=rowwise", "--no-save-model", "--checkpoint-every=never"]
    found = [
        losses(train(*line, *more, n=1, run="-".join(more) or "none", steps=3))
        for more in ([], ["--activation-checkpointing=block"], ["--activation-checkpointing=op"])
    ]
    assert found[0] == found[1] == found[2]


@needs_torchao
def test_a_model_of_transformers_with_a_short_batch(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the model is its own")
    model = save("llama", tmp_path / "model")
    line = [*LLAMA[2:], *FLOAT8_IN_BF16, "--device=cpu", f"--run-dir={tmp_path / 'run'}", "--max-steps=2"]
    # 7 sequences of 5 tokens are 35 tokens.
    events = ranks.run(main_in_ranks, [*line, f"--model={model}", "--seq-len=5", "--batch-size=7"], ranks=2)[0]
    header = "\n".join(of_kind(events, "start")[0]["header"])
    assert "14 linear layers in float8 (tensorwise, weights gathered so, emulated)" in header
    assert len(losses(events)) == 2


def test_a_gpu_without_float8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse([*FLAGS, "--float8=tensorwise"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"--float8 tensorwise: NVIDIA A100 has no float8 products.*drop it"):
        check_device(config, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    check_device(config, "cuda")


@needs_torchao
def test_a_model_without_such_layers_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the model is its own")
    model = save("gpt2", tmp_path / "model")  # whose layers are not nn.Linear
    line = [f"--model={model}", "--model-size=own", *LLAMA[2:], *FLOAT8_IN_BF16]
    with pytest.raises(ConfigError, match=r"--float8 tensorwise with --model hf:.*: none of its blocks has .*; drop"):
        main(parse(small(tmp_path / "run", *line)))


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else real(name, *rest)
    )
    with pytest.raises(ConfigError, match=r"--float8 tensorwise: torchao isn't installed.*\[torchao\]"):
        main(parse(small(tmp_path / "run", *FLAGS, "--float8=tensorwise")))
