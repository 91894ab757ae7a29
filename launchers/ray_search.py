"""The space of a search: `--search "lr=loguniform(1e-4, 1e-2)"`, or a Python file that says it. No Ray here."""

from __future__ import annotations

import ast
import dataclasses
import os
import runpy
from collections.abc import Sequence
from typing import Any, NamedTuple

from fsdp2.config import Config
from fsdp2.options.errors import ConfigError, flag_of, shown
from fsdp2.options.parser import instead

# Ray Tune's names, which users know, and how many arguments they take.
WAYS = {"uniform": 2, "loguniform": 2, "quniform": 3, "randint": 2, "choice": None, "grid": None}
# Where a run lies, and where it starts, is each trial's own.
NOT_SEARCHED = ("run_dir", "resume", "resume_partial")


class Choice(NamedTuple):
    """The variation of one flag: a name of `WAYS` and its arguments."""

    way: str
    arguments: tuple[Any, ...]

    def examples(self) -> tuple[Any, ...]:
        """Values that a trial may get: all of a choice, both ends of a range."""
        if WAYS[self.way] is None:
            return self.arguments
        low, high = self.arguments[:2]
        return low, high - 1 if self.way == "randint" else high


Space = dict[str, Choice]
# Deep nesting and numbers of thousands of digits are no syntax errors to Python.
_NO_EXPRESSION = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def parse_search(texts: Sequence[str]) -> Space:
    """Field of a Config -> how it is varied, from `flag=way(…)` and from files. Raises ConfigError."""
    space: Space = {}
    for text in texts:
        for flag, expression in _entries(text):
            name = flag.removeprefix("--").replace("-", "_")
            known = [f.name for f in dataclasses.fields(Config) if f.name not in NOT_SEARCHED]
            if name not in known:
                fix = instead(flag_of(name), list(map(flag_of, known)))
                raise ConfigError(
                    f"--search {shown(text)}: {shown(flag)} is not a flag that trials can differ in; {fix}"
                )
            if name in space:
                raise ConfigError(f"--search {shown(text)}: {shown(flag)} is varied already; give it once")
            space[name] = _choice(expression, text)
    if not space:
        raise ConfigError('--search: nothing to vary; give, say, --search "lr=loguniform(1e-4, 1e-2)"')
    return space


def _entries(text: str) -> list[tuple[str, str]]:
    if not text.endswith(".py"):
        flag, equals, expression = text.partition("=")
        if not equals:
            raise ConfigError(
                f'--search {shown(text)}: must be flag=way(…), such as "lr=loguniform(1e-4, 1e-2)", or a .py file'
            )
        return [(flag.strip(), expression)]
    if not os.path.isfile(text):
        raise ConfigError(f"--search {shown(text)}: there is no such file")
    space = runpy.run_path(text).get("space")
    if not isinstance(space, dict) or not all(isinstance(value, str) for value in space.values()):
        raise ConfigError(f'--search {shown(text)}: must set space = {{"lr": "loguniform(1e-4, 1e-2)", …}}')
    return list(space.items())


def _choice(expression: str, text: str) -> Choice:
    """`way(a, b)` as data: nothing in it is run."""
    try:
        call = ast.parse(expression.strip(), mode="eval").body
    except _NO_EXPRESSION:
        call = None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in WAYS):
        raise ConfigError(f"--search {shown(text)}: must be one of {', '.join(f'{way}(…)' for way in WAYS)}")
    way = call.func.id
    try:
        # A bare word is text: model=choice(vit, cnn).
        values = tuple(a.id if isinstance(a, ast.Name) else ast.literal_eval(a) for a in call.args)
    except _NO_EXPRESSION:
        raise ConfigError(f"--search {shown(text)}: takes numbers, words and quoted text") from None
    if call.keywords or len(values) != (WAYS[way] or len(values)) or not values:
        raise ConfigError(f"--search {shown(text)}: {way} takes {WAYS[way] or 'one or more'} values")
    if WAYS[way]:
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) < len(values) or numbers[0] >= numbers[1] or (way == "loguniform" and numbers[0] <= 0):
            raise ConfigError(f"--search {shown(text)}: {way} takes numbers, the lower before the higher")
    return Choice(way, values)


def example_config(config: Config, space: Space) -> None:
    """Raises ConfigError if a value makes no sense with the other flags and the first value of each other one."""
    first = {name: choice.examples()[0] for name, choice in space.items()}
    for name, choice in space.items():
        for value in choice.examples():
            dataclasses.replace(config, **{**first, name: value})
