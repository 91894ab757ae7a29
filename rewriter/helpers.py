"""Functions that a rewritten program may need, as they are put into it."""

from __future__ import annotations

SHARD_BY_SIZE = '''\
def shard_by_size(module, min_num_params, is_root=True, **options):
    """Shard what FSDP1's size_based_auto_wrap_policy chose; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if numel < min_num_params or isinstance(module, torch.nn.MultiheadAttention):
        return 0
    taken = sum(shard_by_size(child, min_num_params, False, **options) for child in module.children())
    if is_root or numel - taken < min_num_params or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        return taken
    fully_shard(module, **options)
    return numel
'''

SHARD_BY_POLICY = '''\
def shard_by_policy(module, policy, is_root=True, **options):
    """Shard what an FSDP1 wrapping policy chooses, inner modules first; returns how many parameters are in groups."""
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(shard_by_policy(child, policy, False, **options) for child in module.children())
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    fully_shard(module, **options)
    return numel
'''

OWN_PARAMETERS = '''\
def own_parameters(module):
    """The parameters of a group, without those of groups below it: shards, which FSDP1 kept in one flat parameter."""
    module.reshard()
    below = [inner for inner in module.modules() if inner is not module and isinstance(inner, FSDPModule)]
    theirs = {id(parameter) for inner in below for parameter in inner.parameters()}
    return [parameter for parameter in module.parameters() if id(parameter) not in theirs]
'''

WRAP_BY_SIZE = '''\
def wrap_by_size(module, recurse, nonwrapped_numel, min_num_params=int(1e8)):
    """FSDP1's size_based_auto_wrap_policy: a group for so many parameters that are in no inner group."""
    never = torch.nn.MultiheadAttention if recurse else (torch.nn.ModuleList, torch.nn.ModuleDict)
    return nonwrapped_numel >= min_num_params and not isinstance(module, never)
'''

WRAP_BY_CLASS = '''\
def wrap_by_class(module, recurse, nonwrapped_numel, transformer_layer_cls):
    """FSDP1's transformer_auto_wrap_policy: a group for each module of these classes."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))
'''

WRAP_BY_FUNCTION = '''\
def wrap_by_function(module, recurse, nonwrapped_numel, lambda_fn):
    """FSDP1's lambda_auto_wrap_policy: a group for each module for which the function returns True."""
    return recurse or lambda_fn(module)
'''

WRAP_BY_ANY = '''\
def wrap_by_any(module, recurse, nonwrapped_numel, policies):
    """FSDP1's _or_policy: a group for each module that one of the policies chooses."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)
'''

WRAP_ALWAYS = '''\
def wrap_always(module, recurse, nonwrapped_numel):
    """FSDP1's always_wrap_policy: a group for each module that has parameters of its own."""
    return recurse or any(True for _ in module.parameters(recurse=False))
'''

LOCAL_SHARD = '''\
def local_shard(tensor):
    """This rank's part of a tensor, as FSDP1's parameters and gradients were."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
'''

OWN_GROUP = '''\
def own_group(module):
    """Say that a module is a group of its own, when the model that it is in is sharded."""
    module.own_group = True
    return module
'''

NO_SYNC = '''\
@contextlib.contextmanager
def no_sync(model):
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
'''

NO_SYNC_OR_DDP = '''\
@contextlib.contextmanager
def no_sync(model):
    """Gradients are summed up on each rank, and not reduced, while this is open."""
    if not isinstance(model, FSDPModule):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
'''

FULL_PARAMS = '''\
@contextlib.contextmanager
def full_params(model):
    """Whole parameters while this is open, on every rank, to be read: what is written to them is lost."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
'''

FULL_PARAMS_IN_THEIR_DTYPE = '''\
@contextlib.contextmanager
def full_params(model):
    """Whole parameters in their own dtype while this is open, on every rank, to be read: what is written is lost."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # evaluation leaves groups gathered, in the dtype of mixed precision
    sharded = [(module, *item) for module in model.modules() for item in module.named_parameters(recurse=False)]
    parameters = {id(p): p for _, _, p in sharded if hasattr(p, "full_tensor")}
    whole = {key: torch.nn.Parameter(p.full_tensor(), p.requires_grad) for key, p in parameters.items()}
    for module, name, parameter in sharded:
        setattr(module, name, whole.get(id(parameter), parameter))
    try:
        yield
    finally:
        for module, name, parameter in sharded:
            setattr(module, name, parameter)
'''

INNER_FIRST = '''\
def inner_first(module):
    """All modules below one, children before their parents: the order in which FSDP1 wrapped them."""
    found = []
    for child in module.children():
        found += [*inner_first(child), child]
    return list(dict.fromkeys(found))
'''

INITIALISE = '''\
@torch.no_grad()
def initialise(group, device, init=None):
    """Memory and values for what is on the meta device in a group that is to be sharded, as FSDP1 gave them."""
    modules = [group]
    for module in modules:
        modules += [c for c in module.children() if not isinstance(c, FSDPModule) and c not in modules]
    tensors = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in modules}
    if not any(tensor.is_meta for own in tensors.values() for tensor in own):
        return
    for module in modules:
        if init is not None:
            init(module)
        elif tensors[module]:
            module.to_empty(device=device, recurse=False)
            module.reset_parameters()
'''

INITIALISE_ALIKE = '''\
@torch.no_grad()
def initialise(group, device, init=None, sync=False):
    """Memory and values for what is on the meta device in a group that is to be sharded, as FSDP1 gave them; with
    `sync`, FSDP1's sync_module_states, every rank then gets the values of rank 0."""
    modules = [group]
    for module in modules:
        modules += [c for c in module.children() if not isinstance(c, FSDPModule) and c not in modules]
    tensors = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in modules}
    if any(tensor.is_meta for own in tensors.values() for tensor in own):
        for module in modules:
            if init is not None:
                init(module)
            elif tensors[module]:
                module.to_empty(device=device, recurse=False)
                module.reset_parameters()
    for module in modules if sync else ():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            tensor.data = tensor.data.to(device)
            torch.distributed.broadcast(tensor, src=0)
'''

SHARDING_OPTIONS = '''\
def sharding_options(strategy, device_type):
    """fully_shard's mesh and resharding for the name of one of FSDP1's strategies."""
    if strategy not in (None, "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        raise ValueError(f"{strategy!r} isn't one of FSDP1's strategies")
    shards = ranks = torch.distributed.get_world_size()
    if strategy == "NO_SHARD":  # whole parameters on each rank and all-reduced gradients, as DDP has them
        shards = 1
    elif strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):  # over the devices of a node, with a replica on each
        shards = torch.get_device_module(device_type).device_count()
    shape, names = ((ranks,), None) if shards == ranks else ((ranks // shards, shards), ("replicate", "shard"))
    return {
        "mesh": init_device_mesh(device_type, shape, mesh_dim_names=names),
        "reshard_after_forward": None if strategy in (None, "FULL_SHARD", "HYBRID_SHARD") else False,
    }
'''


def _with_mesh(helper: str) -> str:
    """sharding_options for a mesh that the program may make itself."""
    start, end = helper.index("    shards = ranks"), helper.index("    return {")
    made = helper[start:end].replace("\n    ", "\n        ").replace("    shards", "        shards", 1).rstrip(" ")
    made += "        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)\n"
    own = """\
    elif strategy == "NO_SHARD" or (mesh.ndim == 2) != (strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")):
        raise ValueError(f"{strategy} on a mesh of {mesh.ndim} dimensions")
"""
    text = helper[:start] + "    if mesh is None:\n" + made + own + helper[end:]
    text = text.replace("(strategy, device_type)", "(strategy, device_type, mesh=None)")
    return text.replace("init_device_mesh(device_type, shape, mesh_dim_names=names),", "mesh,")


def _with_first(helper: str) -> str:
    """A helper that shards, with one more argument: what is done with each module before it is sharded."""
    named = helper.replace(", is_root=True", ", first, is_root=True").replace(", False, **", ", first, False, **")
    return named.replace("    fully_shard(module", "    first(module)\n    fully_shard(module")


HELPERS = {
    "shard_by_size": SHARD_BY_SIZE,
    "shard_by_policy": SHARD_BY_POLICY,
    "shard_by_size first": _with_first(SHARD_BY_SIZE),
    "shard_by_policy first": _with_first(SHARD_BY_POLICY),
    "wrap_by_size": WRAP_BY_SIZE,
    "wrap_by_class": WRAP_BY_CLASS,
    "wrap_by_function": WRAP_BY_FUNCTION,
    "wrap_always": WRAP_ALWAYS,
    "wrap_by_any": WRAP_BY_ANY,
    "local_shard": LOCAL_SHARD,
    "own_parameters": OWN_PARAMETERS,
    "own_group": OWN_GROUP,
    "no_sync": NO_SYNC,
    "no_sync or DDP": NO_SYNC_OR_DDP,
    "full_params": FULL_PARAMS,
    "full_params, own dtype": FULL_PARAMS_IN_THEIR_DTYPE,
    "inner_first": INNER_FIRST,
    "initialise": INITIALISE,
    "initialise alike": INITIALISE_ALIKE,
    "sharding_options": SHARDING_OPTIONS,
    "sharding_options, mesh": _with_mesh(SHARDING_OPTIONS),
}
