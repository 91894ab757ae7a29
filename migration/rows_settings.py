"""Rows for the settings of FSDP1: its constructor, enumerations, configurations and policies."""

from __future__ import annotations

from migration.row import CLASS, DECIDE, EXACT, rows

CONSTRUCTOR = rows(
    "FA",
    f"{CLASS}.",
    (
        "module",
        "fully_shard(block) for each block, then fully_shard(model)",
        EXACT,
        "The model stays what it was: its class, its names, no wrapper. Make the optimizer after it.",
    ),
    (
        "process_group",
        "mesh=DeviceMesh.from_group(group, device_type)",
        DECIDE,
        "One group is a one-dimensional mesh. A pair (shard, replicate) is a mesh of two dimensions, with the shard "
        'group last: init_device_mesh(…, (replicas, shards), mesh_dim_names=("replicate", "shard")).',
    ),
    (
        "sharding_strategy",
        "mesh= and reshard_after_forward=",
        DECIDE,
        "See ShardingStrategy: two of its members are no resharding policy.",
    ),
    (
        "cpu_offload",
        "offload_policy=CPUOffloadPolicy()",
        EXACT,
        "See CPUOffload. Without a GPU it must be pin_memory=False.",
    ),
    (
        "auto_wrap_policy",
        "a call of fully_shard for each module that the policy names, inner ones first",
        EXACT,
        "The policy itself is gone: the calls say what is a group. Without a policy the model is one group.",
    ),
    (
        "backward_prefetch",
        "nothing, or set_modules_to_backward_prefetch(…)",
        DECIDE,
        "See BackwardPrefetch; None as BACKWARD_POST. It changes when parameters are gathered, never a loss.",
    ),
    ("mixed_precision", "mp_policy=MixedPrecisionPolicy(…)", DECIDE, "See MixedPrecision, argument by argument."),
    (
        "ignored_modules",
        "ignored_params=set(module.parameters())",
        DECIDE,
        "fully_shard takes parameters, not modules, and each call that would reach them needs the set. Their gradients "
        "are reduced by nobody, as before.",
    ),
    (
        "param_init_fn",
        "model.to_empty(device=…), then initialise every parameter and buffer",
        DECIDE,
        "Build on the meta device, fully_shard, then allocate. to_empty leaves garbage in whatever isn't initialised, "
        "buffers that no state dict holds included.",
    ),
    (
        "device_id",
        "torch.cuda.set_device(local_rank) before the mesh is made",
        EXACT,
        "Parameters have to be on the mesh's device, or on meta, when fully_shard is called.",
    ),
    (
        "sync_module_states",
        "seed all ranks alike, or broadcast: set_model_state_dict(…, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True))",
        DECIDE,
        "FSDP2 never compares ranks. Ranks that initialise differently train a mixture without an error.",
    ),
    (
        "forward_prefetch",
        "unit.set_modules_to_forward_prefetch([the next unit])",
        DECIDE,
        "FSDP2 prefetches one group ahead by its own order of issue; the explicit call is for CPU-bound models.",
    ),
    (
        "limit_all_gathers",
        "nothing",
        EXACT,
        "False has no equivalent: FSDP2 frees memory in stream order and needs no limit. Memory may be lower.",
    ),
    (
        "use_orig_params",
        "nothing",
        DECIDE,
        "True is how FSDP2 always is, but for shapes: there a parameter was a flat piece, so that p.ndim > 1 was never "
        "true, and weight decay by dimension begins to work. False: the optimizer had one flat parameter a unit; "
        "parameter groups and freezing now work parameter by parameter, and the optimizer's state has other names.",
    ),
    ("ignored_states", "ignored_params=", DECIDE, "As ignored_modules; parameters can be given as they are."),
    ("device_mesh", "mesh=", EXACT, "The same mesh. Of two dimensions the last one shards."),
)

SHARDING = rows(
    "FS",
    "ShardingStrategy.",
    (
        "FULL_SHARD",
        "reshard_after_forward=True, and unset for the root",
        EXACT,
        "The root keeps its parameters for backward, which needs them first.",
    ),
    (
        "SHARD_GRAD_OP",
        "reshard_after_forward=False",
        EXACT,
        "Parameters stay gathered from forward to backward, where zero_grad() of the model clears nothing: let the "
        "optimizer do it. FSDP1 had this fault too, with use_orig_params=True alone.",
    ),
    (
        "NO_SHARD",
        "DistributedDataParallel(model)",
        DECIDE,
        "Not reshard_after_forward=False, which shards. It is DDP; or, with units and mixed precision as in FSDP1, "
        'fully_shard over mesh=init_device_mesh(…, (ranks, 1), mesh_dim_names=("replicate", "shard")): a shard is one '
        "rank, so that parameters are whole and gradients all-reduced.",
    ),
    (
        "HYBRID_SHARD",
        'mesh=init_device_mesh(…, (replicas, shards), mesh_dim_names=("replicate", "shard"))',
        DECIDE,
        "Not reshard_after_forward=True alone. Decide the sizes: FSDP1 takes the ranks of a node for a shard group. "
        "Where that is one rank, it never synchronised the replicas, each of which trained a model of its own; FSDP2 "
        "averages their gradients, so losses differ.",
    ),
    (
        "_HYBRID_SHARD_ZERO2",
        "the same mesh, with reshard_after_forward=False",
        DECIDE,
        "As HYBRID_SHARD; parameters stay gathered from forward to backward.",
    ),
)

PRECISION = rows(
    "FP",
    "MixedPrecision.",
    ("param_dtype", "MixedPrecisionPolicy(param_dtype=…)", EXACT, "Sharded parameters and the optimizer stay in fp32."),
    (
        "reduce_dtype",
        "MixedPrecisionPolicy(reduce_dtype=…)",
        DECIDE,
        "Always set it: what unset means has changed between versions of torch. FSDP1's unset is param_dtype.",
    ),
    (
        "buffer_dtype",
        "cast buffers by hand: buffer.data = buffer.to(dtype)",
        DECIDE,
        "FSDP2 leaves buffers alone. Batch norm's statistics are better left in fp32.",
    ),
    (
        "keep_low_precision_grads",
        "nothing",
        DECIDE,
        "False is what FSDP2 does: sharded gradients have the dtype of the sharded parameters. For True there is "
        "nothing, but "
        "to shard a model in that dtype.",
    ),
    (
        "cast_forward_inputs",
        "MixedPrecisionPolicy(cast_forward_inputs=…)",
        DECIDE,
        "FSDP1's default casts for the root alone, FSDP2's casts the inputs of each group.",
    ),
    (
        "cast_root_forward_inputs",
        "MixedPrecisionPolicy(cast_forward_inputs=…) in the root's call",
        EXACT,
        "Each call of fully_shard has a policy of its own.",
    ),
    (
        "_module_classes_to_ignore",
        "fully_shard(module, mp_policy=MixedPrecisionPolicy()) for each of them, before the others",
        DECIDE,
        "FSDP1 leaves batch norm out by default. FSDP2 has no such default: give these modules a group without a "
        "policy.",
    ),
)

OFFLOAD = rows(
    "FO",
    "CPUOffload.",
    (
        "offload_params",
        "CPUOffloadPolicy(pin_memory=torch.cuda.is_available())",
        EXACT,
        "Gradients and optimizer state follow the parameters, as in FSDP1. With clipping on a GPU the group needs the "
        'backend "cpu:gloo,cuda:nccl".',
    ),
)

PREFETCH = rows(
    "FB",
    "BackwardPrefetch.",
    ("BACKWARD_PRE", "nothing", EXACT, "FSDP2 gathers the next group before a group's backward by itself."),
    (
        "BACKWARD_POST",
        "unit.set_modules_to_backward_prefetch([unit]) for each unit",
        DECIDE,
        "FSDP2 gathers the next unit before a unit's backward unless it is told which; its own is there already, so "
        "that nothing is gathered ahead. That is the memory of BACKWARD_POST, with a little less overlap. None means "
        "the same.",
    ),
)

POLICIES = rows(
    "FW",
    "wrap.",
    (
        "transformer_auto_wrap_policy",
        "for m in model.modules(): if isinstance(m, Layer): fully_shard(m)",
        EXACT,
        "Inner modules before outer ones; the root last.",
    ),
    (
        "size_based_auto_wrap_policy",
        "fully_shard for the modules that it chose",
        DECIDE,
        "It counts the parameters that no inner unit has taken, in the order of children. Print what it chose and "
        "shard that, "
        "or choose blocks: by size a group is often half of a block.",
    ),
    (
        "lambda_auto_wrap_policy",
        "for m in model.modules(): if lambda_fn(m): fully_shard(m)",
        EXACT,
        "Inner modules before outer ones.",
    ),
    (
        "always_wrap_policy",
        "fully_shard for every module that has parameters of its own",
        DECIDE,
        "A group each: slow. Choose blocks.",
    ),
    (
        "enable_wrap",
        "fully_shard, after the model is built, on each module that wrap() named",
        DECIDE,
        "Inner modules first. All of the model is whole until then: where that doesn't fit, build it on meta.",
    ),
    ("wrap", "fully_shard(module) after the model is built", DECIDE, "As enable_wrap."),
    (
        "CustomPolicy",
        "fully_shard(m, **what the policy returned) for each module it named",
        DECIDE,
        "What it returns are arguments of FSDP1: translate each by this table.",
    ),
    (
        "ModuleWrapPolicy",
        "for m in model.modules(): if isinstance(m, classes): fully_shard(m)",
        EXACT,
        "Inner modules before outer ones.",
    ),
)
