"""FSDP1's wrapping policies as conditions on a module."""

from __future__ import annotations

from abc import ABC, abstractmethod

import libcst as cst

from rewriter.bindings import Leaf
from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.values import Values

POLICY_CLASSES = {"transformer_auto_wrap_policy": "transformer_layer_cls", "_module_wrap_policy": "module_classes"}


class Conditions(ABC):
    values: Values

    @abstractmethod
    def code(self, node: cst.CSTNode, module: Module) -> str:
        """A node's text with the changes inside of it."""

    @abstractmethod
    def only(self, node: cst.BaseExpression, module: Module) -> Leaf | None:
        """The one value that an expression can be, if it is written where the expression sees the same values."""

    @abstractmethod
    def drop(self, node: cst.BaseExpression, module: Module) -> None:
        """An expression isn't read any more."""

    def condition(self, leaf: Leaf, name: str) -> str:
        """The condition under which a policy makes a module a group, on a variable of that name.

        Raises Undecided for a policy that has none: by size, of the program's own, or with options for each module."""
        symbol, module = leaf.symbol, leaf.module
        if leaf.kind == "partial" and symbol in POLICY_CLASSES and not leaf.spread:
            classes = leaf.args.get(POLICY_CLASSES[symbol]) or leaf.args.get("transformer_layer_cls")
            if classes is not None:
                return f"isinstance({name}, {self._classes(classes, module)})"
        if leaf.kind == "call" and symbol == "ModuleWrapPolicy" and not leaf.spread:
            classes = leaf.args.get(0, leaf.args.get("module_classes"))
            if classes is not None:
                return f"isinstance({name}, {self._classes(classes, module)})"
        if leaf.kind == "partial" and symbol == "lambda_auto_wrap_policy" and "lambda_fn" in leaf.args:
            return self._applied(leaf.args["lambda_fn"], module, name)
        if leaf.kind == "partial" and symbol == "_or_policy":
            policies = leaf.args.get("policies")
            elements = policies.elements if isinstance(policies, (cst.List, cst.Tuple, cst.Set)) else ()
            inner = [self.only(element.value, module) for element in elements]
            made = [self.condition(one, name) for one in inner if one is not None]
            if made and len(made) == len(inner):
                for element in elements:
                    self.drop(element.value, module)
                return " or ".join(made)
        if leaf.kind == "symbol" and symbol == "always_wrap_policy":
            return f"any(True for _ in {name}.parameters(recurse=False))"
        raise Undecided("FA05", "the policy can't be turned into a condition", leaf.node, module)

    def _classes(self, node: cst.BaseExpression, module: Module) -> str:
        """What isinstance takes for a set of classes."""
        listed = (cst.Set, cst.Tuple, cst.List)
        if isinstance(node, listed) and not any(isinstance(e, cst.StarredElement) for e in node.elements):
            names = [self.code(element.value, module) for element in node.elements]
            return names[0] if len(names) == 1 else f"({', '.join(names)})"
        made = isinstance(node, cst.Call) and module.code(node.func) in ("set", "tuple", "frozenset")
        if isinstance(node, cst.Call) and made and node.args and isinstance(inner := node.args[0].value, listed):
            return self._classes(inner, module)
        only = self.only(node, module) if isinstance(node, cst.Name) else None
        if only is not None and isinstance(only.node, listed):
            self.drop(node, module)
            return self._classes(only.node, module)
        return f"tuple({self.code(node, module)})"

    def _applied(self, function: cst.BaseExpression, module: Module, name: str) -> str:
        """A function's text applied to a variable; a lambda's body with its parameter renamed."""
        once = isinstance(function, cst.Name) and len(module.references(function)) == 1
        bound = self.only(function, module) if once else None
        if bound is not None and isinstance(bound.node, cst.Lambda):
            self.drop(function, module)
            return self._applied(bound.node, module, name)
        if isinstance(function, cst.Lambda) and len(function.params.params) == 1:
            parameter = function.params.params[0].name.value
            inner = module.within(function.body, cst.Lambda, cst.CompFor)
            names = {n.value for n in module.within(function.body, cst.Name)}
            if not inner and (name == parameter or name not in names):
                return self._renamed(function.body, module, parameter, name)
        plain = isinstance(function, (cst.Name, cst.Attribute))
        return f"{self.code(function, module)}({name})" if plain else f"({self.code(function, module)})({name})"

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
