"""What the site adds to the pages: a tab for Ray beside each command of torchrun, and short code that isn't broken.

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


class _Unbroken(Postprocessor):
    """A browser breaks a line after any hyphen: --|keep."""

    def run(self, text: str) -> str:
        return re.sub(r"<code>([^<\n]{1,24})</code>", r'<code class="unbroken">\1</code>', text)


class LauncherTabs(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_Tabs(md), "launcher-tabs", 45)  # before the fences become HTML
        md.postprocessors.register(_Unbroken(md), "unbroken", 0)  # when all of it is HTML


def makeExtension(**options: object) -> LauncherTabs:
    return LauncherTabs(**options)
