"""The file that a program gets beside it where FSDP1's options aren't all written in the calls: `shard_like_fsdp1`
takes them as they are, at run time. It is the shim's own code, put together into one file that needs torch alone."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import libcst as cst

from rewriter.module import Module
from rewriter.program import Program
from rewriter.scopes import module_name
from rewriter.source import Source

NAME = "fsdp1_options"
SHIM = Path(__file__).parents[1] / "fsdp2" / "migrate" / "shim"
PARTS = ("mesh", "arguments", "units", "shard")
HEAD = '''"""FSDP1's options as FSDP2's: `shard_like_fsdp1(module, …)` takes what FullyShardedDataParallel took, and
calls `fully_shard`.

The options are torch's own objects: ShardingStrategy, MixedPrecision, CPUOffload, BackwardPrefetch, wrapping policies.
An option that FSDP2 can't honour is refused where the module is sharded, in one line. Written by fsdp2.migrate.
"""

from __future__ import annotations
'''


@functools.cache
def text() -> str:
    """The file. Read, and not imported: nothing of torch is needed to rewrite a program."""
    names: dict[str, set[str]] = {}
    modules: set[str] = set()
    bodies = []
    for part in PARTS:
        source = (SHIM / f"{part}.py").read_text(encoding="utf-8")
        tree = ast.parse(source)
        last = 0
        for node in tree.body:
            if isinstance(node, ast.Import):
                modules |= {
                    f"import {alias.name}" + (f" as {alias.asname}" * bool(alias.asname)) for alias in node.names
                }
            elif isinstance(node, ast.ImportFrom):
                if node.module != "__future__" and not (node.module or "").startswith("fsdp2."):
                    names.setdefault(node.module or "", set()).update(alias.name for alias in node.names)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                break
            last = node.end_lineno or last
        body = "".join(source.splitlines(keepends=True)[last:]).strip("\n")
        bodies.append(re.sub(r"  # type: ignore\[.*?\]", "", body))
    imports = [*modules, *(_from(package, sorted(held, key=_order)) for package, held in names.items())]
    groups = [
        sorted((line for line in imports if ("torch" in line.split()[1]) is ours), key=_line) for ours in (False, True)
    ]
    return "\n".join([HEAD, *groups[0], "", *groups[1], "", "\n\n\n".join(bodies)]) + "\n"


def _order(name: str) -> tuple[bool, str]:
    return not name.isupper(), name


def _line(line: str) -> tuple[bool, str]:
    return line.startswith("from"), line


def _from(package: str, names: list[str]) -> str:
    line = f"from {package} import {', '.join(names)}"
    return line if len(line) <= 120 else f"from {package} import (\n    " + ",\n    ".join(names) + ",\n)"


def at(module: Module) -> Path:
    return module.path.parent / f"{NAME}.py"


def taken(module: Module) -> bool:
    """Whether another file has the name."""
    path = at(module)
    return (
        path.exists()
        and "`shard_like_fsdp1(module, …)` takes what FullyShardedDataParallel took"
        not in path.read_text(encoding="utf-8", errors="replace")
    )


def package(program: Program, module: Module) -> str:
    """What a file imports it from: as it imports files beside it, or as others import the file itself."""
    here, stem = module.path.resolve().parent, module.path.stem
    for other in (module, *program.parsed):
        for statement in other.all(cst.ImportFrom):
            dotted = module_name(statement)
            path = program.file_of(dotted, other)
            if path is None or path.parent != here:
                continue
            if other is module:
                return (
                    re.sub(r"[^.]*$", "", dotted) + NAME if path.stem != "__init__" else f"{dotted.rstrip('.')}.{NAME}"
                )
            if path.stem == stem and "." in dotted.strip(".") and not dotted.startswith("."):
                return f"{dotted.rpartition('.')[0]}.{NAME}"
    relative = (here / "__init__.py").exists() and "__main__" not in module.text
    return f".{NAME}" if relative else NAME


def source(module: Module) -> Source:
    return Source(at(module), "")
