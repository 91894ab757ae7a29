"""One call of FullyShardedDataParallel as calls of fully_shard: all of it, or Undecided and nothing."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import libcst as cst

from fsdp2.migrate.row import CLASS
from rewriter import policies, precision, strategies
from rewriter.bindings import Leaf
from rewriter.conditions import SIZE
from rewriter.edits import Undecided, call
from rewriter.given import OLD, ORDER, Given
from rewriter.helpers import HELPERS
from rewriter.module import Module
from rewriter.placement import Placement, Plan
from rewriter.symbols import ROWS
from rewriter.translate import FSDP, Rewriting, constant

# Arguments that change when something is done and never what is computed.
DROPPED = ("backward_prefetch", "forward_prefetch", "limit_all_gathers", "use_orig_params")


def code_of(argument: str) -> str:
    row = ROWS.get(f"{CLASS}.{OLD.get(argument, argument)}") or ROWS.get(f"{argument}=")
    return row.code if row else "FC07"


class Construction(Placement):
    """A call of FSDP1's class, with the module that holds it. `call` may be of a partial of the class."""

    def __init__(self, rewriting: Rewriting, node: cst.Call, module: Module, preset: Leaf | None = None) -> None:
        self.rewriting, self.node, self.module = rewriting, node, module
        self.edits = rewriting.edits(module)
        self._take(node.args)
        given = Given(rewriting, node, module, preset)
        self.args, self.made = given.args, given.made
        self._take_elsewhere()
        self.group = ""  # the process group, if it isn't all ranks
        home = module.function(node) or module.tree
        self.taken = {name.value for name in module.within(home, cst.Name)}
        self.variable = next(name for name in ("module", "block", "submodule", "group") if not self._bound_as(name))

    def _take(self, args: Sequence[cst.Arg]) -> None:
        """The arguments that stand in the call."""
        for place, arg in enumerate(args):
            name = arg.keyword.value if arg.keyword is not None else ORDER[place] if place < len(ORDER) else ""
            if not arg.star and name not in ("module", ""):
                self.rewriting.take("FX05" if name == "fsdp_auto_wrap_policy" else code_of(name), arg, self.module)

    def _take_elsewhere(self) -> None:
        """Those of a partial, and of dictionaries that the call spreads."""
        for name, value in self.args.items():
            parts = [value.body, value.orelse] if isinstance(value, cst.IfExp) and id(value) in self.made else [value]
            for part in parts if name != "module" else ():
                if (above := self.module.parent(part)) is not None and self.module.parent(above) is not self.node:
                    self.rewriting.take(code_of(name), part, self.module)

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

    # --- the plan ---

    def plan(self, model: str) -> Plan:
        """`model`: the expression that the model has in the lines that are written."""
        try:
            return self._plan(model)
        except Undecided as problem:
            if id(problem.node) in self.made:
                problem.node = self.node  # what was made up stands nowhere that a mark could be put
            raise

    def _plan(self, model: str) -> Plan:
        made = Plan()
        self._refused()
        if (mesh := self._given("device_mesh")) is not None:
            self._name_dimensions(mesh)
        strategy = self._strategy(made)
        self._mesh(made, strategy)
        beyond_ddp = ("mixed_precision", "cpu_offload", "ignored_modules", "ignored_states")
        if strategy == "NO_SHARD" and not any(self._given(name) is not None for name in beyond_ddp):
            self._replicated(made)
            return made
        if strategy == "NO_SHARD":
            why = "give fully_shard a mesh of two dimensions, (world size, 1): replicas, whose shards are of one rank"
            raise self._undecided("FS03", why, self._given("sharding_strategy"))
        policy = self._policy(made, model)
        self._precision(made, model, policy)
        self._offload(made)
        self._ignored(made)
        self._device(made)
        self._begin(made, model)
        for name in DROPPED:
            if name in self.args:
                self._drop(name)
        return made

    def _refused(self) -> None:
        if (node := self._given("process_group")) is not None and not self._is_world(node):
            leaves = self.rewriting.values.leaves(node, self.module)
            if any(isinstance(leaf.node, cst.Tuple) for leaf in leaves):
                raise self._undecided("FA02", "a pair of groups is a mesh of two dimensions", node)

    def _strategy(self, plan: Plan) -> str:
        node = self._given("sharding_strategy")
        if node is None:
            return ""
        values = self.rewriting.values
        leaves = values.leaves(node, self.module)
        symbols = {leaf.symbol.partition(".")[2] if leaf.kind == "symbol" else leaf.kind for leaf in leaves}
        if self.rewriting.by_name and not (len(leaves) == 1 and leaves[0].node is node and leaves[0].kind == "symbol"):
            return self._strategy_by_name(plan, node)
        if len(symbols) == 1 and symbols <= {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "none"}:
            self.rewriting.drop(node, self.module)
            (only,) = symbols
            if only == "SHARD_GRAD_OP":
                plan.options["reshard_after_forward"] = "False"
            return only
        if symbols == {"_HYBRID_SHARD_ZERO2"}:
            self.rewriting.drop(node, self.module)
            plan.options["reshard_after_forward"] = "False"
            return "HYBRID_SHARD"
        plan.options["reshard_after_forward"] = self.rewriting.in_place(
            node, self.module, self.rewriting.strategy, "FA03"
        )
        return ""

    def _strategy_by_name(self, plan: Plan, node: cst.BaseExpression) -> str:
        mesh, group = self._given("device_mesh"), self._given("process_group")
        if group is not None and not self._is_world(group):
            raise self._undecided("FA03", "the strategy is chosen at run time, and the group apart from it", group)
        text = self.rewriting.in_place(node, self.module, strategies.name_of, "FA03")
        self.edits.need("torch")
        self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
        if mesh is not None:  # which another call of this file may not give
            self.edits.helpers["sharding_options"] = HELPERS["sharding_options, mesh"]
        else:
            self.edits.helpers.setdefault("sharding_options", HELPERS["sharding_options"])
        name = self._fresh("sharding")
        given = [text, self._device_type(), *([self._text(mesh)] if mesh is not None else [])]
        plan.before.append(f"{name} = {call('sharding_options', given)}")
        plan.options["**"] = name
        return ""

    def _replicated(self, plan: Plan) -> None:
        """NO_SHARD is DDP."""
        for name in ("auto_wrap_policy", *DROPPED):
            if name in self.args:
                self._drop(name)
        self._device(plan, replicated=True)
        plan.options.pop("mesh", None)
        if (group := self._given("process_group")) is not None:
            plan.options["process_group"] = self._text(group)
        self.edits.need("torch.nn.parallel", "DistributedDataParallel")
        plan.replicated = True

    def _policy(self, plan: Plan, model: str) -> bool:
        node = self._given("auto_wrap_policy")
        if node is None:
            return False
        rewriting = self.rewriting
        leaves = rewriting.values.leaves(node, self.module)
        if all(leaf.kind == "none" for leaf in leaves) and leaves:
            rewriting.drop(node, self.module)
            return False
        if not policies.are_conditions(rewriting, leaves, node, self.module):
            policies.require_same(rewriting, leaves, node, self.module)
            self._by_function(plan, model, node, optional=any(leaf.kind == "none" for leaf in leaves))
            return True
        only = rewriting.only(node, self.module)
        if only is not None and only.symbol in SIZE:
            self._by_size(plan, only, model)
            rewriting.drop(node, self.module)
        elif only is not None and only.kind == "function":
            self._by_function(plan, model, node, optional=False)
        elif only is not None:
            plan.condition = rewriting.condition(only, self.variable)
            rewriting.drop(node, self.module)
        else:
            text = rewriting.in_place(node, self.module, self._predicate, "FA05")
            if isinstance(node, (cst.IfExp, cst.BooleanOperation)):
                name = self._fresh("policy")
                plan.before.append(f"{name} = {text}")
                text = name
            if any(leaf.kind == "none" for leaf in leaves):
                plan.condition = f"{text} is not None and {text}({self.variable})"
            else:
                plan.condition = f"{text}({self.variable})"
        return True

    def _by_function(self, plan: Plan, model: str, node: cst.BaseExpression, optional: bool) -> None:
        """By a function that answers as FSDP1's policies do: a helper asks it about each module."""
        self.rewriting.consume(node)
        plan.chosen_by = "shard_by_policy"
        self.edits.helpers[plan.chosen_by] = HELPERS[plan.chosen_by]
        self.edits.need(FSDP, "fully_shard")
        policy = self._text(node)
        if not re.fullmatch(r"[\w.]+", policy):
            name = self._fresh("policy")
            plan.before.append(f"{name} = {policy}")
            policy = name
        plan.choose = [model, policy]
        plan.optional = policy if optional else ""

    def _by_size(self, plan: Plan, leaf: Leaf, model: str) -> None:
        if leaf.kind == "symbol":
            least = "int(1e8)"
        elif leaf.spread or set(leaf.args) - {"min_num_params"}:
            raise self._undecided("FW02", "it has further arguments", leaf.node)
        else:
            least = self._text(leaf.args["min_num_params"]) if leaf.args else "int(1e8)"
        plan.chosen_by, plan.choose = "shard_by_size", [model, least]
        self.edits.helpers[plan.chosen_by] = HELPERS[plan.chosen_by]
        self.edits.need("torch")
        self.edits.need(FSDP, "fully_shard")

    def _predicate(self, leaf: Leaf) -> str:
        if leaf.kind == "none":
            return "None"
        return f"lambda module: {self.rewriting.condition(leaf)}"

    def _precision(self, plan: Plan, model: str, wrapped: bool) -> None:
        node = self._given("mixed_precision")
        if node is None or constant(node) is False:  # which FSDP1 took for None
            return
        made = precision.translate(self.rewriting, node, self.module, wrapped, self.args["module"])
        if not made.policy:
            self._drop("mixed_precision")
            return
        self.edits.need(FSDP, "MixedPrecisionPolicy")
        policy = made.policy
        policy = self._or_default(node, policy, "MixedPrecisionPolicy")
        inner = wrapped and made.castless
        later = bool(made.norms or made.buffers)
        if (inner or later or made.by_policy) and not re.fullmatch(r"[\w.]+", policy):
            name = self._fresh("mp_policy")
            plan.before.append(f"{name} = {policy}")
            policy = name
        plan.options["mp_policy"] = policy
        if made.by_policy:
            self.edits.modules["dataclasses"] = "dataclasses"
            plan.inner["mp_policy"] = policy
            plan.options["mp_policy"] = f"dataclasses.replace({policy}, cast_forward_inputs=True)"
        if inner:
            # FSDP1 casts the inputs of the root alone.
            self.edits.modules["dataclasses"] = "dataclasses"
            plan.inner["mp_policy"] = f"dataclasses.replace({policy}, cast_forward_inputs=False)"
        self._beside(plan, made, policy, model)

    def _beside(self, plan: Plan, made: precision.Precision, policy: str, model: str) -> None:
        """What FSDP1's mixed precision does to batch norm and to buffers."""
        if made.norms:
            self.edits.need("torch")
            plan.norms = f"MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype={policy}.param_dtype)"
        if made.buffers:
            dtype = f"{policy}.param_dtype" if made.buffers == "param" else made.buffers
            guard = f" and {policy}.param_dtype is not None" if made.maybe else ""
            self.edits.need("torch")
            ignored = self._left_alone()
            if made.norms or ignored:
                var = self.variable
                kept = [f"not isinstance({var}, {precision.NORM})"] * made.norms
                kept += [f"{var} not in {ignored}"] * bool(ignored)
                why = "which left batch norm alone" if made.norms else "which left ignored modules alone"
                lines = f"""\
                    for {var} in {model}.modules():  # FSDP1's buffer_dtype, {why}
                        if {" and ".join(kept)}:
                            for buffer in {var}.buffers(recurse=False):
                                if buffer.is_floating_point(){guard}:
                                    buffer.data = buffer.to({dtype})"""
            else:
                lines = f"""\
                    for buffer in {model}.buffers():  # FSDP1's buffer_dtype
                        if buffer.is_floating_point(){guard}:
                            buffer.data = buffer.to({dtype})"""
            plan.after.append(textwrap.dedent(lines))

    def _offload(self, plan: Plan) -> None:
        node = self._given("cpu_offload")
        if node is None:
            return
        rewriting = self.rewriting
        only = rewriting.only(node, self.module)
        if only is not None and only.kind == "none":
            rewriting.drop(node, self.module)
            return
        if only is not None and only.kind == "call" and only.symbol == "CPUOffload":
            flag = only.args.get(0, only.args.get("offload_params"))
            if constant(flag, False) is False:
                rewriting.drop(node, self.module)
                return
        text = rewriting.in_place(node, self.module, rewriting.offload, "FA04")
        plan.options["offload_policy"] = self._or_default(node, text, "OffloadPolicy")

    def _or_default(self, node: cst.BaseExpression, text: str, default: str) -> str:
        """FSDP1 takes None where FSDP2 wants a policy that does nothing."""
        leaves = self.rewriting.values.leaves(node, self.module)
        if not any(leaf.kind == "none" for leaf in leaves):
            return text
        self.edits.need(FSDP, default)
        chosen = (node.body, node.orelse) if isinstance(node, cst.IfExp) else ()
        if any(self._maybe_none(branch) for branch in chosen):
            return f"({text}) or {default}()"
        if chosen:
            return re.sub(r"\bNone\b(?= if )|(?<= else )None\b", f"{default}()", text)
        return f"{text} or {default}()"

    def _maybe_none(self, node: cst.BaseExpression) -> bool:
        """Whether an expression that isn't None as it stands may have that value."""
        leaves = self.rewriting.values.leaves(node, self.module)
        return constant(node) is not None and any(leaf.kind == "none" for leaf in leaves)

    def _left_alone(self) -> str:
        """The variable for modules that FSDP1 ignored and all below them; "" if there are none."""
        node = self._given("ignored_modules")
        leaves = [] if node is None else self.rewriting.values.leaves(node, self.module)
        if node is None or (leaves and all(leaf.kind == "none" for leaf in leaves)):
            return ""
        self.ignored_name = self.ignored_name or self._fresh("ignored_modules")
        return self.ignored_name

    def _ignored(self, plan: Plan) -> None:
        modules, states = self._given("ignored_modules"), self._given("ignored_states")
        if modules is not None:
            if not self._left_alone():
                self._drop("ignored_modules")
                return
            leaves = self.rewriting.values.leaves(modules, self.module)
            text = self._text(modules)
            maybe = any(leaf.kind in ("none", "unknown") for leaf in leaves)
            chosen = f"({text})" if isinstance(modules, cst.IfExp) else text
            over = f"{chosen} or ()" if maybe else chosen
            if plan.condition or plan.norms or plan.after:
                plan.ignored = self._left_alone()
                plan.before.append(f"{plan.ignored} = {{m for ignored in {over} for m in ignored.modules()}}")
                over = plan.ignored
            plan.options["ignored_params"] = f"{{p for ignored in {over} for p in ignored.parameters()}}"
        elif states is not None:
            leaves = self.rewriting.values.leaves(states, self.module)
            written = [leaf for leaf in leaves if leaf.kind == "value"]
            if len(written) != len(leaves) or "parameters()" not in " ".join(
                leaf.module.code(leaf.node) for leaf in written
            ):
                raise self._undecided("FA15", "whether they are modules or parameters isn't known", states)
            plan.options["ignored_params"] = f"set({self._text(states)})"
