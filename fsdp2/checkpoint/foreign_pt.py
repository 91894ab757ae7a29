"""Read a stranger's `.pt` that holds objects beside tensors: those become inert, and no code of theirs is run.

`weights_only` refuses such a file as a whole. But trainers save their settings, NumPy's random state or sharded tensors
beside the weights, and the weights are what one wants.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2

from fsdp2.checkpoint.source import Refused


class Unread:
    """Stands for an object of a class that isn't known here. It keeps what the file says of it, and does nothing.

    Attributes:
        named: the class, as the file names it.
        arguments, state: what it would have been made with.
    """

    named = ""

    def __new__(cls, *arguments: Any, **named: Any) -> Unread:
        self = object.__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.arguments: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        in_slots = isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict)
        self.state = state[1] if in_slots else state

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...

    def __repr__(self) -> str:
        return f"a {self.named}"


def _unread(named: str) -> type[Unread]:
    return type("Unread", (Unread,), {"named": named})


class _Call:
    """A function that a file may call, and do nothing else with: pickle lets it set attributes of what it names."""

    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: Any) -> None:
        raise Refused(f"the file sets {name} of a function, which no checkpoint does; it was not loaded")

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def _from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A tensor of a subclass: of what isn't known here only what is said of it is kept."""
    if isinstance(kind, type) and issubclass(kind, Unread):
        found = kind(*arguments)
        found.state = state
        return found
    if not isinstance(function, _Call):
        raise Refused("the file makes a tensor in a way that is not known here; it was not loaded")
    return function(*arguments)


def _attribute(owner: Any, name: Any) -> Any:
    if isinstance(owner, type) and issubclass(owner, Unread):
        return _unread(f"{owner.named}.{name}")
    raise Refused(f"the file asks for the attribute {name} of something, which no checkpoint does; it was not loaded")


# All that a file may name. Each makes data of data.
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.nn.parameter", "Parameter"): torch.Tensor,
    ("torch", "device"): _Call(torch.device),
    ("torch.serialization", "_get_layout"): _Call(str),
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuild_tensor_v2),
    ("torch._utils", "_rebuild_parameter"): _Call(_rebuild_parameter),
    ("torch._tensor", "_rebuild_from_type_v2"): _Call(_from_type),
    **{(module, "getattr"): _Call(_attribute) for module in ("builtins", "__builtin__")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        return _unread(f"{module}.{name}")


def load_foreign(path: Path) -> Any:
    """What torch.save wrote, its tensors mapped from the file, and an `Unread` for each object of an unknown class.

    Raises Refused for TorchScript and what no checkpoint does, or what torch.load raises for what is no archive of its.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise Refused(f"{path}: is TorchScript, which holds code; save the state dict")
    # torch.load asks a module for an Unpickler and for its name; no other reads objects without their classes.
    module: Any = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
    return torch.load(path, mmap=True, weights_only=False, map_location="cpu", pickle_module=module)
