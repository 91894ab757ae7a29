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

from migration.rewriter.edits import KEPT, MARKED, MOVED
from migration.rewriter.finding import DOCS, Finding, make
from migration.rewriter.rewrite import MARK
from migration.rewriter.source import LIMIT, Source, Unreadable
from migration.rewriter.symbols import BY_CODE

# Keys without their `fsdp_`, which accelerate's have and transformers' may have.
GONE = ("backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "backward_prefetch_policy")
GONE_TRAINERS = ("limit_all_gathers",)  # accelerate's has no such key
SAME = ("auto_wrap_policy", "offload_params", "activation_checkpointing", "transformer_layer_cls_to_wrap",
        "min_num_params", "cpu_ram_efficient_loading")  # fmt: skip
STRATEGY = ("sharding_strategy", "reshard_after_forward")  # which takes a strategy with FSDP1
ACCELERATE = {f"fsdp_{key}" for key in (*GONE, *SAME, *STRATEGY, "state_dict_type", "version")}
UNKNOWN = "in a form that isn't known here"
ACCELERATES = {"compute_environment", "num_processes", "num_machines", "fsdp_config"}  # beside distributed_type
SHARDS = re.compile(r"(full_shard|shard_grad_op|hybrid_shard(_zero2)?|no_shard)([ ,]+(auto_wrap|offload))*")
XLA = ("xla", "xla_fsdp_v2", "xla_fsdp_settings", "xla_fsdp_grad_ckpt")
TRAINERS = {*GONE, *GONE_TRAINERS, *SAME, *XLA, "cpu_offload", "reshard_after_forward", "state_dict_type", "version"}
SIGNS = re.compile("fsdp|transformer_layer_cls_to_wrap", re.IGNORECASE)
RESHARD = {"FULL_SHARD": True, "1": True, "SHARD_GRAD_OP": False, "2": False}
OTHER = dict.fromkeys(("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"), "FY09") | dict.fromkeys(
    ("NO_SHARD", "3"), "FY10"
)
LOW = re.compile(r"\A(?:.*\n)*?([^#\n]*)mixed_precision\W+(bf16|fp16)\b")
MOVABLE = {"accelerate": "FY01", "transformers": "FY08"}  # and the row about the version
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
    kind: str  # accelerate, transformers, composer, lightning
    places: list[Place] = field(default_factory=list)
    version: int = 1
    head: Place | None = None
    path: tuple[str, ...] = ()  # of keys, to the mapping of FSDP's
    words: Place | None = None  # of transformers' `fsdp` beside it, which FSDP2 has no meaning for

    @property
    def fsdp2(self) -> bool:
        """Return whether it says FSDP2 when the run is over."""
        return self.version == 2 or self.rewritten() != self.source.text

    def findings(self) -> list[Finding]:
        if self.head is None or self.version == 2:
            return []
        if self.kind not in MOVABLE:
            return [self._found(self.head, "FY06" if self.kind == "composer" else "FY07", MARKED)]
        found = [self._found(self.words, "FC39", MARKED)] if self.words else []
        if self.words is self.head:  # whose fsdp_config is another file, or none
            return found
        for place in self.places:
            key = _bare(place.key)
            if key in STRATEGY and not isinstance(place.value, bool):
                value = str(place.value).upper()
                found.append(self._found(place, OTHER.get(value, "FY02"), MOVED if value in RESHARD else MARKED))
            elif key in self._gone:
                found.append(self._found(place, "FY03"))
            elif key == "state_dict_type":
                local = "LOCAL" in str(place.value)
                found.append(self._found(place, "FY04", MARKED if local else MOVED))
            elif key in SAME:
                found.append(self._found(place, "FY05"))
        found += [self._found(self.low, "FY11", KEPT)] if self.low else []
        as_lines = any(one.status == MARKED for one in found) or self.moved is not None
        return [self._found(self.head, MOVABLE[self.kind], *(() if as_lines else (MARKED, BY_HAND))), *found]

    @property
    def low(self) -> Place | None:
        """The precision for which accelerate makes more of 16 bits with FSDP2."""
        low = LOW.search(self.source.text) if self.kind == "accelerate" else None
        return low and Place("mixed_precision", low[2], low[0].count("\n"), len(low[1]))

    @property
    def _gone(self) -> tuple[str, ...]:
        return GONE + (GONE_TRAINERS if self.kind == "transformers" else ())

    def _found(self, place: Place, code: str, status: str = MOVED, why: str = "") -> Finding:
        shown = f"{place.key}: {place.value}" if not isinstance(place.value, Mapping) else f"{place.key}:"
        return make(str(self.source.path), (None, place.line + 1, place.col + 1), code, shown, status, why)

    def undecided(self) -> list[Finding]:
        """List what keeps the file from being moved."""
        return [f for f in self.findings() if f.status not in (MOVED, KEPT)]

    def rewritten(self) -> str:
        """The file's text with FSDP2's keys; as it was if something has to be decided."""
        stays = self.kind not in MOVABLE or self.version == 2 or self.undecided() or not self.places
        return self.source.text if stays or self.moved is None else self.moved

    @cached_property
    def moved(self) -> str | None:
        """The text with FSDP2's keys, read again and compared; None where lines can't be changed one by one, as in a
        mapping on one line or what an anchor shares."""
        data = holder = _read(self.source)
        for key in self.path[:-1]:
            holder = holder[key]
        if self.path:
            holder[self.path[-1]] = self._moved(holder[self.path[-1]])
        else:
            data = self._moved(data)
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
            text, change = lines[place.line], self._change(place.key, place.value)
            if change is None:
                lines[place.line] = ""
            elif change != (place.key, place.value):
                _, sign, remark = text.rstrip("\r\n").partition("#")
                made = f"{text[: len(text) - len(text.lstrip())]}{change[0]}: {json.dumps(change[1])}"
                lines[place.line] = f"{made}{sign and '  #'}{remark}{newline}"
        if self.places and not any(_bare(place.key) == "version" for place in self.places):
            first = self.places[0]
            lines[first.line] = f"{' ' * first.col}{self._prefix}version: 2{newline}" + lines[first.line]
        if self.low:
            said = f"{MARK} FY11 {BY_CODE['FY11'].note} ({DOCS}#fy11)"
            lines[self.low.line] = f"{' ' * self.low.col}{said}{newline}{lines[self.low.line]}"
        return "".join(lines)

    def _as_json(self, data: Any) -> str:
        """With the file's indent and the order of its keys. Raises ValueError for a number that JSON hasn't got."""
        text = self.source.text
        indent = re.search(r"\n([ \t]+)\S", text)
        made = json.dumps(data, indent=indent[1] if indent else None, ensure_ascii=False, allow_nan=False)
        return made.replace("\n", self.source.newline) + text[len(text.rstrip()) :]

    @property
    def _prefix(self) -> str:
        return "fsdp_" if any(place.key.startswith("fsdp_") for place in self.places) else ""

    def _change(self, key: str, value: Any) -> tuple[str, Any] | None:
        """The key and the value that FSDP2 has in the place of FSDP1's; None if it has none."""
        if _bare(key) in STRATEGY and not isinstance(value, bool):
            return f"{self._prefix}reshard_after_forward", RESHARD[str(value).upper()]
        return None if _bare(key) in self._gone else (key, 2 if _bare(key) == "version" else value)

    def _moved(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """A mapping of FSDP's with FSDP2's keys."""
        first = {} if "version" in map(_bare, held) else {f"{self._prefix}version": 2}
        return first | dict(filter(None, (self._change(key, value) for key, value in held.items())))


def _bare(key: str) -> str:
    return str(key).removeprefix("fsdp_")


def read_config(source: Source) -> Config | None:
    """A configuration that uses FSDP1; None for any other file. Raises Unreadable if one that says fsdp is no YAML."""
    if not SIGNS.search(source.path.name + source.text):
        return None
    data = _read(source)
    found = (_trainers(source, data) or _kind(source, data)) if isinstance(data, Mapping) else None
    if found is None and (sign := _sign(data, source.path.name)):
        raise Unreadable(f"says {sign} {UNKNOWN}: move it by hand ({DOCS}#fy01)")
    return found


def _sign(value: Any, under: str) -> str | None:
    """The key, anywhere below `under`, that means FSDP1 to accelerate or transformers; None without one."""
    if isinstance(value, list):
        return next(filter(None, (_sign(one, "") for one in value)), None)
    if not isinstance(value, Mapping):
        return f"{under}: {value}" if under == "fsdp" and SHARDS.fullmatch(str(value)) else None
    held = value if under == "fsdp_config.json" else value.get("fsdp_config")
    held = held if isinstance(held, Mapping) else {}
    bare = {_bare(str(key)): one for key, one in held.items()}
    if str(bare.get("version")) == "2":
        return None
    if value.get("distributed_type") == "FSDP" and ACCELERATES & value.keys():
        return "distributed_type: FSDP"
    if value.get("fsdp", True) and any(bare[key] for key in bare.keys() & TRAINERS):
        return "fsdp_config"
    return next(filter(None, (_sign(one, str(key)) for key, one in value.items())), None)


def _trainers(source: Source, data: Mapping[str, Any]) -> Config | None:
    """The file that `TrainingArguments(fsdp_config="fsdp_config.json")` names: nothing but keys of FSDP's."""
    keys = {_bare(key) for key in data}
    if not keys or keys - TRAINERS or not SIGNS.search(" ".join((source.path.name, *data))):
        return None
    return _config(source, "transformers", data, _place(source, data, str(next(iter(data)))))


def _config(source: Source, kind: str, held: Mapping[str, Any], head: Place, path: tuple[str, ...] = ()) -> Config:
    version = next((value for key, value in held.items() if _bare(key) == "version"), 1)
    places = [_place(source, held, str(key)) for key in held]
    return Config(source, kind, places, 2 if str(version) == "2" or held.get("xla") is True else 1, head, path)


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
        told = data.get("fsdp") if not ours and {_bare(key) for key in held} <= TRAINERS else None
        if not ours and not told and not any(key in held for key in COMPOSER):
            return None
        kind = "transformers" if told else "accelerate" if ours else "composer"
        made = _config(source, kind, held, _place(source, data, "fsdp_config"), (*path, "fsdp_config"))
        lost = kind == "transformers" and re.search(r"hybrid_shard|no_shard", str(told))
        return replace(made, words=_place(source, data, "fsdp")) if lost else made
    if isinstance(data.get("fsdp"), str) and SHARDS.fullmatch(data["fsdp"]):
        words = _place(source, data, "fsdp")
        return Config(source, "transformers", head=words, words=words)
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
