"""Parameters' names without what wrappers put into them."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp2.checkpoint.refusal import Refused

# Of FSDP1, torch.compile, activation checkpointing (the wrapper, and its older name) and Lightning Fabric: anywhere in
# a name. Of DistributedDataParallel: at the beginning alone, since `module` is a name that people give too.
ANYWHERE = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_checkpoint_wrapped", "_forward_module")
IN_FRONT = "module"


def stripped(names: Iterable[str]) -> dict[str, str]:
    """Name -> plain name. `module.` goes where all names begin with it.

    Raises Refused if two names become one.
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in ANYWHERE) for name in names}
    while plain and all(name.startswith(f"{IN_FRONT}.") for name in plain.values()):
        plain = {name: short.removeprefix(f"{IN_FRONT}.") for name, short in plain.items()}
    seen: dict[str, str] = {}
    for name, short in plain.items():
        if short in seen:
            raise Refused(
                f"{seen[short]} and {name} both become {short} without their wrappers' names; save the model's state "
                "dict once, from one of them"
            )
        seen[short] = name
    return plain


def removed(names: dict[str, str]) -> list[str]:
    """The wrappers' names that were taken out, for the report."""
    found = {part for name, short in names.items() if name != short for part in name.split(".")}
    return [f"{part}." for part in (*ANYWHERE, IN_FRONT) if part in found]
