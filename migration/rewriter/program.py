"""All files that were given, as one program: what a name is, through imports from one file to another.

Only files that mention FSDP1 are parsed, and those that something is imported from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import libcst as cst

from migration.rewriter.files import DEPTH, Files
from migration.rewriter.module import Module, last_name
from migration.rewriter.scopes import Scope, module_name
from migration.rewriter.source import Source, why_not
from migration.rewriter.symbols import CLASS, PACKAGE, canonical

# Cheap words, one of which is in every file that uses FSDP1 or a model that another file has sharded.
MENTIONS = re.compile(
    r"fsdp|FullyShardedDataParallel|FullySharded|ShardingStrategy|_fsdp_wrapped_module|clip_grad_norm_|no_sync"
    r"|MixedPrecision|apply_activation_checkpointing|summon_full_params|StateDictType|mp\.spawn|ShardedGradScaler",
    re.IGNORECASE,
)
PLUGIN = "FullyShardedDataParallelPlugin"  # accelerate's
ACCELERATE = re.compile(r"^\s*(?:from|import) accelerate\b", re.MULTILINE)
SURE = re.compile(
    r"FSDP|\bfsdp(_config)?=|strategy=[\"']fsdp|FullyShardedDataParallel|distributed\.fsdp|distributed import fsdp"
    r"|_fsdp_wrapped_module"
)


class Program(Files):
    """`configured`: of each library whose configuration is at hand whether that says FSDP2, when the run is over."""

    def __init__(self, sources: Iterable[Source], configured: Mapping[str, bool] | None = None) -> None:
        super().__init__(sources)
        self.configured = dict(configured or {})
        self._modules: dict[Path, Module | None] = {}
        self._parsed: list[Module] = []
        self._relevant: list[Module] | None = None
        self.unparsable: dict[Path, str] = {}
        self._exports: dict[tuple[Path, str], str | None] = {}
        self._foreign: set[tuple[str, Path]] = set()  # names of no file that was given
        self._symbols: dict[tuple[Scope, str], str | None] = {}

    def module(self, path: Path) -> Module | None:
        """The parsed file, or None if it can't be parsed, which is noted."""
        if path not in self._modules:
            try:
                self._modules[path] = made = Module(self.sources[path])
                self._parsed.append(made)
            except Exception as error:
                self.unparsable[path] = why_not(error)
                self._modules[path] = None
        return self._modules[path]

    def leave_out(self, path: Path, why: str) -> None:
        """Go on without a file, as if it couldn't be parsed: what has been found out with it is forgotten."""
        self.unparsable[path], self._modules[path], self._relevant = why, None, None
        self._parsed = [module for module in self._parsed if module.file != path]
        for known in (self._exports, self._foreign, self._symbols):
            known.clear()

    def known(self, path: Path) -> Module | None:
        """The file, if it has been parsed already."""
        return self._modules.get(path)

    def relevant(self) -> list[Module]:
        """Files that mention what FSDP1 is used by, parsed. Without one that surely does, there are none."""
        if self._relevant is None:  # which each step asks
            self._relevant = self._find_relevant()
        return self._relevant

    def _find_relevant(self) -> list[Module]:
        signs = [SURE, *([ACCELERATE] if "accelerate" in self.configured else [])]
        sure = {path for path, source in self.sources.items() if any(sign.search(source.text) for sign in signs)}
        words = set().union(*(re.findall(r"\w+", self.sources[path].text) for path in sure)) if sure else set()
        names = {path.parent.name if path.stem == "__init__" else path.stem for path in sure}
        near = self._near(sure)
        paths = [
            path
            for path, source in self.sources.items()
            if path in near
            or (
                MENTIONS.search(source.text)
                # a file that only works with models: imported by one that surely does, or importing it
                and (path.stem in words or any(re.search(rf"\b{re.escape(name)}\b", source.text) for name in names))
            )
        ]
        return [module for path in paths if (module := self.module(path)) is not None]

    @property
    def parsed(self) -> list[Module]:
        return list(self._parsed)  # which may grow while it is gone through

    def by_fsdp2(self, modules: Iterable[Module]) -> bool:
        """Return whether accelerate shards by FSDP2, as each plugin of these files says, or the configuration."""
        made = [module.code(call) for module in modules for call in module.named(cst.Call, PLUGIN)]
        said = [re.search(r"\bfsdp_version\s*=\s*(\w+)", code) for code in made]
        default = "2" if self.configured.get("accelerate") else "1"
        return {one[1] if one else default for one in said or [None]} == {"2"}

    # --- what a name is ---

    def symbol(self, node: cst.CSTNode, module: Module, depth: int = 0) -> str | None:
        """FSDP1's own name for a name or attribute, whatever it is called here; None if it isn't FSDP1's."""
        if isinstance(node, (cst.Call, cst.Subscript)):
            return self._looked_up(node, module, depth)
        if not isinstance(node, (cst.Name, cst.Attribute)):
            return None
        key = None if depth else module.dotted(node)
        if key is None:
            return self._symbol(node, module, depth)
        if key not in self._symbols:
            self._symbols[key] = self._symbol(node, module, 0)
        return self._symbols[key]

    def _symbol(self, node: cst.Name | cst.Attribute, module: Module, depth: int) -> str | None:
        for name, imported in module.qualified(node):
            if not imported:
                continue
            known = self.symbol_of(name, module, depth)
            if known is not None:
                return None if known.startswith("library:accelerate") and self.by_fsdp2([module]) else known
        if isinstance(node, cst.Attribute):
            base = self.symbol(node.value, module, depth)
            if base is not None and not base.startswith(("private:", "library:", "fairscale:")):
                if base.startswith("module:"):
                    return canonical(f"{PACKAGE}.{base[7:]}".rstrip(".") + f".{node.attr.value}")
                return f"{base}.{node.attr.value}"
        if isinstance(node, cst.Name) and not module.qualified(node):
            return self._starred(node.value, module, depth)
        return self._alias(node, module, depth) if isinstance(node, cst.Name) and depth <= DEPTH else None

    def _alias(self, node: cst.Name, module: Module, depth: int) -> str | None:
        """The class, or a module of FSDP1's, under another name: `Wrapper = FullyShardedDataParallel`."""
        found = set()
        for binding in module.assignments(node):
            value = bound_value(binding.node, module)
            if not isinstance(value, (cst.Name, cst.Attribute, cst.Call, cst.Subscript)):
                return None
            if not (isinstance(value, cst.Name) and value.value == "None"):
                found.add(self.symbol(value, module, depth + 1) if value is not node else None)
        known = found.pop() if len(found) == 1 else None
        return known if known == CLASS or (known or "").startswith("module:") else None

    def _looked_up(self, node: cst.Call | cst.Subscript, module: Module, depth: int) -> str | None:
        """`getattr(fsdp, "FullyShardedDataParallel")`, `fsdp.__dict__["…"]`, `importlib.import_module("…")`."""
        name, holder = "", None
        if isinstance(node, cst.Call):
            values = [arg.value for arg in node.args]
            called = last_name(node)
            if called == "import_module" and values and isinstance(values[0], cst.SimpleString):
                return canonical(str(values[0].evaluated_value) + ".")
            if called == "getattr" and len(values) >= 2 and isinstance(values[1], cst.SimpleString):
                holder, name = values[0], str(values[1].evaluated_value)
        elif isinstance(node.value, cst.Attribute) and node.value.attr.value == "__dict__":
            index = node.slice[0].slice
            if isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString):
                holder, name = node.value.value, str(index.value.evaluated_value)
        if holder is None:
            return None
        base = self.symbol(holder, module, depth + 1)
        packages = [f"{PACKAGE}.{base[7:]}".rstrip(".")] if base is not None and base.startswith("module:") else [
            qualified for qualified, imported in module.qualified(holder) if imported
        ]  # fmt: skip
        found = [canonical(f"{package}.{name}") for package in packages]
        return CLASS if CLASS in found else None

    def symbol_of(self, qualified: str, module: Module, depth: int = 0) -> str | None:
        known = canonical(qualified)
        if known is not None or depth > DEPTH or (qualified, module.path) in self._foreign:
            return known
        place = self.split(qualified, module)
        if place is None or not place[1]:
            self._foreign.add((qualified, module.path))
            return None
        path, names = place
        if path == module.file:
            return None
        base = self._exported(path, names[0], depth + 1)
        if base is None:
            return None
        return ".".join([base, *names[1:]])

    def _exported(self, path: Path, name: str, depth: int) -> str | None:
        """The FSDP1 name behind a name of a module, by import or plain assignment."""
        key = (path, name)
        if key not in self._exports:
            self._exports[key] = None  # for imports in circles
            module = self.module(path)
            self._exports[key] = self._export_in(module, name, depth) if module is not None else None
        return self._exports[key]

    def _export_in(self, module: Module, name: str, depth: int) -> str | None:
        for binding in module.scope(module.tree).names.get(name, ()):
            value = bound_value(binding.node, module)
            if binding.imported:
                known = self.symbol_of(binding.imported, module, depth + 1)
            else:
                known = self.symbol(value, module, depth + 1) if value is not None else None
            if known is not None:
                return known
        return self._starred(name, module, depth)

    def _starred(self, name: str, module: Module, depth: int) -> str | None:
        """A name that nothing in the file binds, if it comes from `from … import *`."""
        if depth > DEPTH:
            return None
        for statement in module.all(cst.ImportFrom):
            if isinstance(statement.names, cst.ImportStar):
                target = module_name(statement)
                known = canonical(f"{target}.{name}")
                if known is None and (path := self.file_of(target, module)) and path != module.file:
                    known = self._exported(path, name, depth + 1)
                if known is not None and not known.startswith(("private:", "module:")):
                    return known
        return None


def bound_value(target: cst.CSTNode, module: Module) -> cst.BaseExpression | None:
    """The value that a target gets, also one of `a, b = x, y`."""
    above = module.parent(target)
    if isinstance(above, cst.AnnAssign):
        return above.value
    index = None
    if isinstance(above, cst.Element) and isinstance(pair := module.parent(above), (cst.Tuple, cst.List)):
        index, above = [element is above for element in pair.elements].index(True), module.parent(pair)
    assign = module.parent(above) if isinstance(above, cst.AssignTarget) else None
    if not isinstance(assign, cst.Assign):
        return None
    if index is None:
        return assign.value
    held = assign.value.elements if isinstance(assign.value, (cst.Tuple, cst.List)) else ()
    return held[index].value if index < len(held) else None
