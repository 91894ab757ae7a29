"""What differs from rank to rank: conditions that say which ranks get somewhere, followed back to where the program
learns its rank, whatever it calls it."""

from __future__ import annotations

import functools

import libcst as cst

from rewriter.module import Module, last_name
from rewriter.program import Program
from rewriter.values import Values, string

# What a launcher sets, and what torch and libraries on it call a rank.
GLOBAL = {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
ENVIRONMENT = GLOBAL | {"LOCAL_RANK", "PMI_LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "GROUP_RANK"}
CALLS = ("get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank")
FIRST = ("is_main_process", "is_global_zero", "is_world_process_zero")
FIELDS = (*FIRST, "local_rank", "global_rank", "is_local_main_process", "process_index", "local_process_index")


class Ranks:
    def __init__(self, program: Program, values: Values) -> None:
        self.program, self.values = program, values

    def differs(self, node: cst.CSTNode, module: Module) -> bool:
        """Whether something in an expression depends on the rank."""
        if isinstance(node, cst.Call) and module.code(node.func) in ("int", "bool") and node.args:
            node = node.args[0].value
        if isinstance(node, (cst.BooleanOperation, cst.BinaryOperation)):
            parts = [node.left, node.right]
        elif isinstance(node, cst.Comparison):
            parts = [node.left, *(part.comparator for part in node.comparisons)]
        elif isinstance(node, cst.UnaryOperation):
            parts = [node.expression]
        else:
            known = isinstance(node, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
            return known and self._one(node, module)  # type: ignore[arg-type]
        return any(self.differs(part, module) for part in parts)

    def _one(self, node: cst.BaseExpression, module: Module) -> bool:
        return bool(self.program.answer("rank", node, lambda: self._differs(node, module), False))

    def _differs(self, node: cst.BaseExpression, module: Module) -> bool:
        if self._source(node, module) or self._unseen(node, module):
            return True
        for leaf in self.values.leaves(node, module):
            if leaf.node is node:
                if isinstance(node, cst.Attribute) and any(self.differs(*value) for value in self._set(node)):
                    return True
            elif leaf.kind in ("value", "unknown") and self.differs(leaf.node, leaf.module):
                return True
        return False

    def _unseen(self, node: cst.BaseExpression, module: Module) -> bool:
        """Whether a function of a file that wasn't given is asked without an argument, as `is_main_process()`: it may
        ask for the rank, and who reads the mark knows."""
        if not isinstance(node, cst.Call) or node.args or self.values.function(node.func, module) is not None:
            return False
        names = [name for name, imported in module.qualified(node.func) if imported]
        return bool(names) and not any(name.startswith(("torch.", "os.", "time.")) for name in names)

    def _set(self, node: cst.Attribute) -> list[tuple[cst.BaseExpression, Module]]:
        """What attributes of this name are set to, whose object isn't followed."""
        found = []
        for known, where in self.program.named(cst.Attribute, node.attr.value):
            target = where.parent(known)
            assign = where.parent(target) if isinstance(target, cst.AssignTarget) else None
            if isinstance(assign, cst.Assign):
                found.append((assign.value, where))
        return found

    def _source(self, node: cst.CSTNode, module: Module, names: set[str] = ENVIRONMENT) -> bool:
        """Whether a program learns its rank here."""
        if isinstance(node, cst.Call):
            if last_name(node) in CALLS and self.values.function(node.func, module) is None:
                return names is ENVIRONMENT or (last_name(node) in CALLS[:1] and not node.args)
            asked = node.args[0].value if node.args else None
            return last_name(node) in ("getenv", "get") and asked is not None and string(asked) in names
        if isinstance(node, cst.Subscript):
            index = node.slice[0].slice
            return isinstance(index, cst.Index) and string(index.value) in names
        if isinstance(node, cst.Attribute):
            return node.attr.value in (FIELDS if names is ENVIRONMENT else ()) and not self._own(node.attr.value)
        return isinstance(node, cst.Name) and self._spawned(node, module)

    def _own(self, name: str) -> bool:
        """Whether the program itself sets such an attribute, or has such a method."""
        known = self.program.named(cst.Attribute, name)
        return bool(self.program.named(cst.FunctionDef, name)) or any(
            isinstance(where.parent(node), cst.AssignTarget) for node, where in known
        )

    def _spawned(self, node: cst.Name, module: Module) -> bool:
        """Whether a name is the first parameter of a function that is spawned, which is the rank."""
        for binding in module.assignments(node):
            function = module.function(binding.node) if isinstance(binding.node, cst.Param) else None
            if function is None or not function.params.params or function.params.params[0] is not binding.node:
                continue
            spawns = [found for name in ("spawn", "start_processes") for found in self.program.named(cst.Call, name)]
            for call, where in spawns:
                if call.args and self.values.function(call.args[0].value, where) is function:
                    return True
        return False

    # --- the first rank alone ---

    def first(self, test: cst.CSTNode, module: Module) -> bool:
        """Whether a condition holds on the first of all ranks alone, for sure."""
        return bool(self.program.answer("first", test, lambda: self._first(test, module), False))

    def _first(self, test: cst.CSTNode, module: Module) -> bool:
        if isinstance(test, cst.BooleanOperation):
            sides = [self.first(side, module) for side in (test.left, test.right)]
            return any(sides) if isinstance(test.operator, cst.And) else all(sides)
        if isinstance(test, cst.UnaryOperation):
            return isinstance(test.operator, cst.Not) and self._global(test.expression, module)
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            both = [test.left, test.comparisons[0].comparator]
            rest = [side for side in both if not (isinstance(side, cst.Integer) and side.value == "0")]
            equal = isinstance(test.comparisons[0].operator, cst.Equal)
            return equal and len(rest) == 1 and self._global(rest[0], module)
        if isinstance(test, cst.Attribute) and test.attr.value in FIRST and not self._own(test.attr.value):
            return True
        if not isinstance(test, (cst.Name, cst.Attribute, cst.Call)):
            return False
        leaves = [leaf for leaf in self.values.leaves(test, module) if leaf.node is not test]
        return bool(leaves) and all(self.first(leaf.node, leaf.module) for leaf in leaves)

    def _global(self, node: cst.BaseExpression, module: Module) -> bool:
        """Whether an expression is the rank among all ranks; one rank's own number, where nothing says otherwise."""
        if isinstance(node, cst.Call) and module.code(node.func) == "int" and node.args:
            return self._global(node.args[0].value, module)
        if self._source(node, module, GLOBAL):
            return True
        if not isinstance(node, (cst.Name, cst.Attribute, cst.Call)):
            return False
        values = [(leaf.node, leaf.module) for leaf in self.values.leaves(node, module) if leaf.node is not node]
        if not values and isinstance(node, cst.Attribute):
            values = list(self._set(node))
        known = [value for value in values if not isinstance(value[0], cst.Integer)]  # without processes, it is 0
        return bool(known) and all(
            isinstance(value, cst.BaseExpression)
            and bool(self.program.answer("global", value, functools.partial(self._global, value, where), False))
            for value, where in known
        )
