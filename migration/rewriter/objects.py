"""Places that hold values, and objects that hold places: what `Flow` moves values through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libcst as cst

from migration.rewriter.module import Module, last_name
from migration.rewriter.program import Program
from migration.rewriter.symbols import CLASS, PREFIX
from migration.rewriter.tracked import SAME, STATIC
from migration.rewriter.values import key_of

Value = tuple[Any, ...]
Place = Any  # a node's id, or a tuple that begins with what it is a part of
THE_CLASS: Value = ("class",)
A_MODEL: Value = ("model",)
A_METHOD: Value = ("method",)
OWN = {*STATIC, "no_sync", "clip_grad_norm_", "register_comm_hook", "check_is_root"}
ALL, ANY = "*", "?"  # of a container: whatever is in it, and what was put there under no known key
GET = ("get", "pop", "setdefault", "__getitem__", "popitem")
PUT = ("append", "add", "insert", "extend", "update", "setdefault", "appendleft")


class Objects:
    """The places of values, what flows from one to the other, and what objects have."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[Place, dict[Value, str]] = {}  # each with where it comes from
        self._then: dict[Place, list[Callable[[Value, str], None]]] = {}
        self._queue: list[tuple[Place, Value, str]] = []
        self._linked: set[tuple[Place, Place]] = set()
        self._node: dict[int, tuple[Any, Module]] = {}

    def may_be(self, node: cst.CSTNode, kind: Value) -> str:
        """Where an expression has it from that it may be the class, a model or a method; "" if it may not."""
        return self.values.get(id(node), {}).get(kind, "")

    # --- places and what flows between them ---

    def _add(self, place: Place, value: Value, origin: str = "") -> None:
        known = self.values.setdefault(place, {})
        if value not in known:
            known[value] = origin
            self._queue.append((place, value, origin))

    def _when(self, place: Place, then: Callable[[Value, str], None]) -> None:
        self._then.setdefault(place, []).append(then)
        for value, origin in list(self.values.get(place, {}).items()):
            then(value, origin)

    def _link(self, start: Place, end: Place) -> None:
        if (start, end) not in self._linked and start != end:
            self._linked.add((start, end))
            self._when(start, lambda value, origin: self._add(end, value, origin))

    def _each(self, start: Place, end: Place, key: object = None) -> None:
        """Link what is in the containers that an expression may be; of an object, the field at a place."""

        def then(value: Value, _: str) -> None:
            if value[0] == "box":
                self._take(value, key, end)
            elif value[0] == "object" and isinstance(key, int) and key < len(fields := self._fields(value)):
                self._link((value, fields[key]), end)

        self._when(start, then)

    def _fields(self, owner: Value) -> list[str]:
        """List what a dataclass, or a named tuple, is made of."""
        body = [line for line in self._node[owner[1]][0].body.body if isinstance(line, cst.SimpleStatementLine)]
        return [last_name(one.target) for line in body for one in line.body if isinstance(one, cst.AnnAssign)]

    def _inherits(self, owner: int, end: Place, value: Value) -> None:
        """A value, if a class of the program is derived from FSDP1's."""
        self._when(("base", owner), lambda base, origin: self._add(end, value, origin) if base == THE_CLASS else None)

    def _read_of(self, start: Place, name: str, end: Place) -> None:
        self._when(start, lambda value, origin: self._attribute(value, origin, name, end))

    def _set_of(self, owner: Place, name: str, start: Place) -> None:
        self._when(owner, lambda value, _: self._set(value, name, start))

    def _variable(self, name: cst.Name, module: Module) -> Place:
        found = module.assignments(name)
        return id(found) if found else (str(module.path), name.value)

    def _of_file(self, module: Module, name: str) -> Place:
        found = module.scope(module.tree).names.get(name)
        return id(found) if found is not None else (str(module.path), name)

    def _put(self, box: Value, key: object, start: Place) -> None:
        for kept in (ALL, ANY if key is None else key):
            self._link(start, (box, kept))

    def _take(self, box: Value, key: object, end: Place) -> None:
        for kept in (ALL,) if key is None else (key, ANY):
            self._link((box, kept), end)

    def _bind(self, target: cst.BaseExpression, start: Place, module: Module) -> None:
        if isinstance(target, cst.Name):
            self._link(start, self._variable(target, module))
        elif isinstance(target, cst.Attribute):
            self._set_of(id(target.value), target.attr.value, start)
        elif isinstance(target, cst.Subscript):
            key = key_of(target)
            self._when(id(target.value), lambda v, _: self._put(v, key, start) if v[0] == "box" else None)
        elif isinstance(target, (cst.Tuple, cst.List)):
            for number, element in enumerate(target.elements):
                part = ("part", id(element))
                if isinstance(element, cst.StarredElement):
                    self._link(start, part)
                else:
                    self._each(start, part, number)
                self._bind(element.value, part, module)

    # --- objects ---

    def _set(self, owner: Value, name: str, start: Place) -> None:
        if owner[0] in ("object", "made", "file", "of"):
            place = self._of_file(owner[1], name) if owner[0] == "file" else (owner, name)
            self._link(start, place)
            if owner[0] == "object":
                self._find(owner, name, lambda v, _: self._argument(v, 1, start) if v[0] == "setter" else None)

    def _find(self, owner: Value, name: str, then: Callable[[Value, str], None]) -> None:
        """Find a name in an object's class, or in one that it is derived from."""
        node, module = self._node[owner[1]]
        own = owner[0] != "super" and name in module.scope(node).names
        if own:
            self._when((("of", owner[1]), name), then)
        else:
            self._when(
                ("base", owner[1]), lambda v, _: self._when((("of", v[1]), name), then) if v[0] == "of" else None
            )

    def _attribute(self, owner: Value, origin: str, name: str, end: Place) -> None:
        kind = owner[0]
        if kind in ("class", "model") and name in OWN:
            self._add(end, A_METHOD, origin)
        elif kind == "model" and name in ("module", PREFIX):
            self._add(end, A_MODEL, origin)
        elif kind == "model" and name in SAME:
            self._add(end, ("same",), origin)
        elif kind == "torch" and name == CLASS:
            self._add(end, THE_CLASS, origin)
        elif kind == "file":
            self._link(self._of_file(owner[1], name), end)
        elif kind in ("object", "made", "of", "super"):
            if kind in ("object", "made"):
                self._link((owner, name), end)
            if kind == "object":
                self._when(("base", owner[1]), lambda v, _: self._link((("object", v[-1]), name), end))
            if kind != "made":
                self._find(owner, name, lambda value, origin: self._member(owner, value, origin, end))
        elif kind == "box" and name in (*GET, *PUT, "values", "items", "copy"):
            self._add(end, ("of box", owner, name))

    def _member(self, owner: Value, value: Value, origin: str, end: Place) -> None:
        """Read a name of an object's class: functions become methods of it."""
        if value[0] != "function":
            self._add(end, value, origin)
            return
        node, module = self._node[value[1]]
        said = {last_name(one.decorator) for one in node.decorators} if isinstance(node, cst.FunctionDef) else set()
        if "staticmethod" in said or (owner[0] == "of" and "classmethod" not in said):
            self._add(end, value)
            return
        own = ("of", owner[1]) if "classmethod" in said else ("object", owner[1])
        self._add(self._parameter(node.params, 0, module), own)
        if {"property", "cached_property"} & said:
            self._link(("return", value[1]), end)
        elif "setter" not in said:
            self._add(end, ("bound", value[1]))

    def _parameter(self, params: cst.Parameters, place: int | str, module: Module) -> Place:
        listed = [*params.posonly_params, *params.params]
        if isinstance(place, int):
            found = listed[place] if place < len(listed) else None
        else:
            found = next((one for one in (*listed, *params.kwonly_params) if one.name.value == place), None)
        if found is not None:
            return self._variable(found.name, module)
        rest = params.star_arg if isinstance(place, int) else params.star_kwarg
        if not isinstance(rest, cst.Param):
            return ("nowhere",)
        box = ("box", id(rest))
        self._add(self._variable(rest.name, module), box)
        key = place if isinstance(place, str) else place - len(listed)
        self._link(spot := ("rest", id(rest), key), (box, ALL))
        self._link(spot, (box, key))
        return spot

    def _argument(self, function: Value, place: int | str, start: Place) -> None:
        if function[0] in ("function", "bound", "setter"):
            node, module = self._node[function[1]]
            skip = 1 if function[0] == "bound" and isinstance(place, int) else 0
            self._link(start, self._parameter(node.params, place + skip if isinstance(place, int) else place, module))
