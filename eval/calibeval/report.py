"""The HTML report: tables and figures in one file that opens without a network."""

import html
from pathlib import Path

from calibeval import tables
from calibeval.io import atomic_write

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}th,td{padding:.25em .7em;text-align:right}
td{border-bottom:1px solid #ddd}
th{border-bottom:2px solid #555}td.key,th.key{text-align:left}.half{color:#777;font-size:85%}
tr.block td{border-top:2px solid #999}svg{max-width:100%;height:auto}p.note{color:#555}"""


def write(rows: list[tables.Row], figures: list[Path], title: str, path: Path) -> None:
    """Write the table and the figures (stems of .svg files), drawn into the page itself."""
    body = [f"<h1>{html.escape(title)}</h1>", table(rows), f"<p class=note>{tables.NOTE}</p>"]
    for stem in figures:
        drawing = stem.with_name(stem.name + ".svg").read_text(encoding="utf-8")
        # Figures share element names such as "axes_1" and clip paths; each gets its own.
        drawing = drawing[drawing.index("<svg") :]
        for mark in ('id="', "url(#", 'href="#'):
            drawing = drawing.replace(mark, f"{mark}{stem.name}-")
        body.append(f"<figure>{drawing}</figure>")
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )
    with atomic_write(path) as file:
        file.write(page)


def table(rows: list[tables.Row]) -> str:
    """The table as HTML, best in bold."""
    keys = "".join(f"<th class=key>{html.escape(h)}</th>" for h in tables.headings(rows))
    head = "".join(f"<th>{html.escape(column[2])}</th>" for column in tables.COLUMNS)
    lines, bold, block = [f"<tr>{keys}<th>Seeds</th>{head}</tr>"], tables.best(rows), None
    for i, row in enumerate(rows):
        fresh = block not in (None, (row.dataset, row.model))
        block = row.dataset, row.model
        cells = [f"<td class=key>{html.escape(k)}</td>" for k in tables.keys(row)]
        cells.append(f"<td>{len(row.runs)}</td>")
        for j, (metric, confidence, *_) in enumerate(tables.COLUMNS):
            cell = row.cell(metric, confidence)
            mean = f"{cell.mean:.3f}"
            mean = f"<b>{mean}</b>" if (i, j) in bold else mean
            cells.append(f"<td>{mean} <span class=half>±{cell.half:.3f}</span></td>")
        lines.append(f"<tr{' class=block' if fresh else ''}>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"
