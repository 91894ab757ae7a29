"""State dicts of sharded models and their optimizers, by the functions of torch.distributed.checkpoint.state_dict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import libcst as cst

from fsdp2.migrate.row import CLASS
from rewriter import each_parameter
from rewriter.bindings import arguments
from rewriter.edits import Undecided, call
from rewriter.kinds import FULL, SHARDED, Kind
from rewriter.module import Module
from rewriter.scene import Scene
from rewriter.settings import Settings
from rewriter.symbols import ROWS
from rewriter.taken import MOVED, WAITS
from rewriter.translate import constant

LOADS = "set_optimizer_state_dict(model, optimizer, state) loads by itself: call it where the optimizer is loaded"
PACKAGE = "torch.distributed.checkpoint.state_dict"


class StateDicts:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.problems: list[Undecided] = []
        self.settings = Settings(scene)
        self._grouped = any(_in_group(call) for call, _ in scene.calls)
        self._to_load: dict[int, str] = {}  # a load_state_dict of an optimizer: what it loads with

    def run(self) -> list[Undecided]:
        for module in self.scene.modules:
            for node, method in self.scene.static_calls(module):
                self._guarded(partial(self.settings.read, module, node, method))
        for module in self.scene.modules:
            for node, method in self.scene.static_calls(module):
                self._guarded(partial(self._static, module, node, method))
            for node in module.all(cst.Call):
                if isinstance(node.func, cst.Attribute) and node.func.attr.value in ("state_dict", "load_state_dict"):
                    self._guarded(partial(self._method, module, node))
        return self.problems

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Undecided as problem:
            problem.blocking = False
            self.problems.append(problem)

    # --- making and loading them ---

    def _method(self, module: Module, node: cst.Call) -> None:
        assert isinstance(node.func, cst.Attribute)
        receiver, method = node.func.value, node.func.attr.value
        if id(node) in self._to_load:
            self.scene.edits(module).replace(module.span(node), self._to_load[id(node)])
            return
        if not (self.scene.is_model(receiver, module) or self.settings.hold(module, receiver, node)):
            if owner := self.scene.tracked.in_subclass(receiver, module):
                code = "FC10" if method == "state_dict" else "FC11"
                raise Undecided(code, f"{module.code(receiver)} is a sharded model in {owner} alone", node, module)
            return
        kind = self.settings.kind_at(module, node)
        self.scene.take("FC10" if method == "state_dict" else "FC11", node, module, MOVED if kind else WAITS)
        if kind is None:
            return
        args, spread = arguments(node)
        if spread or (method == "state_dict" and args):
            raise Undecided("FC10", "it has further arguments", node, module)
        edits = self.scene.edits(module)
        shown = edits.code(receiver)
        if method == "state_dict":
            options = kind.options(False)
            if self._grouped and "cpu_offload=True" in options:
                options.remove("cpu_offload=True")  # it would keep the dict on the first rank of all, not of each group
            function, values = "get_model_state_dict", [shown]
        else:
            state = args.get(0, args.get("state_dict"))
            if state is None or constant(args.get("assign", args.get(2)), False) is not False:
                raise Undecided("FC11", "its arguments have no equivalent", node, module)
            options = ["full_state_dict=True"] if kind.kind == FULL else []
            strict = args.get("strict", args.get(1))
            if strict is not None and constant(strict) is not True:
                options.append(f"strict={edits.code(strict)}")
            given = edits.code(state)
            if kind.kind == FULL and _read_again(module, state):
                given = f"dict({given})"  # in which the whole tensors are replaced by shards
            function, values = "set_model_state_dict", [shown, given]
            if self.scene.evaluates and not self.scene.fresh(node, module):
                self._reshard(module, node, receiver)
        text = self._made(module, node, function, values, options)
        offloaded = any("cpu_offload" in option for option in options)
        if method == "state_dict" and kind.kind == FULL and kind.cpu and not offloaded:
            # On every rank, FSDP2's own option would leave the state on the first one only.
            where = "" if kind.cpu is True else f" if {kind.cpu} else tensor"
            text = f"{{name: tensor.cpu(){where} for name, tensor in {text}.items()}}"
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

    def _static(self, module: Module, node: cst.Call, method: str) -> None:
        args, spread = arguments(node)
        makers = ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict")
        loaders = (
            "optim_state_dict_to_load",
            "scatter_full_optim_state_dict",
            "shard_full_optim_state_dict",
            "flatten_sharded_optim_state_dict",
        )
        if method not in makers + loaders:
            return
        kind = self.settings.kind_at(module, node)
        if kind is None:
            return
        if spread:
            raise Undecided(self._code(method), "its arguments can't be followed", node, module)
        if method in makers:
            self._make(module, node, method, args, kind)
        else:
            self._load(module, node, method, args, kind)

    @staticmethod
    def _code(method: str) -> str:
        return ROWS[f"{CLASS}.{method}()"].code

    def _make(
        self, module: Module, node: cst.Call, method: str, args: dict[str | int, cst.BaseExpression], kind: Kind
    ) -> None:
        code = self._code(method)
        model, optimizer = args.get(0, args.get("model")), args.get(1, args.get("optim"))
        if model is None or optimizer is None:
            raise Undecided(code, "its arguments can't be followed", node, module)
        given = args.get(2, args.get("optim_state_dict")) if method == "optim_state_dict" else None
        if given is not None and module.code(given) not in (f"{module.code(optimizer)}.state_dict()", "None"):
            raise Undecided(code, "it is given a state dict of its own", node, module)
        if method == "full_optim_state_dict":
            first = constant(args.get("rank0_only", args.get(3)), True) is True
            kind = Kind(FULL, True, first, True, first)
        elif method == "sharded_optim_state_dict":
            kind = Kind(SHARDED)
        if self._grouped and kind.kind == FULL:
            raise Undecided(code, "the first rank of each group of ranks would need its own", node, module)
        edits = self.scene.edits(module)
        self._reshard(module, node, model)
        options = kind.options(True)
        self._offloaded(module, node, kind, kind.optim_cpu, options)
        text = self._made(module, node, "get_optimizer_state_dict", [edits.code(model), edits.code(optimizer)], options)
        edits.replace(module.span(node), text)

    @staticmethod
    def _offloaded(module: Module, node: cst.Call, kind: Kind, cpu: bool | str, options: list[str]) -> None:
        """On every rank, FSDP2's own option would leave the state on the first one only."""
        if kind.kind == FULL and isinstance(cpu, str) and not any("cpu_offload" in option for option in options):
            raise Undecided("FM07", "offload_to_cpu is decided at run time", node, module)

    def _reshard(self, module: Module, node: cst.Call, model: cst.BaseExpression) -> None:
        """After a forward pass without gradients groups stay gathered: get_optimizer_state_dict would find other
        parameters in the model than in the optimizer, and set_model_state_dict would take shards for whole ones. The
        model's state dict, made before, puts them back."""
        home, start = module.function(node), module.span(node)[0]
        around = [above for above in module.ancestors(node) if not isinstance(above, cst.With)]
        for known in module.within(home or module.tree, cst.Call):
            made = isinstance(known.func, cst.Attribute) and known.func.attr.value == "state_dict"
            if not made or module.function(known) is not home or module.span(known)[0] >= start:
                continue
            blocks = [a for a in module.ancestors(known) if isinstance(a, (cst.If, cst.For, cst.While, cst.Try))]
            always = all(any(block is above for above in around) for block in blocks)
            if always and not self.scene.computes(home or module.tree, module, module.span(known)[1], start):
                return
        statement = module.statement(node)
        if isinstance(statement, cst.SimpleStatementLine):
            shown = self.scene.edits(module).code(model)
            each_parameter.reshard(self.scene, module, statement, [shown], "evaluation leaves groups gathered")

    def _load(
        self, module: Module, node: cst.Call, method: str, args: dict[str | int, cst.BaseExpression], kind: Kind
    ) -> None:
        code = self._code(method)
        if method == "optim_state_dict_to_load":
            model, optimizer, state = (args.get(k, args.get(p)) for k, p in
                                       (("model", 0), ("optim", 1), ("optim_state_dict", 2)))  # fmt: skip
            if model is not None and 0 in args and not self.scene.is_model(model, module):
                raise Undecided(
                    code, "its first argument is the model since torch 2.1: give the arguments names", node, module
                )
            options = ["full_state_dict=True"] if kind.kind == FULL else []
        else:
            state, model = args.get(0), args.get(1, args.get("model"))
            state = state if state is not None else next((v for k, v in args.items() if "state_dict" in str(k)), None)
            optimizer = args.get("optim", args.get(3))
            options = [] if method.startswith("flatten") else ["full_state_dict=True"]
            if method.startswith("scatter"):
                options.append("broadcast_from_rank0=True")
        load = self._loading(module, node)
        if load is None:
            raise Undecided(code, LOADS, node, module)
        loaded, assign = load
        assert isinstance(loaded.func, cst.Attribute)
        optimizer = optimizer if optimizer is not None else loaded.func.value
        if model is None or state is None:
            raise Undecided(code, "its arguments can't be followed", node, module)
        if constant(args.get("load_directly"), False) is not False:
            raise Undecided(code, "it loads by itself", node, module)
        self.scene.take(code, loaded, module)
        edits = self.scene.edits(module)
        shown = edits.code(state)
        if method.startswith("scatter") and not isinstance(state, cst.Call):
            shown = f"{shown} or {{}}"
        text = self._made(
            module, loaded, "set_optimizer_state_dict", [edits.code(model), edits.code(optimizer), shown], options
        )
        if assign is None:
            edits.replace(module.span(loaded), text)
        else:
            self._to_load[id(loaded)] = text
            statement = module.statement(assign)
            assert statement is not None
            edits.remove(statement)

    def _loading(self, module: Module, node: cst.Call) -> tuple[cst.Call, cst.Assign | None] | None:
        """The optimizer's load_state_dict that takes the result, and the assignment between, if there is one."""
        above = module.parent(node)
        if isinstance(above, cst.Arg):
            outer = module.parent(above)
            if isinstance(outer, cst.Call) and self._is_load(outer):
                return outer, None
        if isinstance(above, cst.Assign) and len(above.targets) == 1 and isinstance(above.targets[0].target, cst.Name):
            target = above.targets[0].target
            reads = [read for read in module.references(target) if module.span(read)[0] > module.span(node)[0]]
            reads = [read for read in reads if module.function(read) is module.function(node)]
            if len(reads) == 1 and isinstance(arg := module.parent(reads[0]), cst.Arg):
                outer = module.parent(arg)
                if isinstance(outer, cst.Call) and self._is_load(outer):
                    return outer, above
        return None

    @staticmethod
    def _is_load(node: cst.Call) -> bool:
        return isinstance(node.func, cst.Attribute) and node.func.attr.value == "load_state_dict"


def _in_group(node: cst.Call) -> bool:
    """Whether a constructor shards over some of the ranks."""
    return any(
        arg.keyword is not None and arg.keyword.value == "process_group" and constant(arg.value) is not None
        for arg in node.args
    )


def move(scene: Scene) -> list[Undecided]:
    return StateDicts(scene).run()


def _read_again(module: Module, state: cst.BaseExpression) -> bool:
    """Whether a state dict may be read once more after it was loaded: it isn't made by the expression itself."""
    if isinstance(state, cst.Attribute):
        return True
    root: cst.BaseExpression = state
    while isinstance(root, (cst.Subscript, cst.Attribute)):
        root = root.value
    if not isinstance(root, cst.Name):
        return False
    shown, end = module.code(state), module.span(state)[1]
    home = module.function(state)
    loops = [a for a in module.ancestors(state) if isinstance(a, (cst.For, cst.While)) and module.function(a) is home]
    made = [module.span(binding.node)[0] for binding in module.assignments(root)]
    if any(all(at < module.span(loop)[0] for at in made) for loop in loops):
        return True
    return any(
        module.span(read)[0] > end
        for read in module.references(root)
        if any(
            module.code(one) == shown for one in (read, *module.ancestors(read)) if isinstance(one, cst.BaseExpression)
        )
    )
