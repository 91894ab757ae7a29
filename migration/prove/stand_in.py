"""The CPU in the place of torch.cuda and torch.accelerator, for programs that run nowhere else.

It is honest where a program only says where its tensors are: each "cuda" device becomes the CPU, NCCL becomes gloo, and
streams, events and memory statistics do nothing. Everything is computed as on a CPU, so the losses aren't a GPU's. A
program that compiles kernels of its own, or asks for what no CPU has, fails, and so it is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
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


def _with(holder: Any, name: str, change: Callable[[dict[str, Any]], None]) -> Any:
    theirs = getattr(holder, name)
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def replacement(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named)
        change(given.arguments)
        return theirs(*given.args, **given.kwargs)

    return mock.patch.object(holder, name, replacement)


def _gloo(given: dict[str, Any]) -> None:
    given.update(backend="gloo")
    given.pop("device_id", None)


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


def stand_in(rank: int, ranks: int) -> ExitStack:
    """Until it is closed, this process seems to have a GPU."""
    stack = ExitStack()
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": ranks,
        "current_device": rank,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "get_device_name": "the CPU in a GPU's place",
        "get_device_capability": (9, 0),
        **dict.fromkeys(
            ("set_device", "synchronize", "empty_cache", "ipc_collect", "init", "manual_seed", "manual_seed_all")
        ),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats")),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        "memory_stats": {},
        "mem_get_info": (80 << 30, 80 << 30),
    }
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        stack.enter_context(mock.patch.object(torch.cuda, name, _Nothing))
    stack.enter_context(mock.patch.object(torch.cuda, "device", _Nothing))
    answers = {
        "is_available": True,
        "device_count": ranks,
        "current_accelerator": CPU,
        "current_device_index": rank,
        "current_stream": _Nothing(),
    }
    for name, answer in (answers | dict.fromkeys(("set_device_index", "synchronize", "device_index"))).items():
        stack.enter_context(mock.patch.object(torch.accelerator, name, lambda *_, answer=answer, **__: answer))
    stack.enter_context(_with(dist, "init_process_group", _gloo))
    stack.enter_context(_with(dist, "new_group", _gloo))
    stack.enter_context(_with(DeviceMesh, "__init__", _on_cpu("device_type")))
    stack.enter_context(_with(FullyShardedDataParallel, "__init__", _set(device_id=CPU)))
    stack.enter_context(_with(DistributedDataParallel, "__init__", _set(device_ids=None, output_device=None)))
    stack.enter_context(_with(DataLoader, "__init__", _set(pin_memory=False)))
    for holder in (torch.autocast, torch.amp.GradScaler):
        stack.enter_context(_with(holder, "__init__", _on_cpu("device_type", "device")))
    stack.enter_context(mock.patch.object(nn.Module, "to", _module_to(nn.Module.to)))
    stack.enter_context(mock.patch.object(nn.Module, "cuda", lambda module, *_: module))
    stack.enter_context(_OnTheCpu())
    return stack
