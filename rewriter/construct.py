"""One call of FullyShardedDataParallel as calls of fully_shard, where it says its options itself: all of it, or
Undecided and nothing."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

import libcst as cst
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp2.migrate.row import CLASS
from rewriter import precision
from rewriter.bindings import arguments
from rewriter.edits import Undecided, call
from rewriter.helpers import HELPERS
from rewriter.module import Module
from rewriter.program import Program
from rewriter.symbols import ROWS
from rewriter.translate import FSDP, Rewriting, constant

ORDER = tuple(inspect.signature(FullyShardedDataParallel).parameters)
OLD = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}
# Arguments that change when something is done and never what is computed.
DROPPED = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")
RESHARD = {"": "", "FULL_SHARD": "", "SHARD_GRAD_OP": "False", "HYBRID_SHARD": "", "_HYBRID_SHARD_ZERO2": "False",
           "NO_SHARD": ""}  # fmt: skip

SIZE = ("size_based_auto_wrap_policy", "default_auto_wrap_policy")
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
    """What a call becomes: lines before, a condition for inner groups, options of fully_shard, lines after."""

    before: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    inner: dict[str, str] = field(default_factory=dict)  # where the inner groups' options differ
    condition: str = ""
    least: str = ""  # or so many parameters, from which on a module is an inner group
    after: list[str] = field(default_factory=list)
    replicated: bool = False

    @property
    def simple(self) -> bool:
        return not (self.before or self.condition or self.least or self.after)


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
        self.variable = next(name for name in ("module", "block", "submodule", "group") if not self._bound_as(name))

    def _undecided(self, code: str, why: str, node: cst.CSTNode | None = None) -> Undecided:
        return Undecided(code, why, node if node is not None else self.node, self.module)

    def _bound_as(self, name: str) -> bool:
        """Whether a name is a variable or an argument of this function, which a loop would overwrite."""
        home = self.module.function(self.node)
        targets = (cst.Param, cst.AssignTarget, cst.AnnAssign, cst.For, cst.AsName)
        if self.module.code(self.args["module"]).partition(".")[0] == name:
            return True
        return any(
            found.value == name and isinstance(self.module.parent(found), targets)
            for found in self.module.within(home or self.module.tree, cst.Name)
            if self.module.function(found) is home
        )

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
        for name in ("param_init_fn", "process_group", "ignored_states"):
            if (node := self._given(name)) is not None and not self._is_world(name, node):
                raise self._undecided(code_of(name), f"what {name} asks for is done where the model is made", node)
        if any(META.search(source.text) for source in self.rewriting.program.sources.values()):
            raise self._undecided("FC20", "a part may be on the meta device, and gets values as it is sharded")
        strategy = self._strategy(made)
        mesh = self._given("device_mesh")
        if mesh is not None:
            self._name_dimensions(mesh)
            made.options["mesh"] = self._text(mesh)
        elif strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
            made.options["mesh"] = self._of_nodes()
        for name in DROPPED:
            if name in self.args:
                self.rewriting.drop(self.args[name], self.module)
        if strategy == "NO_SHARD":
            self._replicated(made)
            return made
        policy = self._given("auto_wrap_policy")
        if policy is not None and not self._by_size(made, policy):
            made.condition = self.rewriting.inlined(
                policy, self.module, lambda leaf: self.rewriting.condition(leaf, self.variable), "FA05"
            )
        self._precision(made, model, policy is not None)
        offload = self._given("cpu_offload")
        if offload is not None and (
            text := self.rewriting.inlined(offload, self.module, self.rewriting.offload, "FA04")
        ):
            made.options["offload_policy"] = text
        self._ignored(made)
        self._device(made)
        self._synchronised(made, model)
        return made

    def _by_size(self, plan: Plan, policy: cst.BaseExpression) -> bool:
        leaf = self.rewriting.known(policy, self.module, "FA05")
        if leaf.symbol not in SIZE or leaf.spread or set(leaf.args) - {"min_num_params"}:
            return False
        plan.least = self._text(leaf.args["min_num_params"]) if leaf.args else "int(1e8)"
        self.rewriting.drop(policy, self.module)
        self.edits.helpers["shard_by_size"] = HELPERS["shard_by_size"]
        self.edits.need("torch")
        return True

    def _is_world(self, name: str, node: cst.BaseExpression) -> bool:
        return name == "process_group" and self.module.code(node).endswith(("group.WORLD", "_get_default_group()"))

    def _strategy(self, plan: Plan) -> str:
        node = self._given("sharding_strategy")
        if node is None:
            return ""
        leaf = self.rewriting.known(node, self.module, "FA03")
        head, _, strategy = leaf.symbol.partition(".")
        if leaf.kind != "symbol" or head != "ShardingStrategy" or strategy not in RESHARD:
            raise self._undecided("FA03", "which strategy it is turns out at run time", node)
        self.rewriting.drop(node, self.module)
        if RESHARD[strategy]:
            plan.options["reshard_after_forward"] = RESHARD[strategy]
        return strategy

    def _of_nodes(self) -> str:
        """FSDP1 takes the devices of a node for a shard group."""
        self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
        self.edits.need("torch")
        if self._device_text()[1] != "cuda":
            raise self._undecided("FS04", "the devices of a node aren't known to be GPUs", self.args["device_id"])
        world, local = f"{self._dist()}.get_world_size()", "torch.cuda.device_count()"
        shape = [f"({world} // {local}, {local})", 'mesh_dim_names=("replicate", "shard")']
        return call("init_device_mesh", ['"cuda"', *shape])

    def _replicated(self, plan: Plan) -> None:
        """NO_SHARD is DDP."""
        for name in ("mixed_precision", "cpu_offload", "ignored_modules", "device_mesh"):
            if (node := self._given(name)) is not None:
                raise self._undecided("FS03", f"DDP has no {name}: replicas are shards of one rank", node)
        if "auto_wrap_policy" in self.args:
            self.rewriting.drop(self.args["auto_wrap_policy"], self.module)
        if (sync := self._given("sync_module_states")) is not None:
            self.rewriting.drop(sync, self.module)  # DDP does
        self._device(plan)
        plan.options.pop("mesh", None)
        self.edits.need("torch.nn.parallel", "DistributedDataParallel")
        plan.replicated = True

    def _precision(self, plan: Plan, model: str, wrapped: bool) -> None:
        node = self._given("mixed_precision")
        made = None
        if node is not None:
            made = precision.translate(self.rewriting, node, self.module, wrapped, self.args["module"])
        if made is None:
            return
        self.edits.need(FSDP, "MixedPrecisionPolicy")
        policy = made.policy
        if wrapped and made.castless:
            name = self.fresh("mp_policy")
            plan.before.append(f"{name} = {policy}")
            policy = name
            # FSDP1 casts the inputs of the root alone.
            self.edits.modules["dataclasses"] = "dataclasses"
            plan.inner["mp_policy"] = f"dataclasses.replace({policy}, cast_forward_inputs=False)"
        plan.options["mp_policy"] = policy
        if made.buffers:
            if self._given("ignored_modules") is not None:
                raise self._undecided("FP03", "buffers of ignored modules keep their dtype")
            plan.after.append(
                f"for buffer in {model}.buffers():  # FSDP1's buffer_dtype\n"
                f"    if buffer.is_floating_point():\n        buffer.data = buffer.to({made.buffers})"
            )

    def _ignored(self, plan: Plan) -> None:
        if (node := self._given("ignored_modules")) is None:
            return
        if plan.condition or plan.least:
            raise self._undecided("FA08", "the policy mustn't choose what is ignored", node)
        leaves = self.rewriting.values.leaves(node, self.module)
        text = f"({self._text(node)})" if isinstance(node, cst.IfExp) else self._text(node)
        over = f"{text} or ()" if any(leaf.kind in ("none", "unknown") for leaf in leaves) else text
        plan.options["ignored_params"] = f"{{p for ignored in {over} for p in ignored.parameters()}}"

    # --- processes and devices ---

    def _name_dimensions(self, mesh: cst.BaseExpression) -> None:
        """FSDP2 wants names for the two dimensions of a mesh, FSDP1 didn't."""
        for leaf in self.rewriting.values.leaves(mesh, self.module):
            made, module = leaf.node, leaf.module
            if not isinstance(made, cst.Call) or not module.code(made.func).endswith("init_device_mesh"):
                raise self._undecided("FA16", "the mesh is made in a way that isn't followed", mesh)
            shape = made.args[1].value if len(made.args) == 2 else None
            if isinstance(shape, cst.Tuple) and len(shape.elements) == 2:
                edits, end = self.rewriting.edits(module), module.span(made)[1] - 1
                comma = "" if module.text[:end].rstrip().endswith(",") else ", "
                if not edits.has((end, end)):
                    self.rewriting.take("FA16", made, module)
                    edits.replace((end, end), f'{comma}mesh_dim_names=("replicate", "shard")')

    def _dist(self) -> str:
        """What torch.distributed is called here."""
        return self.edits.modules.setdefault("torch.distributed", self._alias("torch.distributed", "dist"))

    def _alias(self, package: str, fallback: str) -> str:
        for statement in self.module.all(cst.Import):
            for alias in statement.names:
                if alias.evaluated_name == package and self.module.function(statement) is None:
                    return alias.evaluated_alias or package
        for imported in self.module.all(cst.ImportFrom):
            if isinstance(imported.names, cst.ImportStar) or self.module.function(imported) is not None:
                continue
            for alias in imported.names:
                source = cst.helpers.get_full_name_for_node(imported.module) if imported.module else ""
                if f"{source}.{alias.evaluated_name}" == package:
                    return alias.evaluated_alias or alias.evaluated_name
        return fallback

    def _device_text(self) -> tuple[str, str]:
        """The device_id as text, and which type of device it is: "cuda", where none is given; "" if it isn't known."""
        node = self._given("device_id")
        if node is None:
            return "", "cuda"
        shown = [leaf.module.code(leaf.node) for leaf in self.rewriting.values.leaves(node, self.module)]
        kinds = {
            "cpu" if "cpu" in text else "cuda" if re.search("cuda|rank|[0-9]", text.lower()) else "" for text in shown
        }
        return self._text(node), kinds.pop() if len(kinds) == 1 else ""

    def _device(self, plan: Plan) -> None:
        text, kind = self._device_text()
        if not text:
            return
        texts = [source.text for source in self.rewriting.program.sources.values()]
        placed = "current_device()" in text or any("set_device(" in one for one in texts)
        if not kind and not placed:
            raise self._undecided("FA10", "which device it is turns out at run time", self.args["device_id"])
        if kind != "cuda" and "mesh" not in plan.options:
            self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
            self.edits.need("torch")
            shown = '"cpu"' if kind else f"torch.device({text}).type"
            plan.options["mesh"] = f"init_device_mesh({shown}, ({self._dist()}.get_world_size(),))"
        elif kind == "cuda" and not placed:
            self.edits.need("torch")
            plan.before.append(f"torch.cuda.set_device({text})")

    def _synchronised(self, plan: Plan, model: str) -> None:
        """FSDP1's sync_module_states: all ranks begin with rank 0's values."""
        node = self._given("sync_module_states")
        wanted = constant(node, False)
        if node is None or wanted is False:
            return
        if wanted is not True or self._given("device_mesh") is not None:
            raise self._undecided("FA11", "whose values are taken turns out at run time", node)
        device, dist = self._device_text()[0], self._dist()
        lines = [f"{model}.to({device})"] if device else []
        lines += [
            f"for tensor in [*{model}.parameters(), *{model}.buffers()]:  # FSDP1's sync_module_states",
            f"    {dist}.broadcast(tensor.detach(), src=0)",
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
    for node in module.all(cst.Call) if "meta" in module.text else ():
        name = module.code(node.func).rpartition(".")[2]
        first = constant(node.args[0].value) if node.args and not node.args[0].star else None
        said = [constant(arg.value) for arg in node.args if arg.keyword is not None and arg.keyword.value == "device"]
        if (name in ("device", "set_default_device") and first == "meta") or "meta" in said:
            found.append(node)
    return found + [node for node in module.all(cst.Call) if module.code(node.func).endswith("init_empty_weights")]
