"""Rows for calls of FSDP1: methods, state dicts, and code around them."""

from __future__ import annotations

from migration.row import CLASS, DECIDE, EXACT, REFUSED, rows

METHODS = rows(
    "FM",
    f"{CLASS}.",
    (
        "module()",
        "the model itself",
        EXACT,
        "There is no wrapper: model.module.x is model.x, and names have no prefix.",
    ),
    ("check_is_root()", "nothing", REFUSED, "The root is the model that you called fully_shard on last."),
    (
        "fsdp_modules()",
        "[m for m in model.modules() if isinstance(m, FSDPModule)]",
        EXACT,
        "root_only=True: the model.",
    ),
    (
        "apply()",
        "model.apply(fn) on the sharded model",
        DECIDE,
        "FSDP1 gathers parameters around fn. Here fn gets DTensors: right for element-wise values, not for what "
        "depends on the whole shape; unshard() the group first then.",
    ),
    ("set_state_dict_type()", "get_model_state_dict(model, options=StateDictOptions(…))", EXACT, "See StateDictType."),
    ("get_state_dict_type()", "nothing", REFUSED, "Each call specifies its state-dict type."),
    ("state_dict_type()", "get_model_state_dict(model, options=StateDictOptions(…))", EXACT, "See StateDictType."),
    ("forward()", "model(…)", EXACT, "For another entry point: register_fsdp_forward_method(model, name)."),
    (
        "summon_full_params()",
        "module.unshard() … module.reshard(), or parameter.full_tensor()",
        DECIDE,
        "full_tensor() to read. Writing: set_model_state_dict; changes to a gathered parameter are lost when it is "
        "resharded.",
    ),
    ("named_buffers()", "model.named_buffers()", EXACT, "No prefixes to strip."),
    ("named_parameters()", "model.named_parameters()", EXACT, "DTensors with plain names; p.to_local() is the shard."),
    (
        "no_sync()",
        "model.set_requires_gradient_sync(False) … True for the last microbatch",
        EXACT,
        "Set it back on every path, exceptions included. Both add up whole gradients on each rank: FSDP1 in the dtype "
        "of the computation, FSDP2 in reduce_dtype. Where the two differ, so do the sums. Microbatches that are given "
        "up, as at the end of an epoch, are cleared by zero_grad() in FSDP1 and not in FSDP2: let the last one reduce, "
        "or call model.reset_iter_state() (torch 2.15) too.",
    ),
    (
        "clip_grad_norm_()",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        DECIDE,
        "The squares are summed in another order: the norm agrees to its last digits, not to its last bit. It returns "
        "a "
        "DTensor: .full_tensor() on every rank before it is printed.",
    ),
    (
        "full_optim_state_dict()",
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))",
        EXACT,
        "Deprecated in FSDP1 too.",
    ),
    ("sharded_optim_state_dict()", "get_optimizer_state_dict(model, optimizer)", EXACT, "Deprecated in FSDP1 too."),
    (
        "shard_full_optim_state_dict()",
        "set_optimizer_state_dict(…, options=StateDictOptions(full_state_dict=True))",
        EXACT,
        "Clone each `step` first: flat parameters share one.",
    ),
    (
        "flatten_sharded_optim_state_dict()",
        "set_optimizer_state_dict(model, optimizer, state)",
        EXACT,
        "Nothing is flat any more.",
    ),
    (
        "scatter_full_optim_state_dict()",
        "set_optimizer_state_dict(…, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))",
        EXACT,
        "Clone each `step` first: flat parameters share one.",
    ),
    (
        "rekey_optim_state_dict()",
        "nothing",
        REFUSED,
        "get_optimizer_state_dict always has names. Convert a checkpoint with ids once, with the model at hand.",
    ),
    (
        "optim_state_dict()",
        "get_optimizer_state_dict(model, optimizer)",
        EXACT,
        "What FSDP1 made loads through set_optimizer_state_dict; of a full one clone each `step`, which flat "
        "parameters share.",
    ),
    (
        "optim_state_dict_to_load()",
        "set_optimizer_state_dict(model, optimizer, state)",
        EXACT,
        "Loads at once; no second load_state_dict.",
    ),
    (
        "register_comm_hook()",
        "nothing",
        REFUSED,
        "For another dtype use reduce_dtype; for another reduction set_custom_reduce_scatter, which isn't the same "
        "interface.",
    ),
)

STATE_DICTS = rows(
    "FD",
    "",
    (
        "StateDictType.FULL_STATE_DICT",
        "StateDictOptions(full_state_dict=True, cpu_offload=True)",
        EXACT,
        "Rank 0 has it, others an empty one. Without cpu_offload all have it, on the device.",
    ),
    (
        "StateDictType.SHARDED_STATE_DICT",
        "get_model_state_dict(model), saved by torch.distributed.checkpoint",
        EXACT,
        "DTensors; what FSDP1 saved loads as it is.",
    ),
    (
        "StateDictType.LOCAL_STATE_DICT",
        "nothing",
        REFUSED,
        "Flat shards without names, for one world size. Save again from FSDP1 as SHARDED_STATE_DICT.",
    ),
    ("FullStateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    (
        "FullStateDictConfig.rank0_only",
        "StateDictOptions(full_state_dict=True, cpu_offload=True)",
        EXACT,
        "cpu_offload with full_state_dict is on rank 0 alone.",
    ),
    ("ShardedStateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    ("ShardedStateDictConfig._use_dtensor", "nothing", EXACT, "They are DTensors always."),
    ("LocalStateDictConfig.offload_to_cpu", "nothing", REFUSED, "As LOCAL_STATE_DICT."),
    ("StateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    ("FullOptimStateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    (
        "FullOptimStateDictConfig.rank0_only",
        "StateDictOptions(full_state_dict=True, cpu_offload=True)",
        EXACT,
        "As for the model.",
    ),
    ("ShardedOptimStateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    ("ShardedOptimStateDictConfig._use_dtensor", "nothing", EXACT, "They are DTensors always."),
    ("LocalOptimStateDictConfig.offload_to_cpu", "nothing", REFUSED, "As LOCAL_STATE_DICT."),
    ("OptimStateDictConfig.offload_to_cpu", "StateDictOptions(cpu_offload=…)", EXACT, ""),
    ("StateDictSettings.state_dict_type", "nothing", REFUSED, "As get_state_dict_type()."),
    ("StateDictSettings.state_dict_config", "nothing", REFUSED, "As get_state_dict_type()."),
    ("StateDictSettings.optim_state_dict_config", "nothing", REFUSED, "As get_state_dict_type()."),
    ("OptimStateKeyType.PARAM_NAME", "get_optimizer_state_dict", EXACT, "Names are all there is."),
    ("OptimStateKeyType.PARAM_ID", "nothing", REFUSED, "As rekey_optim_state_dict()."),
)

AROUND = rows(
    "FX",
    "",
    (
        "ShardedGradScaler",
        "torch.amp.GradScaler",
        EXACT,
        "Gradients are DTensors, which reduce the overflow flag themselves.",
    ),
    (
        "apply_activation_checkpointing",
        "apply_activation_checkpointing, or checkpoint_wrapper on each block, before fully_shard",
        EXACT,
        "In FSDP1 it could come after wrapping; here recomputation has to be inside of the group.",
    ),
    (
        "FlatParameter",
        "nothing",
        REFUSED,
        "There is none: .numel() of a DTensor is the whole parameter's, to_local() the shard.",
    ),
    ("default_auto_wrap_policy", "as size_based_auto_wrap_policy", DECIDE, "Its name before torch 1.12."),
    ("fsdp_auto_wrap_policy=", "as auto_wrap_policy", EXACT, "Its name before torch 1.12."),
    (
        "ignored_params=",
        "as ignored_states",
        DECIDE,
        "Its name in torch 2.0; fully_shard's argument of that name takes a set.",
    ),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "torch.distributed.fsdp",
        EXACT,
        "The module that the class is in; private names of it have no equivalent.",
    ),
)
