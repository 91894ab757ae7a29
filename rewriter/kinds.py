"""What kind of state dict a call of FSDP1 asks for."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from rewriter.bindings import Leaf, arguments
from rewriter.edits import Undecided
from rewriter.module import Module
from rewriter.translate import constant
from rewriter.values import Values

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"


@dataclass(frozen=True)
class Kind:
    """A kind of state dict: FULL or SHARDED; on the CPU; on the first rank only."""

    kind: str = FULL
    cpu: bool | str = False  # or the expression that decides
    first: bool = False
    optim_cpu: bool | str = True
    optim_first: bool = False

    def options(self, optimizer: bool) -> list[str]:
        """Arguments of StateDictOptions that give the same."""
        cpu, first = (self.optim_cpu, self.optim_first) if optimizer else (self.cpu, self.first)
        if self.kind == SHARDED:
            # The optimizer's default of FSDP1 is the CPU; sharded tensors are loaded to where they belong anyway.
            return [f"cpu_offload={self.cpu}"] if self.cpu else []
        # With both, FSDP2 gives the dict to the first rank and an empty one to the others.
        return ["full_state_dict=True", *([f"cpu_offload={cpu}"] if cpu and first else [])]


def kind_of(values: Values, module: Module, node: cst.Call) -> Kind:
    args, spread = arguments(node)
    chosen = args.get("state_dict_type", args.get(1))
    if spread or chosen is None:
        raise Undecided("FM07", "its arguments can't be followed", node, module)
    leaves = values.leaves(chosen, module)
    symbols = {leaf.symbol for leaf in leaves}
    if symbols == {"StateDictType.LOCAL_STATE_DICT"}:
        raise Undecided("FD03", "flat shards have no equivalent: SHARDED_STATE_DICT", node, module)
    if len(symbols) != 1 or not symbols <= {f"StateDictType.{FULL}", f"StateDictType.{SHARDED}"}:
        raise Undecided("FM07", "the kind of state dict is chosen at run time", node, module)
    kind = symbols.pop().partition(".")[2]
    cpu, first = _config(values, module, node, args.get("state_dict_config", args.get(2)), (False, False))
    optim = args.get("optim_state_dict_config", args.get(3))
    optim_cpu, optim_first = _config(values, module, node, optim, (True, False))
    return Kind(kind, cpu, first, optim_cpu, optim_first)


def _config(
    values: Values,
    module: Module,
    call: cst.Call,
    node: cst.BaseExpression | None,
    default: tuple[bool, bool],
) -> tuple[bool | str, bool]:
    if node is None:
        return default
    leaves = values.leaves(node, module)
    if len(leaves) == 1 and leaves[0].kind == "none":
        return default
    if len(leaves) != 1 or leaves[0].kind != "call" or leaves[0].spread:
        raise Undecided("FM07", "its configuration can't be followed", node, module)
    leaf = leaves[0]
    first = _flag(leaf, "rank0_only", 1, False)
    offload = leaf.args.get("offload_to_cpu", leaf.args.get(0))
    while isinstance(offload, cst.Name) and len(written := values.written(offload, module)) == 1:
        if written[0][0] is offload or written[0][1] is not module:
            break
        offload = written[0][0]
    # An expression can be said again elsewhere where everything in it is a name of the module, or of this function.
    if offload is not None and leaf.module is module and not isinstance(constant(offload), bool):
        if module.code(offload) == "torch.cuda.is_available()":
            return module.code(offload), first
        here = module.function(offload) is module.function(call) and not isinstance(offload, cst.Name)
        if here or (first and _of_the_module(offload, module)):
            return module.code(offload), first
    return _flag(leaf, "offload_to_cpu", 0, default[0]), first


def _of_the_module(node: cst.BaseExpression, module: Module) -> bool:
    names = module.within(node, cst.Name)
    bound = [binding for name in names for binding in module.assignments(name)]
    return isinstance(node, cst.Comparison) and bool(bound) and all(module.function(b.node) is None for b in bound)


def _flag(leaf: Leaf, name: str, place: int, default: bool) -> bool:
    node = leaf.args.get(name, leaf.args.get(place))
    value = constant(node, default)
    if not isinstance(value, bool):
        raise Undecided("FM07", f"{name} is decided at run time", leaf.node, leaf.module)
    return value
