"""LoRA: the weights stay as they are, and beside some of them two thin matrices are trained.

A linear layer with the weight W (out, in) computes W x + (alpha / rank) B A x, with A (rank, in) and B (out, rank); B
starts at zero. Source: https://arxiv.org/abs/2106.09685. The layers are those of the `peft` package, with which a
program that doesn't know this one loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fsdp2.models.initial import Table, draw, fan_in_uniform, fill_for, zeros

ADAPTER = "default"  # peft's name of an adapter that has none
FILE = "adapter_config.json"  # peft's name

# As peft draws them: kaiming_uniform with a = sqrt(5) is U(-1/sqrt(fan in), 1/sqrt(fan in)).
INITIAL_VALUES: Table = {"*.lora_A.*": fan_in_uniform, "*.lora_B.*": zeros}


@dataclass(frozen=True)
class Lora:
    """The matrices that are trained.

    Attributes:
        rank: of the product B A.
        alpha: the product counts alpha / rank times.
        targets: patterns of the names of linear layers; none = all those in blocks.
        dropout: the chance with which training sets an input of A to zero. The layer's own input stays.
        base_dtype: in which the weights that stay are kept. The one that they are computed in changes no result.
        weights: where those come from.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    dropout: float = 0.0
    base_dtype: torch.dtype = torch.float32
    weights: str | None = None

    def targets_in(self, model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
        """Names of the layers that get adapters. Raises ValueError if a pattern matches none."""
        linear = [name for name, one in model.named_modules() if isinstance(one, nn.Linear) or _is_transposed(one)]
        patterns = self.targets
        if not patterns:
            inside = {id(module) for block in blocks for module in block.modules()}
            patterns = tuple(name for name in linear if id(model.get_submodule(name)) in inside)
        if not patterns:
            raise ValueError("--lora: no block of the model has a linear layer; name those that are to have adapters")
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in linear):
                near = ", ".join(linear[:3]) or "none"
                raise ValueError(f"--lora-targets {pattern}: no linear layer has such a name; they are like {near}")
        return [name for name in linear if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def adapt(self, model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, Any]:
        """Put adapters into a model, which alone are trained then; what peft's adapter_config.json says of them.

        Raises ValueError as `targets_in` does, and for layers that can't be adapted, such as a tied head.
        """
        from peft import LoraConfig, inject_adapter_in_model

        if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
            raise ValueError(
                "--lora: training changes the averages of the model's batch norms, which a checkpoint of adapters "
                "doesn't hold"
            )
        names = self.targets_in(model, blocks)
        transposed = {_is_transposed(model.get_submodule(name)) for name in names}
        if len(transposed) > 1:
            raise ValueError("--lora-targets: some of the layers are nn.Linear and some Conv1D; name those of one kind")
        for name in names:
            if others := _sharing(model, name):
                raise ValueError(
                    f"--lora-targets {name}: shares its weight with {others[0]}, and an adapter changes one of the "
                    "two; merged, it would change both; name other layers"
                )
        # The last part of a name says it for each block, as people write it, where no other module has such a name.
        parts = sorted({name.rpartition(".")[2] for name in names})
        same = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in parts}
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            lora_dropout=self.dropout,
            target_modules=parts if same == set(names) else names,
            fan_in_fan_out=transposed.pop(),
            base_model_name_or_path=self.weights,
        )
        inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        for name, parameter in model.named_parameters():
            if not is_adapter(name):
                parameter.requires_grad_(False)
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(self.base_dtype)
        return {**config.to_dict(), "target_modules": sorted(config.target_modules or ()), "inference_mode": True}


def is_adapter(name: str) -> bool:
    """Return whether a weight of this name is one of a pair A, B."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The name that a weight which isn't trained has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def base_weights(named: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's weights by name those that aren't adapters, under their names in a model without any."""
    return {base_name(name): value for name, value in named.items() if not is_adapter(name)}


def draw_adapters(model: nn.Module, seed: int, *, brought: Callable[[str], bool]) -> None:
    """Set the adapters of a model, sharded or not, but for those that something else brings."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if is_adapter(name))
    draw(((name, tensor, fill_for(INITIAL_VALUES, name)) for name, tensor in named if not brought(name)), seed)


def _sharing(model: nn.Module, name: str) -> list[str]:
    """The modules, but for this one, that have its weight."""
    weight = model.get_submodule(name).weight
    return [one for one, module in model.named_modules() if one != name and getattr(module, "weight", None) is weight]


def _is_transposed(module: nn.Module) -> bool:
    # GPT-2's Conv1D is a linear layer whose weight is transposed, and peft knows it.
    return type(module).__name__ == "Conv1D"
