"""FullyShardedDataParallel as `torch.distributed.fsdp` has it, on `fully_shard`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision

from fsdp1_interface import gradients, mixing, optimizer_states
from fsdp1_interface.arguments import Arguments, Unsupported
from fsdp1_interface.clip import clip_grad_norm
from fsdp1_interface.explain import original_class, say, warn
from fsdp1_interface.full_params import full_params
from fsdp1_interface.sharding import Unit, require_fine_sums, shard, unit_of
from fsdp1_interface.states import StateDicts, register_hooks
from fsdp1_interface.units import own_modules


class InnerPart(Unsupported, AttributeError):
    """So that `hasattr` says what is true: there is none."""


class FullyShardedDataParallel(StateDicts, nn.Module):
    """FSDP1's constructor and methods, on FSDP2. They are documented at
    https://docs.pytorch.org/docs/stable/fsdp.html; what becomes of each is in docs/migration-options.md.

    There is no wrapper: the call shards the module that it is given and returns it, an instance of its own class
    and of this one. So `model.module` is the model, and no name has a prefix.

    Raises:
        Unsupported: an argument that FSDP2 can't honour, or a model whose own names would be ambiguous.
        TypeError, ValueError: what FSDP1 refuses too.
    """

    def __new__(cls, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = cls.__dict__.get("_fsdp1_original")
        if original is not None:  # a part of a sharded container, such as a slice of nn.Sequential, isn't sharded
            return original(module, *args, **kwargs)
        if not isinstance(module, nn.Module):
            raise TypeError(f"FSDP shards modules; {type(module).__name__} given")
        if isinstance(module, FSDPModule):
            raise ValueError(f"{original_class(module).__name__} is sharded already")
        _require_unambiguous(module)
        return _as_instance(module, cls)

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
        *,
        fsdp_auto_wrap_policy: Any = None,  # auto_wrap_policy before torch 1.12
        ignored_params: Any = None,  # ignored_states in torch 2.0
    ) -> None:
        # nn.Module.__init__ isn't called: it has been, when the module was made.
        given = {name: value for name, value in locals().items() if name in Arguments.__dataclass_fields__}
        old = {"auto_wrap_policy": fsdp_auto_wrap_policy, "ignored_states": ignored_params}
        given |= {name: value for name, value in old.items() if value is not None}
        try:
            shard(module, Arguments(**given), lambda part: register_hooks(_as_instance(part, FullyShardedDataParallel)))
            mixing.explained()
        except BaseException:
            if not isinstance(module, FSDPModule):
                module.__class__ = original_class(module)
            raise

    def _get_name(self) -> str:
        return original_class(self).__name__

    def __repr__(self) -> str:
        """The model as FSDP1 prints it, with a wrapper, for who looks for one in it."""
        inner = super().__repr__().replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (_fsdp_wrapped_module): {inner}\n)" if unit_of(self) else inner

    def __getattr__(self, name: str) -> Any:
        # Asked last, when the model has no such name: what FSDP1's wrapper has.
        try:
            return super().__getattr__(name)
        except AttributeError:
            unit = unit_of(self)
            if unit is None:
                raise
            if name in ATTRIBUTES:
                return ATTRIBUTES[name](self, unit)
            if name in INNER_PARTS:
                raise InnerPart(f".{name} is an inner part of FSDP1's wrapper: {INNER_PARTS[name]}") from None
            if hasattr(WRAPPER, name) or (name.startswith("_") and not name.startswith("__")):
                what = (
                    f"{original_class(self).__name__} has no .{name}, nor has FSDP2 any inner part of FSDP1's wrapper"
                )
                raise InnerPart(f"{what}: {_GIVEN}; {_GATHERED}; {_IN_ORDER}") from None
            raise

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        found = [(inner, unit_of(inner)) for inner in module.modules()]
        return [inner for inner, unit in found if unit is not None and (unit.is_root or not root_only)]

    def check_is_root(self) -> bool:
        unit = unit_of(self)
        return unit is not None and unit.is_root

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are summed up on each rank, whole, and reduced by the first backward outside of this.

        FSDP1 sums them in the dtype of the computation, FSDP2 in `reduce_dtype`. Where that is finer, so are the
        sums. Raises Unsupported where it is coarser.
        """
        self._require_root("no_sync()")
        require_fine_sums(self.modules())
        say("no_sync()", "model.set_requires_gradient_sync(False)\n...  # and True before the last microbatch")
        gradients.sums(self)
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm over all ranks, of no dimensions. A collective call."""
        self._require_root("clip_grad_norm_()")
        say("clip_grad_norm_(x)", "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), x).full_tensor()")
        return clip_grad_norm(self, float(max_norm), float(norm_type))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        gradients.clear(self, set_to_none)

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        say(
            "summon_full_params(model)",
            "full = {name: p.full_tensor() for name, p in model.named_parameters()}  # to read\n"
            "set_model_state_dict(model, changed, options=StateDictOptions(full_state_dict=True))  # to write",
        )
        unit = unit_of(module)
        owners = module.modules() if recurse else own_modules(module, unit.ignored) if unit is not None else ()
        return full_params(
            module,
            list(owners),
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """`nn.Module.apply` while the parameters are whole; what it writes is kept."""
        with self.summon_full_params(self):
            return super().apply(fn)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        raise Unsupported(
            "register_comm_hook(): FSDP2 has no such hook. For another dtype set reduce_dtype in MixedPrecision; for "
            "another reduction move to fully_shard and its set_custom_reduce_scatter()"
        )

    optim_state_dict = staticmethod(optimizer_states.optim_state_dict)
    optim_state_dict_to_load = staticmethod(optimizer_states.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(optimizer_states.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(optimizer_states.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(optimizer_states.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(optimizer_states.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(optimizer_states.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(optimizer_states.rekey_optim_state_dict)

    def _require_root(self, what: str) -> None:
        if not self.check_is_root():
            raise RuntimeError(f"{what}: call it on the outermost FSDP module; this one is inside another")


# Some programs ask which arguments there are, and would be told those of __new__.
_of_init = inspect.signature(FullyShardedDataParallel.__init__)
FullyShardedDataParallel.__signature__ = _of_init.replace(  # type: ignore[attr-defined]
    parameters=list(_of_init.parameters.values())[1:], return_annotation=inspect.Signature.empty
)

ATTRIBUTES: dict[str, Callable[[nn.Module, Unit], Any]] = {
    "module": lambda module, unit: module,
    "_fsdp_wrapped_module": lambda module, unit: module,
    "sharding_strategy": lambda module, unit: unit.arguments.sharding_strategy,
    "mixed_precision": lambda module, unit: unit.arguments.mixed_precision or MixedPrecision(),
    "cpu_offload": lambda module, unit: unit.arguments.cpu_offload or CPUOffload(),
    "backward_prefetch": lambda module, unit: unit.arguments.backward_prefetch,
    "forward_prefetch": lambda module, unit: unit.arguments.forward_prefetch,
    "limit_all_gathers": lambda module, unit: unit.arguments.limit_all_gathers,
    "compute_device": lambda module, unit: unit.arguments.device,
    "process_group": lambda module, unit: unit.process_group,
    "rank": lambda module, unit: unit.process_group.rank(),
    "world_size": lambda module, unit: unit.process_group.size(),
    "params": lambda module, unit: _params(module, unit),
}


def _params(module: nn.Module, unit: Unit) -> list[nn.Parameter]:
    warn(f".params: FSDP1 had this unit's in one flat parameter, of which a rank had a part. {_NOT_FLAT}")
    found = (parameter for part in own_modules(module, unit.ignored) for parameter in part.parameters(recurse=False))
    return [parameter for parameter in dict.fromkeys(found) if parameter not in unit.ignored.parameters]


WRAPPER = torch.distributed.fsdp.FullyShardedDataParallel
_GIVEN = "what FSDP was given is in .sharding_strategy, .mixed_precision and so on, and check_is_root() knows the root"
_NOT_FLAT = (
    "FSDP2 has no flat parameter. A unit's parameters are in named_parameters() under their own names, each a DTensor "
    "of its own shape; .to_local() is this rank's shard"
)
_GATHERED = "to gather a unit's parameters and to free them write unit.unshard() and unit.reshard()"
_IN_ORDER = (
    "FSDP2 has its own streams and order of gathering; set_modules_to_forward_prefetch() and "
    "set_modules_to_backward_prefetch() say what is gathered early"
)
INNER_PARTS = {
    **dict.fromkeys(("flat_params", "_flat_param", "flat_param"), _NOT_FLAT),
    **dict.fromkeys(("_handle", "_handles", "_all_handles", "_fully_sharded_module_to_handle"), _GATHERED),
    **dict.fromkeys(("_streams", "_exec_order_data", "_unshard_stream", "_post_backward_stream"), _IN_ORDER),
    "training_state": "FSDP2 tells nobody what it is doing; hooks of modules run before and after forward and backward",
}


def _as_instance(module: nn.Module, cls: type) -> nn.Module:
    """Make it one of `cls` too, as fully_shard does with a class of its own."""
    if not isinstance(module, FullyShardedDataParallel):
        original = type(module)
        module.__class__ = type(f"FSDP1{original.__name__}", (cls, original), {"_fsdp1_original": original})
    return module


def _require_unambiguous(module: nn.Module) -> None:
    names = {name for cls in (FullyShardedDataParallel, StateDicts) for name in vars(cls) if not name.startswith("_")}
    clash = sorted(name for name in (*names - set(dir(nn.Module)), "module") if hasattr(module, name))
    if clash:
        raise Unsupported(
            f"{type(module).__name__}.{clash[0]}: FSDP1's wrapper has this name too, and here there is no wrapper, so "
            f"the name would be ambiguous. Rename it, or use fully_shard, which adds no such names"
        )
