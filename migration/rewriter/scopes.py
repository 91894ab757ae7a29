"""The bindings of each name of a file, and its reads: Python's scopes, in one walk.

libcst has a provider of scopes; it takes four times as long as parsing, most of it for what nothing here asks.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import libcst as cst

Child = cst.CSTNode
# Fields in another order than the text's, and those that hold no code.
ORDER = {
    cst.FunctionDef: ("decorators", "name", "type_parameters", "params", "returns", "body"),
    cst.ClassDef: ("decorators", "name", "type_parameters", "bases", "keywords", "body"),
    cst.IfExp: ("body", "test", "orelse"),
    cst.Arg: ("keyword", "value"),
}
LAYOUT = re.compile(
    r"whitespace|comma|equal|dot|semicolon|colon|[lr]par|[lr]bracket|[lr]brace|leading_lines|lines_|header|footer"
    r"|indent|operator|asynchronous|relative|open_|close_|separator|star$|default_|has_|encoding|newline|arrow|bar"
)
_FIELDS: dict[type, tuple[str, ...]] = {}
_TEXT = {str, type(None), bool, cst.MaybeSentinel}  # asking whether one is a node is slow
WORD = re.compile(r"[A-Za-z_]\w*")


def children(node: cst.CSTNode) -> list[Child]:
    """The nodes right below a node that hold code, in the text's order. libcst's own way copies the node."""
    kind = type(node)
    names = _FIELDS.get(kind)
    if names is None:
        names = ORDER.get(kind) or tuple(f for f in kind.__dataclass_fields__ if not LAYOUT.match(f))
        _FIELDS[kind] = names
    found: list[Child] = []
    for name in names:
        value = getattr(node, name)
        held = type(value)
        if held is list or held is tuple:
            found += [one for one in value if type(one) not in _TEXT]
        elif held not in _TEXT and isinstance(value, cst.CSTNode):
            found.append(value)
    return found


@dataclass(eq=False)
class Binding:
    """Binds a name: a target, parameter, definition or import; `imported` is its qualified name, if it is one."""

    node: cst.CSTNode
    imported: str = ""
    references: list[cst.CSTNode] = field(default_factory=list)


class Scope:
    def __init__(self, parent: Scope | None, kind: type[cst.CSTNode]) -> None:
        self.parent, self.kind = parent, kind
        self.names: dict[str, list[Binding]] = {}
        self.elsewhere: dict[str, Scope] = {}  # global and nonlocal names

    def find(self, name: str) -> list[Binding]:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.elsewhere:
                return scope.elsewhere[name].names.get(name, [])
            if name in scope.names and (scope is self or scope.kind is not cst.ClassDef):
                return scope.names[name]
            scope = scope.parent
        return []

    def bind(self, name: str, node: cst.CSTNode, imported: str = "") -> None:
        self.elsewhere.get(name, self).names.setdefault(name, []).append(Binding(node, imported))

    @property
    def top(self) -> Scope:
        return self if self.parent is None else self.parent.top


class Scopes:
    """`of`: the scope that a name is looked up in, by the id of its node or of the node that makes the scope."""

    def __init__(self, tree: cst.Module) -> None:
        self.of: dict[int, Scope] = {}
        self._loads: list[tuple[cst.CSTNode, str, Scope]] = []
        self._annotation = 0
        top = Scope(None, cst.Module)
        self.of[id(tree)] = top
        self._each(tree, top)
        for node, name, scope in self._loads:
            for binding in scope.find(name):
                binding.references.append(node)

    def qualified(self, node: cst.CSTNode) -> list[tuple[str, bool]]:
        """Qualified names that an expression may have, and whether they come from an import."""
        root: cst.CSTNode = node
        rest = ""
        while not isinstance(root, cst.Name):
            if isinstance(root, cst.Attribute):
                rest = f".{root.attr.value}{rest}"
                root = root.value
            elif isinstance(root, cst.Call):
                root = root.func
            elif isinstance(root, cst.Subscript):
                root = root.value
            else:
                return []
        scope = self.of.get(id(root))
        if scope is None:
            return []
        found = scope.find(root.value)
        if not found and hasattr(builtins, root.value):
            return [(f"builtins.{root.value}{rest}", False)]
        return sorted({(f"{b.imported or root.value}{rest}", bool(b.imported)) for b in found})

    # --- the walk ---

    def _each(self, node: cst.CSTNode, scope: Scope) -> None:
        for child in children(node):
            self._visit(child, scope)

    def _visit(self, node: cst.CSTNode, scope: Scope) -> None:
        special = _VISITS.get(type(node))
        if special is not None:
            special(self, node, scope)
        else:
            self._each(node, scope)

    def _name(self, node: cst.Name, scope: Scope) -> None:
        self.of[id(node)] = scope
        self._loads.append((node, node.value, scope))

    def _string(self, node: cst.SimpleString, scope: Scope) -> None:
        """An annotation may be a string, which reads the names in it."""
        for name in WORD.findall(node.value) if self._annotation else ():
            self._loads.append((node, name, scope))

    def _annotated(self, node: cst.Annotation, scope: Scope) -> None:
        self._annotation += 1
        self._each(node, scope)
        self._annotation -= 1

    def _value(self, node: cst.Attribute | cst.Arg, scope: Scope) -> None:
        self._visit(node.value, scope)

    def _target(self, node: cst.CSTNode, scope: Scope) -> None:
        if isinstance(node, cst.Name):
            scope.bind(node.value, node)
        elif isinstance(node, (cst.Tuple, cst.List)):
            for element in node.elements:
                self._target(element.value, scope)
        elif isinstance(node, cst.StarredElement):
            self._target(node.value, scope)
        else:
            self._visit(node, scope)

    def _targeted(self, node: cst.CSTNode, scope: Scope) -> None:
        """A statement or expression with one target that it binds."""
        assert isinstance(node, (cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr))
        home = scope
        while isinstance(node, cst.NamedExpr) and issubclass(home.kind, cst.BaseComp) and home.parent is not None:
            home = home.parent
        self._target(node.target, home)
        for child in children(node):
            if child is not node.target:
                self._visit(child, scope)

    def _as(self, node: cst.AsName, scope: Scope) -> None:
        self._target(node.name, scope)

    def _match(self, node: cst.CSTNode, scope: Scope) -> None:
        for child in children(node):
            if isinstance(child, cst.Name):
                self._target(child, scope)
            else:
                self._visit(child, scope)

    def _import(self, node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
        if isinstance(node.names, cst.ImportStar):
            return
        package = module_name(node) if isinstance(node, cst.ImportFrom) else ""
        package += "." if package and not package.endswith(".") else ""
        for alias in node.names:
            bound = alias.evaluated_alias or alias.evaluated_name
            if isinstance(node, cst.Import) and alias.asname is None:
                bound = bound.partition(".")[0]  # import a.b binds a
                scope.bind(bound, node, bound)
            else:
                scope.bind(bound, node, package + alias.evaluated_name)

    def _function(self, node: cst.FunctionDef, scope: Scope) -> None:
        scope.bind(node.name.value, node)
        self.of[id(node.name)] = scope
        inner = self.of[id(node)] = Scope(scope, cst.FunctionDef)
        for decorator in node.decorators:
            self._visit(decorator, scope)
        self._parameters(node.params, inner, scope)
        self._declared(node.body, inner)
        self._each(node.body, inner)
        if node.returns is not None:
            self._visit(node.returns, scope)

    def _lambda(self, node: cst.Lambda, scope: Scope) -> None:
        inner = self.of[id(node)] = Scope(scope, cst.Lambda)
        self._parameters(node.params, inner, scope)
        self._visit(node.body, inner)

    def _parameters(self, node: cst.Parameters, inner: Scope, outer: Scope) -> None:
        for param in (p for p in children(node) if isinstance(p, cst.Param)):
            inner.bind(param.name.value, param)
            self.of[id(param.name)] = inner
            for part in (param.default, param.annotation):
                if part is not None:
                    self._visit(part, outer)

    def _declared(self, node: cst.CSTNode, scope: Scope) -> None:
        """global and nonlocal, which hold for the whole function wherever they stand in it."""
        if isinstance(node, (cst.Global, cst.Nonlocal)):
            for item in node.names:
                home: Scope | None = scope.top if isinstance(node, cst.Global) else scope.parent
                while isinstance(node, cst.Nonlocal) and home is not None and item.name.value not in home.names:
                    home = home.parent
                scope.elsewhere[item.name.value] = home or scope.top
        elif not isinstance(node, (cst.FunctionDef, cst.ClassDef, cst.BaseExpression)):
            for child in children(node):
                self._declared(child, scope)

    def _class(self, node: cst.ClassDef, scope: Scope) -> None:
        scope.bind(node.name.value, node)
        self.of[id(node.name)] = scope
        inner = self.of[id(node)] = Scope(scope, cst.ClassDef)
        for part in (*node.decorators, *node.bases, *node.keywords):
            self._visit(part, scope)
        self._each(node.body, inner)

    def _comprehension(self, node: cst.BaseComp, scope: Scope) -> None:
        inner = self.of[id(node)] = Scope(scope, type(node))
        loop: cst.CompFor | None = node.for_in
        outer = scope
        while loop is not None:
            self._visit(loop.iter, outer)
            self._target(loop.target, inner)
            for condition in loop.ifs:
                self._visit(condition, inner)
            loop, outer = loop.inner_for_in, inner
        for child in children(node):
            if not isinstance(child, cst.CompFor):
                self._visit(child, inner)


def module_name(statement: cst.ImportFrom) -> str:
    """The module of `from … import`, with its dots."""
    name = cst.helpers.get_full_name_for_node(statement.module) if statement.module is not None else ""
    return "." * len(statement.relative) + (name or "")


_VISITS: dict[type, Callable[..., None]] = {
    cst.Name: Scopes._name,
    cst.SimpleString: Scopes._string,
    cst.Annotation: Scopes._annotated,
    cst.AsName: Scopes._as,
    cst.Import: Scopes._import,
    cst.ImportFrom: Scopes._import,
    cst.FunctionDef: Scopes._function,
    cst.Lambda: Scopes._lambda,
    cst.ClassDef: Scopes._class,
    **dict.fromkeys((cst.Global, cst.Nonlocal), lambda *_: None),  # which _declared has read
    **dict.fromkeys((cst.Attribute, cst.Arg), Scopes._value),
    **dict.fromkeys((cst.AssignTarget, cst.AugAssign, cst.AnnAssign, cst.For, cst.NamedExpr), Scopes._targeted),
    **dict.fromkeys((cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp), Scopes._comprehension),
    **dict.fromkeys((cst.MatchAs, cst.MatchStar, cst.MatchMapping), Scopes._match),
}
