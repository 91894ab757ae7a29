"""State dicts of sharded models and their optimizers, by the functions of torch.distributed.checkpoint.state_dict.

Their kind is plain where a `with` statement around them says it, or nothing does: then it is FSDP1's default, the full.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import libcst as cst

from migration.options import CLASS
from migration.rewriter.edits import Edits, Undecided, call, guarded
from migration.rewriter.module import Module
from migration.rewriter.rewriting import constant
from migration.rewriter.scene import Scene
from migration.rewriter.symbols import ROWS
from migration.rewriter.values import arguments

PACKAGE = "torch.distributed.checkpoint.state_dict"
TYPES = {"StateDictType.FULL_STATE_DICT": True, "StateDictType.SHARDED_STATE_DICT": False}
Args = dict[str | int, cst.BaseExpression]


@dataclass(frozen=True)
class Kind:
    """A kind of state dict: the full one, or each rank's shards; on the CPU, or the expression that decides it; on the
    first rank only. `optim_…`: of an optimizer's state, whose default in FSDP1 is the CPU."""

    full: bool = True
    cpu: bool | str = False
    first: bool = False
    optim_cpu: bool | str = True
    optim_first: bool = False

    def options(self, optimizer: bool) -> list[str]:
        """Arguments of StateDictOptions that give the same."""
        cpu, first = (self.optim_cpu, self.optim_first) if optimizer else (self.cpu, self.first)
        if not self.full:  # sharded tensors are loaded to where they belong anyway
            return [f"cpu_offload={self.cpu}"] if self.cpu else []
        # With both, FSDP2 gives the dict to the first rank and an empty one to the others.
        return ["full_state_dict=True", *([f"cpu_offload={cpu}"] if cpu and first else [])]


class StateDicts:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.problems: list[Undecided] = []
        self._kinds: dict[int, Kind] = {}  # of with statements
        self._to_load: dict[int, str] = {}  # a load_state_dict of an optimizer: what it loads with

    def run(self) -> list[Undecided]:
        calls = [(module, *found) for module in self.scene.modules for found in self.scene.static_calls(module)]
        for step in (self._setting, self._optimizers):
            for module, node, method in calls:
                guarded(self.problems, step, module, node, method)
        for module in self.scene.modules:
            for node in module.all(cst.Call):
                if isinstance(node.func, cst.Attribute) and node.func.attr.value in ("state_dict", "load_state_dict"):
                    guarded(self.problems, self._models, module, node, node.func)
        return self.problems

    # --- which kind ---

    def _setting(self, module: Module, node: cst.Call, method: str) -> None:
        if method not in ("state_dict_type", "set_state_dict_type"):
            return
        item = module.parent(node)
        block = module.parent(item) if isinstance(item, cst.WithItem) else None
        if (
            not isinstance(block, cst.With)
            or not isinstance(item, cst.WithItem)
            or module.within(block.body, cst.Yield)
        ):
            raise Undecided("FM07", "the kind is set for state dicts that are made elsewhere", node, module)
        for made in module.within(block.body, cst.Call):
            if self.scene.flow.functions(made.func):
                why = f"{module.code(made.func)} may make or load a state dict of the kind that is set here"
                raise Undecided("FM07", why, node, module)
        if not can_unwrap(module, block):
            raise Undecided("FM07", "the lines of its body can't be moved", node, module)
        self._kinds[id(block)] = self._kind(module, node)
        for arg in node.args[1:]:
            self.scene.rewriting.drop(arg.value, module)
        unwrap(self.scene.edits(module), block, item)

    def _kind(self, module: Module, node: cst.Call) -> Kind:
        args, spread = arguments(node)
        chosen = args.get("state_dict_type", args.get(1))
        leaf = self.scene.rewriting.only(chosen, module) if chosen is not None and not spread else None
        if leaf is None or leaf.symbol not in TYPES:
            raise Undecided("FM07", "the kind of state dict is chosen at run time", node, module)
        cpu, first = self._config(module, args.get("state_dict_config", args.get(2)), (False, False))
        optim = self._config(module, args.get("optim_state_dict_config", args.get(3)), (True, False))
        return Kind(TYPES[leaf.symbol], cpu, first, *optim)

    def _config(
        self, module: Module, node: cst.BaseExpression | None, default: tuple[bool, bool]
    ) -> tuple[bool | str, bool]:
        if node is None:
            return default
        leaf = self.scene.rewriting.known(node, module, "FM07")
        if leaf.kind != "call" or leaf.spread:
            raise Undecided("FM07", "its configuration isn't written out", node, module)
        offload = leaf.args.get("offload_to_cpu", leaf.args.get(0))
        cpu, first = constant(offload, default[0]), constant(leaf.args.get("rank0_only", leaf.args.get(1)), False)
        if offload is not None and module.code(offload) == "torch.cuda.is_available()":
            cpu = module.code(offload)
        if not isinstance(cpu, bool | str) or not isinstance(first, bool):
            raise Undecided("FM07", "its configuration is decided at run time", node, module)
        return cpu, first

    def _kind_at(self, module: Module, node: cst.CSTNode) -> Kind:
        for above in module.ancestors(node):
            if isinstance(above, cst.With) and any("summon_full_params" in module.code(i.item) for i in above.items):
                raise Undecided("FM09", "state dicts are made on every rank, outside of it", node, module)
            if id(above) in self._kinds:
                return self._kinds[id(above)]
        return Kind()

    # --- models ---

    def _models(self, module: Module, node: cst.Call, called: cst.Attribute) -> None:
        if id(node) in self._to_load:
            self.scene.edits(module).replace(module.span(node), self._to_load[id(node)])
            return
        if not self.scene.is_model(called.value, module):
            return
        kind, saves = self._kind_at(module, node), called.attr.value == "state_dict"
        code = "FC10" if saves else "FC11"
        self.scene.take(code, node, module)
        edits, (args, spread) = self.scene.edits(module), arguments(node)
        if saves:
            if args or spread:
                raise Undecided(code, "it has further arguments", node, module)
            options = kind.options(False)
            text = self._made(module, node, "get_model_state_dict", [edits.code(called.value)], options)
            if kind.full and kind.cpu and not any("cpu_offload" in option for option in options):
                # On every rank, FSDP2's own option would leave the state on the first one only.
                where = "" if kind.cpu is True else f" if {kind.cpu} else tensor"
                text = f"{{name: tensor.cpu(){where} for name, tensor in {text}.items()}}"
            edits.replace(module.span(node), text)
            return
        state, strict = args.get(0, args.get("state_dict")), constant(args.get("strict", args.get(1)), True)
        if spread or state is None or strict not in (True, False) or len(args) > 2:
            raise Undecided(code, "its arguments have no equivalent", node, module)
        given = edits.code(state)
        if kind.full and not isinstance(state, cst.Call):
            given = f"dict({given})"  # in which the whole tensors are replaced by shards
        options = ["full_state_dict=True"] * kind.full + ["strict=False"] * (not strict)
        self._reshard(module, node, called.value)
        text = self._made(module, node, "set_model_state_dict", [edits.code(called.value), given], options)
        edits.replace(module.span(node), text)

    def _made(self, module: Module, node: cst.CSTNode, function: str, values: list[str], options: list[str]) -> str:
        edits = self.scene.edits(module)
        edits.need(PACKAGE, function)
        if options:
            edits.need(PACKAGE, "StateDictOptions")
            values = [*values, f"options=StateDictOptions({', '.join(options)})"]
        made = call(function, values, module.span(node)[0] - module.line_span(node)[0])
        # Lines of an argument each stand below the call's line, whatever comes before it there.
        return made.replace("\n", module.source.newline + module.indent(node))

    def _reshard(self, module: Module, node: cst.CSTNode, model: cst.BaseExpression) -> None:
        """After a forward without gradients groups stay gathered: torch's functions would find other parameters in the
        model than in the optimizer, and take shards for whole ones."""
        statement, edits = module.statement(node), self.scene.edits(module)
        if self.scene.evaluates and statement is not None:
            edits.need("torch.distributed.fsdp", "FSDPModule")
            taken = {name.value for name in module.within(module.function(statement) or module.tree, cst.Name)}
            name = next(n for n in ("module", "group", "submodule", "fsdp_module") if n not in taken)
            why = "evaluation leaves groups gathered"
            edits.before(
                statement,
                f"for {name} in {edits.code(model)}.modules():  # {why}\n"
                f"    if isinstance({name}, FSDPModule):\n        {name}.reshard()",
            )

    # --- optimizers ---

    def _optimizers(self, module: Module, node: cst.Call, method: str) -> None:
        if method not in ("optim_state_dict", "optim_state_dict_to_load"):
            return
        code, kind = ROWS[f"{CLASS}.{method}()"].code, self._kind_at(module, node)
        args, spread = arguments(node)
        model, optimizer = args.get(0, args.get("model")), args.get(1, args.get("optim"))
        state = args.get(2, args.get("optim_state_dict"))
        edits = self.scene.edits(module)
        if model is None or optimizer is None or spread or not self.scene.is_model(model, module):
            raise Undecided(code, "its arguments can't be followed", node, module)
        if method == "optim_state_dict":
            if state is not None:
                raise Undecided(code, "it is given a state dict of its own", node, module)
            self._reshard(module, node, model)
            values = [edits.code(model), edits.code(optimizer)]
            text = self._made(module, node, "get_optimizer_state_dict", values, kind.options(True))
            edits.replace(module.span(node), text)
            return
        load = self._loading(module, node)
        if load is None or state is None or len(args) > 3:
            raise Undecided(
                code, "set_optimizer_state_dict loads by itself, where the optimizer is loaded", node, module
            )
        loaded, assign = load
        self._reshard(module, assign or loaded, model)
        values = [edits.code(model), edits.code(optimizer), edits.code(state)]
        if kind.full:
            edits.helper("own_steps", node, code)
            edits.need("torch")
            values[-1] = f"own_steps({values[-1]})"
        text = self._made(module, loaded, "set_optimizer_state_dict", values, ["full_state_dict=True"] * kind.full)
        if assign is None:
            edits.replace(module.span(loaded), text)
        else:
            self._to_load[id(loaded)] = text
            edits.remove(module.statement(assign) or assign)

    @staticmethod
    def _loading(module: Module, node: cst.Call) -> tuple[cst.Call, cst.Assign | None] | None:
        """The optimizer's load_state_dict that takes the result, and the assignment between, if there is one."""
        assign = module.parent(node)
        read: cst.CSTNode = node
        if isinstance(assign, cst.Assign) and isinstance(target := assign.targets[0].target, cst.Name):
            reads = [r for r in module.references(target) if module.order(r) > module.order(node)]
            if len(reads) != 1 or module.function(reads[0]) is not module.function(node):
                return None
            read = reads[0]
        arg = module.parent(read)
        outer = module.parent(arg) if isinstance(arg, cst.Arg) else None
        if not isinstance(outer, cst.Call) or not isinstance(outer.func, cst.Attribute):
            return None
        return (
            (outer, assign if isinstance(assign, cst.Assign) else None)
            if (outer.func.attr.value == "load_state_dict")
            else None
        )


def move(scene: Scene) -> list[Undecided]:
    return StateDicts(scene).run()


def can_unwrap(module: Module, block: cst.With) -> bool:
    """True if the lines of the body can be moved to the left: not those of one on the same line, nor of a string."""
    strings = module.within(block.body, cst.SimpleString, cst.FormattedString)
    return isinstance(block.body, cst.IndentedBlock) and not any("\n" in module.code(text) for text in strings)


def unwrap(edits: Edits, block: cst.With, *items: cst.WithItem) -> None:
    """Take items from a with statement, or all of it away if nothing is left of it. Ask `can_unwrap` first."""
    module = edits.module
    rest = [other for other in block.items if not any(other is item for item in items)]
    if rest:
        span = module.span(block.items[0])[0], module.span(block.items[-1])[1]
        edits.replace(span, ", ".join(module.code(other).rstrip(", ") for other in rest))
        return
    assert isinstance(block.body, cst.IndentedBlock)
    outer = module.indent(block)
    colon = module.text.index(":", max(module.span(item)[1] for item in block.items))
    # Behind the colon's line, so that comments above the first statement are kept.
    start, end = module.text.index("\n", colon) + 1, module.line_span(block.body.body[-1])[1]

    def body() -> str:
        inner = edits.render((start - 1, end))[1:]  # with what is put above the first statement
        return textwrap.indent(textwrap.dedent(inner), outer, lambda line: bool(line.strip()))

    edits.replace((module.line_span(block)[0], end), body, kept=(start, end))
