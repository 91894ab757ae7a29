"""One step back from a name or an attribute to what it is bound to: assignments, arguments, other files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import libcst as cst

from rewriter.members import (
    class_attributes,
    constructed,
    field_of_any,
    is_property,
    method_of_any,
    returned_by,
)
from rewriter.module import Module
from rewriter.program import Program, top_assignments
from rewriter.scopes import Binding

Bound = cst.BaseExpression | cst.FunctionDef | cst.ClassDef


@dataclass
class Leaf:
    """A value at the end of the trail.

    Attributes:
        kind: "none", "symbol" (FSDP1's name in `symbol`), "call" (of FSDP1's `symbol`), "partial" (of it),
            "member" (one of the enumeration `symbol`, whose name the expression args[0] gives at run time; args[1], if
                it is there, stands for a name that is none),
            "function" (a def or lambda of the program), "class", "value" (anything else that is written out),
            "unknown".
        args: of a call or partial: its arguments as they are written, keyword or position to expression.
    """

    kind: str
    node: cst.CSTNode
    module: Module
    symbol: str = ""
    args: dict[str | int, cst.BaseExpression] = field(default_factory=dict)
    spread: bool = False  # *args or **kwargs among the arguments
    why: str = ""


def arguments(call: cst.Call, skip: int = 0) -> tuple[dict[str | int, cst.BaseExpression], bool]:
    """Arguments of a call by keyword or position, from the `skip`th positional on; and whether any is spread."""
    found: dict[str | int, cst.BaseExpression] = {}
    spread, position = False, 0
    for arg in call.args:
        if arg.star:
            spread = True
        elif arg.keyword is not None:
            found[arg.keyword.value] = arg.value
        else:
            if position >= skip:
                found[position - skip] = arg.value
            position += 1
    return found, spread


class Bindings(ABC):
    program: Program

    @abstractmethod
    def written(self, node: cst.BaseExpression, module: Module) -> list[tuple[cst.BaseExpression, Module]]:
        """Where an expression's value is written out."""

    @abstractmethod
    def leaves(self, node: cst.BaseExpression, module: Module) -> list[Leaf]:
        """Every value that an expression may have."""

    def sources(self, node: cst.Name | cst.Attribute, module: Module) -> tuple[list[tuple[Bound, Module]] | None, str]:
        """What a name or an attribute is bound to. None, and why, if any binding can't be followed."""
        if isinstance(node, cst.Attribute):
            return self._attribute(node, module)
        found: list[tuple[Bound, Module]] = []
        bindings = self._reaching(node, module)
        if not bindings:
            place = self.program.definition(node, module)
            return self._defined(*place) if place else (None, f"{node.value} is bound nowhere")
        for binding in bindings:
            bound = binding.node
            if isinstance(bound, (cst.FunctionDef, cst.ClassDef)):
                found.append((bound, module))
            elif isinstance(bound, (cst.ImportFrom, cst.Import)):
                place = self.program.definition(node, module)
                if place is None:
                    return None, f"{node.value} is imported from a file that wasn't given"
                values, why = self._defined(*place)
                if values is None:
                    return None, why
                found += values
            elif isinstance(bound, (cst.Name, cst.Param)):
                values = self._bound(bound, module) if isinstance(bound, cst.Name) else self._argument(bound, module)
                if values is None:
                    return None, f"{node.value} gets its value in a way that isn't followed"
                found += values
            else:
                return None, f"{node.value} gets its value in a way that isn't followed"
        return found, ""

    @staticmethod
    def _reaching(name: cst.Name, module: Module) -> list[Binding]:
        """The bindings that a read may see: not those that one beside the read, and before it, has replaced."""
        bindings = module.assignments(name)
        home = module.function(name)
        if len(bindings) < 2 or any(module.function(b.node) is not home for b in bindings):
            return bindings
        here = module.order(name)
        for statement in (
            s for s in module.ancestors(name) if isinstance(s, (cst.BaseStatement, cst.BaseCompoundStatement))
        ):
            beside = module.block_of(statement)
            last = -1
            for binding in bindings:
                line = module.statement(binding.node)
                at = module.order(binding.node)
                plain = isinstance(line, cst.SimpleStatementLine) and any(line is known for known in beside)
                if plain and at < module.order(statement):
                    last = max(last, at)
            if last >= 0:
                loops = [a for a in module.ancestors(name) if isinstance(a, (cst.For, cst.While))]
                again = any(module.order(loop) > last for loop in loops)
                return [b for b in bindings if (at := module.order(b.node)) >= last and (at < here or again)]
        return bindings

    def _defined(self, module: Module, name: str) -> tuple[list[tuple[Bound, Module]] | None, str]:
        if name in module.top_level:
            return [(module.top_level[name], module)], ""
        values = top_assignments(module, name)
        return ([(value, module) for value in values], "") if values else (None, f"{name} isn't found")

    def _bound(self, target: cst.Name, module: Module) -> list[tuple[Bound, Module]] | None:
        """What is assigned to a name where it is a target."""
        above = module.parent(target)
        if isinstance(above, cst.AssignTarget):
            assign = module.parent(above)
            return [(assign.value, module)] if isinstance(assign, cst.Assign) else None
        if isinstance(above, cst.AnnAssign):
            return [(above.value, module)] if above.value is not None else []
        if isinstance(above, cst.NamedExpr):
            return [(above.value, module)]
        if isinstance(above, cst.Element) and isinstance(pair := module.parent(above), (cst.Tuple, cst.List)):
            index = [element is above for element in pair.elements].index(True)
            assign = module.parent(module.parent(pair) or pair)
            if isinstance(assign, cst.Assign):
                return self._item(assign.value, module, index)
            loop = module.parent(pair)
            if isinstance(loop, (cst.For, cst.CompFor)) and loop.target is pair:
                return self._turns(loop.iter, module, index)
        if isinstance(above, (cst.For, cst.CompFor)) and above.target is target:
            return self._turns(above.iter, module)
        return None

    def _turns(
        self, node: cst.BaseExpression, module: Module, index: int | None = None
    ) -> list[tuple[Bound, Module]] | None:
        """What a loop's variable is, turn by turn; the index-th variable, if there are several."""
        name = module.code(node.func) if isinstance(node, cst.Call) else ""
        if isinstance(node, cst.Call) and index is not None and not any(arg.star or arg.keyword for arg in node.args):
            if name == "enumerate" and index == 1 and node.args:
                return self._turns(node.args[0].value, module)
            if name == "zip" and index < len(node.args):
                return self._turns(node.args[index].value, module)
        found: list[tuple[Bound, Module]] = []
        read = [node] if not isinstance(node, cst.Name) else module.references(node)
        if any(not self._goes_through(name, module) for name in read):
            return None  # something else expects what stands there now
        for written, where in self.written(node, module):
            if not isinstance(written, (cst.Tuple, cst.List)):
                return None
            for element in written.elements:
                if not isinstance(element, cst.Element):
                    return None
                if index is None:
                    found.append((element.value, where))
                elif (item := self._item(element.value, where, index)) is not None:
                    found += item
                else:
                    return None
        return found

    @staticmethod
    def _goes_through(node: cst.CSTNode, module: Module) -> bool:
        """Whether an expression is only what a loop goes through, or an index chooses from."""
        above = module.parent(node)
        if isinstance(above, cst.Subscript):
            return above.value is node
        if isinstance(above, cst.Arg) and isinstance(call := module.parent(above), cst.Call):
            name = module.code(call.func)
            return name == "len" or (name in ("enumerate", "zip") and Bindings._goes_through(call, module))
        return isinstance(above, (cst.For, cst.CompFor)) and above.iter is node

    def _item(self, node: cst.BaseExpression, module: Module, index: int) -> list[tuple[Bound, Module]] | None:
        """What a tuple holds at a place, if it is written out, here or in what the called function returns."""
        if isinstance(node, (cst.Tuple, cst.List)):
            return [(node.elements[index].value, module)] if index < len(node.elements) else None
        if isinstance(node, cst.Call):
            returned = self.returns(node, module)
            if returned is None:
                return None
            found: list[tuple[Bound, Module]] = []
            for value, where in returned:
                item = self._item(value, where, index)
                if item is None:
                    return None
                found += item
            return found
        return None

    def _argument(self, parameter: cst.Param, module: Module) -> list[tuple[Bound, Module]] | None:
        """What is passed for a function's parameter in all calls that the program has; its default too."""
        function = module.function(parameter)
        if function is None or parameter.star:
            return None
        found: list[tuple[Bound, Module]] = []
        if parameter.default is not None:
            found.append((parameter.default, module))
        passed = self.passed(function, module, parameter.name.value)
        if passed is None or not (found or passed):
            return None
        return [*found, *passed]

    def passed(
        self, function: cst.FunctionDef, module: Module, parameter: str
    ) -> list[tuple[cst.BaseExpression, Module]] | None:
        """The arguments for a parameter in the calls of a function. None if it is also used in another way."""
        names = [p.name.value for p in (*function.params.posonly_params, *function.params.params)]
        method = module.enclosing(function, cst.ClassDef, cst.FunctionDef)
        if isinstance(method, cst.ClassDef):
            names = names[1:]
        found: list[tuple[cst.BaseExpression, Module]] = []
        for call, where in self.calls(function, module):
            args, spread = arguments(call)
            if parameter in args:
                found.append((args[parameter], where))
            elif parameter in names and (place := names.index(parameter)) in args:
                found.append((args[place], where))
            elif spread:
                return None
        return found

    def calls(self, function: cst.FunctionDef, module: Module) -> list[tuple[cst.Call, Module]]:
        """Calls of a function or method, in all files that are parsed. Methods are told apart by name alone."""
        return self.program.answer("calls", function, lambda: self._calls(function, module), [])

    def _calls(self, function: cst.FunctionDef, module: Module) -> list[tuple[cst.Call, Module]]:
        name = function.name.value
        owner = module.enclosing(function, cst.ClassDef, cst.FunctionDef)
        if isinstance(owner, cst.ClassDef):
            made = self.program.called(owner.name.value) if name == "__init__" else []
            found = [(c, where) for c, where in made if isinstance(c.func, cst.Name)]
            named = self.program.called(name)
            return found + [(c, where) for c, where in named if isinstance(c.func, cst.Attribute)]
        named = self.program.called(name) + self.program.named(cst.Call, "")
        return [(call, where) for call, where in named if self.function(call.func, where) is function]

    def function(self, node: cst.CSTNode, module: Module) -> cst.FunctionDef | None:
        """The function of the program that a called expression is."""
        found = self.function_in(node, module)
        return found[0] if found else None

    def function_in(self, node: cst.CSTNode, module: Module) -> tuple[cst.FunctionDef, Module] | None:
        return self.program.answer("function", node, lambda: self._function_in(node, module))

    def _function_in(self, node: cst.CSTNode, module: Module) -> tuple[cst.FunctionDef, Module] | None:
        if isinstance(node, cst.Call):  # of what it returns
            made = [self.function_in(value, where) for value, where in self.returns(node, module) or ()]
            return made[0] if len(made) == 1 else None
        if isinstance(node, cst.Name):
            for binding in module.assignments(node):
                if isinstance(binding.node, cst.FunctionDef):
                    return binding.node, module
        if isinstance(node, (cst.Name, cst.Attribute)):
            place = self.program.definition(node, module)
            if place is not None:
                known = place[0].top_level.get(place[1])
                if isinstance(known, cst.FunctionDef):
                    return known, place[0]
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == "self":
            owner = module.enclosing(node, cst.ClassDef)
            if owner is not None:
                for statement in owner.body.body:
                    if isinstance(statement, cst.FunctionDef) and statement.name.value == node.attr.value:
                        return statement, module
        return method_of_any(self.program, node, module) if isinstance(node, cst.Attribute) else None

    def returns(self, call: cst.Call, module: Module) -> list[tuple[cst.BaseExpression, Module]] | None:
        """What a called function of the program returns; None if it isn't the program's."""
        place = self.function_in(call.func, module)
        if place is None:
            return None
        function, where = place
        return returned_by(function, where)

    # --- attributes ---

    def _attribute(self, node: cst.Attribute, module: Module) -> tuple[list[tuple[Bound, Module]] | None, str]:
        place = self.program.definition(node, module)
        if place is not None:
            return self._defined(*place)
        name = node.attr.value
        if isinstance(node.value, cst.Name) and node.value.value == "self":
            values = self._self_attribute(node, module)
            own = self.function_in(node, module)
            if not values and own is not None and is_property(own[0]):
                values = list(returned_by(*own))
            return (values, "") if values else (None, f"self.{name} is set nowhere in its class")
        held: list[tuple[Bound, Module]] = []
        for owner, where in self.classes(node.value, module):
            values = [(value, where) for target, value in class_attributes(owner) if target == name]
            held += values + (constructed(self.program, owner, name) if values else [])
        held = held or field_of_any(self.program, name)
        if not held:
            return None, f"{module.code(node)} comes from somewhere that isn't followed"
        if self._stored(name):
            return None, f"{module.code(node)} is changed at run time"
        return held, ""

    def _self_attribute(self, node: cst.Attribute, module: Module) -> list[tuple[Bound, Module]]:
        owner = module.enclosing(node, cst.ClassDef)
        found: list[tuple[Bound, Module]] = []
        if owner is None:
            return found
        for assign in module.within(owner, cst.Assign, cst.AnnAssign):
            targets = [t.target for t in assign.targets] if isinstance(assign, cst.Assign) else [assign.target]
            for target in targets:
                if (
                    isinstance(target, cst.Attribute)
                    and target.attr.value == node.attr.value
                    and isinstance(target.value, cst.Name)
                    and target.value.value == "self"
                    and assign.value is not None
                ):
                    found.append((assign.value, module))
        return found + [(v, module) for name, v in class_attributes(owner) if name == node.attr.value]

    def classes(self, node: cst.BaseExpression, module: Module) -> list[tuple[cst.ClassDef, Module]]:
        """The classes of the program that an expression is, or is an instance of."""
        found = []
        for leaf in self.leaves(node, module) if isinstance(node, (cst.Name, cst.Attribute, cst.Call)) else []:
            if leaf.kind == "class" and isinstance(leaf.node, cst.ClassDef):
                found.append((leaf.node, leaf.module))
            elif leaf.kind == "value" and isinstance(leaf.node, cst.Call):
                found += [
                    (made.node, made.module)
                    for made in self.leaves(leaf.node.func, leaf.module)
                    if made.kind == "class" and isinstance(made.node, cst.ClassDef)
                ]
        return found

    def _stored(self, name: str) -> bool:
        """Whether any object's attribute of that name is set."""
        known = self.program.named(cst.Attribute, name)
        return any(isinstance(where.parent(node), cst.AssignTarget) for node, where in known)
