"""What the site adds to the pages: a tab for Ray beside each command of torchrun, and what a phone needs.

Short code and flags aren't broken, and a cell with long text has a class, so that it isn't made as narrow as others.

A command is shown in tabs where the other launcher does the same: `torchrun --nproc_per_node N -m fsdp2.train FLAGS`.
"""

from __future__ import annotations

import re

from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

BLOCK = re.compile(r"^```bash\n((?:torchrun --nproc_per_node \d+ -m fsdp2\.train.*\n(?: .*\n)*)+)^```$", re.MULTILINE)


def of_ray(command: str) -> str:
    """The same training through Ray."""
    return re.sub(
        r"torchrun --nproc_per_node (\d+) -m fsdp2\.train", r"python -m launchers.ray_train --num-workers \1", command
    )


def tabs(text: str) -> str:
    """A page with a second tab for each block that only starts trainings."""

    def both(block: re.Match[str]) -> str:
        parts = []
        for name, commands in (("torchrun", block[1]), ("Ray", of_ray(block[1]))):
            lines = ["```bash", *commands.rstrip("\n").split("\n"), "```"]
            parts.append(f'=== "{name}"\n\n' + "\n".join(f"    {line}" for line in lines) + "\n")
        return "\n".join(parts)

    return BLOCK.sub(both, text)


class _Tabs(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return tabs("\n".join(lines)).split("\n")


SHORT, LONG = 24, 60  # letters of code, and of a cell


def for_phones(html: str) -> str:
    """A page on which a browser breaks no line after a hyphen of short code or of a flag, as --|keep."""

    def code(found: re.Match[str]) -> str:
        if len(found[1]) <= SHORT:
            return f'<code class="unbroken">{found[1]}</code>'
        flags = re.sub(r"--[a-z][a-z-]*(?:=\w+)?", r'<span class="unbroken">\g<0></span>', found[1])
        return f"<code>{flags}</code>"

    def cell(found: re.Match[str]) -> str:
        text = re.sub("<[^>]*>", "", found[1])
        return f'<td class="long">{found[1]}</td>' if len(text) > LONG else found[0]

    return re.sub(r"<td>(.*?)</td>", cell, re.sub(r"<code>([^<\n]+)</code>", code, html), flags=re.DOTALL)


class _ForPhones(Postprocessor):
    def run(self, text: str) -> str:
        return for_phones(text)


class LauncherTabs(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Tabs(md), "launcher-tabs", 45)  # before the fences become HTML
        md.postprocessors.register(_ForPhones(md), "for-phones", 0)  # when all of it is HTML


def makeExtension(**options: object) -> LauncherTabs:
    return LauncherTabs(**options)
