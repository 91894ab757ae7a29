"""FSDP1's interface on FSDP2, for a program that uses FSDP1 in ways that aren't plain.

Its imports of FSDP1's class become imports of a package that is put into the program: the shim's own files, which need
torch alone. Options, kinds of state dicts, classes that are passed on: all are decided at run time, as before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import libcst as cst

from migration.options import CLASS
from migration.rewriter import beyond, imports, methods
from migration.rewriter.edits import KEPT, Undecided
from migration.rewriter.module import Module
from migration.rewriter.names import code_of, uses
from migration.rewriter.program import Program
from migration.rewriter.scene import Scene
from migration.rewriter.scopes import module_name
from migration.rewriter.source import INTERFACE, Source
from migration.rewriter.symbols import AROUND, BY_CODE, PACKAGE, PREFIX, canonical
from migration.rewriter.values import string

GIVEN = ("process_group", "sharding_strategy", "mixed_precision", "cpu_offload", "compute_device")
SHIM = Path(__file__).parents[2] / "fsdp1_interface"
GIVES = (CLASS, "ShardedGradScaler", "default_auto_wrap_policy")
# What a model still has there, and the rows about it.
METHODS = {"module": "FC08", "state_dict": "FC10", "load_state_dict": "FC11", "no_sync": "FM12",
           "clip_grad_norm_": "FM13", "apply": "FM04", "zero_grad": "FC35"}  # fmt: skip
# What the shim refuses when it is used: asked before anything runs.
REFUSED = {"FlatParameter": "FX03", "StateDictType.LOCAL_STATE_DICT": "FD03", "LocalStateDictConfig": "FD08",
           "LocalOptimStateDictConfig": "FD14", f"{CLASS}.rekey_optim_state_dict": "FM19"}  # fmt: skip


@functools.cache
def files() -> dict[str, str]:
    """The package's files by name. Read, and not imported: nothing of torch is needed to rewrite a program."""
    here = "fsdp1_interface"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(SHIM.glob("*.py"))}
    texts = {name: text.replace(f"FSDP2:  from {here}", f"FSDP2:  from {INTERFACE}") for name, text in texts.items()}
    return {name: text.replace(f"from {here}.", "from .").replace(f"from {here} ", "from . ")
            for name, text in texts.items()}  # fmt: skip


class Home:
    """The module that a program's files import the interface from: one copy, since isinstance asks for its class.

    Raises Undecided if they can't all import one.
    """

    def __init__(self, program: Program, modules: Sequence[Module]) -> None:
        self._program = program
        names = {id(module): self._dotted(module) for module in modules}
        roots = {id(module): _above(module.file, len(names[id(module)])) for module in modules}
        places = [roots[key] / name[0] for key, name in names.items() if len(name) > 1]
        places = [folder for folder in dict.fromkeys(places) if (folder / "__init__.py").exists()]
        for folder in (*places, *dict.fromkeys(roots.values())):
            outside = [m for m in modules if not (folder in m.path.resolve().parents if folder in places
                                                  else roots[id(m)] == folder)]  # fmt: skip
            if all(self._imports_from(folder, module) for module in outside):
                self._folder = folder
                self.package = f"{folder.name}.{INTERFACE}" if folder in places else INTERFACE
                break
        else:
            listed = ", ".join(sorted({folder.name for folder in roots.values()}))
            why = f"its files are imported from several folders, and need one copy of FSDP1's interface: {listed}"
            raise Undecided("FC07", why, modules[0].tree.body[0], modules[0])
        links = any(path.is_symlink() for path in (self.folder, *self.folder.glob("*")))  # lead elsewhere, perhaps
        if links or (self.folder.exists() and not (self.folder / "wrapped.py").exists()):
            why = f"{INTERFACE} beside it is something else: rename it, since FSDP1's interface needs that name"
            raise Undecided("FC07", why, modules[0].tree.body[0], modules[0])

    @property
    def folder(self) -> Path:
        return self._folder / INTERFACE

    def sources(self) -> list[tuple[Source, str]]:
        """The files to add, each with its text."""
        missing = {} if self.folder.exists() else files()
        return [(Source(self.folder / name, ""), text) for name, text in missing.items()]

    def _imports_from(self, folder: Path, module: Module) -> bool:
        """Return whether a file imports something below a folder, so that it can import more from there."""
        found = [
            self._program.file_of(dotted, module)
            for statement in module.all(cst.Import, cst.ImportFrom)
            for dotted in imports.packages(statement)
            if not dotted.startswith(".")
        ]
        return any(path is not None and folder in path.parents for path in found)

    def _dotted(self, module: Module) -> list[str]:
        """A file's name as others import it, the longest if there are several; else as the packages around it say,
        unless it is run as a script."""
        path = module.file
        names = [
            dotted.split(".")
            for other in self._program.parsed
            for statement in other.all(cst.Import, cst.ImportFrom)
            for dotted in imports.packages(statement)
            if not dotted.startswith(".") and self._program.file_of(dotted, other) == path
        ]
        parts = [path.stem] if path.stem != "__init__" else []
        folder = path.parent
        while (names or "__main__" not in module.text) and (folder / "__init__.py").exists():
            parts.insert(0, folder.name)
            folder = folder.parent
        return parts if not names or parts in names else max(names, key=len)


def _above(path: Path, names: int) -> Path:
    """The folder from which a file is imported by so many names; a package's __init__.py has the folder's own."""
    return path.parents[names if path.stem == "__init__" else names - 1]


def move(scene: Scene, modules: Sequence[Module]) -> tuple[Home | None, list[Undecided]]:
    """Change where these files get FSDP1's class from. What is left are names that the interface hasn't got."""
    program = scene.rewriting.program
    needing = [module for module in modules if _given(program, module)]
    try:
        home = Home(program, needing) if needing else None
    except Undecided as problem:
        return None, [problem]
    problems: list[Undecided] = []
    for module in modules:
        if home is not None:
            _imports(scene, module, home.package)
        for node, symbol in uses(module, scene.symbol):
            if symbol in AROUND.values():
                continue
            code = code_of(symbol, node, module, scene.symbol)
            head = symbol.partition(".")[0]
            only_compared = isinstance(module.parent(node), (cst.Comparison, cst.ComparisonTarget))
            if (refused := REFUSED.get(symbol, REFUSED.get(head))) and not only_compared:
                problems.append(_left(refused, node, module))
            elif code == "FC05" and not _takes_module_first(module, node):
                problems.append(_left("FC05", node, module))
            elif head in GIVES and home is not None:
                _at_use(scene, module, node, head, home.package)
                scene.take(code, node, module)
            elif head.startswith("module:") and isinstance(module.parent(node), (cst.Assign, cst.AnnAssign)):
                scene.take(code, node, module, KEPT)  # of which each use is looked at
            elif head.startswith(("private:", "library:", "fairscale:", "module:")):
                problems.append(_left(code, node, module))
            elif (option := beyond.refused(scene, module, node, symbol)) is not None:
                problems.append(option)
            else:
                scene.take(code, node, module, KEPT)
        problems += _of_models(scene, module)
    return home, problems


def _of_models(scene: Scene, module: Module) -> list[Undecided]:
    """Judge accesses to sharded models: they have most names, and not FSDP1's inner parts."""
    methods.compare(scene, module)
    problems = []
    for call in module.all(cst.Call):
        methods.forward(scene, module, call)
        if _unwraps_for_ever(module, call):
            why = "model.module is the model, so that what unwraps until there is no .module never ends"
            problems.append(Undecided("FC08", why, call, module, blocking=False))
        if methods.by_name(module, call):
            scene.take("FC03", call, module, KEPT)
        problems += _inner(scene, module, call)
    for call in (node for node, where in scene.calls if where is module):
        for made in methods.optimizers_before(module, call):
            scene.take("FC14", made, module, KEPT)
    for node in module.all(cst.Attribute):
        name = node.attr.value
        if name == PREFIX or (name in METHODS and scene.is_model(node.value, module)):
            if name in ("module", PREFIX) and methods.asks_type(module, node):
                problems.append(Undecided("FC08", methods.OWN_TYPE, node, module, blocking=False))
                continue
            scene.take(METHODS.get(name, "FC08"), node, module, KEPT)
        elif name == "register_comm_hook" and scene.is_model(node.value, module):
            problems.append(_left("FM22", node, module))
        else:
            problems += _inner(scene, module, node)
    return problems


def _inner(scene: Scene, module: Module, node: cst.Attribute | cst.Call) -> list[Undecided]:
    """Judge what FSDP1's models have inside, of which the interface has some."""
    if not (code := methods.attribute_of_model(scene, module, node)):
        return []
    if (node.attr.value if isinstance(node, cst.Attribute) else methods.asked(module, node)) not in GIVEN:
        return [_left(code, node, module)]
    scene.take(code, node, module, KEPT)
    return []


def kept(program: Program, modules: Sequence[Module]) -> bool:
    """Return whether these files have the interface already, and nothing of FSDP1's class beside it."""
    has = any(module_name(line).endswith(INTERFACE) for module in modules for line in module.all(cst.ImportFrom))
    return has and not any(_given(program, module) for module in modules)


def _takes_module_first(module: Module, base: cst.CSTNode) -> bool:
    """Return whether a class derived from FSDP1's is made of a module, as the interface's are."""
    owner = module.enclosing(base, cst.ClassDef)
    lines = owner.body.body if owner is not None else ()
    made = [line for line in lines if isinstance(line, cst.FunctionDef) and line.name.value == "__init__"]
    return not made or [param.name.value for param in made[0].params.params[1:2]] in (["module"], [])


def _unwraps_for_ever(module: Module, call: cst.Call) -> bool:
    """`while hasattr(model, "module")`, and a function that calls itself with model.module: FSDP1's inner module has no
    such attribute, and here it is the model itself."""
    asked = string(call.args[1].value) if module.code(call.func) == "hasattr" and len(call.args) == 2 else None
    if asked in ("module", PREFIX):
        return module.enclosing(call, cst.While, cst.FunctionDef) is not module.function(call)
    home = module.function(call)
    own = home is not None and isinstance(call.func, cst.Name) and call.func.value == home.name.value
    inner = [arg.value.attr.value for arg in call.args if isinstance(arg.value, cst.Attribute)]
    return own and bool({"module", PREFIX} & set(inner))


def _left(code: str, node: cst.CSTNode, module: Module) -> Undecided:
    problem = Undecided(code, BY_CODE[code].note, node, module, blocking=False)
    problem.leftover = True
    return problem


def _given(program: Program, module: Module) -> bool:
    return any(symbol.partition(".")[0] in GIVES for _, symbol in uses(module, program.symbol)) or any(
        _ours(name) for name in imports.imported(module)
    )


def _ours(name: imports.Name) -> bool:
    return bool(name.package) and canonical(f"{name.package}.{name.name}") in GIVES


def _imports(scene: Scene, module: Module, package: str) -> None:
    """`from torch.distributed.fsdp import …`, wherever it stands, without what the interface gives, which follows."""
    edits = scene.edits(module)
    ours = [name for name in imports.imported(module) if _ours(name)]
    for statement in {id(name.statement): name.statement for name in ours}.values():
        here = [name for name in ours if name.statement is statement]
        kept = imports.without(statement, here, module)
        lines = [*kept, imports.from_line(package, [module.code(name.alias).rstrip(", ") for name in here])]
        edits.replace(module.span(statement), _joined(module, statement, lines))
        for name in here:
            scene.take("FC01", name.alias, module)
    for statement in module.all(cst.ImportFrom):
        if isinstance(statement.names, cst.ImportStar) and module_name(statement).startswith(PACKAGE):
            edits.replace(module.span(statement), f"from {package} import *")


def _joined(module: Module, statement: cst.CSTNode, lines: list[str]) -> str:
    line = module.parent(statement)
    alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
    text = "\n".join(lines) if alone else "; ".join(" ".join(one.split()) for one in lines)
    return text.replace("\n", module.source.newline + module.indent(statement))


def _at_use(scene: Scene, module: Module, node: cst.CSTNode, head: str, package: str) -> None:
    """`fsdp.FullyShardedDataParallel` and the like, which no import of the class stands behind."""
    program = scene.rewriting.program
    while program.symbol(node, module) != head and isinstance(node, cst.Attribute):
        node = node.value
    if isinstance(node, (cst.Attribute, cst.Call, cst.Subscript)) and not _through_file(program, node, module):
        edits = scene.edits(module)
        ours = [name for name in imports.imported(module) if _ours(name) and name.name == head]
        here = [name.bound for name in ours if module.function(name.alias) is None]
        if not here:
            edits.need(package, head)
        edits.replace(module.span(node), here[0] if here else head)


def _through_file(program: Program, node: cst.CSTNode, module: Module) -> bool:
    """Return whether it is read from a file of the program, whose import changes."""
    base = node.value if isinstance(node, cst.Attribute) else None
    return base is not None and any(
        program.split(f"{name}.x", module) is not None for name, imported in module.qualified(base) if imported
    )
