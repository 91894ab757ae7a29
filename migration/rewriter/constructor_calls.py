"""One call of FullyShardedDataParallel that says its options as calls of fully_shard: all of it, or Undecided."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from migration.options import CLASS, SECTIONS
from migration.rewriter import precision
from migration.rewriter.edits import Undecided
from migration.rewriter.imports import imported
from migration.rewriter.module import Module
from migration.rewriter.program import Program
from migration.rewriter.rewriting import FSDP, Rewriting, constant
from migration.rewriter.symbols import ROWS
from migration.rewriter.values import Leaf, arguments, assignment

# FullyShardedDataParallel's arguments, in its order.
ORDER = tuple(row.name.partition(".")[2] for row in SECTIONS["The constructor's arguments"])
OLD = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}
# Arguments that change when something is done and never what is computed.
DROPPED = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
# Arguments of which the interface makes what FSDP1 did, and no line of FSDP2 does.
ELSEWHERE = ("param_init_fn", "process_group", "ignored_states", "ignored_modules")
RESHARD = {"FULL_SHARD": "", "SHARD_GRAD_OP": "False"}
SIZE = ("size_based_auto_wrap_policy", "default_auto_wrap_policy")
# Policies, each with the argument that its classes are.
BY_CLASS = {"ModuleWrapPolicy": "module_classes", "transformer_auto_wrap_policy": "transformer_layer_cls"}
WRITE = "no argument of fully_shard is that: leave it out here, and do what it asks for where the model is made"
META = re.compile(r"[\"']meta[\"']|init_empty_weights")


def code_of(argument: str) -> str:
    row = ROWS.get(f"{CLASS}.{OLD.get(argument, argument)}") or ROWS.get(f"{argument}=")
    return "FX05" if argument == "fsdp_auto_wrap_policy" else row.code if row else "FC07"


def named(node: cst.Call) -> list[tuple[str, cst.Arg]]:
    """The arguments beside the module, by FSDP1's names; "" for those that are spread."""
    found = []
    for place, arg in enumerate(node.args):
        name = arg.keyword.value if arg.keyword is not None else ORDER[place] if place < len(ORDER) else ""
        if name != "module":
            found.append(("" if arg.star else name, arg))
    return found


@dataclass
class Plan:
    """The successor of a call: lines before, a condition for inner groups, options of fully_shard, lines after."""

    before: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    inner: dict[str, str] = field(default_factory=dict)  # where the inner groups' options differ
    condition: str = ""
    least: str = ""  # or so many parameters, from which on a module is an inner group
    after: list[str] = field(default_factory=list)


class Construction:
    """A call of FSDP1's class, with the module that holds it."""

    def __init__(self, rewriting: Rewriting, node: cst.Call, module: Module) -> None:
        self.rewriting, self.node, self.module = rewriting, node, module
        self.edits = rewriting.edits(module)
        given, spread = arguments(node)
        if spread:
            raise self._undecided("FC07", "some of its options are set elsewhere")
        by_name = {ORDER[key] if isinstance(key, int) else OLD.get(key, key): value for key, value in given.items()}
        if unknown := set(by_name) - set(ORDER):
            raise self._undecided("FC07", f"FSDP1 has no argument {min(unknown)}")
        if "module" not in by_name:
            raise self._undecided("FC07", "it isn't clear which module is sharded")
        self.args = by_name
        for name, arg in named(node):
            rewriting.take(code_of(name), arg, module)
        home = module.function(node) or module.tree
        self.taken = {name.value for name in module.within(home, cst.Name)}
        targets = (cst.Param, cst.AssignTarget, cst.AnnAssign, cst.For, cst.AsName)
        bound = {n.value for n in module.within(home, cst.Name) if isinstance(module.parent(n), targets)}
        bound.add(module.code(by_name["module"]).partition(".")[0])
        self.variable = next(name for name in ("module", "block", "submodule", "group") if name not in bound)

    def _undecided(self, code: str, why: str, node: cst.CSTNode | None = None) -> Undecided:
        return Undecided(code, why, node if node is not None else self.node, self.module)

    def _given(self, name: str) -> cst.BaseExpression | None:
        """An argument; None where it is left out, or None under whatever name."""
        node = self.args.get(name)
        if node is None or constant(node) is None:
            return None
        only = self.rewriting.only(node, self.module)
        if only is not None and only.kind == "none":
            self.rewriting.drop(node, self.module)
            return None
        return node

    def _text(self, node: cst.CSTNode) -> str:
        return self.rewriting.code(node, self.module)

    def fresh(self, name: str) -> str:
        """A name for a variable that nothing in this function has."""
        while name in self.taken:
            name = f"fsdp_{name}"
        self.taken.add(name)
        return name

    # --- the plan ---

    def plan(self, model: str) -> Plan:
        """`model`: the expression that the model has in the lines that are written."""
        made = Plan()
        for name in ELSEWHERE:
            if (node := self._given(name)) is not None:
                raise self._undecided(code_of(name), WRITE, node)
        if any(META.search(source.text) for source in self.rewriting.program.sources.values()):
            raise self._undecided("FC20", "a part may be on the meta device, and gets values as it is sharded")
        for name in DROPPED:
            if name in self.args:
                self.rewriting.drop(self.args[name], self.module)
        self._strategy(made)
        self._mesh(made)
        policy = self._given("auto_wrap_policy")
        if policy is not None:
            self._policy(made, policy)
        self._precision(made, model, policy is not None)
        self._offload(made)
        self._device(made)
        self._synchronised(made, model)
        return made

    def _policy(self, plan: Plan, policy: cst.BaseExpression) -> None:
        leaf = self.rewriting.known(policy, self.module, "FA05")
        if leaf.symbol in SIZE and not leaf.spread and not set(leaf.args) - {"min_num_params"}:
            plan.least = self._text(leaf.args["min_num_params"]) if leaf.args else "int(1e8)"
            self.edits.helper("shard_by_size", policy, "FA05")
            self.edits.need("torch")
        else:
            plan.condition = condition(self.rewriting, leaf, self.variable)
        self.rewriting.drop(policy, self.module)

    def _strategy(self, plan: Plan) -> None:
        node = self._given("sharding_strategy")
        if node is None:
            return
        leaf = self.rewriting.known(node, self.module, "FA03")
        strategy = leaf.symbol.partition(".")[2]
        if strategy not in RESHARD:
            raise self._undecided("FA03", "its mesh depends on how many devices a node has, or on replicas", node)
        self.rewriting.drop(node, self.module)
        if RESHARD[strategy]:
            plan.options["reshard_after_forward"] = RESHARD[strategy]

    def _mesh(self, plan: Plan) -> None:
        node = self._given("device_mesh")
        if node is None:
            return
        leaf = self.rewriting.only(node, self.module)
        made = leaf.args.get(1) if leaf is not None and leaf.kind == "value" else None
        if not isinstance(made, cst.Tuple) or len(made.elements) != 1:
            raise self._undecided("FA16", "how many dimensions the mesh has is decided elsewhere", node)
        plan.options["mesh"] = self._text(node)

    def _precision(self, plan: Plan, model: str, wrapped: bool) -> None:
        node = self._given("mixed_precision")
        made = precision.translate(self.rewriting, node, self.module, wrapped) if node is not None else None
        if made is None:
            return
        policy = made.policy
        if wrapped and made.castless:
            policy = self.fresh("mp_policy")
            plan.before.append(f"{policy} = {made.policy}")
            # FSDP1 casts the inputs of the root alone.
            self.edits.modules["dataclasses"] = "dataclasses"
            plan.inner["mp_policy"] = f"dataclasses.replace({policy}, cast_forward_inputs=False)"
        plan.options["mp_policy"] = policy
        if made.buffers:
            if any("state_dict" in source.text for source in self.rewriting.program.sources.values()):
                raise self._undecided("FP03", "buffers that are cast would be saved so, FSDP1's in their own dtype")
            plan.after.append(
                f"for buffer in {model}.buffers():  # FSDP1's buffer_dtype\n"
                f"    if buffer.is_floating_point():\n        buffer.data = buffer.to({made.buffers})"
            )

    def _offload(self, plan: Plan) -> None:
        if (node := self._given("cpu_offload")) is None:
            return
        leaf = self.rewriting.known(node, self.module, "FA04")
        wanted = constant(leaf.args.get(0, leaf.args.get("offload_params")), False)
        if leaf.symbol != "CPUOffload" or leaf.spread or not isinstance(wanted, bool):
            raise self._undecided("FA04", "whether anything is offloaded turns out at run time", node)
        self.rewriting.drop(node, self.module)
        if wanted:
            self.edits.need(FSDP, "CPUOffloadPolicy")
            self.edits.need("torch")
            plan.options["offload_policy"] = "CPUOffloadPolicy(pin_memory=torch.cuda.is_available())"

    # --- processes and devices ---

    def _dist(self) -> str:
        """The name of torch.distributed here."""
        ways = (("", "torch.distributed"), ("torch", "distributed"))
        known = [one for one in imported(self.module) if self.module.function(one.statement) is None]
        found = (one.bound for way in ways for one in known if (one.package, one.name) == way)
        return self.edits.modules.setdefault("torch.distributed", next(found, "dist"))

    def _device(self, plan: Plan) -> None:
        """FSDP1 takes the device for its own; FSDP2 the mesh's, and of GPUs the one that is set."""
        if (node := self._given("device_id")) is None:
            return
        text, leaf = self._text(node), self.rewriting.only(node, self.module)
        bound = self.module.assignments(node) if isinstance(node, cst.Name) else []
        values = [made.value for b in bound if (made := assignment(b.node, self.module)) and made.value is not None]
        shown = " ".join(self.module.code(one) for one in (leaf.node if leaf is not None else node, *values))
        sources = [source.text for source in self.rewriting.program.sources.values()]
        placed = any("set_device(" in one for one in sources)
        sure = "cpu" not in shown and re.search(r"cuda|^\d+$", shown)
        if sure or ("cpu" not in shown and any(f"set_device({text})" in one for one in sources)):
            if not placed and "current_device()" not in shown:
                self.edits.need("torch")
                test = None
                if isinstance(node, cst.IfExp) and constant(node.orelse) is None:  # as on a CPU, where it is an error
                    test, text = self._text(node.test), self._text(node.body)
                plan.before.append(f"if {test}:\n    " * (test is not None) + f"torch.cuda.set_device({text})")
            return
        self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
        if re.fullmatch(r"(torch\.)?(device\()?[\"']cpu[\"']\)?", shown.split(" ")[0]):
            kind = '"cpu"'
        elif placed or leaf is not None:
            self.edits.need("torch")
            kind = f"torch.device({text}).type"
        else:
            raise self._undecided("FA10", "which device it is turns out at run time", node)
        plan.options.setdefault("mesh", f"init_device_mesh({kind}, ({self._dist()}.get_world_size(),))")

    def _synchronised(self, plan: Plan, model: str) -> None:
        """FSDP1's sync_module_states: all ranks begin with rank 0's values."""
        node = self._given("sync_module_states")
        wanted = constant(node, False)
        if node is None or wanted is False:
            return
        if wanted is not True or self._given("device_mesh") is not None:
            raise self._undecided("FA11", "whose values are taken turns out at run time", node)
        device = self._given("device_id")
        lines = [f"{model}.to({self._text(device)})"] if device is not None else []
        lines += [
            f"for tensor in [*{model}.parameters(), *{model}.buffers()]:  # FSDP1's sync_module_states",
            f"    {self._dist()}.broadcast(tensor.detach(), src=0)",
        ]
        plan.before.append("\n".join(lines))


def constructions(program: Program) -> list[tuple[cst.Call, Module]]:
    """Every call of FSDP1's class by a name of it; inner ones first."""
    found = [
        (node, module)
        for module in program.relevant()
        for node in module.all(cst.Call)
        if program.symbol(node.func, module) == CLASS
    ]
    return sorted(found, key=lambda made: made[1].span(made[0])[1] - made[1].span(made[0])[0])


def meta_calls(module: Module) -> list[cst.Call]:
    """Calls that make something on the meta device, or say that it is to be made there."""
    found: list[cst.Call] = []
    for node in module.all(cst.Call) if META.search(module.text) else ():
        name = module.code(node.func).rpartition(".")[2]
        first = constant(node.args[0].value) if node.args and not node.args[0].star else None
        said = [constant(arg.value) for arg in node.args if arg.keyword is not None and arg.keyword.value == "device"]
        if (
            (name in ("device", "set_default_device") and first == "meta")
            or "meta" in said
            or name == "init_empty_weights"
        ):
            found.append(node)
    return found


def condition(rewriting: Rewriting, leaf: Leaf, name: str) -> str:
    """The condition under which a policy makes a module a group, on a variable of that name.

    Raises Undecided for one that has none: by size, of the program's own, or with options for each module."""
    argument = BY_CLASS.get(leaf.symbol)
    classes = leaf.args.get(argument or "", leaf.args.get(0))
    if leaf.kind not in ("call", "partial") or leaf.spread or argument is None or classes is None:
        raise Undecided("FA05", "the policy can't be turned into a condition", leaf.node, leaf.module)
    return f"isinstance({name}, {_classes(rewriting, classes, leaf.module)})"


def _classes(rewriting: Rewriting, node: cst.BaseExpression, module: Module) -> str:
    """The second argument of isinstance for a set of classes."""
    only = rewriting.only(node, module)
    held = only.node if only is not None else None
    if isinstance(held, (cst.Set, cst.Tuple, cst.List)):
        if any(isinstance(element, cst.StarredElement) for element in held.elements):
            raise Undecided("FA05", "some of its classes come from elsewhere", node, module)
        rewriting.drop(node, module)
        names = [rewriting.code(element.value, module) for element in held.elements]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"
    return f"tuple({rewriting.code(node, module)})"
