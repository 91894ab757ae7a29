"""Places that hold values, and objects that hold places: what `Flow` moves values through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libcst as cst

from migration.rewriter.branches import Branches
from migration.rewriter.module import Module, last_name
from migration.rewriter.program import Program
from migration.rewriter.scopes import module_name
from migration.rewriter.symbols import CLASS, PREFIX
from migration.rewriter.values import key_of, string

Value = tuple[Any, ...]
Place = Any  # a node's id, or a tuple that begins with what it is a part of
THE_CLASS: Value = ("class",)
MODEL: Value = ("model",)  # which a name of FSDP1's class has made
MAYBE: Value = ("maybe",)  # a model that is made by what may be the class
A_METHOD: Value = ("method",)
# Methods that give the model back.
SAME = ("to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "requires_grad_")
# Static methods of the class, and the place of the model among their arguments.
STATIC = dict.fromkeys(
    ("state_dict_type", "set_state_dict_type", "get_state_dict_type", "summon_full_params", "fsdp_modules",
     "optim_state_dict", "optim_state_dict_to_load", "full_optim_state_dict", "sharded_optim_state_dict"), 0,
)  # fmt: skip
STATIC |= dict.fromkeys([f"{name}_optim_state_dict" for name in ("shard_full", "flatten_sharded", "scatter_full")], 1)
STATIC["rekey_optim_state_dict"] = 2
OWN = {*STATIC, "no_sync", "clip_grad_norm_", "register_comm_hook", "check_is_root"}
STATES = ("state_dict", "load_state_dict")  # of a class that is derived from FSDP1's
SUPER = (*OWN, *STATES, "__init__", "forward", "apply", "named_parameters", "named_buffers")
ALL, ANY = "*", "?"  # of a container: whatever is in it, and what was put there under no known key
HELD = "models"  # of a container of which nothing else is known
GET = ("get", "pop", "setdefault", "__getitem__", "popitem")
PUT = ("append", "add", "insert", "extend", "update", "setdefault", "appendleft")


class Objects(Branches):
    """The places of values, what flows from one to the other, and what objects have."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: dict[Place, dict[Value, str]] = {}  # each with where it comes from
        self._then: dict[Place, list[Callable[[Value, str], None]]] = {}
        self._queue: list[tuple[Place, Value, str]] = []
        self._linked: set[tuple[Place, Place]] = set()
        self._node: dict[int, tuple[Any, Module]] = {}
        self._sets: list[tuple[Place, str, Place]] = []  # of attributes: of what, which, to what
        self._reads: list[tuple[Place, str, Place]] = []
        self._exported: set[tuple[Path, str]] = set()
        self._methods: dict[str, list[int]] = {}
        self._stores: dict[Value, list[tuple[str, cst.CSTNode, Module]]] = {}

    def is_model(self, node: cst.CSTNode) -> bool:
        return MODEL in self.values.get(id(node), ())

    def may_be(self, node: cst.CSTNode, kind: Value) -> str:
        """The source by which an expression may be the class, a model or a method; "" if it may not."""
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
        self._reads.append((start, name, end))
        self._when(start, lambda value, origin: self._attribute(value, origin, name, end))

    def _set_of(self, owner: Place, name: str, start: Place) -> None:
        self._sets.append((owner, name, start))
        self._when(owner, lambda value, _: self._set(value, name, start))

    def _by_name(self) -> bool:
        """Models in attributes of what is unknown, which may be any object that has such an attribute."""
        names = set()
        for owner, name, start in self._sets:
            for value, origin in self.values.get(start, {}).items() if MODEL in self.values.get(start, {}) else ():
                if value == MODEL or value[-1] == HELD:
                    names.add(name)
                    self._add(("of unknown", name), value, origin)
                    if not self.values.get(owner):
                        self._add(("of any", name), value, origin)
        for owner, name, end in self._reads:
            if name in names:
                self._link(("of any" if self.values.get(owner) else "of unknown", name), end)
        return bool(self._queue)

    def _variable(self, name: cst.Name, module: Module) -> Place:
        """A variable, without what assignments give it, which `_name` reads one by one."""
        found = module.assignments(name)
        if not found:
            return self._of_file(module.file, name.value)
        self._link(place := ("variable", id(found)), id(found))
        return place

    def _name(self, read: cst.Name, module: Module) -> None:
        self._when(self._variable(read, module), lambda v, origin: self._reach(read, module, v, origin))
        for binding in module.assignments(read):
            if isinstance(target := binding.node, cst.Name):
                then = functools.partial(self._reach, read, module, target=target)
                self._when(("target", id(target)), then)

    def _reach(self, read: cst.CSTNode, module: Module, value: Value, origin: str, target: Any = None) -> None:
        if value not in (MODEL, MAYBE) or self._reached(read, module, target):
            self._add(id(read), value, origin)

    def _of_file(self, path: Path, name: str) -> Place:
        """A name that other files read of a file, which may have it from `import *`."""
        if (place := (path, name)) not in self._exported:
            self._exported.add(place)
            if (module := self.program.known(path)) is not None:
                self._starred(module, name)
        return place

    def _starred(self, module: Module, name: str) -> None:
        for statement in module.all(cst.ImportFrom) if name not in module.scope(module.tree).names else ():
            if isinstance(statement.names, cst.ImportStar):
                other = self.program.file_of(module_name(statement), module)
                if other is not None:
                    self._link(self._of_file(other, name), (module.file, name))

    def _perhaps(self, start: Place, end: Place) -> None:
        """Link a value to where there may be others beside it."""
        self._when(start, lambda value, origin: self._add(end, MAYBE if value == MODEL else value, origin))

    def _put(self, box: Value, key: object, start: Place) -> None:
        self._perhaps(start, (box, ALL))
        if key is None:
            self._perhaps(start, (box, ANY))
        else:
            self._link(start, (box, key))

    def _store(self, box: Value, target: cst.Subscript, start: Place, module: Module) -> None:
        self._put(box, key := key_of(target), start)
        self._stores.setdefault(box, []).append((str(key), target, module))

    def entries(self, node: cst.CSTNode) -> list[tuple[str, cst.CSTNode, Module]]:
        """Keys of the dictionaries that an expression may be, each with where it is written."""
        found: list[tuple[str, cst.CSTNode, Module]] = []
        for box in self.values.get(id(node), ()):
            made, module = self._node.get(box[1], (None, None)) if box[0] == "box" else (None, None)
            if module is not None and isinstance(made, cst.Dict):
                pairs = [one for one in made.elements if isinstance(one, cst.DictElement)]
                found += [(string(one.key) or "", one, module) for one in pairs]
            elif module is not None and isinstance(made, cst.Call):
                found += [(one.keyword.value, one, module) for one in made.args if one.keyword is not None]
            found += self._stores.get(box, [])
        return found

    def _full(self, box: Value, origin: str) -> None:
        """A container of models alone."""
        for kept in (ALL, ANY):
            self._add((box, kept), MODEL, origin)

    def _take(self, box: Value, key: object, end: Place) -> None:
        for kept in (ALL,) if key is None else (key, ANY):
            self._link((box, kept), end)

    def _bind(self, target: cst.BaseExpression, start: Place, module: Module) -> None:
        if isinstance(target, cst.Name):
            self._link(start, place := ("target", id(target)))
            self._link(place, id(module.assignments(target)))
        elif isinstance(target, cst.Attribute):
            self._set_of(id(target.value), target.attr.value, start)
        elif isinstance(target, cst.Subscript):
            self._when(id(target.value), lambda v, _: self._store(v, target, start, module) if v[0] == "box" else None)
            self._when(start, lambda v, origin: self._holds(target, start, module, origin) if v == MODEL else None)
        elif isinstance(target, (cst.Tuple, cst.List)):
            for number, element in enumerate(target.elements):
                part = ("part", id(element))
                if isinstance(element, cst.StarredElement):
                    self._link(start, part)
                else:
                    self._each(start, part, number)
                self._bind(element.value, part, module)

    def _holds(self, target: cst.Subscript, start: Place, module: Module, origin: str) -> None:
        """Follow models into what they are put into: its parameters are theirs, whatever it is."""
        held, box, key = ("held", id(target)), ("box", id(target), HELD), key_of(target)
        self._put(box, key, start)
        if key is None:
            self._full(box, origin)
        for value in (MODEL, box):
            self._add(held, value, origin)
        if isinstance(target.value, cst.Attribute):
            self._bind(target.value, held, module)
        elif isinstance(target.value, cst.Name):
            for read in module.references(target.value):
                then = functools.partial(self._reach, read, module, target=target)
                self._when(held, then)

    # --- objects ---

    def _set(self, owner: Value, name: str, start: Place) -> None:
        if owner[0] in ("object", "made", "file", "of"):
            self._link(start, self._of_file(owner[1], name) if owner[0] == "file" else (owner, name))
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
        if kind in ("class", "model", "maybe") and name in OWN:
            self._add(end, A_METHOD, origin)
        elif kind in ("model", "maybe") and name in ("module", PREFIX):
            self._add(end, owner, origin)
        elif kind in ("model", "maybe") and name in SAME:
            self._add(end, ("same", owner), origin)
        elif kind == "torch" and name == CLASS:
            self._add(end, THE_CLASS, origin)
        elif kind == "file":
            self._link(self._of_file(owner[1], name), end)
        elif kind in ("object", "made", "of", "super"):
            if name in (SUPER if kind == "super" else STATES if kind == "object" else ()):
                self._inherits(owner[1], end, A_METHOD)
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
        self._put(box, key, spot := ("rest", id(rest), key))
        return spot

    def _argument(self, function: Value, place: int | str, start: Place) -> None:
        if function[0] in ("function", "bound", "setter"):
            node, module = self._node[function[1]]
            skip = 1 if function[0] == "bound" and isinstance(place, int) else 0
            self._link(start, self._parameter(node.params, place + skip if isinstance(place, int) else place, module))
