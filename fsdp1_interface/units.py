"""The modules that become groups, and what happens to each before it is sharded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import CustomPolicy

from fsdp1_interface.arguments import Arguments


class Ignored:
    """Modules and parameters that no group may hold, those of inner FSDP calls included.

    Attributes:
        modules: with all that is in them.
        parameters: all of them; `fully_shard` is given this set.
    """

    def __init__(self, root: nn.Module, arguments: Arguments) -> None:
        given = list(arguments.ignored_states or arguments.ignored_modules or ())
        tensors = [thing for thing in given if isinstance(thing, nn.Parameter)]
        modules = [thing for thing in given if isinstance(thing, nn.Module)]
        if len(given) != len(tensors) + len(modules):
            raise TypeError("ignored_states: give parameters or modules")
        if any(isinstance(module, FSDPModule) for module in modules):
            raise ValueError("ignored_modules: one of them is sharded already")
        self.modules = {inner for module in modules for inner in module.modules()}
        self.parameters = {*tensors, *(p for module in self.modules for p in module.parameters(recurse=False))}
        for module in root.modules():
            inner: Ignored | None = getattr(module.__dict__.get("_fsdp1"), "ignored", None)
            if inner is not None:
                self.modules |= inner.modules
                self.parameters |= inner.parameters


def chosen(root: nn.Module, arguments: Arguments, ignored: Ignored) -> dict[nn.Module, dict[str, Any]]:
    """The modules that `auto_wrap_policy` makes units, inner ones first, with the arguments it changes for each.

    Those that mixed precision leaves out (`alone`) are units of their own, as in FSDP1.
    Raises ValueError if something in the model is sharded already, as FSDP1 does.
    """
    policy = arguments.auto_wrap_policy
    found: dict[nn.Module, dict[str, Any]] = {}
    if policy is None:
        return found
    if any(isinstance(module, FSDPModule) for module in root.modules()):
        raise ValueError("auto_wrap_policy: a module in this model is sharded already; shard it by one of the two ways")
    classes = alone(arguments)
    if isinstance(policy, CustomPolicy):
        decide = custom_decision(policy)
        for module in _post_order(root):
            answer = False if module is root or module in ignored.modules else decide(module)
            if not isinstance(answer, (dict, bool)):
                raise ValueError(f"CustomPolicy: {type(answer).__name__} returned; give a bool, or a dict of arguments")
            if answer is not False or (isinstance(module, classes) and module not in ignored.modules):
                found[module] = answer if isinstance(answer, dict) else {}  # an empty dict is a unit too
        return _without_empty(found, ignored)

    def ask(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if classes and (recurse or isinstance(module, classes)):
            return True
        return bool(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel))

    _ask(root, ask, ignored, found, is_root=True)
    return _without_empty(found, ignored)


def _without_empty(found: dict[nn.Module, dict[str, Any]], ignored: Ignored) -> dict[nn.Module, dict[str, Any]]:
    """Without the lists of modules whose parameters are all in inner units: `fully_shard` refuses lists, since they
    have no forward that could gather anything. One with parameters of its own fails under FSDP1 too."""
    taken: set[nn.Parameter] = set(ignored.parameters)
    kept = {}
    for module, changes in found.items():
        own = set(module.parameters()) - taken
        taken |= own
        if own or not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            kept[module] = changes
    return kept


def alone(arguments: Arguments) -> tuple[type[nn.Module], ...]:
    """The classes whose modules compute in fp32 when the others don't; batch norm unless told otherwise."""
    precision = arguments.mixed_precision
    return () if precision is None or arguments.auto_wrap_policy is None else tuple(precision._module_classes_to_ignore)


def custom_decision(policy: CustomPolicy) -> Callable[[nn.Module], Any]:
    """The function that a CustomPolicy was made with. torch has no public way to ask for it
    (`test_the_function_of_a_custom_policy_can_be_read`)."""
    return policy._lambda_fn


def _ask(
    module: nn.Module,
    policy: Callable[..., bool],
    ignored: Ignored,
    found: dict[nn.Module, dict[str, Any]],
    *,
    is_root: bool = False,
) -> int:
    """FSDP1's protocol: may it be entered; then, with the parameters that no inner unit has taken, is it one?
    Returns how many parameters are in units."""
    total = sum(p.numel() for p in module.parameters() if p not in ignored.parameters)
    if not policy(module=module, recurse=True, nonwrapped_numel=total):
        return 0
    inner = sum(_ask(child, policy, ignored, found) for child in module.children() if child not in ignored.modules)
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=total - inner):
        found[module] = {}
        return total
    return inner


def _post_order(root: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        seen.add(module)
        for child in module.children():
            if child not in seen:
                yield from visit(child)
        yield module

    return visit(root)


def own_modules(unit: nn.Module, ignored: Ignored) -> list[nn.Module]:
    """The modules of a unit that no inner unit has, from the outside in: FSDP1's order of initialising them."""
    order, queue, seen = [], deque([unit]), {unit}
    while queue:
        module = queue.popleft()
        order.append(module)
        for child in module.children():
            if child not in seen and not isinstance(child, FSDPModule) and child not in ignored.modules:
                seen.add(child)
                queue.append(child)
    return order


@torch.no_grad()
def materialize(unit: nn.Module, arguments: Arguments, ignored: Ignored) -> None:
    """Give a unit on the meta device memory and values, by `param_init_fn` or each module's `reset_parameters()`.

    Raises ValueError if a module has no such method, or if anything is left on meta.
    """
    modules = own_modules(unit, ignored)

    def on_meta() -> list[str]:
        return [
            f"{type(module).__name__}.{name}"
            for module in modules
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if tensor.is_meta and tensor not in ignored.parameters
        ]

    if not on_meta():
        return
    for module in modules:
        if arguments.param_init_fn is not None:
            arguments.param_init_fn(module)
        elif any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            reset = getattr(module, "reset_parameters", None)
            if reset is None:
                raise ValueError(
                    f"{type(module).__name__} is on the meta device and has no reset_parameters(); give it one, or "
                    "give FSDP a param_init_fn"
                )
            module.to_empty(device=arguments.device, recurse=False)
            reset()
    if left := on_meta():
        raise ValueError(f"still on the meta device after initialisation: {', '.join(left)}")


@torch.no_grad()
def synchronize(unit: nn.Module, mesh: DeviceMesh, ignored: Ignored, seen: set[Tensor]) -> None:
    """Broadcast a unit's parameters, and all buffers not yet in `seen`, from the first rank of the mesh.

    Over the replicas first, so that the first rank of each shard group has them when they go to its others.
    """
    buffers = [buffer for buffer in unit.buffers() if buffer not in seen]
    seen.update(buffers)
    own = [p for module in own_modules(unit, ignored) for p in module.parameters(recurse=False)]
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        for tensor in (*buffers, *(p for p in dict.fromkeys(own) if p not in ignored.parameters)):
            dist.broadcast(tensor.detach(), dist.get_global_rank(group, 0), group=group)
