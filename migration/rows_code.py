"""Rows for code that is no option of FSDP1: lines around the calls, and configuration files."""

from __future__ import annotations

from migration.row import DECIDE, EXACT, REFUSED, rows

IN_CODE = rows(
    "FC",
    "",
    (
        "import of FSDP1",
        "from torch.distributed.fsdp import fully_shard, FSDPModule, …",
        EXACT,
        "The package is the same; its FSDP1 names go when nothing uses them any more.",
    ),
    (
        "isinstance(x, FullyShardedDataParallel)",
        "isinstance(x, FSDPModule)",
        EXACT,
        "fully_shard changes the class of the module itself, to one that is also an FSDPModule.",
    ),
    ("FullyShardedDataParallel as a type", "FSDPModule", EXACT, "In annotations."),
    (
        "FullyShardedDataParallel as a value",
        "fully_shard",
        DECIDE,
        "Passed on to something that calls it with FSDP1's arguments or asks for instances of it: such a program keeps "
        "FSDP1's interface, on FSDP2.",
    ),
    (
        "subclass of FullyShardedDataParallel",
        "nothing",
        REFUSED,
        "fully_shard makes no wrapper that could be derived from: such a program keeps FSDP1's interface, which can "
        "be. Without it, move what it overrides into functions, or into the model.",
    ),
    (
        "private name of FSDP1",
        "nothing",
        REFUSED,
        "It has no counterpart: use what fully_shard, FSDPModule and torch.distributed.checkpoint.state_dict offer.",
    ),
    (
        "arguments that can't be followed",
        "fully_shard's own arguments",
        DECIDE,
        "Such a program keeps FSDP1's interface, which reads them at run time. Once you know what they are, write them "
        "into a call of fully_shard.",
    ),
    ("model.module, model._fsdp_wrapped_module", "model", EXACT, "There is no wrapper, so nothing is below it."),
    (
        '"_fsdp_wrapped_module." in names',
        "the name itself",
        EXACT,
        "Names have no prefix. What old checkpoints have is stripped when they are converted.",
    ),
    (
        "state_dict() of a sharded model",
        "get_model_state_dict(model, options=StateDictOptions(…))",
        EXACT,
        "FSDP1 gives full tensors unless state_dict_type sets another type; a model of FSDP2 gives DTensors. It is a "
        "collective: every rank has to call it.",
    ),
    (
        "load_state_dict() of a sharded model",
        "set_model_state_dict(model, state, options=StateDictOptions(…))",
        EXACT,
        "Plain tensors don't go into DTensors by load_state_dict.",
    ),
    (
        "state dict on one rank only",
        "the call before the branch, on every rank",
        DECIDE,
        "Gathering is a collective: in a branch that only one rank takes it waits for ever.",
    ),
    (
        "torch.nn.utils.clip_grad_norm_ on a sharded model",
        "the same call",
        DECIDE,
        "With FSDP1 each rank clipped by the norm of its own shards, which was a mistake. With DTensors it is the "
        "norm of the model, and .full_tensor() shows it: losses differ from before.",
    ),
    (
        "optimizer made before sharding",
        "the optimizer after fully_shard",
        DECIDE,
        "It holds the parameters as they were before: fully_shard puts DTensors in their place, and the optimizer "
        "would go on stepping tensors that nothing uses. FSDP1's interface on FSDP2 gives it the new ones where "
        "use_orig_params=True.",
    ),
    (
        "copy.deepcopy of a sharded model",
        "a second model, built and sharded like the first",
        DECIDE,
        "fully_shard's modules can't be copied. For an EMA keep a dict of detached clones of the (DTensor) parameters, "
        "or build the model twice and load one's state dict into the other.",
    ),
    (
        "other entry point of a sharded model",
        'register_fsdp_forward_method(model, "name")',
        EXACT,
        "Gathering happens around forward, as in FSDP1. Another method that uses parameters of its own unit has to be "
        "registered.",
    ),
    (
        "numel() of a sharded model's parameters",
        "parameter.numel() is the whole parameter's, parameter.to_local().numel() the shard's",
        DECIDE,
        "With FSDP1 it counted this rank's shards. Sums over ranks that follow it are too large now.",
    ),
    (
        "requires_grad after sharding",
        "the same, before fully_shard",
        DECIDE,
        "Frozen and trained parameters may share a group, whose frozen ones are then gathered and freed with it; set "
        "requires_grad before the model is sharded and the optimizer is made. Where models are frozen in turns, as in "
        "a GAN, losses differ: FSDP1 keeps the gradient that a frozen unit has and adds it to its next one.",
    ),
    (
        "mp.spawn with ranks set by hand",
        "torchrun",
        EXACT,
        "Works on, and is left as it is. Under torchrun the ranks come from the environment, and a port that is set in "
        "the program would be another one than torchrun's.",
    ),
    (
        "model on the meta device",
        "initial values for each group before its fully_shard; or to_empty(device=…) after the last, and then values",
        DECIDE,
        "FSDP1 initialised each unit as it was wrapped, and broadcast rank 0's values if it was told to; so does what "
        "is rewritten. fully_shard itself gives no values, and to_empty leaves garbage in what gets none.",
    ),
    (
        "FSDP of accelerate, Lightning or Composer",
        "the library's own switch to FSDP2",
        DECIDE,
        "accelerate: FullyShardedDataParallelPlugin(fsdp_version=2, …). Lightning: ModelParallelStrategy, with a "
        "configure_model that calls fully_shard. Composer: parallelism_config={'fsdp2': …}.",
    ),
    (
        "FullyShardedDataParallel of fairscale",
        "nothing",
        REFUSED,
        "Not torch's. Its arguments have other names: move to torch.distributed.fsdp by its table first.",
    ),
    (
        "checkpoint wrappers after sharding",
        "the same; better before fully_shard",
        EXACT,
        "The same losses. Wrapped first and sharded second, recomputation is inside of the group.",
    ),
    ("code that can't be parsed", "nothing", REFUSED, "It holds names of FSDP1; nothing could be said about them."),
    (
        "torch.compile of a sharded model",
        "the same; better each block, before fully_shard",
        EXACT,
        "It works on. Compiled block by block before sharding, the blocks share what was compiled.",
    ),
    (
        "gradients of a sharded model by hand",
        "DTensors: gradient.to_local(), or gradient.full_tensor() on every rank",
        DECIDE,
        "With FSDP1 a gradient was this rank's shard, plain. A norm that is summed over ranks by hand would count it "
        "twice, and a plain tensor takes none in place. The norm over all ranks is torch.nn.utils.get_total_norm(the "
        "gradients).full_tensor(), or the interface's model.clip_grad_norm_(inf).",
    ),
    (
        "parameters of sharded models changed by hand",
        "the same, after module.reshard() for each FSDPModule of a model that was evaluated",
        DECIDE,
        "An EMA, a copy, a projection. Element by element it works on DTensors. But evaluation leaves groups gathered, "
        "and then such a loop meets plain tensors, whose changes are lost. With FSDP1 the outermost unit of a model "
        "that is only evaluated stays as it was the first time, in what it computes and in its state dict.",
    ),
    (
        "shape of a sharded model's parameters",
        "the same: parameter.ndim and parameter.shape are the whole parameter's",
        DECIDE,
        "With FSDP1 each was a flat piece of one dimension, so that p.ndim > 1 was never true: an optimizer that "
        "decays by dimension decayed nothing, and now does. Losses differ from before.",
    ),
    (
        "load_sharded_optimizer_state_dict",
        "{key: get_optimizer_state_dict(model, optimizer)}, filled by torch.distributed.checkpoint.load",
        EXACT,
        "It makes ShardedTensors. set_optimizer_state_dict takes them without an error, and the next step fails.",
    ),
    (
        "model.process_group",
        "next(model.parameters()).device_mesh.get_group(-1)",
        EXACT,
        "The ranks that hold the shards of one replica: the mesh's last dimension. Gathered parameters have none: "
        "model.reshard() first, after an evaluation.",
    ),
    (
        "other attributes of FSDP1's models",
        "nothing",
        REFUSED,
        "sharding_strategy, mixed_precision, cpu_offload, compute_device, training_state and the handles of flat "
        "parameters: keep what you gave to fully_shard.",
    ),
    (
        "initial values drawn after sharding",
        "the same, before fully_shard, or on DTensors",
        DECIDE,
        "FSDP1 drew them on each rank's flat shards. DTensors draw other numbers, the same for any number of ranks: "
        "losses differ from the first step.",
    ),
    (
        "_reshard(unit, unit._handle, True)",
        "unit.reshard()",
        EXACT,
        "FSDP2 reshards any group, a replicated one too: where NO_SHARD was asked for first, FSDPModule is.",
    ),
    (
        "unit.params",
        "the group's own parameters",
        EXACT,
        "FSDP1 kept them in one flat parameter. FSDP2 has them one by one, as shards once the group isn't gathered. "
        "The interface's `params` are these.",
    ),
    (
        "zero_grad() of a sharded model",
        "the same, after module.reshard() for each FSDPModule that is gathered; or optimizer.zero_grad()",
        EXACT,
        "It clears nothing of a gathered group, as the outermost one is from forward to backward and after an "
        "evaluation. FSDP1 had this fault with SHARD_GRAD_OP and use_orig_params=True alone.",
    ),
    (
        "what may be FSDP1's class, or its model's method",
        "the same with FSDP1's interface; else what its place of origin becomes",
        DECIDE,
        "A table, a parameter, a field or a derived class carries it there. Whether it is it turns out at run time.",
    ),
    (
        "questions by a name of FSDP1's",
        "isinstance(model, FSDPModule), isinstance(parameter, DTensor)",
        DECIDE,
        "By its class's name, or a private attribute of its parameters. The interface answers as FSDP1 does, FSDP2 "
        "doesn't.",
    ),
)

IN_CONFIGURATIONS = rows(
    "FY",
    "",
    ("accelerate: fsdp_version", "fsdp_version: 2", EXACT, "Below fsdp_config; without it accelerate uses FSDP1."),
    (
        "accelerate: fsdp_sharding_strategy",
        "fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
        DECIDE,
        "NO_SHARD is distributed_type: MULTI_GPU, without fsdp_config. HYBRID_SHARD is no resharding policy: it takes "
        "a parallelism_config with dp_replicate_size and dp_shard_size.",
    ),
    (
        "accelerate: fsdp_backward_prefetch, fsdp_forward_prefetch, fsdp_use_orig_params, fsdp_sync_module_states",
        "nothing",
        EXACT,
        "accelerate refuses or ignores them with FSDP2. Rank 0's values are broadcast with "
        "fsdp_cpu_ram_efficient_loading.",
    ),
    (
        "accelerate: fsdp_state_dict_type",
        "FULL_STATE_DICT or SHARDED_STATE_DICT",
        DECIDE,
        "LOCAL_STATE_DICT has no equivalent: SHARDED_STATE_DICT.",
    ),
    (
        "accelerate: fsdp_auto_wrap_policy, fsdp_transformer_layer_cls_to_wrap, fsdp_offload_params, "
        "fsdp_activation_checkpointing",
        "the same",
        EXACT,
        "",
    ),
    (
        "Composer: fsdp_config",
        "parallelism_config with fsdp2",
        DECIDE,
        "FSDP2Config has activation_checkpointing, reshard_after_forward, state_dict_type and a few more; what else "
        "stands here has no place there.",
    ),
    (
        "Lightning: strategy fsdp",
        "ModelParallelStrategy",
        DECIDE,
        "The strategy shards over a mesh; the model says in configure_model what is a group.",
    ),
)
