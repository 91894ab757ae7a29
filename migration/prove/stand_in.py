"""The CPU in the place of torch.cuda and torch.accelerator, for programs that run nowhere else.

It is honest where a program only says where its tensors are: each "cuda" device becomes the CPU, NCCL becomes gloo, and
streams, events and memory statistics do nothing. Everything is computed as on a CPU, so the losses aren't a GPU's. A
program that compiles kernels of its own, or asks for what no CPU has, fails, and so it is refused.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

CPU = torch.device("cpu")
# Libraries ask for these while they are imported, to choose their kernels.
PROPERTIES = SimpleNamespace(
    name="the CPU in a GPU's place", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32
)
ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_usage device_memory_used
    utilization temperature power_draw clock_rate initial_seed get_sync_debug_mode"""
NOTHING = """set_device synchronize empty_cache ipc_collect init manual_seed manual_seed_all set_rng_state set_stream
    reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats
    set_sync_debug_mode set_per_process_memory_fraction set_device_index set_device_idx"""
EMPTY = "Stream Event current_stream default_stream stream device device_index"


def _moved(value: Any) -> Any:
    """A device as it is given: "cuda:1", torch.device("cuda", 1)."""
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


def _all_moved(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_moved, arguments)), {key: _moved(value) for key, value in named.items()}


class _OnTheCpu(TorchFunctionMode):
    """Of functions that take a device, and of Tensor.to(0), Tensor.cuda() and Tensor.is_cuda."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _all_moved(args, kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], CPU, *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = CPU
        if function is torch.Tensor.pin_memory:
            return args[0]
        return function(*args, **kwargs)


class _Nothing:
    """A stream or an event: whatever is asked of it does nothing, and it is its own context."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def patched(holder: Any, name: str, change: Callable[[dict[str, Any]], None]) -> Any:
    """Change what a function is called with, by its parameters' names, while this is entered."""
    theirs = getattr(holder, name)
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def replacement(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        change(given.arguments)
        return theirs(*given.args, **given.kwargs)

    return mock.patch.object(holder, name, replacement)


def _set(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda given: given.update(values)


def _on_cpu(*names: str) -> Callable[[dict[str, Any]], None]:
    def change(given: dict[str, Any]) -> None:
        given.update({name: "cpu" if isinstance(given[name], str) else CPU for name in names if name in given})

    return change


def _module_to(theirs: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def to(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
        arguments, named = _all_moved(arguments, named)
        return theirs(module, *(CPU if type(one) is int else one for one in arguments), **named)

    return to


def stand_in(rank: int, devices: int) -> ExitStack:
    """Until it is closed, this process seems to have a GPU, on a node of so many."""
    stack = ExitStack()
    answers: dict[str, Any] = {
        **dict.fromkeys(ZERO.split(), 0),
        **dict.fromkeys(NOTHING.split()),
        **dict.fromkeys(EMPTY.split(), _Nothing),
        **dict.fromkeys(("is_available", "is_bf16_supported", "can_device_access_peer"), True),
        "device_count": devices,
        **dict.fromkeys(("current_device", "current_device_index", "current_device_idx"), rank % devices),
        "current_accelerator": CPU,
        "is_current_stream_capturing": False,
        "get_device_name": PROPERTIES.name,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": PROPERTIES,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_per_process_memory_fraction": 1.0,
        **dict.fromkeys(("mem_get_info", "get_memory_info"), (PROPERTIES.total_memory,) * 2),
        "memory_stats": {},
        "memory_summary": "",
    }
    for holder, (name, answer) in itertools.product((torch.cuda, torch.accelerator), answers.items()):
        if name in holder.__all__:
            known = answer if answer is _Nothing else lambda *_, answer=answer, **__: answer
            stack.enter_context(mock.patch.object(holder, name, known))
    # FSDP1's HYBRID_SHARD makes a shard group of the devices of a node.
    stack.enter_context(mock.patch.object(torch.cpu, "device_count", return_value=devices))
    stack.enter_context(patched(dist, "init_process_group", _set(backend="gloo", device_id=None)))
    stack.enter_context(patched(dist, "new_group", _set(backend="gloo", device_id=None)))
    stack.enter_context(patched(DeviceMesh, "__init__", _on_cpu("device_type")))
    # FSDP1's CPU offload would add up all steps' gradients here: by their device it tells whether it has moved them.
    stack.enter_context(patched(FullyShardedDataParallel, "__init__", _set(device_id=CPU, cpu_offload=None)))
    # FSDP1 refuses sync_module_states=True on a CPU, where gloo can broadcast as well. Its check has no public name.
    stack.enter_context(mock.patch("torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"))
    stack.enter_context(patched(DistributedDataParallel, "__init__", _set(device_ids=None, output_device=None)))
    stack.enter_context(patched(DataLoader, "__init__", _set(pin_memory=False)))
    for holder in (torch.autocast, torch.amp.GradScaler):
        stack.enter_context(patched(holder, "__init__", _on_cpu("device_type", "device")))
    stack.enter_context(mock.patch.object(nn.Module, "to", _module_to(nn.Module.to)))
    stack.enter_context(mock.patch.object(nn.Module, "cuda", lambda module, *_: module))
    stack.enter_context(_OnTheCpu())
    return stack
