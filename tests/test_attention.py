"""Attention: blocks say what a mask says, a kernel is chosen for all threads, and what can't be is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp2.config import Config, parse
from fsdp2.models import attention, llama
from fsdp2.models.attention import BLOCK, attend, block_mask, document_mask, kernels, mask_of, way
from fsdp2.models.initial import reset_parameters
from fsdp2.options.errors import ConfigError
from fsdp2.options.strategies import check_device
from fsdp2.parallel.activation_checkpointing import EXPENSIVE, checkpoint_activations
from fsdp2.report import header
from tests.harness import Ranks, forget_models, losses, main_in_ranks, of_kind

TEXT = ["--model=llama", "--dataset=text:x.txt"]


def documents(length: int, *ends: tuple[int, ...]) -> Tensor:
    """Rows of documents that end at these places, (N, length)."""
    rows = [torch.bucketize(torch.arange(length), torch.tensor(row, dtype=torch.int64), right=True) for row in ends]
    return torch.stack(rows)


ROWS = {
    "shorter than a block": documents(16, (5, 9), ()),
    "blocks": documents(2 * BLOCK, (BLOCK,), (1, 2, 3, BLOCK + 1)),
    "a rest": documents(2 * BLOCK + 44, (100, 250), (7,)),
    "in no order": documents(BLOCK + 9, (3, 130)).flip(-1),
}


@pytest.mark.parametrize("rows", ROWS)
def test_empty_blocks_are_empty_and_full_ones_full(rows: str) -> None:
    mask = document_mask(ROWS[rows])
    blocks = block_mask(ROWS[rows])
    rest = -mask.shape[-1] % BLOCK
    count = (mask.shape[-1] + rest) // BLOCK
    # Of each block (N, queries, keys), how many pairs see each other; what is beyond the end doesn't.
    seen = F.pad(mask, (0, rest, 0, rest)).view(len(mask), count, BLOCK, count, BLOCK).sum((2, 4))

    def dense(number: Tensor | None, indices: Tensor | None) -> Tensor:
        assert number is not None
        assert indices is not None
        found = torch.zeros_like(seen, dtype=torch.bool)
        for row, query in torch.cartesian_prod(torch.arange(len(mask)), torch.arange(count)).tolist():
            found[row, query, indices[row, 0, query, : number[row, 0, query]].long()] = True
        return found

    partly = dense(blocks.kv_num_blocks, blocks.kv_indices)
    full = dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert torch.equal(seen[full], torch.full_like(seen[full], BLOCK * BLOCK))
    assert not seen[~(full | partly)].any()
    assert not (full & partly).any()
    if rows == "blocks":
        assert full[0].tolist() == [[False, False], [False, False]]
        assert partly.tolist() == [[[True, False], [False, True]], [[True, False], [True, True]]]


def test_a_block_before_ones_own_in_one_document_is_full() -> None:
    blocks = block_mask(documents(3 * BLOCK, ()))
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.tolist() == [[[0, 1, 2]]]
    assert blocks.kv_num_blocks.tolist() == [[[1, 1, 1]]]


@pytest.fixture
def flex_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """FlexAttention on the CPU, forward and backward, as torch computes it without a compiler; how often it is called.

    torch refuses to train with it there, since its CPU kernel has no backward. Uncompiled it needs none.
    """
    from torch.nn.attention import flex_attention as torchs

    calls: list[int] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return torchs.flex_attention(*arguments, **named)

    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "flex", lambda: counted)
    monkeypatch.setattr(attention, "way", lambda *arguments, **named: "flex")
    yield calls
    torch._dynamo.reset()


def _values_and_gradients(function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    given = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*given)
    out.square().sum().backward()
    return [out.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", ["shorter than a block", "a rest"])
def test_flex_attends_as_the_mask_says(rows: str, flex_here: list[int]) -> None:
    ids = ROWS[rows]
    generator = torch.Generator().manual_seed(0)
    shape = (len(ids), 4, ids.shape[1], 16)
    query, key, value = (torch.randn(shape, generator=generator)[:, :heads] for heads in (4, 2, 2))
    blocks = mask_of(ids, query.transpose(1, 2), "auto")
    assert not isinstance(blocks, Tensor)
    ours = _values_and_gradients(partial(attend, mask=blocks), query, key, value)
    theirs = _values_and_gradients(partial(attend, mask=document_mask(ids)), query, key, value)
    assert flex_here == [1]
    for one, other in zip(ours, theirs, strict=True):
        # fp32 sums in another order: up to 300 terms. Largest difference seen: 6e-6, of gradients up to 10.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def _model(more: dict[str, Any]) -> nn.Module:
    model = llama.SPEC.make(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, **more)
    reset_parameters(model, llama.INITIAL_VALUES, seed=1)
    return model


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("recompute", [None, "block", "op"])
def test_a_llama_with_flex_is_that_with_a_mask(
    recompute: str | None, flex_here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = documents(40, (11, 30), (7,))
    tokens = torch.randint(64, ids.shape, generator=torch.Generator().manual_seed(0))
    found = {}
    for choice in ("auto", "math"):
        if choice == "math":
            monkeypatch.setattr(attention, "way", way)
        model = _model({"attention": choice})
        if recompute is not None:
            checkpoint_activations(llama.blocks(model), recompute)
        loss = llama.loss(model(tokens, None, ids), tokens)
        loss.backward()
        found[choice] = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    assert len(flex_here) >= 2  # a call of each block, and more in backward
    for one, other in zip(found["auto"], found["math"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # fp32 through two blocks


def test_recomputing_cheap_operators_keeps_what_flex_gave() -> None:
    assert torch.ops.higher_order.flex_attention in EXPENSIVE


def test_flex_is_compiled_once_for_all_batches(flex_here: list[int]) -> None:
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention.flex_attention import flex_attention

    counter = CompileCounter()
    compiled = torch.compile(flex_attention, backend=counter, fullgraph=True)
    query, key = torch.ones(2, 2, 40, 16), torch.ones(2, 2, 40, 16)
    for ends in (((11, 30), (7,)), ((1,), ()), ((5, 6, 7), (39,))):
        compiled(query, key, key, block_mask=block_mask(documents(40, *ends)), enable_gqa=True)
    assert counter.frame_count == 1


def test_compiled_blocks_take_flex_in_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention import flex_attention as torchs

    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(attention, "way", lambda *arguments, **named: "flex")
    torch._dynamo.reset()
    counter, model = CompileCounter(), _model({})
    for block in llama.blocks(model):
        block.compile(backend=counter, fullgraph=True)
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    for ends in (((11, 30), (7,)), ((1,), ()), ((5, 6, 7), (39,))):
        model(tokens, None, documents(40, *ends)).sum().backward()
    torch._dynamo.reset()
    assert counter.frame_count == 1  # equal blocks share it


def test_who_attends_by_flex() -> None:
    assert way("auto", "cuda", apart=True) == ("flex" if attention.missing() is None else "auto")
    assert way("auto", "cuda", apart=False) == "auto"
    assert way("flex", "cuda", apart=False) == "flex"
    assert way("auto", "cpu", apart=True) == way("flex", "cpu", apart=True) == "auto"
    assert way("math", "cuda", apart=True) == "math"


def test_where_nothing_compiles_documents_are_kept_apart_by_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "missing", lambda: "a C compiler")
    assert way("auto", "cuda", apart=True) == "auto"
    with pytest.raises(ConfigError, match="flex: it has to be compiled, and a C compiler is missing"):
        check_device(Config(model="llama", attention="flex"), "cuda")


class Seen(TorchDispatchMode):
    """The names of the operators that run, also in the thread of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_kernel_is_the_only_one_in_recomputation_and_on_other_threads_too() -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    query = torch.ones(1, 2, 8, 16, requires_grad=True)
    seen: dict[str, set[str]] = {}

    def attends() -> None:
        with Seen() as mode:
            checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), query, use_reentrant=False).sum().backward()
        seen[threading.current_thread().name] = mode.names

    attends()
    assert flash in seen.pop("MainThread")
    with kernels("math"):
        attends()
        other = threading.Thread(target=attends, name="other")
        other.start()
        other.join()
    assert [flash in names for names in seen.values()] == [False, False]
    attends()
    assert flash in seen["MainThread"]


def _run(flags: list[str], ways: list[str]) -> list[tuple[list[float], str]]:
    found = []
    for one in ways:
        events = main_in_ranks([*flags[:-1], f"{flags[-1]}/{one}", f"--attention={one}"])
        line = next(line for line in of_kind(events, "start")[0]["header"] if line.startswith("attention"))
        found.append((losses(events), line))
    assert torch.backends.cuda.flash_sdp_enabled()
    return found


def test_a_run_attends_as_its_header_says(ranks: Ranks, tmp_path: Path) -> None:
    flags = ["--model=llama", "--dataset=random-tokens", "--seq-len=16", "--batch-size=4", "--max-steps=2"]
    flags += ["--test-batch-size=64", "--threads=1", "--device=cpu", "--no-save-model", f"--run-dir={tmp_path}"]
    ((free, of_torch), (plain, math)), *_ = ranks.run(_run, flags, ["auto", "math"], ranks=2)
    assert (of_torch, math) == ("attention: as torch chooses", "attention: math")
    assert plain == pytest.approx(free, rel=1e-6)


WAYS = {"fsdp2": [], "none": ["--strategy=none"], "flex": [], "flex in fsdp1": ["--strategy=fsdp1"]}


def _alone(flags: list[str], folder: str) -> dict[str, list[float]]:
    """Losses of each of `WAYS`; some with FlexAttention in place of the mask, as on a GPU."""
    from torch.nn.attention import flex_attention as torchs

    found = {}
    for name, more in WAYS.items():
        with pytest.MonkeyPatch.context() as patch:
            if name.startswith("flex"):
                patch.setattr(torchs, "_validate_device", lambda *tensors: None)
                patch.setattr(attention, "flex", lambda: torchs.flex_attention)
                patch.setattr(attention, "way", lambda *arguments, **named: "flex")
            found[name] = losses(main_in_ranks([*flags, *more, f"--run-dir={folder}/{name}"]))
    torch._dynamo.reset()
    return found


def test_one_rank_trains_in_bf16_without_sharding_and_with_flex_nearly_as_with_fsdp2(
    ranks: Ranks, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A first text.\n\nAnother one, which is longer than the first.\n" * 40)
    flags = ["--model=llama", f"--dataset=text:{text}", "--seq-len=32", "--batch-size=4", "--max-steps=4"]
    flags += ["--mixed-precision=bf16", "--activation-checkpointing", "--chunked-loss=32", "--threads=1"]
    (found,) = ranks.run(_alone, [*flags, "--device=cpu", "--no-save-model"], str(tmp_path), ranks=1)
    masked = found.pop("fsdp2")
    for name, others in found.items():
        # Autocast and FlexAttention round other things to bf16's three digits.
        assert others == pytest.approx(masked, rel=5e-3), name
        assert others != masked, name


@pytest.mark.parametrize(
    ("flags", "device", "message"),
    [
        (["--model=cnn", "--attention=math"], "cpu", "math with --model cnn: the model doesn't use torch's scaled_dot"),
        (
            ["--model=vit", "--attention=flex"],
            "cuda",
            "flex with --model vit: the model has no FlexAttention to train with",
        ),
        (["--model=vit", "--attention=cudnn"], "cpu", "cudnn: it is a kernel of GPUs; on a CPU use auto or math"),
        (["--model=vit", "--attention=flash"], "cpu", "flash: it is a kernel of GPUs; on a CPU use auto or math"),
        (["--model=llama", "--attention=flex"], "cpu", "flex: torch's FlexAttention has no backward on a CPU"),
        (["--model=llama", "--attention=flash"], "cuda", "flash without --mixed-precision: the kernel computes in"),
        ([*TEXT, "--attention=flash", "--mixed-precision"], "cuda", "apart: the kernel takes no mask"),
        (["--model=vit", "--attention=cudnn", "--mixed-precision", "--deterministic"], "cuda", "the kernel isn't; use"),
        (["--model=llama", "--attention=efficient"], "cuda", "a key of it serves several queries"),
    ],
)
def test_what_can_not_attend_so_is_refused(flags: list[str], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_device(parse(flags), device)


def test_models_of_transformers_follow_a_kernel_if_they_use_torchs_attention(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.others.common import save

    flags = [f"--model={save('llama', tmp_path)}", "--attention=math"]
    check_device(parse(flags), "cpu")
    numbers = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**numbers, "attention_dropout": 0.1}))
    forget_models()
    with pytest.raises(ConfigError, match=r"flex with --model hf:.*: the model has no FlexAttention to train with"):
        parse([*flags[:1], "--attention=flex"])
    (tmp_path / "config.json").write_text(json.dumps({**numbers, "attn_implementation": "eager"}))
    forget_models()
    with pytest.raises(ConfigError, match=r"math with --model hf:.*: the model doesn't use torch's scaled_dot_product"):
        parse(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--model=vit", "--attention=efficient"],
        ["--model=llama", "--model-size=160m", "--attention=efficient"],  # as many keys as queries
        ["--model=llama", "--attention=flash", "--mixed-precision"],
        [*TEXT, "--attention=flash", "--mixed-precision", "--documents=together"],
        [*TEXT, "--attention=math"],
        ["--model=cnn"],
    ],
)
def test_what_can_attend_so_is_not_refused(flags: list[str]) -> None:
    check_device(parse(flags), "cuda")


def test_the_header_names_what_a_gpu_would_use() -> None:
    gpu = torch.device("cuda", 0)
    for flags, expected in (
        (TEXT, ["attention: flex"] if attention.missing() is None else ["attention: as torch chooses"]),
        ([*TEXT, "--documents=together"], ["attention: as torch chooses"]),
        ([*TEXT, "--attention=efficient", "--model-size=160m"], ["attention: efficient"]),
        (["--model=vit"], ["attention: as torch chooses"]),
        (["--model=cnn"], []),
    ):
        config = parse(flags)
        assert header.attention(config, gpu) == expected


def test_a_plan_counts_scores_and_masks_where_there_are_any() -> None:
    from fsdp2_tools.plan.device import gpu
    from fsdp2_tools.plan.plans import plan

    h200 = gpu("h200")
    line = [*TEXT, "--seq-len=1024", "--batch-size=2"]

    def peak(*flags: str) -> int:
        return plan(parse([*line, *flags]), 1, h200, None).tensors

    scores = 4 * 2 * 4 * 1024 * 1024  # of a layer, fp32
    apart, together = peak(), peak("--documents=together")
    assert apart == together  # no mask
    assert peak("--attention=math", "--documents=together") > together + scores
    with pytest.raises(ConfigError, match="flash with --documents apart"):
        peak("--attention=flash", "--mixed-precision")
