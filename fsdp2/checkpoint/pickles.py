"""Unpickle a stranger's bytes without his classes: what comes out is plain values and inert `Unread` objects.

Python's own unpickler hands out real classes, and a pickle's BUILD sets attributes of what it is given: that changes
this process. One whose `find_class` hands out stand-ins, in C, reads a `.metadata` in an eighth of the time, and
isn't enough: it makes a table as long as the highest number of a memo (LONG_BINPUT), hashes whatever tuple is a key
(nested in itself 60 times that takes ages; a million deep, Python dies of its stack), and calls `extend`, `add`,
`__setitem__` and `__setstate__` of the tensors that a file's names make. This one knows the few opcodes that today's
writers emit, touches nothing but what it made itself, and takes time and memory in proportion to the file's size.

Source: https://docs.python.org/3/library/pickletools.html
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp2.checkpoint.refusal import Refused

# No checkpoint nests deeper; code that walks a tree by recursion can rely on it.
MAX_DEPTH = 100
_MAX_NAME = 500

Make = Callable[..., Any]


class Unread:
    """Stands for a class, a function, or an object of one. It keeps what the file says of it, and does nothing.

    Attributes:
        named: the class or function, as the file names it.
        arguments: what it would have been called with; None for the class or function itself.
        state: what would have been set on the object.

    Raises ValueError for a name of more than `_MAX_NAME` characters.
    """

    __slots__ = ("arguments", "named", "state")

    def __init__(self, named: str, arguments: tuple[Any, ...] | None = None, state: Any = None) -> None:
        if len(named) > _MAX_NAME:  # names are put together, of parts that a file has once
            raise ValueError("a name in it is too long")
        self.named, self.arguments, self.state = named, arguments, state

    def __repr__(self) -> str:
        return f"a {self.named}"


def unpickle(
    data: bytes, known: Mapping[str, Make], *, is_allowed: Callable[[str], bool], persistent: Make | None = None
) -> Any:
    """Read a pickle without running it. Raises Refused, with a reason that reads on from the name of the file.

    Args:
        known: name of a class or function -> what makes data of the arguments in its place. It may raise anything.
        is_allowed: whether another name may become an `Unread`.
        persistent: makes an object of a persistent id, where those are allowed.
    """
    machine = _Machine(data, known, is_allowed, persistent)
    try:
        return machine.run()
    except Refused:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, struct.error, RuntimeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:100]
        raise Refused(f"is not a complete pickle ({type(error).__name__} at byte {machine.at}: {reason})") from None


def new_dict() -> dict[Any, Any]:
    """Of no arguments: dict itself would hash whatever it is given."""
    return {}


def require_small(value: Any, limit: int) -> None:
    """Raise Refused for a tree that holds itself, is deeper than MAX_DEPTH, or is larger than `limit` when walked.

    References that are shared make a small file a tree of any size: the tree's nodes and characters are counted.
    """
    _weigh(value, limit, {}, 0)


def _weigh(value: Any, limit: int, seen: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """The weight of a value as a tree, and its height."""
    if isinstance(value, (str, bytes, bytearray)):
        return 1 + len(value), 0
    if not isinstance(value, (dict, list, tuple, set, frozenset)):
        return 1, 0
    if id(value) in seen:
        weight, height = seen[id(value)]
    else:
        seen[id(value)] = 0, MAX_DEPTH  # if it is met below itself
        children = [*value, *value.values()] if isinstance(value, dict) else value
        weight, height = 1, 0
        if depth < MAX_DEPTH:
            for child in children:
                child_weight, child_height = _weigh(child, limit, seen, depth + 1)
                weight, height = weight + child_weight, max(height, child_height + 1)
        seen[id(value)] = weight, height
    if depth + height >= MAX_DEPTH:
        raise Refused(f"is nested deeper than {MAX_DEPTH}, or holds itself, which no checkpoint does")
    if weight > limit:
        raise Refused("shares its parts so that it is far larger than its file, which no checkpoint does")
    return weight, height


def _is_key(value: Any) -> bool:
    """Return whether hashing it is quick: nested tuples take any time, and any stack."""
    if isinstance(value, (tuple, frozenset)):
        return all(isinstance(one, (str, int, float, bytes, type(None))) for one in value)
    return isinstance(value, (str, int, float, complex, bytes, Unread, torch.dtype, type(None)))


class _Machine:
    def __init__(
        self, data: bytes, known: Mapping[str, Make], is_allowed: Callable[[str], bool], persistent: Make | None
    ) -> None:
        self.data, self.known, self.is_allowed, self.persistent = data, known, is_allowed, persistent
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}  # and no list, which would be as long as the highest number

    def run(self) -> Any:
        data, operations = self.data, _OPERATIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                (result,) = self.stack
                return result
            if code not in operations:
                raise Refused(f"has the pickle opcode {bytes([code])!r}, which no writer of checkpoints emits")
            operations[code](self)

    def pop_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def tuple_of(self) -> None:
        self.stack.append(tuple(self.pop_mark()))

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def append(self) -> None:
        self.extend([self.stack.pop()])

    def appends(self) -> None:
        self.extend(self.pop_mark())

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Unread):
            raise TypeError("it appends to something that isn't a list")

    def add_items(self) -> None:
        items = self.pop_mark()
        if isinstance(self.stack[-1], set) and all(map(_is_key, items)):
            self.stack[-1].update(items)
        elif not isinstance(self.stack[-1], Unread):
            raise TypeError("it adds to something that isn't a set, or adds what a set can't hold")

    def frozen(self) -> None:
        items = self.pop_mark()
        if not all(map(_is_key, items)):
            raise TypeError("a set holds something that a set can't hold")
        self.stack.append(frozenset(items))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_all([key, value])

    def set_items(self) -> None:
        self.set_all(self.pop_mark())

    def set_all(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Unread):
            return
        if not isinstance(target, dict):
            raise TypeError("it sets items of something that isn't a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not _is_key(key):
                raise TypeError("a dictionary has a key that is unhashable")
            target[key] = value

    def global_(self) -> None:
        middle = self.data.index(b"\n", self.at)
        end = self.data.index(b"\n", middle + 1)
        module, name = self.data[self.at : middle].decode(), self.data[middle + 1 : end].decode()
        self.at = end + 1
        self.name(module, name)

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def name(self, module: str, name: str) -> None:
        if len(module) + len(name) > _MAX_NAME:
            raise ValueError("a name in it is too long")
        named = f"{'builtins' if module == '__builtin__' else module}.{name}"
        # Neither BUILD nor anything else can change them.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self.stack.append(dtype)
        elif named in self.known or self.is_allowed(named):
            self.stack.append(Unread(named))
        else:
            raise Refused(f"asks for {named}")

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not (isinstance(function, Unread) and function.arguments is None and isinstance(arguments, tuple)):
            raise TypeError("it calls something that isn't a function")
        make = self.known.get(function.named)
        self.stack.append(Unread(function.named, arguments) if make is None else make(*arguments))

    def call_named(self) -> None:
        named = self.stack.pop()
        self.call()
        if isinstance(self.stack[-1], Unread):
            self.stack[-1].state = named

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Unread) and target.arguments is not None:
            in_slots = isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict)
            target.state = state[1] if in_slots else state
        elif not isinstance(target, (dict, torch.Tensor)):  # whose attributes are left out
            raise TypeError(f"it sets attributes of a {'function or class' if isinstance(target, Unread) else 'value'}")

    def persistent_id(self) -> None:
        if self.persistent is None:
            raise Refused("refers to something outside of it, which no such file does")
        self.stack.append(self.persistent(self.stack.pop()))


Operation = Callable[[_Machine], None]


def _operand(form: str, use: Callable[[_Machine, Any], None]) -> Operation:
    """Read a number, and use it."""
    one = struct.Struct(form)

    def operate(machine: _Machine) -> None:
        use(machine, one.unpack_from(machine.data, machine.at)[0])
        machine.at += one.size

    return operate


def _counted(form: str, make: Callable[[bytes], Any]) -> Operation:
    """Read bytes that their length precedes."""
    count = struct.Struct(form)

    def operate(machine: _Machine) -> None:
        start = machine.at + count.size
        end = start + count.unpack_from(machine.data, machine.at)[0]
        if end > len(machine.data):
            raise ValueError("it ends in the middle")
        machine.stack.append(make(machine.data[start:end]))
        machine.at = end

    return operate


def _push(make: Callable[[], Any]) -> Operation:
    return lambda machine: machine.stack.append(make())


def _tuple(count: int) -> Operation:
    def operate(machine: _Machine) -> None:
        items = tuple(machine.stack[-count:])
        if len(items) != count:
            raise IndexError("the stack is empty")
        machine.stack[-count:] = [items]

    return operate


def _skip(count: int) -> Operation:
    def operate(machine: _Machine) -> None:
        machine.at += count

    return operate


_STOP = pickle.STOP[0]
_OPERATIONS: dict[int, Operation] = {
    operation[0]: operate
    for operation, operate in {
        pickle.BINPUT: _operand("B", _Machine.put),
        pickle.LONG_BINPUT: _operand("<I", _Machine.put),
        pickle.MEMOIZE: _Machine.memoize,
        pickle.BINGET: _operand("B", _Machine.get),
        pickle.LONG_BINGET: _operand("<I", _Machine.get),
        pickle.BININT1: _operand("B", _Machine.push),
        pickle.BININT2: _operand("<H", _Machine.push),
        pickle.BININT: _operand("<i", _Machine.push),
        pickle.BINFLOAT: _operand(">d", _Machine.push),
        pickle.LONG1: _counted("B", lambda raw: int.from_bytes(raw, "little", signed=True)),
        # Strictly: pickle itself lets a lone surrogate through, which no name has.
        pickle.SHORT_BINUNICODE: _counted("B", bytes.decode),
        pickle.BINUNICODE: _counted("<I", bytes.decode),
        pickle.SHORT_BINBYTES: _counted("B", bytes),
        pickle.BINBYTES: _counted("<I", bytes),
        pickle.NONE: _push(lambda: None),
        pickle.NEWTRUE: _push(lambda: True),
        pickle.NEWFALSE: _push(lambda: False),
        pickle.EMPTY_TUPLE: _push(tuple),
        pickle.EMPTY_LIST: _push(list),
        pickle.EMPTY_DICT: _push(dict),
        pickle.EMPTY_SET: _push(set),
        pickle.TUPLE1: _tuple(1),
        pickle.TUPLE2: _tuple(2),
        pickle.TUPLE3: _tuple(3),
        pickle.TUPLE: _Machine.tuple_of,
        pickle.MARK: _Machine.mark,
        pickle.APPEND: _Machine.append,
        pickle.APPENDS: _Machine.appends,
        pickle.ADDITEMS: _Machine.add_items,
        pickle.FROZENSET: _Machine.frozen,
        pickle.SETITEM: _Machine.set_item,
        pickle.SETITEMS: _Machine.set_items,
        pickle.GLOBAL: _Machine.global_,
        pickle.STACK_GLOBAL: _Machine.stack_global,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.NEWOBJ_EX: _Machine.call_named,
        pickle.BUILD: _Machine.build,
        pickle.BINPERSID: _Machine.persistent_id,
        pickle.PROTO: _skip(1),
        pickle.FRAME: _skip(8),
    }.items()
}
