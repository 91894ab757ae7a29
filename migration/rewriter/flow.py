"""The ways of FSDP1's class and its models: one forward flow of values, through whatever holds them.

Each expression, variable, attribute and container has the set of values that it may have, which grows until nothing
changes. A value is FSDP1's class, a model, a method of one, or something of the program that can hold or make them: a
function, a class, an object, a container, a file. The order of statements counts for a variable's models alone. A model
is certain where a name of the class has made it; what may be the class makes what may be a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from migration.rewriter.module import Module, last_name
from migration.rewriter.objects import ALL, ANY, GET, MAYBE, MODEL, PUT, SAME, STATIC, THE_CLASS, Place, Value
from migration.rewriter.program import Program
from migration.rewriter.said import MAKE, Said
from migration.rewriter.symbols import CLASS, PACKAGE
from migration.rewriter.values import key_of, string

ALIKE = ("list", "tuple", "set", "sorted", "reversed", "iter", "ModuleList", "ModuleDict", "deque", "OrderedDict",
         "MappingProxyType", "values", "copy")  # fmt: skip
COMMON = {*SAME, *dir(dict), *dir(list), *dir(set)}  # methods of which a name says nothing
OBJECTS = ("SimpleNamespace", "Namespace")


class Flow(Said):
    def __init__(self, program: Program, constructions: Sequence[tuple[cst.Call, Module]]) -> None:
        super().__init__(program)
        self._calls: dict[int, list[tuple[cst.Call, Module]]] = {}  # by function
        self._unknown: list[cst.Call] = []  # of methods, as far as is written beside them
        self._constructions, self._visited = constructions, 0
        while self._visit() or (self._begins and (self._moves() or self._by_name() or self._methods_by_name())):
            pass

    def _visit(self) -> bool:
        """Visit files that are new; a rule may parse another one."""
        start, parsed = self._visited, self.program.parsed
        for call, module in self._constructions if not start else ():
            self._certain.add(id(call))
            self._add(id(call), MODEL, self._place(call, module))
        for module in parsed[start:]:
            for name, bindings in module.scope(module.tree).names.items():
                self._link(id(bindings), (module.file, name))
            for path, name in list(self._exported):
                if path == module.file:
                    self._starred(module, name)
            for node in module.all(*_RULES):
                _RULES[type(node)](self, node, module)
        self._visited = len(parsed)
        return self._visited > start

    def _moves(self) -> bool:
        moves = bool(self._queue)
        while self._queue:
            place, value, origin = self._queue.pop()
            for then in tuple(self._then.get(place, ())):
                then(value, origin)
        return moves

    def _methods_by_name(self) -> bool:
        """Calls of methods of what is unknown, where one class alone has such a method, that get or give a model."""
        for node in self._unknown:
            known = [] if self.values.get(id(node.func)) else self._methods.get(last_name(node), [])
            places = [*(id(arg.value) for arg in node.args), *(("return", one) for one in known)]
            if len(known) == 1 and any(MODEL in self.values.get(at, ()) for at in places):
                self._add(id(node.func), ("bound", known[0]))
        return bool(self._queue)

    def functions(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The functions of the program that a called expression may be."""
        return [self._node[value[1]][0] for value in self.values.get(id(node), ()) if value[0] in ("function", "bound")]

    def calls(self, function: cst.CSTNode) -> list[tuple[cst.Call, Module]]:
        return self._calls.get(id(function), [])

    # --- calls ---

    def _call(self, node: cst.Call, module: Module) -> None:
        name, first = last_name(node.func), node.args[0].value if node.args else None
        asked = string(node.args[1].value) if len(node.args) > 1 else None
        names = {known for known, _ in module.qualified(node.func)}
        self._when(id(node.func), lambda value, origin: self._called(value, origin, node, module))
        if name in STATIC and self.program.symbol(node.func, module) == f"{CLASS}.{name}":
            self._static(node, name, module)
        if any(imported for _, imported in module.qualified(node.func)):
            for arg in node.args:
                self._when(id(arg.value), lambda value, _: self._parse(value, node.func, module))
        elif isinstance(node.func, cst.Attribute) and name not in COMMON:
            self._unknown.append(node)
        if first is None:
            if name == "super" and (owner := module.enclosing(node, cst.ClassDef)) is not None:
                self._add(id(node), ("super", id(owner)))
                self._inherits(id(owner), id(node), MAYBE)
            if name == "dict" or name in OBJECTS:
                self._add(id(node), ("box", id(node)) if name == "dict" else ("made", id(node)))
            return
        if "functools.partial" in names or name in ("cast", *ALIKE) or "torch.compile" in names:
            wanted = node.args[-1].value if name == "cast" else first
            self._link(id(wanted), id(node))
        elif name == "getattr" and asked:
            self._read_of(id(first), asked, id(node))
        elif name == "setattr" and asked and len(node.args) == 3:
            self._set_of(id(first), asked, id(node.args[2].value))
        elif name in ("isinstance", "hasattr") and self._certain:
            self._asked(node, first, module)
        elif name == "next":
            self._each(id(first), id(node))
        elif name in ("enumerate", "zip", "dict", *OBJECTS):
            self._made(node, name, module)
        elif name == "map":
            self._when(id(first), lambda value, _: self._mapped(value, node))
        elif name == "field":
            for arg in node.args:
                if arg.keyword is not None and arg.keyword.value == "default_factory":
                    self._when(id(arg.value), lambda value, origin: self._called(value, origin, node, module, True))
                elif arg.keyword is not None and arg.keyword.value == "default":
                    self._link(id(arg.value), id(node))

    def _made(self, node: cst.Call, name: str, module: Module) -> None:
        made = ("made" if name in OBJECTS else "box", id(node))
        self._add(id(node), made)
        self._node[id(node)] = node, module
        if name in ("enumerate", "zip"):
            pair = ("box", id(node), "pair")
            self._add((made, ALL), pair)
            for place, arg in enumerate(node.args, int(name == "enumerate")):
                self._each(id(arg.value), (pair, place))
        for arg in node.args:
            if arg.keyword is not None and name == "dict":
                self._put(made, arg.keyword.value, id(arg.value))
            elif arg.keyword is not None:
                self._link(id(arg.value), (made, arg.keyword.value))
            elif name == "dict":
                self._each(id(arg.value), (made, ANY))
                self._link((made, ANY), (made, ALL))

    def _mapped(self, function: Value, node: cst.Call) -> None:
        box = ("box", id(node))
        self._add(id(node), box)
        self._put(box, None, ("return", function[-1]) if function[0] in ("function", "bound") else ("nowhere",))
        if function == THE_CLASS:
            self._add((box, ALL), MAYBE, self.may_be(node.args[0].value, THE_CLASS))
        for place, arg in enumerate(node.args[1:]):
            self._each(id(arg.value), part := ("part", id(arg)))
            self._argument(function, place, part)

    def _parse(self, value: Value, called: cst.BaseExpression, module: Module) -> None:
        """Parse the file of a function that gets a model."""
        for name, imported in module.qualified(called) if value in (THE_CLASS, MODEL, MAYBE) else ():
            if imported:
                last = name.rpartition(".")[2]
                head = name[: -len(last)]
                for path in self.program.behind(head.rstrip(".") or head, last, module.file):
                    self.program.module(path)

    def _called(self, value: Value, origin: str, node: cst.Call, module: Module, bare: bool = False) -> None:
        kind = value[0]
        if kind == "same" or (kind == "class" and id(node) not in self._certain):
            self._add(id(node), value[1] if kind == "same" else MAYBE, origin)
        elif kind == "of box":
            self._of_box(value[1], value[2], node)
        elif kind in ("function", "bound"):
            self._calls.setdefault(value[1], []).append((node, module))
            if not bare:
                self._arguments(value, node)
            self._link(("return", value[1]), id(node))
        elif kind == "of":
            made = ("object", value[1])
            self._add(id(node), made)
            self._inherits(value[1], id(node), MAYBE)
            if self._is_around(*self._node[value[1]]):
                for arg in node.args if not bare else ():
                    self._when(id(arg.value), lambda v, o: self._add(id(node), v, o) if v == MODEL else None)
            self._find(
                made, "__init__", lambda v, _: self._arguments(("bound", *v[1:]), node) if v[0] == "function" else None
            )
            fields = self._fields(made)
            for place, arg in enumerate(node.args):
                name = arg.keyword.value if arg.keyword else fields[place] if place < len(fields) else ""
                if name in fields:
                    self._link(id(arg.value), (made, name))

    def _arguments(self, function: Value, node: cst.Call) -> None:
        for place, arg in enumerate(node.args):
            if arg.star:
                self._spread(function, arg, place)
            else:
                self._argument(function, arg.keyword.value if arg.keyword is not None else place, id(arg.value))

    def _spread(self, function: Value, arg: cst.Arg, start: int) -> None:
        params = self._node[function[1]][0].params
        names = [one.name.value for one in (*params.params, *params.kwonly_params)]
        for key in range(8) if arg.star == "*" else names:
            self._each(id(arg.value), part := ("part", id(arg), key), key)
            self._argument(function, start + key if isinstance(key, int) else key, part)

    def _of_box(self, box: Value, name: str, node: cst.Call) -> None:
        values = [arg.value for arg in node.args]
        if name in GET and values:
            self._take(box, string(values[0]), id(node))
        if name in ("get", "setdefault") and len(values) > 1:
            self._link(id(values[1]), id(node))
        if name in PUT and values:
            key = string(values[0]) if name == "setdefault" else None
            for arg in node.args:
                if arg.keyword is not None:
                    self._put(box, arg.keyword.value, id(arg.value))
                elif name in ("extend", "update"):
                    for kept in (ALL, ANY):
                        self._each(id(arg.value), (box, kept))
                else:
                    self._put(box, key, id(arg.value))
        if name in ("values", "copy"):
            self._add(id(node), box)
        if name == "items":
            items, pair = ("box", id(node), "items"), ("box", id(node), "item")
            self._add(id(node), items)
            self._add((items, ALL), pair)
            self._take(box, None, (pair, 1))

    # --- what each kind of node says ---

    def _read(self, node: cst.Name | cst.Attribute, module: Module) -> None:
        symbol, names = self.program.symbol(node, module), [n for n, imported in module.qualified(node) if imported]
        if symbol in MAKE or (symbol or "").startswith("module:") or PACKAGE in names:
            self._add(id(node), MAKE.get(symbol or "", ("torch",)), self._place(node, module))
            self._begins = True
        above = module.parent(node)
        if isinstance(node, cst.Attribute):
            if not isinstance(above, cst.AssignTarget):
                self._read_of(id(node.value), node.attr.value, id(node))
        elif not (isinstance(above, cst.Attribute) and above.attr is node):
            self._name(node, module)
        if isinstance(node, cst.Attribute) and names:
            self._imported(names, id(node), module)

    def _import(self, node: cst.Import | cst.ImportFrom, module: Module) -> None:
        if not isinstance(node.names, cst.ImportStar):
            for alias in node.names:
                bound = cst.Name((alias.evaluated_alias or alias.evaluated_name).partition(".")[0])
                known = module.scope(node).find(bound.value)
                for binding in known:
                    if binding.node is node and binding.imported:
                        self._imported([binding.imported], place := ("variable", id(known)), module)
                        self._link(place, id(known))

    def _imported(self, names: list[str], end: Place, module: Module) -> None:
        for name in names:
            place = self.program.split(name, module)
            if place is not None and place[0] != module.file:
                if not place[1]:
                    self._add(end, ("file", place[0]))
                elif len(place[1]) == 1:
                    self._link(self._of_file(place[0], place[1][0]), end)

    def _assign(self, node: cst.Assign | cst.AnnAssign | cst.NamedExpr, module: Module) -> None:
        if node.value is not None:
            for target in [t.target for t in node.targets] if isinstance(node, cst.Assign) else [node.target]:
                self._bind(target, id(node.value), module)
            if isinstance(node, cst.NamedExpr):
                self._link(id(node.value), id(node))
        if isinstance(node, cst.AnnAssign):
            self._said(node.annotation, said := ("said", id(node)), module)
            self._bind(node.target, said, module)

    def _loop(self, node: cst.For | cst.CompFor, module: Module) -> None:
        self._each(id(node.iter), part := ("each", id(node)))
        self._bind(node.target, part, module)

    def _entered(self, node: cst.WithItem, module: Module) -> None:
        if node.asname is not None:
            self._each(id(node.item), part := ("each", id(node)))
            self._read_of(id(node.item), "__enter__", enter := ("enter", id(node)))
            self._when(enter, lambda v, _: self._link(("return", v[-1]), part) if v[0] == "bound" else None)
            self._bind(node.asname.name, part, module)

    def _function(self, node: cst.FunctionDef | cst.Lambda, module: Module) -> None:
        self._node[id(node)] = node, module
        value: Value = ("function", id(node))
        for param in (*node.params.posonly_params, *node.params.params, *node.params.kwonly_params):
            if param.default is not None:
                self._link(id(param.default), self._variable(param.name, module))
            if param.annotation is not None:
                self._said(param.annotation, self._variable(param.name, module), module)
        if isinstance(node, cst.Lambda):
            self._add(id(node), value)
            self._link(id(node.body), ("return", id(node)))
            return
        if any(last_name(one.decorator) == "setter" for one in node.decorators):
            value = ("setter", id(node))
        self._defined(node, value, module)
        owner = module.enclosing(node, cst.ClassDef, cst.FunctionDef)
        if isinstance(owner, cst.ClassDef):
            self._methods.setdefault(node.name.value, []).append(id(node))
            said = {last_name(one.decorator) for one in node.decorators}
            if "staticmethod" not in said and node.params.params:
                own = "of" if "classmethod" in said else "object"
                place = self._parameter(node.params, 0, module)
                if own == "object":
                    self._link(("selves", id(owner)), place)
                else:
                    self._add(place, ("of", id(owner)))
                    self._inherits(id(owner), place, THE_CLASS)

    def _class(self, node: cst.ClassDef, module: Module) -> None:
        self._node[id(node)] = node, module
        value: Value = ("of", id(node))
        self._defined(node, value, module)
        self._add(("selves", id(node)), ("object", id(node)))
        for base in node.bases:
            self._when(id(base.value), lambda v, o: self._derived(node, v, o))
        for name, bindings in module.scope(node).names.items() if module.scope(node).kind is cst.ClassDef else ():
            self._link(id(bindings), (value, name))

    def _derived(self, node: cst.ClassDef, base: Value, origin: str) -> None:
        place = ("base", id(node))
        if base == THE_CLASS:
            self._add(("selves", id(node)), MAYBE, origin)
        if base == THE_CLASS or base[0] == "of":
            self._add(place, base, origin)
        if base[0] == "of" and base[1] != id(node):
            self._link(("base", base[1]), place)
            self._link(("selves", id(node)), ("selves", base[1]))
            self._when(("base", base[1]), lambda v, o: self._derived(node, v, o) if v == THE_CLASS else None)

    def _defined(self, node: cst.FunctionDef | cst.ClassDef, value: Value, module: Module) -> None:
        """A definition's name, and its decorators, which get it and may keep it."""
        self._add(self._variable(node.name, module), value)
        for one in node.decorators:
            self._when(id(one.decorator), lambda v, _: self._decorated(v, node, module))
        self._add(("value", id(node)), value)
        if isinstance(node, cst.ClassDef):  # one that is derived from FSDP1's class is FSDP1's class again
            for place in (self._variable(node.name, module), ("value", id(node))):
                self._inherits(id(node), place, THE_CLASS)

    def _decorated(self, decorator: Value, node: cst.FunctionDef | cst.ClassDef, module: Module) -> None:
        self._argument(decorator, 0, ("value", id(node)))
        if decorator[0] in ("function", "bound"):
            self._link(("return", decorator[1]), self._variable(node.name, module))

    def _return(self, node: cst.Return | cst.Yield, module: Module) -> None:
        function = module.function(node)
        if function is None or not isinstance(node.value, cst.BaseExpression):
            return
        if isinstance(node, cst.Return):
            self._link(id(node.value), ("return", id(function)))
        else:
            self._add(("return", id(function)), box := ("box", id(function)))
            self._put(box, None, id(node.value))

    def _either(self, node: cst.IfExp | cst.BooleanOperation, module: Module) -> None:
        for part in (node.body, node.orelse) if isinstance(node, cst.IfExp) else (node.left, node.right):
            self._link(id(part), id(node))

    def _box(self, node: Any, module: Module) -> None:
        box = ("box", id(node))
        self._add(id(node), box)
        self._node[id(node)] = node, module
        if isinstance(node, (cst.BaseSimpleComp, cst.DictComp)):
            made = node.value if isinstance(node, cst.DictComp) else node.elt
            self._put(box, None, id(made))
            if id(made) in self._certain:
                self._full(box, self._place(made, module))
            return
        values = [id(element.value) for element in node.elements]
        for each in values:
            self._when(
                each, lambda _, o: self._full(box, o) if all(MODEL in self.values.get(v, ()) for v in values) else None
            )
        for place, element in enumerate(node.elements):
            if isinstance(element, (cst.StarredElement, cst.StarredDictElement)):
                for kept in (ALL, ANY):
                    self._each(id(element.value), (box, kept))
            else:
                key = string(element.key) if isinstance(element, cst.DictElement) else place
                self._put(box, key, id(element.value))

    def _subscript(self, node: cst.Subscript, module: Module) -> None:
        if not isinstance(module.parent(node), cst.AssignTarget):
            self._each(id(node.value), id(node), key_of(node))


_RULES: dict[type, Callable[..., None]] = {
    cst.Call: Flow._call,
    cst.ClassDef: Flow._class,
    cst.Subscript: Flow._subscript,
    cst.WithItem: Flow._entered,
    **dict.fromkeys((cst.Name, cst.Attribute), Flow._read),
    **dict.fromkeys((cst.Import, cst.ImportFrom), Flow._import),
    **dict.fromkeys((cst.Assign, cst.AnnAssign, cst.NamedExpr), Flow._assign),
    **dict.fromkeys((cst.For, cst.CompFor), Flow._loop),
    **dict.fromkeys((cst.FunctionDef, cst.Lambda), Flow._function),
    **dict.fromkeys((cst.Return, cst.Yield), Flow._return),
    **dict.fromkeys((cst.IfExp, cst.BooleanOperation), Flow._either),
    **dict.fromkeys((cst.Dict, cst.List, cst.Tuple, cst.Set, cst.ListComp, cst.SetComp, cst.DictComp,
                     cst.GeneratorExp), Flow._box),
}  # fmt: skip
