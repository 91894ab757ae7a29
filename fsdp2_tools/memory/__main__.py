"""Show where the memory of a run went:  python -m fsdp2.memory runs/vit-…

Reads what `--memory-snapshot` has recorded; prints each rank's peak by kind, and writes a page for each that opens
without a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdp2.run.process import early
from fsdp2_tools.memory.options import parse

if __name__ == "__main__":
    early.answer(parse)

from fsdp2.options.errors import require
from fsdp2.options.parser import files_at
from fsdp2.run.process import ending
from fsdp2.units import printable, short, size
from fsdp2_extra.allocations.timeline import Timeline, file_name
from fsdp2_tools import results
from fsdp2_tools.memory.read import exchanges, read_timelines


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """The pages written. Raises ConfigError if there is nothing to show."""
    options = parse(arguments)
    files = files_at(options.run, "RUN")
    lines = read_timelines(files, options.run)
    print("\n".join(map(printable, summary(lines).splitlines())))
    if options.no_pages:
        return []
    require("plotly", "plots", "the pages")
    from fsdp2_tools.memory.page import page

    out = results.folder(Path(options.out or ("." if "://" in options.run else options.run)))
    written = []
    for line in lines:
        path = out / file_name(line.facts["rank"]).replace(".json.gz", ".html")
        results.write(path, page(line, "the run's own ledger of tensors"))
        print(f"page: {short(path.absolute())}")
        written.append(path)
    return written


def summary(lines: Sequence[Timeline]) -> str:
    """Each rank's peak, by kind; and what the ranks exchange in a step."""
    rows: dict[str, list[str]] = {}
    kinds = dict.fromkeys(kind for line in lines for kind in line.by_kind(line.peak()[0]))  # that any rank has
    for line in lines:
        at, most = line.peak()
        sizes = line.by_kind(at)
        phase = line.phase_at(at)
        for name, cell in [
            ("", f"rank {line.facts['rank']}"),
            ("peak", size(most)),
            ("in", f"{phase.name}, step {phase.step}"),
            *((kind, size(sizes.get(kind, 0))) for kind in kinds),
        ]:
            rows.setdefault(name, []).append(cell)
    width = max(len(name) for name in rows) + 2
    text = [f"{name:{width}}" + "".join(f"{cell:>22}" for cell in cells) for name, cells in rows.items()]
    text += [f"{name}: {count} a step, {size(amount)}" for name, (count, amount) in exchanges(lines[0]).items()]
    return "\n".join(text)


if __name__ == "__main__":
    with ending.exit_status():
        main()
