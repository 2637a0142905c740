"""From an index of record files to tables, figures and one HTML page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from calibeval.io import write_text
from calibeval.report import figures, html, index, tables


def collect(
    source: Path,
    out: Path,
    columns: str = tables.DEFAULT,
    title: str = "Calibration",
    note: str = "",
    sections: Sequence[str] = (),
    page: Path | None = None,
) -> str:
    """Write the tables, the figures and the page (default `out`/report.html); return the tables.

    `note` is HTML under the title, `sections` are more of it after the figures. Bad input raises
    `InputError` before anything is written.
    """
    chosen = tables.columns(columns)
    results = index.read(source)
    main, paired = tables.main(results, chosen), tables.differences(results, chosen)
    made = [main, *([paired] if paired else [])]
    for name, one in zip(("table", "differences"), made, strict=False):
        write_text(out / f"{name}.md", tables.markdown(one))
        write_text(out / f"{name}.tex", tables.latex(one))
    write_text(out / "table.csv", tables.tidy(results))
    drawn = figures.draw(results, out)
    parts = [note, *html.collected(made, drawn), *sections, html.settings(results)]
    html.page(title, parts, page or Path(out) / "report.html")
    fresh = {figure.stem.name for figure in drawn} | ({"differences"} if paired else set())
    own = ("differences.", "bars_", "ece-against_", "reliability_")
    files = sorted(path for path in Path(out).iterdir() if path.name.startswith(own))
    if old := ", ".join(path.name for path in files if path.stem not in fresh):
        print(f"warning: {out}: of an earlier collect, not made now: {old}", file=sys.stderr)
    return "\n".join(map(tables.markdown, made))
