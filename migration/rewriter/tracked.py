"""Which expressions of a program are sharded models: followed forward from where one is made, each read leading to the
next, through assignments, arguments, returned values, attributes, containers and loops."""

from __future__ import annotations

import libcst as cst

from migration.rewriter.branches import Branches
from migration.rewriter.module import Module, last_name
from migration.rewriter.names import in_annotation
from migration.rewriter.program import Program
from migration.rewriter.symbols import CLASS
from migration.rewriter.values import Values, arguments, key_of

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


class Tracked(Branches):
    """`constructions`: the calls that make sharded models, each with its module."""

    def __init__(self, program: Program, values: Values, constructions: list[tuple[cst.Call, Module]]) -> None:
        self.program, self.values = program, values
        self._constructions = constructions
        parsed = -1
        while parsed != len(program.parsed):  # following one may parse another file
            parsed = len(program.parsed)
            self._follow()

    def is_model(self, node: cst.CSTNode, module: Module) -> bool:
        """Return whether an expression is, or may be, a sharded model where it stands."""
        return id(node) in self._models

    def _follow(self) -> None:
        self._models: set[int] = set()
        self._lists: set[int] = set()
        self._bound: dict[int, int] = {}  # a binding's node: the position from which on it is a sharded model
        self._attributes: dict[str, set[str]] = {}  # by name: the classes that set it; "" for other objects
        # Dictionaries, lists and ModuleDicts of sharded models, by their names: where something of them is sharded.
        self._holders: dict[str, list[tuple[cst.FunctionDef | None, int, object]]] = {}
        self._ways: list[tuple[cst.CSTNode, Module]] = []
        self._made = {id(call) for call, _ in self._constructions}
        for call, module in self._constructions:
            self._hold(call, module)
        for module in self.program.parsed:
            for annotation in module.all(cst.Annotation) if "F" in module.text else ():
                self._annotated(annotation, module)
        for name in STATIC:
            for call, module in self.program.named(cst.Call, name):
                self._seed(call, module)
        for name in ("isinstance", "hasattr") if self._made else ():
            for call, module in self.program.named(cst.Call, name):
                self._asked(call, module)
        while self._ways:
            self._onward(*self._ways.pop())

    def _hold(self, node: cst.CSTNode, module: Module) -> None:
        """An expression is a sharded model."""
        if id(node) not in self._models:
            self._models.add(id(node))
            self._ways.append((node, module))

    # --- where a model goes from where it is read ---

    def _onward(self, node: cst.CSTNode, module: Module) -> None:
        above = module.parent(node)
        if isinstance(above, (cst.Assign, cst.AnnAssign)):
            targets = [t.target for t in above.targets] if isinstance(above, cst.Assign) else [above.target]
            for target in targets:
                if not isinstance(target, (cst.Tuple, cst.List)):
                    self._target(target, module, module.order(above))
        elif isinstance(above, cst.NamedExpr) and above.value is node:
            self._target(above.target, module, module.order(above))
            self._hold(above, module)
        elif isinstance(above, cst.Arg) and isinstance(call := module.parent(above), cst.Call):
            self._passed(above, call, module)
        elif isinstance(above, cst.Attribute) and above.value is node:
            call = module.parent(above)
            called = isinstance(call, cst.Call) and call.func is above
            if above.attr.value in ("module", "_fsdp_wrapped_module"):
                self._hold(above, module)
            elif above.attr.value in SAME and called and call is not None:
                self._hold(call, module)
            elif above.attr.value in ("values", "items") and called and call is not None:
                self._values(node, call, module)
        elif isinstance(above, cst.Subscript) and above.value is node:
            self._subscript(above, module)
        elif isinstance(above, cst.IfExp) and above.test is not node:
            self._hold(above, module)
        elif isinstance(above, cst.Element) and isinstance(pair := module.parent(above), (cst.Tuple, cst.List)):
            self._in_tuple(above, pair, module)
        elif isinstance(above, cst.Return) and (function := module.function(above)) is not None:
            for call, where in self._calls(function, module):
                self._hold(call, where)

    def _calls(self, function: cst.FunctionDef, module: Module) -> list[tuple[cst.Call, Module]]:
        return [(c, m) for c, m in self.values.calls(function, module) if self.values.function(c.func, m) is function]

    def _values(self, node: cst.CSTNode, call: cst.CSTNode, module: Module) -> None:
        """values() or items() of a dictionary, or of a ModuleDict, of sharded models."""
        if any(held.rpartition(".")[2] == last_name(node) for held in self._holders):
            self._listed(call, module)

    def _subscript(self, node: cst.Subscript, module: Module) -> None:
        held, wanted = self._holders.get(module.code(node.value), []), key_of(node)
        home, here = module.function(node), module.order(node)
        later = [
            function is home and here < since for function, since, key in held if None in (key, wanted) or key == wanted
        ]
        if not all(later):
            self._hold(node, module)

    def _in_tuple(self, element: cst.BaseElement, pair: cst.Tuple | cst.List, module: Module) -> None:
        index = [known is element for known in pair.elements].index(True)
        if all(id(known.value) in self._models for known in pair.elements):
            self._listed(pair, module)
        above = module.parent(pair)
        if isinstance(above, cst.Assign):
            self._unpacked(above, index, module)
        elif isinstance(above, cst.Return) and isinstance(pair, cst.Tuple):
            function = module.function(above)
            for call, where in self._calls(function, module) if function is not None else ():
                assign = where.parent(call)
                if isinstance(assign, cst.Assign):
                    self._unpacked(assign, index, where)

    def _unpacked(self, assign: cst.Assign, index: int, module: Module) -> None:
        for target in [t.target for t in assign.targets]:
            if isinstance(target, (cst.Tuple, cst.List)) and index < len(target.elements):
                self._target(target.elements[index].value, module, module.order(assign))

    def _passed(self, arg: cst.Arg, call: cst.Call, module: Module) -> None:
        """The receivers of a sharded model: a parameter of the program's functions, a field, a model around it."""
        if id(call) in self._made:
            return
        if arg is call.args[0] and any(name in WRAPPERS for name, _ in module.qualified(call.func)):
            self._hold(call, module)
        if not arg.star and self._holder(call, module):
            self._hold(call, module)
        owner = self.values.class_in(call.func, module)
        place = self.values.function_in(call.func, module) or (owner and _constructor(*owner))
        if place is None:
            if owner is not None and arg.keyword is not None:
                self._attribute(arg.keyword.value, owner[0].name.value)
            return
        function, where = place
        names = [*function.params.posonly_params, *function.params.params]
        if isinstance(where.enclosing(function, cst.ClassDef, cst.FunctionDef), cst.ClassDef):
            names = names[1:]
        if arg.keyword is not None:
            known = [p for p in (*names, *function.params.kwonly_params) if p.name.value == arg.keyword.value]
        else:
            given = [a for a in call.args if a.keyword is None and not a.star]
            position = next((n for n, a in enumerate(given) if a is arg), len(names))
            known = names[position : position + 1]
        for parameter in known:
            self._bind(parameter, where, 0)

    def _holder(self, node: cst.Call, module: Module) -> bool:
        """A model of the program's whose parts are given to it sharded. Its parameters are theirs."""
        owner = self.values.class_in(node.func, module)
        return (
            owner is not None
            and any(owner[1].code(base.value).endswith("Module") for base in owner[0].bases)
            and "self.module" not in owner[1].code(owner[0])
        )

    # --- what holds it then, and where that is read ---

    def _target(self, target: cst.BaseExpression, module: Module, since: int) -> None:
        if isinstance(target, cst.Name):
            self._bind(target, module, since)
        elif isinstance(target, cst.Attribute):
            self._set(target, module)
        elif isinstance(target, cst.Subscript) and isinstance(target.value, (cst.Name, cst.Attribute)):
            held = self._holders.setdefault(module.code(target.value), [])
            if (place := (module.function(target), since, key_of(target))) not in held:
                held.append(place)
                for known, where in self.program.named(type(target.value), last_name(target.value)):
                    if id(known) in self._models:
                        self._ways.append((known, where))
            self._target(target.value, module, since)

    def _bind(self, bound: cst.Name | cst.Param, module: Module, since: int) -> None:
        """A name is a sharded model from a position on."""
        if id(bound) in self._bound:
            return
        self._bound[id(bound)] = since
        name = bound.name if isinstance(bound, cst.Param) else bound
        self._models.add(id(name))
        for binding in module.assignments(name):
            for read in binding.references if binding.node is bound else ():
                if isinstance(read, cst.Name) and not self._excluded(read, module):
                    others = self._conditions(read, module, "orelse")
                    if others and self._conditions(bound, module) & others:
                        continue
                    if since <= module.order(read) or not self._beside(bound, read, module):
                        self._hold(read, module)
        if isinstance(bound, cst.Name) and module.function(bound) is None:
            self._import(bound, module)

    def _import(self, bound: cst.Name, module: Module) -> None:
        """Another file reads it."""
        for other in self.program.also_called(bound.value):
            for read, where in self.program.named(cst.Name, other):
                if where is not module and any(known.imported for known in where.assignments(read)):
                    place = self.program.definition(read, where)
                    if place == (module, bound.value) and not self._excluded(read, where):
                        self._hold(read, where)

    def _set(self, node: cst.Attribute, module: Module) -> None:
        owner = module.enclosing(node, cst.ClassDef)
        mine = isinstance(node.value, cst.Name) and node.value.value == "self" and owner is not None
        self._attribute(node.attr.value, owner.name.value if mine and owner else "")

    def _attribute(self, name: str, owner: str) -> None:
        """Objects of a class, or any, have an attribute that is a sharded model."""
        setters = self._attributes.setdefault(name, set())
        if owner not in setters:
            setters.add(owner)
            for node, module in self.program.named(cst.Attribute, name):
                if id(node) not in self._models and self._held(node, module):
                    self._hold(node, module)

    def _held(self, node: cst.Attribute, module: Module) -> bool:
        setters = self._attributes.get(node.attr.value)
        if setters is None:
            return False
        if not (isinstance(node.value, cst.Name) and node.value.value == "self"):
            return True
        owner = module.enclosing(node, cst.ClassDef)
        if owner is None:
            return False
        # A class derived from this one may set it: torch's functions for state dicts take other models too.
        below = {name for name in setters for known, where in self.program.named(cst.ClassDef, name)
                 if owner.name.value in self._bases(known, where)}  # fmt: skip
        return bool(below or setters & ({owner.name.value, ""} | self._bases(owner, module)))

    def _bases(self, owner: cst.ClassDef, module: Module, depth: int = 0) -> set[str]:
        """The names of the classes that a class is derived from, as far as the program has them."""
        found: set[str] = set()
        for base in owner.bases if depth < 5 else ():
            name = module.code(base.value).rpartition(".")[2]
            found.add(name)
            for known, where in self.program.named(cst.ClassDef, name):
                if known is not owner:
                    found |= self._bases(known, where, depth + 1)
        return found

    @staticmethod
    def _conditions(node: cst.CSTNode, module: Module, branch: str = "body") -> set[str]:
        """The conditions of this function under which a statement is reached; with "orelse" those without which."""
        found, below = set(), node
        for above in module.ancestors(node):
            if isinstance(above, cst.FunctionDef):
                break
            if isinstance(above, cst.If) and below is getattr(above, branch):
                found.add(module.code(above.test))
            below = above
        return found

    def _beside(self, binding: cst.CSTNode, read: cst.Name, module: Module) -> bool:
        """Return whether reads above the binding come before it: same function, and no loop around both."""
        if module.function(binding) is not module.function(read):
            return False
        loops = {id(loop) for loop in module.ancestors(binding) if isinstance(loop, (cst.For, cst.While))}
        return not any(id(loop) in loops for loop in module.ancestors(read))

    # --- lists of models ---

    def _listed(self, node: cst.CSTNode, module: Module) -> None:
        """FSDP.fsdp_modules(model), a function that returns it, values() of a dictionary, or models one by one."""
        if id(node) in self._lists:
            return
        self._lists.add(id(node))
        above = module.parent(node)
        if isinstance(above, cst.Return) and (function := module.function(above)) is not None:
            for call, where in self._calls(function, module):
                self._listed(call, where)
        if isinstance(above, (cst.For, cst.CompFor)) and above.iter is node:
            pairs = isinstance(node, cst.Call) and last_name(node) == "items"
            target = above.target
            if isinstance(target, cst.Name) and not pairs:
                self._target(target, module, 0)
            elif isinstance(target, cst.Tuple) and pairs:
                self._target(target.elements[1].value, module, 0)
        zipped = module.parent(above) if isinstance(above, cst.Arg) else None
        loop = module.parent(zipped) if isinstance(zipped, cst.Call) and last_name(zipped) == "zip" else None
        if isinstance(loop, (cst.For, cst.CompFor)) and isinstance(loop.target, cst.Tuple):
            assert isinstance(zipped, cst.Call)
            place = [arg is above for arg in zipped.args].index(True)
            if place < len(loop.target.elements):
                self._target(loop.target.elements[place].value, module, 0)

    # --- where it starts ---

    def _asked(self, call: cst.Call, module: Module) -> None:
        """Code under `if isinstance(model, FSDP)`."""
        above = module.parent(call)
        asked = call.args[0].value if call.args else None
        if not isinstance(above, (cst.If, cst.IfExp)) or above.test is not call or not isinstance(asked, cst.Name):
            return
        if self._asks(call, asked.value, module):
            home = module.function(above)
            for read in module.within(above.body, cst.Name):
                beside = module.parent(read)
                named = isinstance(beside, cst.Attribute) and beside.attr is read
                same = read.value == asked.value and not named and module.function(read) is home
                if same and not self._excluded(read, module):
                    self._hold(read, module)

    def _annotated(self, annotation: cst.Annotation, module: Module) -> None:
        """Annotations that name FSDP1: `model: FSDP`, `model: "FSDP | None"`."""
        names = module.within(annotation, cst.Name, cst.Attribute, cst.SimpleString)
        symbol = self.program.symbol
        said = any(symbol(name, module) == CLASS or in_annotation(name, module, symbol) for name in names)
        around = {last_name(one.value) for one in module.within(annotation, cst.Subscript)}
        holder = module.parent(annotation)
        if not said or not around <= {"Optional", "Union"}:
            return
        if isinstance(holder, cst.Param):
            self._bind(holder, module, 0)
        elif isinstance(holder, cst.AnnAssign):
            self._target(holder.target, module, 0)

    def _seed(self, call: cst.Call, module: Module) -> None:
        """The model that a static method of FSDP1's class is called with."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in STATIC:
            return
        if self.program.symbol(call.func, module) != f"{CLASS}.{call.func.attr.value}":
            return
        if call.func.attr.value == "fsdp_modules":
            self._listed(call, module)
        args, _ = arguments(call)
        node = args.get("model", args.get("module", args.get(STATIC[call.func.attr.value])))
        loads = call.func.attr.value == "optim_state_dict_to_load" and node is not None and 1 in args
        if loads and node is not None and ("optim" in module.code(node) or "osd" in module.code(node)):
            node = args[1]  # until torch 2.1 the model came second
        if isinstance(node, cst.Name):
            for binding in module.assignments(node):
                if isinstance(module.parent(binding.node), cst.Param) or isinstance(binding.node, cst.Param):
                    assert isinstance(binding.node, (cst.Name, cst.Param))
                    self._bind(binding.node, module, 0)
        elif isinstance(node, cst.Attribute) and not self._made:
            self._set(node, module)


def _constructor(owner: cst.ClassDef, module: Module) -> tuple[cst.FunctionDef, Module] | None:
    lines = [line for line in owner.body.body if isinstance(line, cst.FunctionDef)]
    return next(((line, module) for line in lines if line.name.value == "__init__"), None)
