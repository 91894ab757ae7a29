"""FSDP1's wrapping policies as conditions on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.symbols import row_of
from rewriter.values import Values

POLICY_CLASSES = {"transformer_auto_wrap_policy": "transformer_layer_cls", "_module_wrap_policy": "module_classes"}
SIZE = ("size_based_auto_wrap_policy", "default_auto_wrap_policy")


class Conditions(ABC):
    values: Values

    @abstractmethod
    def code(self, node: cst.CSTNode, module: Module) -> str:
        """A node's text with the changes inside of it."""

    @abstractmethod
    def only(self, node: cst.BaseExpression, module: Module) -> Leaf | None:
        """The one value that an expression can be, if it is written where the expression sees the same names."""

    @abstractmethod
    def drop(self, node: cst.BaseExpression, module: Module) -> None:
        """An expression isn't read any more."""

    def condition(self, leaf: Leaf, name: str = "module") -> str:
        """The condition under which a policy makes a module a group, on a variable of that name."""
        symbol, module = leaf.symbol, leaf.module
        if leaf.kind in ("partial", "call") and symbol in POLICY_CLASSES and not leaf.spread:
            keyword = POLICY_CLASSES[symbol]
            classes = leaf.args.get(keyword) or leaf.args.get("transformer_layer_cls")
            if classes is not None and leaf.kind == "partial":
                return f"isinstance({name}, {self._classes(classes, module)})"
        if leaf.kind == "call" and symbol == "ModuleWrapPolicy" and not leaf.spread:
            classes = leaf.args.get(0, leaf.args.get("module_classes"))
            if classes is not None:
                return f"isinstance({name}, {self._classes(classes, module)})"
        if leaf.kind == "partial" and symbol == "lambda_auto_wrap_policy" and "lambda_fn" in leaf.args:
            return self._applied(leaf.args["lambda_fn"], module, name)
        if leaf.kind == "call" and symbol == "CustomPolicy":
            function = leaf.args.get(0, leaf.args.get("lambda_fn"))
            if function is not None and self._boolean(function, module):
                return self._applied(function, module, name)
            raise Undecided("FW07", "it may return arguments of FSDP1 for a module", leaf.node, module)
        if leaf.kind == "partial" and symbol == "_or_policy" and "policies" in leaf.args:
            policies = leaf.args["policies"]
            if isinstance(policies, (cst.List, cst.Tuple, cst.Set)):
                parts = []
                for element in policies.elements:
                    inner = self.only(element.value, module)
                    if inner is None:
                        raise Undecided("FA05", "one of its policies can't be followed", leaf.node, module)
                    self.drop(element.value, module)
                    parts.append(self.condition(inner, name))
                return " or ".join(parts)
        if leaf.kind == "symbol" and symbol == "always_wrap_policy":
            return f"any(True for _ in {name}.parameters(recurse=False))"
        row = row_of(symbol) if symbol else None
        raise Undecided(row.code if row else "FA05", "the policy can't be turned into a condition", leaf.node, module)

    def _classes(self, node: cst.BaseExpression, module: Module) -> str:
        """What isinstance takes for a set of classes."""
        if isinstance(node, (cst.Set, cst.Tuple, cst.List)) and not any(
            isinstance(e, cst.StarredElement) for e in node.elements
        ):
            names = [self.code(element.value, module) for element in node.elements]
            return names[0] if len(names) == 1 else f"({', '.join(names)})"
        if isinstance(node, cst.Call) and module.code(node.func) in ("set", "tuple", "frozenset") and node.args:
            inner = node.args[0].value
            if isinstance(inner, (cst.Tuple, cst.List, cst.Set)):
                return self._classes(inner, module)
        if isinstance(node, (cst.Name, cst.Attribute)):
            only = self.only(node, module)
            if only is not None and only.kind == "value" and isinstance(only.node, (cst.Set, cst.Tuple, cst.List)):
                home = module.function(only.node)
                if home is module.function(node) and not any(
                    isinstance(e.value, cst.Name) and e.value.value == "self" for e in only.node.elements
                ):
                    self.drop(node, module)
                    return self._classes(only.node, module)
        return f"tuple({self.code(node, module)})"

    def _applied(self, function: cst.BaseExpression, module: Module, name: str) -> str:
        """A function's text applied to a variable; a lambda's body with its parameter renamed."""
        if isinstance(function, cst.Name):
            bound = self.only(function, module)
            if bound is not None and isinstance(bound.node, cst.Lambda):
                home = module.function(bound.node)
                if len(module.references(function)) == 1 and home is module.function(function):
                    self.drop(function, module)
                    return self._applied(bound.node, module, name)
        if isinstance(function, cst.Lambda) and len(function.params.params) == 1:
            parameter = function.params.params[0].name.value
            inner = module.within(function.body, cst.Lambda, cst.CompFor)
            names = {n.value for n in module.within(function.body, cst.Name)}
            if not inner and (name == parameter or name not in names):
                return self._renamed(function.body, module, parameter, name)
            return f"({self.code(function, module)})({name})"
        if isinstance(function, (cst.Name, cst.Attribute)):
            return f"{self.code(function, module)}({name})"
        return f"({self.code(function, module)})({name})"

    @staticmethod
    def _renamed(node: cst.BaseExpression, module: Module, old: str, new: str) -> str:
        (start, end), parts = module.span(node), []
        for used in module.within(node, cst.Name):
            above = module.parent(used)
            if used.value == old and not (isinstance(above, cst.Attribute) and above.attr is used):
                at = module.span(used)
                parts += [module.text[start : at[0]], new]
                start = at[1]
        return "".join([*parts, module.text[start:end]])

    def _boolean(self, function: cst.BaseExpression, module: Module) -> bool:
        """Whether a function surely returns True or False."""
        for leaf in self.values.leaves(function, module):
            node = leaf.node
            if isinstance(node, cst.Lambda):
                returned: list[cst.BaseExpression] = [node.body]
            elif isinstance(node, cst.FunctionDef):
                returned = [r.value for r in leaf.module.within(node, cst.Return) if r.value is not None]
            else:
                return False
            if not returned or not all(self.is_boolean(value, leaf.module) for value in returned):
                return False
        return True

    def is_boolean(self, node: cst.BaseExpression, module: Module, depth: int = 3) -> bool:
        if isinstance(node, (cst.Comparison,)) or (isinstance(node, cst.Name) and node.value in ("True", "False")):
            return True
        if isinstance(node, cst.UnaryOperation):
            return isinstance(node.operator, cst.Not)
        if isinstance(node, cst.BooleanOperation):
            return self.is_boolean(node.left, module) and self.is_boolean(node.right, module)
        if isinstance(node, cst.Name) and depth:
            sources = self.values.sources(node, module)[0]
            return bool(sources) and all(
                isinstance(value, cst.BaseExpression) and self.is_boolean(value, where, depth - 1)
                for value, where in sources or ()
            )
        returned = self.values.returns(node, module) if isinstance(node, cst.Call) and depth else None
        if returned:
            return all(self.is_boolean(value, where, depth - 1) for value, where in returned)
        return isinstance(node, cst.Call) and module.code(node.func) in ("isinstance", "any", "all", "bool", "hasattr")
