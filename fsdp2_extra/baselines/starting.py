"""The start of a baseline's model: on meta, then with memory and initial values, whole or a part at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fsdp2.parallel.activation_checkpointing import checkpoint_activations
from fsdp2.parallel.compiling import compile_blocks
from fsdp2.parallel.freeze import freeze
from fsdp2.parallel.meta import allocate, check_initialised, poison, shared_names
from fsdp2.parallel.rules import Options, Start


def meta_model(options: Options, start: Start) -> tuple[nn.Module, Sequence[nn.Module]]:
    """The model on meta and its blocks: frozen, then with recomputation, then compiled, as the options say."""
    model = start.build()
    freeze(model, options.freeze)
    blocks = start.blocks_of(model)
    if options.activation_checkpointing:
        checkpoint_activations(blocks, options.activation_checkpointing)
    if options.compile:
        compile_blocks(blocks)
    return model, blocks


def whole_model(options: Options, start: Start) -> nn.Module:
    """The model with initial or loaded weights. Each rank holds all of it."""
    model, _ = meta_model(options, start)
    fill(model, options, start)
    if start.load_weights is not None:
        start.load_weights(model)
    return model


def fill(model: nn.Module, options: Options, start: Start) -> None:
    """Give a whole model on meta its memory and its initial values."""
    allocate(model, start.device, cpu_offload=options.cpu_offload)
    start.set_weights(model)
    check_initialised(model, brought=start.brought)


def ties_weights(model: nn.Module) -> bool:
    """Return whether a parameter has two names in this model."""
    return any(len(names) > 1 for names in shared_names(model))


def materialise(module: nn.Module, name: str, start: Start) -> nn.Module:
    """Give memory and initial values to what a module on meta owns itself; its children stay as they are.

    Args:
        name: of the module in the whole model.
        start: its `set_weights` is called with a model that holds only the module's own tensors, under their names in
            the whole model.

    Returns that model. Raises RuntimeError if one of the tensors is left unset.
    """
    values = {name: buffer for name, buffer in module.named_buffers(recurse=False) if not buffer.is_meta}
    module.to_empty(device=start.device, recurse=False)
    prefix = f"{name}." if name else ""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    part = model_of({prefix + key: tensor for key, tensor in own})
    poison(part)
    for key, value in values.items():
        getattr(module, key).copy_(value)
    start.set_weights(part)
    check_initialised(part, brought=start.brought)
    return part


def model_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A model that can't compute: the tensors under their names, as parameters where they are `nn.Parameter`s."""
    model = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = model
        for child in path:
            if child not in dict(module.named_children()):
                module.add_module(child, nn.Module())
            module = module.get_submodule(child)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)
    return model
