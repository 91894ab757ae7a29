"""The judge: one process that trains transformers' Llama, with peft's adapters, by plain autograd.

Nothing of `fsdp2/` is imported, so a fault that all its runs share isn't shared by this. A document is a forward of
its own, without masks or positions; a step is a backward of all samples, so their order and ranks play no role.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Trained:
    """What a training left.

    Attributes:
        losses: of each step, the mean over its targets, before its update.
        norms: of each step's gradients, before they're clipped.
        gradients: of the first step, after they're clipped, by name.
        parameters: after the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def model_of(size: dict[str, Any]) -> nn.Module:
    """transformers' Llama of a size, with the values that its own constructor draws."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size["vocab_size"],
        hidden_size=size["dim"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        intermediate_size=size["hidden"],
        tie_word_embeddings=size["tied"],
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        attn_implementation="eager",
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def start_of(size: dict[str, Any]) -> dict[str, Tensor]:
    """Weights with which each part of the model matters: also those of norms differ from each other."""
    model, generator = model_of(size), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * drawn if name.endswith("norm.weight") else 0.2 * drawn)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def sequences(texts: list[str], samples: int, window: int, *, apart: bool) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, (n,) each, of the windows; or of each part of a document that stands in one."""
    tokens = [byte for text in texts for byte in text.encode()][: samples * window + 1]
    owner = [number for number, text in enumerate(texts) for _ in text.encode()]
    found = []
    for begin in range(0, samples * window, window):
        begins = [begin]
        if apart:
            begins += [at for at in range(begin + 1, begin + window) if owner[at] != owner[at - 1]]
        for first, after in zip(begins, [*begins[1:], begin + window], strict=True):
            targets = tokens[first + 1 : after + 1]
            if apart and owner[after] != owner[after - 1]:
                targets[-1] = -100
            found.append((torch.tensor(tokens[first:after]), torch.tensor(targets)))
    return found


def train(
    size: dict[str, Any],
    start: dict[str, Tensor],
    rows: list[tuple[Tensor, Tensor]],
    *,
    steps: int,
    lr: float,
    clip: float | None = None,
    bf16: bool = False,
    frozen: tuple[str, ...] = (),
    adapters: dict[str, Tensor] | None = None,
) -> Trained:
    """Train all that isn't frozen, or the adapters alone, by SGD with a momentum of 0.9.

    Args:
        start: the model's whole state.
        rows: as `sequences` gives them; all are one step.
        clip: the norm that gradients are clipped to.
        bf16: compute with parameters rounded to bf16; they stay, and are updated, in fp32.
        frozen: patterns of names.
        adapters: of rank 2, by the names that peft gives them; their product counts twice.
    """
    torch.manual_seed(0)
    model = model_of(size)
    model.load_state_dict(start)
    if adapters is not None:
        from peft import LoraConfig, inject_adapter_in_model

        within = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        names = sorted(within - {"lm_head"})
        inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=names), model)
        missing = model.load_state_dict(adapters, strict=False)
        assert not missing.unexpected_keys, missing.unexpected_keys
    for name, parameter in model.named_parameters():
        trained = "lora_" in name if adapters is not None else not any(fnmatchcase(name, one) for one in frozen)
        parameter.requires_grad_(trained)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(named.values(), lr=lr, momentum=0.9)
    count = sum(int((targets != -100).sum()) for _, targets in rows)
    found = Trained()
    for step in range(steps):
        loss = sum(_losses(model, rows, bf16=bf16), torch.zeros(())) / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(named.values(), float("inf") if clip is None else clip)
        if step == 0:
            found.gradients = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    found.parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
    return found


def _losses(model: nn.Module, rows: list[tuple[Tensor, Tensor]], *, bf16: bool) -> Iterator[Tensor]:
    kind = torch.bfloat16 if bf16 else torch.float32
    rounded = {name: parameter.to(kind) for name, parameter in model.named_parameters()}
    for inputs, targets in rows:
        outputs = torch.func.functional_call(model, rounded, (inputs.unsqueeze(0),), tie_weights=True)
        yield F.cross_entropy(outputs.logits[0].float(), targets, reduction="sum", ignore_index=-100)
