"""The given files as paths and texts: which file a dotted name means, and which belong together. Nothing is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from migration.rewriter.module import Module
from migration.rewriter.source import Source

USES = re.compile(r"FullyShardedDataParallel|distributed\.fsdp|distributed import fsdp|_fsdp_wrapped_module")
IMPORTS = re.compile(  # of bounded length, since each line may begin one that never ends
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]{,4000}\)|[^\n#]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
# What is done with models, and with a class that is handed on.
HANDLES = re.compile(
    r"parameters\(|state_dict|no_sync|clip_grad|requires_grad|regist|wrap|\bcls\(|\]\(|def (build|make)"
)
USED = re.compile(r"clip_grad_norm_|no_sync|fsdp", re.IGNORECASE)
DEPTH = 12


class Files:
    def __init__(self, sources: Iterable[Source]) -> None:
        self.sources = {source.path.resolve(): source for source in sources}
        self._files: dict[tuple[str, Path], Path | None] = {}
        self._lines: dict[Path, list[tuple[str, str, str]]] = {}
        self._handed: dict[tuple[str, str, Path], set[Path]] = {}
        self._by_last_name: dict[str, list[Path]] = {}
        for path in self.sources:
            name = path.parent.name if path.stem == "__init__" else path.stem
            self._by_last_name.setdefault(name, []).append(path)

    # --- from one file to another ---

    def file_of(self, dotted: str, importer: Module) -> Path | None:
        """The given file that a module's name means, seen from another one. None if it isn't among them."""
        key = (dotted, importer.path)
        if key not in self._files:
            self._files[key] = self._file_of(dotted, importer.path.resolve())
        return self._files[key]

    def _file_of(self, dotted: str, importer: Path) -> Path | None:
        if dotted.startswith("."):
            level = len(dotted) - len(dotted.lstrip("."))
            folder = importer.parent
            for _ in range(level - 1):
                folder = folder.parent
            return self._under(folder, dotted.lstrip("."))
        parts = dotted.split(".")
        candidates = self._by_last_name.get(parts[-1], [])
        if not candidates:
            return None
        for folder in importer.parents:  # the nearest one wins, as it does when a script is run from its folder
            found = self._under(folder, dotted)
            if found in candidates:
                return found
        ends = [path for path in candidates if self._dotted(path).endswith("." + dotted)]
        return ends[0] if len(ends) == 1 else None

    def _under(self, folder: Path, dotted: str) -> Path | None:
        base = folder.joinpath(*dotted.split(".")) if dotted else folder
        for path in (base.with_suffix(".py") if dotted else base / "__init__.py", base / "__init__.py"):
            if path in self.sources:
                return path
        return None

    @staticmethod
    def _dotted(path: Path) -> str:
        parts = [*path.parts[1:-1], *([] if path.stem == "__init__" else [path.stem])]
        return "." + ".".join(parts)

    def split(self, qualified: str, importer: Module) -> tuple[Path, list[str]] | None:
        """A qualified name as one of the given files and the names below it."""
        lead = len(qualified) - len(qualified.lstrip("."))
        parts = qualified[lead:].split(".")
        for count in range(len(parts), 0, -1):
            path = self.file_of("." * lead + ".".join(parts[:count]), importer)
            if path is not None:
                return path, parts[count:]
        if lead:  # from . import x, where x is a name in __init__.py
            path = self.file_of("." * lead, importer)
            return (path, parts) if path is not None else None
        return None

    # --- which belong together ---

    def _near(self, sure: set[Path]) -> set[Path]:
        """Files that use FSDP1, those that import something of one of them, through a package's __init__.py too, and
        what these import that does something with parameters: a model goes from one to the other under any name."""
        imported = {path: self._imported(path) for path in self.sources} if sure else {}
        users = {path for path in sure if USES.search(self.sources[path].text)}  # the others may only talk of it
        while more := {path for path in sure - users if imported[path] & users}:
            users |= more
        found = sure | {path for path, others in imported.items() if others & users}
        found |= {
            other for path in found for other in imported.get(path, ()) if HANDLES.search(self.sources[other].text)
        }
        while more := {p for p in imported.keys() - found if imported[p] & found and USED.search(self.sources[p].text)}:
            found |= more
        return found

    def _import_lines(self, path: Path) -> list[tuple[str, str, str]]:
        if path not in self._lines:
            self._lines[path] = IMPORTS.findall(self.sources[path].text)
        return self._lines[path]

    def _imported(self, path: Path) -> set[Path]:
        """The given files that a file imports something of, found without parsing it."""
        found: set[Path] = set()
        for package, listed, plain in self._import_lines(path):
            if package:
                found |= {file for name in re.findall(r"\w+", listed) for file in self.behind(package, name, path)}
            for name in re.findall(r"[\w.]+", plain):
                if (file := self._file_of(name, path)) is not None:
                    used = re.findall(rf"\b{re.escape(name)}\.(\w+)", self.sources[path].text)
                    found |= {file, *(other for one in used for other in self.behind(name, one, path))}
        return found - {path}

    def behind(self, package: str, name: str, path: Path, depth: int = 0) -> set[Path]:
        """The files that `from package import name` may get it from: each hands on what it imports itself."""
        key = (package, name, path)
        if key not in self._handed:
            self._handed[key] = set()  # for imports in circles
            below = self._file_of(f"{package}{'' if package.endswith('.') else '.'}{name}", path)
            file = below or self._file_of(package, path)
            found = {file} if file is not None else set()
            if below is None and file is not None and depth < DEPTH:
                for source, listed, _ in self._import_lines(file):
                    if source and ("*" in listed or re.search(rf"\b{name}\b", listed)):
                        found |= self.behind(source, name, file, depth + 1)
            self._handed[key] = found
        return self._handed[key]
