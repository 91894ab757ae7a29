"""Which names and attributes of a program hold a sharded model: followed from the constructor through assignments,
arguments, returned values and attributes."""

from __future__ import annotations

import libcst as cst

from rewriter.bindings import arguments
from rewriter.branches import Branches
from rewriter.module import Module, last_name
from rewriter.names import in_annotation
from rewriter.program import Program
from rewriter.symbols import CLASS
from rewriter.values import Values

# Methods that give the model back.
SAME = ("to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "requires_grad_")
WRAPPERS = ("torch.compile",)
# Static methods of the class, and the place of the model among their arguments.
STATIC = {
    "state_dict_type": 0,
    "set_state_dict_type": 0,
    "get_state_dict_type": 0,
    "summon_full_params": 0,
    "fsdp_modules": 0,
    "optim_state_dict": 0,
    "optim_state_dict_to_load": 0,
    "full_optim_state_dict": 0,
    "sharded_optim_state_dict": 0,
    "shard_full_optim_state_dict": 1,
    "flatten_sharded_optim_state_dict": 1,
    "scatter_full_optim_state_dict": 1,
    "rekey_optim_state_dict": 2,
}
ROUNDS = 8


class Tracked(Branches):
    """`constructions`: the calls that make sharded models, each with its module."""

    def __init__(self, program: Program, values: Values, constructions: list[tuple[cst.Call, Module]]) -> None:
        self.program, self.values = program, values
        self._made = {id(call) for call, _ in constructions}
        self._bound: dict[int, int] = {}  # a binding's node: the position from which on it is a sharded model
        self._attributes: dict[str, set[str]] = {}  # by name: the classes that set it; "" for other objects
        self._returning: set[int] = set()
        # Dictionaries, lists and ModuleDicts of sharded models, by their names: where something of them is sharded.
        self._holders: dict[str, list[tuple[cst.FunctionDef | None, int]]] = {}
        self._grow()

    def is_model(self, node: cst.CSTNode, module: Module) -> bool:
        """Whether an expression is, or may be, a sharded model where it stands."""
        if id(node) in self._made:
            return True
        if isinstance(node, cst.Attribute):
            if node.attr.value in ("module", "_fsdp_wrapped_module") and self.is_model(node.value, module):
                return True
            return self._held(node, module)
        if isinstance(node, cst.Subscript):
            held = self._holders.get(module.code(node.value), [])
            home, here = module.function(node), module.order(node)
            later = any(function is home and here < since for function, since in held)
            return bool(held) and not later and self.is_model(node.value, module)
        if isinstance(node, cst.Name):
            if self._excluded(node, module):
                return False
            if self._made and self._included(node, module):
                return True
            here = module.order(node)
            others = self._otherwise(node, module)
            for binding in module.assignments(node):
                if binding.imported and self._imported(node, module):
                    return True
                since = self._bound.get(id(binding.node))
                if since is None or (others and self._conditions(binding.node, module) & others):
                    continue
                if since <= here or not self._beside(binding.node, node, module):
                    return True
            return False
        if isinstance(node, cst.Call):
            if isinstance(node.func, cst.Attribute) and node.func.attr.value in SAME:
                return self.is_model(node.func.value, module)
            if any(name in WRAPPERS for name, _ in module.qualified(node.func)) and node.args:
                return self.is_model(node.args[0].value, module)
            function = self.values.function(node.func, module)
            return (function is not None and id(function) in self._returning) or self._holder(node, module)
        return isinstance(node, cst.IfExp) and (self.is_model(node.body, module) or self.is_model(node.orelse, module))

    def _holder(self, node: cst.Call, module: Module) -> bool:
        """A model of the program's whose parts are given to it sharded. Its parameters are theirs."""
        if not node.args or not isinstance(node.func, cst.Name):
            return False
        if not any(self.is_model(arg.value, module) for arg in node.args if not arg.star):
            return False
        owners = [leaf for leaf in self.values.leaves(node.func, module) if isinstance(leaf.node, cst.ClassDef)]
        return any(
            leaf.module.code(base.value).endswith("Module") and "self.module" not in leaf.module.code(leaf.node)
            for leaf in owners
            if isinstance(leaf.node, cst.ClassDef)
            for base in leaf.node.bases
        )

    @staticmethod
    def _conditions(node: cst.CSTNode, module: Module) -> set[str]:
        """The conditions of this function under which a statement is reached."""
        found, below = set(), node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                break
            if isinstance(above, cst.If) and below is above.body:
                found.add(module.code(above.test))
            below = above
        return found

    @staticmethod
    def _otherwise(node: cst.CSTNode, module: Module) -> set[str]:
        """The conditions whose else leads here."""
        found, below = set(), node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                break
            if isinstance(above, cst.If) and below is above.orelse:
                found.add(module.code(above.test))
            below = above
        return found

    def _held(self, node: cst.Attribute, module: Module) -> bool:
        setters = self._attributes.get(node.attr.value)
        if setters is None:
            return False
        if not (isinstance(node.value, cst.Name) and node.value.value == "self"):
            if node.attr.value == "module":  # of DDP, it may be: only an object of a class that sets it
                owners = {owner.name.value for owner, _ in self.values.classes(node.value, module)}
                return bool(owners & setters)
            return True
        owner = module.enclosing(node, cst.ClassDef)
        return owner is not None and bool(setters & ({owner.name.value, ""} | self._bases(owner, module)))

    def in_subclass(self, node: cst.CSTNode, module: Module) -> str:
        """The class, if an attribute of self is set to a sharded model in a class derived from this one only."""
        if not isinstance(node, cst.Attribute) or self.is_model(node, module):
            return ""
        owner = module.enclosing(node, cst.ClassDef)
        if owner is None or not (isinstance(node.value, cst.Name) and node.value.value == "self"):
            return ""
        for setter in sorted(self._attributes.get(node.attr.value, ())):
            for where in self.program.parsed:
                for known in where.all(cst.ClassDef):
                    if known.name.value == setter and owner.name.value in self._bases(known, where):
                        return setter
        return ""

    def _bases(self, owner: cst.ClassDef, module: Module, depth: int = 0) -> set[str]:
        """The names of the classes that a class is derived from, as far as the program has them."""
        found: set[str] = set()
        for base in owner.bases if depth < 5 else ():
            name = module.code(base.value).rpartition(".")[2]
            found.add(name)
            for where in self.program.parsed:
                for known in where.all(cst.ClassDef):
                    if known.name.value == name and known is not owner:
                        found |= self._bases(known, where, depth + 1)
        return found

    def _beside(self, binding: cst.CSTNode, read: cst.Name, module: Module) -> bool:
        """Whether reads above the binding come before it: same function, and no loop around both."""
        if module.function(binding) is not module.function(read):
            return False
        loops = {id(loop) for loop in module.ancestors(binding) if isinstance(loop, (cst.For, cst.While))}
        return not any(id(loop) in loops for loop in module.ancestors(read))

    def _annotated(self, annotation: cst.Annotation, module: Module) -> None:
        """What a program says is FSDP1's: `model: FSDP`, `model: "FSDP | None"`."""
        names = module.within(annotation, cst.Name, cst.Attribute, cst.SimpleString)
        symbol = self.program.symbol
        said = any(symbol(name, module) == CLASS or in_annotation(name, module, symbol) for name in names)
        around = {last_name(one.value) for one in module.within(annotation, cst.Subscript)}
        holder = module.parent(annotation)
        if not said or not around <= {"Optional", "Union"}:
            return
        if isinstance(holder, cst.Param):
            self._bound.update({id(holder): 0, id(holder.name): 0})
        elif isinstance(holder, cst.AnnAssign):
            self._target(holder.target, module, 0)

    def _imported(self, name: cst.Name, module: Module) -> bool:
        """Whether another file's variable is a sharded model."""
        place = self.program.definition(name, module)
        return place is not None and any(
            id(target) in self._bound and place[0].function(target) is None
            for target in place[0].named(cst.Name, place[1])
        )

    def _grow(self) -> None:
        for module in self.program.parsed:
            for annotation in module.all(cst.Annotation) if "F" in module.text else ():
                self._annotated(annotation, module)
            for call in module.all(cst.Call):
                self._seed(call, module)
        for _ in range(ROUNDS):
            before = (len(self._bound), sum(map(len, self._attributes.values())), len(self._returning))
            for module in self.program.parsed:
                for assign in module.all(cst.Assign, cst.AnnAssign):
                    self._assigned(assign, module)
                for call in module.all(cst.Call):
                    self._passed(call, module)
                for loop in module.all(cst.For, cst.CompFor):
                    self._looped(loop, module)
                for returned in module.all(cst.Return):
                    if returned.value is not None and (function := module.function(returned)) is not None:
                        self._returned(returned.value, function, module)
            if before == (len(self._bound), sum(map(len, self._attributes.values())), len(self._returning)):
                return

    def _looped(self, loop: cst.For | cst.CompFor, module: Module) -> None:
        """A loop over sharded models, or over several lists of them at once."""
        target, over = loop.target, loop.iter
        if isinstance(target, cst.Name):
            if self._lists_models(over, module):
                self._bound.setdefault(id(target), 0)
        elif isinstance(target, cst.Tuple) and isinstance(over, cst.Call):
            called = over.func.attr.value if isinstance(over.func, cst.Attribute) else module.code(over.func)
            for place, element in enumerate(target.elements):
                listed = called == "zip" and place < len(over.args) and over.args[place].value
                if (listed and self._lists_models(listed, module)) or (
                    called == "items" and place == 1 and self._holds_models(over, module)
                ):
                    self._target(element.value, module, 0)

    def _holds_models(self, node: cst.Call, module: Module) -> bool:
        """values() or items() of a dictionary, or of a ModuleDict, of sharded models."""
        held = node.func.value if isinstance(node.func, cst.Attribute) else None
        last = module.code(held).rpartition(".")[2] if held is not None else ""
        return any(name.rpartition(".")[2] == last for name in self._holders) and self.is_model(held or node, module)

    def _lists_models(self, node: cst.BaseExpression, module: Module, depth: int = 0) -> bool:
        """FSDP.fsdp_modules(model), a function that returns it, or models one after the other."""
        if isinstance(node, (cst.Tuple, cst.List)):
            return bool(node.elements) and all(self.is_model(element.value, module) for element in node.elements)
        if not isinstance(node, cst.Call) or depth > 2:
            return False
        if self.program.symbol(node.func, module) == f"{CLASS}.fsdp_modules":
            return True
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "values" and not node.args:
            return self._holds_models(node, module)
        returned = self.values.returns(node, module) or ()
        return any(self._lists_models(value, where, depth + 1) for value, where in returned)

    def _seed(self, call: cst.Call, module: Module) -> None:
        """The model that a static method of FSDP1's class is called with."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in STATIC:
            return
        if self.program.symbol(call.func, module) != f"{CLASS}.{call.func.attr.value}":
            return
        args, _ = arguments(call)
        node = args.get("model", args.get("module", args.get(STATIC[call.func.attr.value])))
        loads = call.func.attr.value == "optim_state_dict_to_load" and node is not None and 1 in args
        if loads and node is not None and ("optim" in module.code(node) or "osd" in module.code(node)):
            node = args[1]  # until torch 2.1 the model came second
        if isinstance(node, cst.Name):
            for binding in module.assignments(node):
                if isinstance(module.parent(binding.node), cst.Param) or isinstance(binding.node, cst.Param):
                    self._bound.setdefault(id(binding.node), 0)
        elif isinstance(node, cst.Attribute) and not self._made:
            self._attribute(node, module)

    def _target(self, target: cst.BaseExpression, module: Module, since: int) -> None:
        if isinstance(target, cst.Name):
            self._bound.setdefault(id(target), since)
        elif isinstance(target, cst.Attribute):
            self._attribute(target, module)
        elif isinstance(target, cst.Subscript) and isinstance(target.value, (cst.Name, cst.Attribute)):
            held = self._holders.setdefault(module.code(target.value), [])
            if (place := (module.function(target), since)) not in held:
                held.append(place)
            self._target(target.value, module, since)

    def _attribute(self, node: cst.Attribute, module: Module) -> None:
        owner = module.enclosing(node, cst.ClassDef)
        mine = isinstance(node.value, cst.Name) and node.value.value == "self" and owner is not None
        self._attributes.setdefault(node.attr.value, set()).add(owner.name.value if mine and owner else "")

    def _assigned(self, assign: cst.Assign | cst.AnnAssign, module: Module) -> None:
        if assign.value is None:
            return
        targets = [t.target for t in assign.targets] if isinstance(assign, cst.Assign) else [assign.target]
        since = module.order(assign)
        for target in targets:
            if isinstance(target, (cst.Tuple, cst.List)):
                self._unpacked(target, assign.value, module, since)
            elif self.is_model(assign.value, module):
                self._target(target, module, since)

    def _unpacked(self, target: cst.Tuple | cst.List, value: cst.BaseExpression, module: Module, since: int) -> None:
        for index, element in enumerate(target.elements):
            if isinstance(value, (cst.Tuple, cst.List)) and index < len(value.elements):
                if self.is_model(value.elements[index].value, module):
                    self._target(element.value, module, since)
            elif isinstance(value, cst.Call):
                for returned, where in self.values.returns(value, module) or ():
                    held = returned.elements if isinstance(returned, cst.Tuple) else ()
                    if index < len(held) and self.is_model(held[index].value, where):
                        self._target(element.value, module, since)

    def _passed(self, call: cst.Call, module: Module) -> None:
        """Parameters of the program's functions that a sharded model is passed for."""
        if not call.args or id(call) in self._made:
            return
        place = self.values.function_in(call.func, module) or self._method(call, module)
        if place is None:
            self._fields(call, module)
            return
        function, where = place
        names = [*function.params.posonly_params, *function.params.params]
        if isinstance(where.enclosing(function, cst.ClassDef, cst.FunctionDef), cst.ClassDef):
            names = names[1:]
        by_name = {p.name.value: p for p in (*names, *function.params.kwonly_params)}
        position = 0
        for arg in call.args:
            parameter = None
            if arg.keyword is not None:
                parameter = by_name.get(arg.keyword.value)
            elif not arg.star:
                parameter = names[position] if position < len(names) else None
                position += 1
            if parameter is not None and self.is_model(arg.value, module):
                self._bound.setdefault(id(parameter.name), 0)
                self._bound.setdefault(id(parameter), 0)

    def _fields(self, call: cst.Call, module: Module) -> None:
        """Fields of a dataclass that are given a sharded model."""
        for arg in call.args:
            if arg.keyword is None or not self.is_model(arg.value, module):
                continue
            for leaf in self.values.leaves(call.func, module) if isinstance(call.func, cst.Name) else ():
                if isinstance(leaf.node, cst.ClassDef):
                    self._attributes.setdefault(arg.keyword.value, set()).add(leaf.node.name.value)

    def _method(self, call: cst.Call, module: Module) -> tuple[cst.FunctionDef, Module] | None:
        """The __init__ of a class of the program that is called."""
        if not isinstance(call.func, cst.Name):
            return None
        for leaf in self.values.leaves(call.func, module):
            if leaf.kind == "class" and isinstance(leaf.node, cst.ClassDef):
                for line in leaf.node.body.body:
                    if isinstance(line, cst.FunctionDef) and line.name.value == "__init__":
                        return line, leaf.module
        return None

    def _returned(self, node: cst.BaseExpression, function: cst.FunctionDef, module: Module) -> None:
        if self.is_model(node, module):
            self._returning.add(id(function))
