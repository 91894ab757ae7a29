"""Tiny models of transformers, made in code and saved as a user has them; and a plain loop to compare with."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fsdp2 import data, train
from fsdp2.checkpoint.state import RandomState, seed_everything
from fsdp2.config import parse
from fsdp2.data.loader import Batches
from fsdp2.models.spec import ModelSpec
from fsdp2.parallel.groups import shard_groups
from fsdp2.parallel.meta import shared_names
from fsdp2.parallel.precision import with_statistics
from fsdp2.run.process import runtime
from tests.harness import imported_once

imported_once("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
imported_once("peft", "timm.models")

SEED = 3
BATCH = 4  # of each of two ranks
TEXT = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}

# Class of the configuration, class of the model, and what makes it small. What is drawn by chance is off: each rank
# draws its own.
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**TEXT, **LLAMA, "num_key_value_heads": 2}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",  # its embedding is its head
        {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**TEXT, **LLAMA, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",  # one weight under three names
        {**TEXT, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {"vocab_size": 256, **LLAMA, "max_position_embeddings": 32}
        | dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {**LLAMA, "image_size": 28, "patch_size": 7, "num_channels": 1, "num_labels": 10}
        | dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
    ),
}
WORDS = ("--dataset=random-tokens",)  # of language; its test split is small


def save(name: str, folder: Path, seed: int = 0, **more: Any) -> str:
    """A folder with a tiny model and its weights, as `save_pretrained` writes it; how `--model` calls it."""
    import transformers

    config_class, model_class, numbers = MODELS[name]
    torch.manual_seed(seed)
    getattr(transformers, model_class)(getattr(transformers, config_class)(**{**numbers, **more})).save_pretrained(
        folder
    )
    return f"hf:{folder}"


def plain(model: str) -> nn.Module:
    """The model of a folder as transformers loads it, where torch would have put its memory.

    A tensor that is mapped from a file lies where the file has it, and MKL rounds by how a matrix is aligned: the same
    weights give other last bits from there.
    """
    import transformers

    folder = model.removeprefix("hf:")
    named: list[str] = transformers.AutoConfig.from_pretrained(folder).architectures
    return aligned(getattr(transformers, named[0]).from_pretrained(folder, dtype=torch.float32))


def aligned(model: nn.Module) -> nn.Module:
    """A model with its tensors in memory that torch has allocated."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def flags(model: str, run: Path | str, *more: str) -> list[str]:
    """The command line of the smallest run of a model, into a run directory."""
    return [
        *(f"--model={model}", f"--run-dir={run}", f"--batch-size={BATCH}", "--threads=1", "--device=cpu"),
        *("--optimizer=adam", "--schedule=step", "--warmup-steps=0", "--clip-grad-norm=off"),  # with weights, too
        *("--lr=0.01", "--seq-len=16", "--test-batch-size=1000", f"--seed={SEED}"),
        *more,
    ]


def started(line: list[str]) -> dict[str, Any]:
    """The whole model as a run of this command line starts with it, see `contents`. To be run by `Ranks`."""
    config = parse(line)
    engine = train.make_engine(config, runtime.world(), torch.device("cpu"), restoring=False)
    return {
        **contents(engine.model),
        "state": dict(get_model_state_dict(engine.model, options=StateDictOptions(full_state_dict=True))),
    }


def contents(model: nn.Module) -> dict[str, Any]:
    """State dict, buffers whether it has them or not, and the names of shared parameters, of a plain model."""
    return {
        "state": dict(model.state_dict()),
        "buffers": buffers_of(model),
        "shared": [names for names in shared_names(model) if len(names) > 1],
    }


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """By their names in the model, whatever wraps it."""
    return {re.sub(r"(_fsdp_wrapped_)?module\.", "", name): buffer.clone() for name, buffer in model.named_buffers()}


class Together(torch.autograd.Function):
    """What a group is given. Gradients of one input are summed within the group first, as by the hooks of FSDP2."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


class Rounded:
    """A model whose parameters are rounded for each forward, as `MixedPrecisionPolicy(param_dtype)` has them.

    Inputs of the groups that `fully_shard` would be called on are rounded too, and batch norms stay as they are. What a
    forward changes in buffers stays in the copy.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.model, self.copy = model, copy.deepcopy(model)
        as_it_is = {parameter for norm in with_statistics([self.copy]) for parameter in norm.parameters()}
        for parameter in set(self.copy.parameters()) - as_it_is:
            parameter.data = parameter.data.to(dtype)
            if hasattr(parameter, "grad_dtype"):  # since torch 2.15, whose FSDP2 keeps a gradient as it comes
                parameter.grad_dtype = None

        def cast(_: nn.Module, *given: Any) -> Any:
            rounded, structure = tree_flatten(
                tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, given)
            )
            at = [i for i, one in enumerate(rounded) if isinstance(one, Tensor) and one.requires_grad]
            for i, one in zip(at, Together.apply(*(rounded[i] for i in at)) if at else (), strict=True):
                rounded[i] = one
            return tree_unflatten(rounded, structure)

        groups = shard_groups(self.copy, spec.blocks(self.copy), 1)
        for module in [self.copy, *(module for group in groups for module in group)]:
            module.register_forward_pre_hook(cast, with_kwargs=True)

    def __enter__(self) -> nn.Module:
        for whole, rounded in zip(self.model.parameters(), self.copy.parameters(), strict=True):
            rounded.data.copy_(whole.data)
            rounded.grad = None
        return self.copy.train()

    def __exit__(self, *_: object) -> None:
        for whole, rounded in zip(self.model.parameters(), self.copy.parameters(), strict=True):
            if rounded.grad is not None:
                gradient = rounded.grad.to(whole.dtype)
                whole.grad = gradient if whole.grad is None else whole.grad + gradient


def plain_losses(
    model: nn.Module, steps: int, spec: ModelSpec | None = None, compute: torch.dtype = torch.float32
) -> list[float]:
    """The losses of a plain loop in one process, on what two ranks would get: two microbatches for each step.

    What a model draws by chance, such as dropout, it draws for a microbatch as the rank would that got it.

    Args:
        compute: the dtype of parameters and inputs in forward and backward; what the optimizer updates is the model's.
    """
    tasks: dict[str, tuple[str, int | None]] = {"t5": ("seq2seq", 0), "bert": ("masked", 255)}
    kind = vars(model)["config"].model_type if spec is None else spec.kind
    task, token = tasks.get(kind, ("causal", None)) if spec is None else (spec.task, spec.special_token)
    dataset = data.load(
        "digits" if kind in ("vit", "image") else "random-tokens",
        root=None,
        seq_len=16,
        vocab_size=256 if spec is None else spec.vocab_size("own"),
        task=task,
        special_token=token,
    )
    batches = Batches(
        dataset.train,
        global_batch=2 * BATCH,
        accumulation=2,
        seed=SEED,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
        workers=0,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    losses: list[float] = []
    draws = [RandomState(rank, torch.device("cpu")) for rank in range(2)]
    drawn = []
    for rank, one in enumerate(draws):
        seed_everything(SEED, rank)
        drawn.append(one.state_dict())
    rounded = None if spec is None or compute == torch.float32 else Rounded(model, spec, compute)
    for microbatches in batches:
        parts = []
        for rank, batch in enumerate(microbatches):
            draws[rank].load_state_dict(drawn[rank])
            with rounded or nullcontext(model) as used:
                if rounded or kind == "image":  # an image is resized, which is all that happens to it
                    assert spec is not None
                    logits = spec.logits(spec.call(used, batch))
                else:
                    named = {"input_ids" if kind != "vit" else "pixel_values": batch.inputs}
                    logits = used(**(batch.inputs if isinstance(batch.inputs, dict) else named)).logits
                part = F.cross_entropy(logits.float().flatten(0, -2), batch.targets.flatten(), reduction="sum")
                (part / batch.target_count).backward()
            parts.append(part.detach())
            drawn[rank] = draws[rank].state_dict()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(parts).double().sum() / batch.target_count))
        if len(losses) == steps:
            break
    return losses
