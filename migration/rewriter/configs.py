"""Configuration files: accelerate's fsdp_config moved, those of Lightning and Composer found.

YAML is read by a parser that knows where each key stands; what changes are whole lines, so that comments stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from migration.rewriter.finding import Finding, make
from migration.rewriter.source import LIMIT, Source, Unreadable
from migration.rewriter.taken import MARKED, MOVED

GONE = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states")
GONE_OLD = ("fsdp_backward_prefetch_policy",)
SAME = (
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_offload_params",
    "fsdp_activation_checkpointing",
    "fsdp_min_num_params",
    "fsdp_cpu_ram_efficient_loading",
)
ACCELERATE = {*GONE, *GONE_OLD, *SAME, "fsdp_sharding_strategy", "fsdp_state_dict_type", "fsdp_version"}
RESHARD = {"FULL_SHARD": "true", "1": "true", "SHARD_GRAD_OP": "false", "2": "false"}
BY_HAND = "It isn't written with one key a line, so it is left: move its keys by hand."
COMPOSER = (
    "sharding_strategy",
    "mixed_precision",
    "activation_checkpointing",
    "backward_prefetch",
    "flatten_parameters",
)


@dataclass
class Place:
    """One key of the file: its line and column from 0, and its value."""

    key: str
    value: Any
    line: int
    col: int


@dataclass
class Config:
    source: Source
    kind: str  # accelerate, composer, lightning
    places: list[Place] = field(default_factory=list)
    version: int = 1
    head: Place | None = None
    path: tuple[str, ...] = ()  # of keys, to the mapping in which fsdp_config stands

    def findings(self) -> list[Finding]:
        if self.head is None or self.version == 2:
            return []
        if self.kind != "accelerate":
            return [self._found(self.head, "FY06" if self.kind == "composer" else "FY07", MARKED)]
        found = []
        for place in self.places:
            if place.key == "fsdp_sharding_strategy":
                found.append(self._found(place, "FY02", MOVED if str(place.value) in RESHARD else MARKED))
            elif place.key in GONE + GONE_OLD:
                found.append(self._found(place, "FY03"))
            elif place.key == "fsdp_state_dict_type":
                local = "LOCAL" in str(place.value)
                found.append(self._found(place, "FY04", MARKED if local else MOVED))
            elif place.key in SAME:
                found.append(self._found(place, "FY05"))
        as_lines = any(one.status != MOVED for one in found) or self.moved is not None
        return [self._found(self.head, "FY01", *(() if as_lines else (MARKED, BY_HAND))), *found]

    def _found(self, place: Place, code: str, status: str = MOVED, why: str = "") -> Finding:
        shown = f"{place.key}: {place.value}" if not isinstance(place.value, Mapping) else f"{place.key}:"
        return make(str(self.source.path), (None, place.line + 1, place.col + 1), code, shown, status, why)

    def undecided(self) -> list[Finding]:
        """List what keeps the file from being moved."""
        return [f for f in self.findings() if f.status != MOVED]

    def rewritten(self) -> str:
        """The file's text with FSDP2's keys; as it was if something has to be decided."""
        stays = self.kind != "accelerate" or self.version == 2 or self.undecided() or not self.places
        return self.source.text if stays or self.moved is None else self.moved

    @cached_property
    def moved(self) -> str | None:
        """The text with FSDP2's keys, read again and compared; None where lines can't be changed one by one, as in a
        mapping on one line or what an anchor shares."""
        data = _read(self.source)
        holder = data
        for key in self.path:
            holder = holder[key]
        holder["fsdp_config"] = _moved(holder["fsdp_config"])
        try:
            text = self._as_json(data) if self.source.path.suffix == ".json" else self._by_lines()
            text.encode(self.source.encoding)  # JSON may spell half of a surrogate pair
            return text if _read(replace(self.source, text=text)) == data else None
        except ValueError:
            return None

    def _by_lines(self) -> str:
        newline = self.source.newline
        lines = self.source.text.splitlines(keepends=True)
        for place in self.places:
            text = lines[place.line]
            indent = text[: len(text) - len(text.lstrip())]
            if place.key in GONE + GONE_OLD:
                lines[place.line] = ""
            elif place.key == "fsdp_version":
                lines[place.line] = f"{indent}fsdp_version: 2{newline}"
            elif place.key == "fsdp_sharding_strategy":
                remark = text.rstrip("\r\n").partition("#")[1:]
                said = f"  {''.join(remark)}" if remark[0] else ""
                lines[place.line] = f"{indent}fsdp_reshard_after_forward: {RESHARD[str(place.value)]}{said}{newline}"
        if self.places and not any(place.key == "fsdp_version" for place in self.places):
            first = self.places[0]
            lines[first.line] = f"{' ' * first.col}fsdp_version: 2{newline}" + lines[first.line]
        return "".join(lines)

    def _as_json(self, data: Any) -> str:
        """With the file's indent and the order of its keys. Raises ValueError for a number that JSON hasn't got."""
        text = self.source.text
        indent = re.search(r"\n([ \t]+)\S", text)
        made = json.dumps(data, indent=indent[1] if indent else None, ensure_ascii=False, allow_nan=False)
        return made.replace("\n", self.source.newline) + text[len(text.rstrip()) :]


def _moved(held: Mapping[str, Any]) -> dict[str, Any]:
    """An fsdp_config with FSDP2's keys."""
    moved: dict[str, Any] = {} if "fsdp_version" in held else {"fsdp_version": 2}
    for key, value in held.items():
        if key == "fsdp_sharding_strategy":
            moved["fsdp_reshard_after_forward"] = RESHARD[str(value)] == "true"
        elif key not in GONE + GONE_OLD:
            moved[key] = 2 if key == "fsdp_version" else value
    return moved


def read_config(source: Source) -> Config | None:
    """A configuration that uses FSDP1; None for any other file. Raises Unreadable if one that says fsdp is no YAML."""
    if "fsdp" not in source.text.lower():
        return None
    data = _read(source)
    return _kind(source, data) if isinstance(data, Mapping) else None


def _read(source: Source) -> Any:
    return _json(source) if source.path.suffix == ".json" else _yaml(source)


def _json(source: Source) -> Any:
    try:
        return json.loads(source.text)
    except (ValueError, RecursionError):
        raise Unreadable("is not JSON") from None


def _yaml(source: Source) -> Any:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="rt").load(source.text)
    except (YAMLError, ValueError, RecursionError, TypeError):
        raise Unreadable("is not YAML of one document") from None
    if _size(data, {}) > LIMIT:
        raise Unreadable("is made of aliases that stand for more than it could hold")
    return data


def _size(value: Any, known: dict[int, int]) -> int:
    """The number of values if each alias is what it stands for."""
    if id(value) not in known and isinstance(value, Mapping | list):
        known[id(value)] = LIMIT + 1  # of what holds itself
        below = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_size(one, known) for one in below)
    return known.get(id(value), 1)


def _kind(source: Source, data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Config | None:
    held = data.get("fsdp_config")
    if isinstance(held, Mapping):
        ours = any(key in ACCELERATE for key in held)  # others have an fsdp_config with keys of their own
        if not ours and not any(key in held for key in COMPOSER):
            return None
        made = Config(source, "accelerate" if ours else "composer", path=path)
        made.head = _place(source, data, "fsdp_config")
        made.places = [_place(source, held, str(key)) for key in held]
        made.version = 2 if str(held.get("fsdp_version")) == "2" else 1
        return made
    found = _lightning(source, data, path[-1] if path else "")
    if found is not None:
        return found
    for key, value in data.items():
        if isinstance(value, Mapping) and (below := _kind(source, value, (*path, key))) is not None:
            return below
    return None


def _lightning(source: Source, data: Mapping[str, Any], under: str) -> Config | None:
    """strategy: fsdp of a Trainer, or a class_path that ends in FSDPStrategy."""
    strategy = data.get("strategy")
    name = strategy.get("class_path") if isinstance(strategy, Mapping) else strategy
    trainers = under in ("trainer", "fabric") or any(key in data for key in ("accelerator", "devices", "num_nodes"))
    if isinstance(name, str) and ((name.startswith("fsdp") and trainers) or name.endswith("FSDPStrategy")):
        return Config(source, "lightning", head=_place(source, data, "strategy"))
    return None


def _place(source: Source, data: Mapping[str, Any], key: str) -> Place:
    if hasattr(data, "lc"):  # it doesn't know the keys of what is merged in
        line, col = data.lc.key(key) if key in (data.lc.data or {}) else (data.lc.line, data.lc.col)
        return Place(key, data[key], line, col)
    start = source.text.find(f'"{key}"')
    before = source.text[: max(start, 0)]
    return Place(key, data[key], before.count("\n"), len(before) - before.rfind("\n") - 1)
