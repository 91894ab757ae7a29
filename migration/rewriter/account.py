"""The account of a program: each use of FSDP1 once, and what becomes of it. `check` prints it, `rewrite` applies it.

Rules record what they take while they make their changes; whatever no rule has taken is marked. So nothing is asked
twice, and the two commands can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import libcst as cst

from migration.rewriter import imports, names
from migration.rewriter.edits import BLOCKS, KEPT, MARKED, MOVED, WAITS, Taken, Undecided
from migration.rewriter.module import Module
from migration.rewriter.precision import FIELDS
from migration.rewriter.scene import Scene
from migration.rewriter.scopes import module_name
from migration.rewriter.source import Source
from migration.rewriter.symbols import AROUND, CONFIGS, OPTIONS, ROWS, canonical

FIELDS_OF: dict[str, tuple[str, ...]] = {
    "MixedPrecision": FIELDS,
    "CPUOffload": ("offload_params",),
    **dict.fromkeys(CONFIGS, ("offload_to_cpu", "rank0_only")),
    "StateDictSettings": ("state_dict_type", "state_dict_config", "optim_state_dict_config"),
}


@dataclass(frozen=True)
class Entry:
    """`start`, `end`: the place in the file's text; `statement`: that of the statement that it stands in."""

    source: Source
    start: int
    end: int
    statement: tuple[int, int]
    code: str
    outcome: str
    why: str
    use: bool  # a name of FSDP1, not an argument, a method of a model, or what is done with one

    @property
    def shown(self) -> str:
        line = self.source.text[self.start : self.end].split("\n")[0].strip()
        return line if len(line) <= 60 else line[:57] + "…"


def entries(scene: Scene, undecided: list[Undecided], modules: list[Module]) -> list[Entry]:
    """List what was taken, what is left to decide, and the arguments of FSDP1's configurations."""
    problems = {id(problem.node) for problem in undecided}
    held = {id(module) for module in modules}
    found: list[tuple[Taken, bool]] = []
    seen: set[tuple[int, str]] = set()
    for problem in undecided:
        outcome = BLOCKS if problem.blocking else MARKED
        found.append((Taken(problem.code, problem.node, problem.module, outcome, problem.why), False))
    for taken in scene.rewriting.account:
        own = id(taken.module) in held and id(taken.node) not in problems
        if own and (id(taken.node), taken.code) not in seen:
            seen.add((id(taken.node), taken.code))
            found.append((taken, False))
    recorded = {id(taken.node): place for place, (taken, _) in enumerate(found)}
    for module in modules:
        for node, symbol in names.uses(module, scene.symbol):
            if _settled(scene, symbol, module):
                continue
            if symbol in AROUND.values():
                if scene.shards:
                    found.append((Taken("FX02", node, module, KEPT), True))
                continue
            if (place := recorded.get(id(node))) is None:
                code = names.code_of(symbol, node, module, scene.symbol)
                gone = scene.edits(module).covers(node) or isinstance(node, cst.SimpleString)
                taken = Taken(code, node, module, MOVED if gone else WAITS)
                place = len(found)
                found.append((taken, True))
            found[place] = (found[place][0], True)
            found += [(arg, False) for arg in _fields(found[place][0], symbol)]
    return [_entry(taken, use) for taken, use in found]


def _fields(taken: Taken, symbol: str) -> list[Taken]:
    """The arguments of a configuration's call, which go its way."""
    call = taken.module.parent(taken.node)
    if not isinstance(call, cst.Call) or call.func is not taken.node:
        return []
    order = FIELDS_OF.get(symbol, ())
    named = [(a.keyword.value if a.keyword is not None else order[n], a) for n, a in enumerate(call.args[: len(order)])]
    return [
        replace(taken, code=ROWS[f"{symbol}.{name}"].code, node=arg)
        for name, arg in named
        if f"{symbol}.{name}" in ROWS
    ]


def _entry(taken: Taken, use: bool) -> Entry:
    module = taken.module
    span = module.span(taken.node)
    around = module.line_span(module.statement(taken.node) or taken.node)
    return Entry(module.source, *span, around, taken.code, taken.outcome, taken.why, use)


def _settled(scene: Scene, symbol: str, module: Module) -> bool:
    """Return whether this is an option of FSDP1's in a program that shards by FSDP2, and has none of its class left."""
    if symbol.startswith("library:accelerate"):
        return scene.rewriting.program.by_fsdp2([module])
    return symbol.partition(".")[0] in OPTIONS and scene.fsdp2 and not scene.shards


def imported(scene: Scene, found: list[Entry], modules: list[Module]) -> list[Entry]:
    """Imports of FSDP1, each with the worst that becomes of what it brings."""
    made: list[Entry] = []
    taken = {(entry.source.path, entry.start, entry.code) for entry in found}
    for module in modules:
        left = [entry for entry in found if entry.source.path == module.path and entry.outcome not in (MOVED, KEPT)]
        blocked = any(entry.outcome in (BLOCKS, WAITS) for entry in left)

        def add(node: cst.CSTNode, code: str, bound: str, module: Module = module, stays: bool = blocked,
                left: list[Entry] = left) -> None:  # fmt: skip
            read = any(bound in entry.source.text[slice(*entry.statement)] for entry in left)
            outcome = MARKED if code in ("FC21", "FC22") else WAITS if stays or read else MOVED
            made.append(_entry(Taken(code, node, module, outcome), False))

        for name in imports.imported(module):
            qualified = (
                f"{name.package}.{name.name}" if name.package and not name.package.startswith(".") else name.name
            )
            known = canonical(qualified) if not name.package.startswith(".") else None
            if known is None or qualified in AROUND or _settled(scene, known, module):
                continue
            code = {"private": "FC06", "library": "FC21", "fairscale": "FC22"}.get(known.partition(":")[0], "FC01")
            if name.name == "default_auto_wrap_policy":
                code = "FX04"
            elif code == "FC01" and "fully_sharded_data_parallel" in qualified:
                code = "FX07"
            add(name.alias, code, name.bound)
        for statement in module.all(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar) and module_name(statement).startswith(
                "torch.distributed.fsdp"
            ):
                add(statement, "FC01", "")
    return [entry for entry in made if (entry.source.path, entry.start, entry.code) not in taken]
