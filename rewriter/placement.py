"""Where a model is put: its mesh, its device, and whose values it begins with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import libcst as cst

from rewriter.edits import Edits, Undecided, call
from rewriter.helpers import HELPERS
from rewriter.module import Module
from rewriter.translate import Rewriting, constant


@dataclass
class Plan:
    """What a call becomes: lines before, a condition for inner groups, options of fully_shard, lines after."""

    before: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)  # "**": a dictionary of some
    root: dict[str, str] = field(default_factory=dict)  # where the root's options differ
    inner: dict[str, str] = field(default_factory=dict)  # where the inner groups' options differ
    condition: str = ""
    chosen_by: str = ""  # the helper that shards inner groups,
    choose: list[str] = field(default_factory=list)  # and its arguments before fully_shard's
    optional: str = ""  # the policy, if it may be None
    norms: str = ""
    ignored: str = ""  # the variable with all modules that FSDP1 left alone, where inner groups might be among them
    after: list[str] = field(default_factory=list)
    replicated: bool = False
    initial: str = ""  # the helper's arguments after the module, where groups get their initial values one by one

    @property
    def simple(self) -> bool:
        return not (self.before or self.condition or self.chosen_by or self.norms or self.after or self.initial)


class Placement:
    """The part of a constructor's call that is about processes and devices."""

    rewriting: Rewriting
    node: cst.Call
    module: Module
    edits: Edits
    args: dict[str, cst.BaseExpression]
    taken: set[str]
    made: dict[int, cst.IfExp]  # arguments that stand nowhere in the text
    group: str  # the process group, if it isn't all ranks
    ignored_name: str = ""

    def _undecided(self, code: str, why: str, node: cst.CSTNode | None = None) -> Undecided:
        return Undecided(code, why, node if node is not None else self.node, self.module)

    def _given(self, name: str) -> cst.BaseExpression | None:
        node = self.args.get(name)
        return None if node is None or constant(node) is None else node

    def _text(self, node: cst.CSTNode) -> str:
        if isinstance(node, cst.IfExp) and id(node) in self.made:
            return f"{self._text(node.body)} if {self._text(node.test)} else {self._text(node.orelse)}"
        if isinstance(node, cst.Name) and node.value == "None":
            return "None"  # which may have been made up too
        return self.rewriting.code(node, self.module)

    def _fresh(self, name: str) -> str:
        """A name for a variable that nothing in this function has."""
        while name in self.taken:
            name = f"fsdp_{name}"
        self.taken.add(name)
        return name

    def _drop(self, name: str) -> None:
        self.rewriting.drop(self.args[name], self.module)

    def _is_world(self, node: cst.BaseExpression) -> bool:
        leaves = self.rewriting.values.leaves(node, self.module)
        if leaves and all(leaf.kind == "none" for leaf in leaves):
            return True
        return self.module.code(node).endswith(("group.WORLD", "_get_default_group()"))

    def _mesh(self, plan: Plan, strategy: str) -> None:
        mesh, group = self._given("device_mesh"), self._given("process_group")
        if "**" in plan.options:
            return  # sharding_options has taken it
        if mesh is not None:
            plan.options["mesh"] = self._text(mesh)
        elif group is not None and not self._is_world(group):
            if strategy == "HYBRID_SHARD":
                raise self._undecided("FA02", "the groups of HYBRID_SHARD are a mesh of two dimensions", group)
            self.edits.need("torch.distributed.device_mesh", "DeviceMesh")
            self.group = self._text(group)
            if not re.fullmatch(r"[\w.]+", self.group):
                name = self._fresh("process_group")
                plan.before.append(f"{name} = {self.group}")
                self.group = name
            plan.options["mesh"] = f"DeviceMesh.from_group({self.group}, {self._device_type()})"
        elif strategy == "HYBRID_SHARD":
            self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
            world, local = f"{self._dist()}.get_world_size()", "torch.cuda.device_count()"
            self.edits.need("torch")
            # FSDP1 takes the devices of a node for a shard group.
            plan.options["mesh"] = call(
                "init_device_mesh",
                ['"cuda"', f"({world} // {local}, {local})", 'mesh_dim_names=("replicate", "shard")'],
            )

    def _name_dimensions(self, mesh: cst.BaseExpression) -> None:
        """FSDP2 wants names for the two dimensions of a mesh, FSDP1 didn't."""
        for leaf in self.rewriting.values.leaves(mesh, self.module):
            made, module = leaf.node, leaf.module
            if not isinstance(made, cst.Call) or not module.code(made.func).endswith("init_device_mesh"):
                continue
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

    def _device_leaves(self) -> tuple[str, bool]:
        """The device_id as text, and whether it may be the CPU."""
        node = self._given("device_id")
        if node is None:
            return "", False
        return self._text(node), any('"cpu"' in text or "'cpu'" in text for text in self._devices(node, self.module))

    def _devices(self, node: cst.BaseExpression, module: Module, seen: frozenset[int] = frozenset()) -> list[str]:
        """The texts of all that a device may be."""
        found = []
        for leaf in self.rewriting.values.leaves(node, module):
            made = leaf.node
            if id(made) in seen:
                continue  # device = torch.device(device)
            if isinstance(made, cst.Call) and leaf.module.code(made.func) == "torch.device" and len(made.args) == 1:
                found += self._devices(made.args[0].value, leaf.module, seen | {id(made)})
            else:
                found.append(leaf.module.code(made))
        return found

    def _device_type(self) -> str:
        text, cpu = self._device_leaves()
        node = self._given("device_id")
        # A name of which nothing is known may be a device of any type.
        sure = node is None or all(re.search("cuda|rank|[0-9]", t) for t in self._devices(node, self.module))
        if not cpu and sure:
            return '"cuda"'
        if "cpu" in text:
            return '"cpu"'
        if node is not None and any(leaf.kind == "none" for leaf in self.rewriting.values.leaves(node, self.module)):
            text = f'{text} if {text} is not None else "cuda"' if re.fullmatch(r"[\w.]+", text) else text
        made = re.fullmatch(r"torch\.device\([^()]*\)", text)
        return f"{text if made else f'torch.device({text})'}.type"

    def _device(self, plan: Plan, replicated: bool = False) -> None:
        text, cpu = self._device_leaves()
        if not text:
            return
        if cpu and not replicated:
            if not {"mesh", "**"} & set(plan.options):
                self.edits.need("torch.distributed.device_mesh", "init_device_mesh")
                plan.options["mesh"] = f"init_device_mesh({self._device_type()}, ({self._dist()}.get_world_size(),))"
        elif not cpu and "current_device()" not in text and "set_device(" not in self._all_text():
            self.edits.need("torch")
            kind = self._device_type()
            guard = "" if kind == '"cuda"' else f'if {kind} == "cuda":\n    '
            plan.before.append(f"{guard}torch.cuda.set_device({text})")

    def _begin(self, plan: Plan, model: str) -> None:
        """What parameters are before they are sharded: made on the meta device, rank 0's for all, or as they are."""
        sync = self._sync()
        node = self._given("param_init_fn")
        if node is None and not any(map(meta_calls, self.rewriting.program.parsed)):
            if sync:
                self._broadcast(plan, model, sync)
        else:
            self._initial(plan, node, sync)

    def _initial(self, plan: Plan, node: cst.BaseExpression | None, sync: str) -> None:
        """FSDP1 gave each unit on the meta device its values when it wrapped it: a helper does it before each group."""
        code = "FC20" if node is None else "FA09"
        if "ignored_params" in plan.options:
            raise self._undecided(code, "what is ignored gets no initial values, and has to have them before", node)
        if sync and self.group:
            raise self._undecided(code, "values of the first rank of a process group go to its others by hand", node)
        device, _ = self._device_leaves()
        arguments = [device or 'torch.device("cuda", torch.cuda.current_device())']
        if node is not None:
            init = self._text(node)
            if not re.fullmatch(r"[\w.]+", init):
                name = self._fresh("init")
                lines = [line.strip() for line in init.splitlines()]
                plan.before.append(
                    f"{name} = {init}" if len(lines) == 1 else "\n    ".join([f"{name} = (", *lines]) + "\n)"
                )
                init = name
            arguments.append(init)
        arguments += [f"sync={sync}"] if sync else []
        plan.initial = ", ".join(arguments)
        self.edits.need("torch")
        self.edits.need("torch.distributed.fsdp", "FSDPModule")
        if plan.chosen_by:
            self.edits.helpers[plan.chosen_by] = HELPERS[f"{plan.chosen_by} first"]
            plan.choose.append(f"lambda module: initialise(module, {plan.initial})")
        else:
            self.edits.helpers["inner_first"] = HELPERS["inner_first"]
        if sync or "initialise" not in self.edits.helpers:  # what two calls share can do what either needs
            self.edits.helpers["initialise"] = HELPERS["initialise alike" if sync else "initialise"]

    def _all_text(self) -> str:
        return "\n".join(source.text for source in self.rewriting.program.sources.values())

    def _sync(self) -> str:
        """The condition under which all ranks begin with the first one's values; empty if none do."""
        node = self._given("sync_module_states")
        if node is None or constant(node) is False:
            return ""
        leaves = self.rewriting.values.leaves(node, self.module)
        if leaves and all(constant(leaf.node) is False for leaf in leaves if isinstance(leaf.node, cst.Name)) and all(
            isinstance(leaf.node, cst.Name) and leaf.kind == "value" for leaf in leaves
        ):  # fmt: skip
            return ""
        mesh = self._given("device_mesh")
        if mesh is not None and not self._of_all_ranks(mesh):
            raise self._undecided("FA11", "whose values are taken depends on the mesh", node)
        return self._text(node)

    def _of_all_ranks(self, mesh: cst.BaseExpression) -> bool:
        """Whether the first rank of a mesh, or of no mesh, is rank 0, and every rank is in it: so init_device_mesh."""
        leaves = self.rewriting.values.leaves(mesh, self.module)
        return bool(leaves) and all(
            leaf.kind == "none"
            or (isinstance(leaf.node, cst.Call) and leaf.module.code(leaf.node.func).endswith("init_device_mesh"))
            for leaf in leaves
        )

    def _broadcast(self, plan: Plan, model: str, sync: str) -> None:
        device, _ = self._device_leaves()
        dist = self._dist()
        source = f"src={dist}.get_global_rank({self.group}, 0), group={self.group}" if self.group else "src=0"
        lines = []
        if device:
            lines.append(f"{model}.to({device})")
        # FSDP1's sync_module_states: all ranks begin with rank 0's values.
        lines += [
            f"for tensor in [*{model}.parameters(), *{model}.buffers()]:  # FSDP1's sync_module_states",
            f"    {dist}.broadcast(tensor.detach(), {source})",
        ]
        if sync != "True":
            lines = [f"if {sync}:", *("    " + line for line in lines)]
        plan.before.append("\n".join(lines))


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
