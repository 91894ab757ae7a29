"""Explain a call of the shim as the FSDP2 code that one would write by hand."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp1_interface.arguments import Arguments
from fsdp1_interface.units import Ignored

log = logging.getLogger("fsdp1_interface")
_said: set[str] = set()


def say(what: str, code: str) -> None:
    """At the level of a warning, since that is what is seen by default."""
    warn(f"{what} is, in FSDP2:\n" + "\n".join(f"    {line}" for line in code.splitlines()))


def warn(text: str) -> None:
    """Once in a process, on rank 0 alone."""
    if text not in _said and (not dist.is_initialized() or dist.get_rank() == 0):
        _said.add(text)
        log.warning(text)


def constructor_code(
    model: nn.Module,
    names: Mapping[nn.Module, str],
    plan: Mapping[nn.Module, Mapping[str, Any]],
    arguments: Arguments,
    ignored: Ignored,
    buffers_cast: list[str],
    on_meta: bool,
) -> str:
    """Code that can be run as it is, where `model` is what FSDP was called with. Only how a model that is on the
    meta device on rank 0 gets its values isn't in it, and it says so.

    Args:
        names: of the modules, from before they were sharded.
        plan: `fully_shard`'s arguments for each module, in the order of the calls; the model is the last.
    """
    body: list[str] = []
    if on_meta:
        body.append("# First what is on the meta device gets memory and values: to_empty() and reset_parameters()")
    if arguments.sync_module_states:
        tied = len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))
        body += [
            "if any(tensor.is_meta for tensor in model.parameters()):  # on a rank that leaves values to rank 0",
            f'    model.to_empty(device="{arguments.device.type}")',
            *["    # That unties weights: tie them here, as by model.tie_weights() of transformers"] * tied,
            *["else:", f'    model.to("{arguments.device.type}")'] * (arguments.device.type != "cpu"),
            "for tensor in (*model.parameters(), *model.buffers()):",
            "    dist.broadcast(tensor.detach(), 0)",
        ]
    if buffers_cast:
        assert arguments.mixed_precision is not None  # else nothing would have been cast
        body += [
            f"for name in {tuple(buffers_cast)}:",
            f"    model.get_buffer(name).data = model.get_buffer(name).to({arguments.mixed_precision.buffer_dtype})",
        ]
    if ignored.parameters:
        left_out = sorted(name for name, p in model.named_parameters() if p in ignored.parameters)
        body.append(f"ignored = {{model.get_parameter(name) for name in {tuple(left_out)}}}")
    meshes = {plan[model]["mesh"]: "mesh"}
    for keywords in plan.values():  # a CustomPolicy may give a unit another strategy, and so another mesh
        meshes.setdefault(keywords["mesh"], f"mesh_{len(meshes) + 1}")
    groups: dict[str, list[nn.Module]] = {}
    for module, keywords in plan.items():
        if module is not model:
            groups.setdefault(_keywords(keywords, meshes), []).append(module)
    for text, modules in groups.items():
        body += _loop(model, modules, names, text)
    body.append(f"fully_shard(model, {_keywords(plan[model], meshes)})")
    body += _prefetch(arguments)
    others = [_mesh_line(name, mesh) for mesh, name in meshes.items() if name != "mesh"]
    return "\n".join([*_imports(body, groups), *_mesh(arguments), *others, *body])


def _loop(model: nn.Module, modules: list[nn.Module], names: Mapping[nn.Module, str], keywords: str) -> list[str]:
    """By class where a class says it, else by name."""
    classes = {original_class(module) for module in modules}
    of_class = [module for module in names if module is not model and isinstance(module, tuple(classes))]
    if len(classes) <= 3 and len(of_class) == len(modules):
        wanted = ", ".join(sorted(cls.__name__ for cls in classes))
        return [
            f"for unit in reversed(list(model.modules())):  # inner ones first; {len(modules)} of them",
            f"    if isinstance(unit, {f'({wanted})' if len(classes) > 1 else wanted}) and unit is not model:",
            f"        fully_shard(unit, {keywords})",
        ]
    listed = ", ".join(repr(names[module]) for module in modules)
    return [f"for name in ({listed},):", f"    fully_shard(model.get_submodule(name), {keywords})"]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the user wrote; those of the shim and of fully_shard come before it."""
    made = next((cls for cls in type(module).__mro__ if "_fsdp1_original" in cls.__dict__), None)
    return type(module) if made is None else made.__dict__["_fsdp1_original"]


def _keywords(given: Mapping[str, Any], meshes: Mapping[DeviceMesh, str]) -> str:
    parts = [f"mesh={meshes[given['mesh']]}"]
    if given["reshard_after_forward"] is not None:
        parts.append(f"reshard_after_forward={given['reshard_after_forward']}")
    if given["mp_policy"] != MixedPrecisionPolicy():
        parts.append(f"mp_policy={_precision(given['mp_policy'])}")
    if isinstance(given["offload_policy"], CPUOffloadPolicy):
        parts.append(f"offload_policy=CPUOffloadPolicy(pin_memory={given['offload_policy'].pin_memory})")
    if given["ignored_params"]:
        parts.append("ignored_params=ignored")
    return ", ".join(parts)


def _precision(policy: MixedPrecisionPolicy) -> str:
    names = ("param_dtype", "reduce_dtype", "output_dtype")
    given = [f"{name}={getattr(policy, name)}" for name in names if getattr(policy, name) is not None]
    return f"MixedPrecisionPolicy({', '.join(given)}, cast_forward_inputs={policy.cast_forward_inputs})"


def _mesh(arguments: Arguments) -> list[str]:
    mesh = arguments.mesh
    if arguments.device_mesh is not None and mesh is arguments.device_mesh:
        return ["# mesh: the one that was given"]
    if arguments.process_group is not None:
        return ["# mesh: DeviceMesh.from_group of the groups that were given"]
    return [_mesh_line("mesh", mesh)]


def _mesh_line(name: str, mesh: DeviceMesh) -> str:
    names = f", mesh_dim_names={mesh.mesh_dim_names}" if mesh.ndim == 2 else ""
    line = f'{name} = init_device_mesh("{mesh.device_type}", {tuple(mesh.shape)}{names})'
    whole = mesh.ndim == 2 and mesh.shape[1] == 1
    return line + "  # a shard is one rank: whole parameters, all-reduced gradients, as DDP" * whole


def _prefetch(arguments: Arguments) -> list[str]:
    lines = []
    if arguments.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        lines += [
            "for unit in model.modules():  # its own parameters instead of the next unit's: no prefetch in backward",
            "    if isinstance(unit, FSDPModule):",
            "        unit.set_modules_to_backward_prefetch([unit])",
        ]
    if arguments.forward_prefetch:
        lines += [
            "units = [module for module in model.modules() if isinstance(module, FSDPModule)]",
            "for unit, following in zip(units, units[1:]):",
            "    unit.set_modules_to_forward_prefetch([following])",
        ]
    return lines


def _imports(body: list[str], groups: Mapping[str, list[nn.Module]]) -> list[str]:
    text = "\n".join(body)
    names = ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "fully_shard")
    lines = ["import torch"] if "torch." in text else []
    if "dist." in text:
        lines.append("import torch.distributed as dist")
    lines += [
        "from torch.distributed.device_mesh import init_device_mesh",
        f"from torch.distributed.fsdp import {', '.join(name for name in names if name in text)}",
    ]
    classes = {original_class(module) for modules in groups.values() for module in modules}
    named = {cls for cls in classes if re.search(rf"isinstance\(unit, [^:]*\b{cls.__name__}\b", text)}
    named = {cls for cls in named if cls.__module__ != "__main__"}
    return lines + sorted(f"from {cls.__module__} import {cls.__name__}" for cls in named)
