"""The HTML report: one file that opens without a network, on a phone as well."""

import base64
import html
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from calibeval.io import counted, write_text
from calibeval.records import meta
from calibeval.report.figures import Figure
from calibeval.report.index import Results
from calibeval.report.tables import Table

STYLE = """:root{color-scheme:light dark;--line:#8886}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem}
.box{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.22rem .6rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{vertical-align:bottom}.n{text-align:right}tbody{border-top:2px solid var(--line)}
.plain td{white-space:normal;overflow-wrap:anywhere;min-width:4rem}
.i{opacity:.65;font-size:.85em}.first{border-left:1px solid var(--line)}
.note,figcaption{font-size:.87rem}.gap{color:#d6455a;font-weight:600}
figure{margin:1.2rem 0}figure img{background:#fff;border-radius:4px}
figure img.column{width:min(100%,34rem)}figure img.page{width:100%;min-width:40rem}
.pair{display:grid;gap:0 2rem}@media(min-width:60rem){.pair{grid-template-columns:1fr 1fr}}"""


def escape(value: object) -> str:
    """Text for HTML."""
    return html.escape("" if value is None else str(value))


def page(title: str, parts: Sequence[str], path: Path) -> None:
    """Write a report of HTML parts under its title."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    text = f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title>'
    text += f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}"
    write_text(path, f"{text}</body></html>\n")


def collected(tables: Sequence[Table], figures: Sequence[Figure]) -> list[str]:
    """Summary and differences first, then the table and the figures with their captions."""
    main, *paired = tables
    parts = []
    for one in paired:
        parts += ["<h2>In words</h2>", summary(one), "<h2>Differences to β = 0</h2>", table(one)]
    if not paired:
        parts.append("<p>No row has β = 0 beside another of its kind: nothing to compare.</p>")
    parts += ["<h2>Accuracy and calibration</h2>" + table(main), "<h2>Figures</h2>"]
    # Of what is there in both widths, a column's: it can be read on a phone.
    twins = {figure.stem.name.removesuffix("_column") + "_page" for figure in figures}
    shown = [figure for figure in figures if figure.stem.name not in twins]
    shown.sort(key=lambda figure: figure.width)
    drawn = [_figure(i, figure) for i, figure in enumerate(shown, 1)]
    narrow = sum(figure.width == "column" for figure in shown)
    return [*parts, "<div class=pair>", *drawn[:narrow], "</div>", *drawn[narrow:]]


def _figure(number: int, figure: Figure) -> str:
    caption, name = f"{number}. {figure.caption}", f"{figure.stem.name}.pdf"
    said = f"<figcaption>{escape(caption)} <code>{escape(name)}</code></figcaption>"
    svg = figure.stem.with_name(figure.stem.name + ".svg")
    return f"<figure>{picture(svg, caption, figure.width)}{said}</figure>"


def picture(path: Path, alt: str, width: str = "page") -> str:
    """An SVG file inside the page, in a box of its own that scrolls."""
    data = f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return f'<div class=box><img class={width} alt="{escape(alt)}" src="{data}"></div>'


def table(of: Table) -> str:
    """A table in a box of its own that scrolls."""
    each = len(of.heads)
    edge = ["'n first'", *["n"] * (each - 1)] * len(of.groups)
    spans = "".join(f"<th class=first colspan={each}>{escape(group)}</th>" for group in of.groups)
    heads = zip(edge, of.heads * len(of.groups), strict=True)
    lines = [f"<tr><th colspan={len(of.keys)}></th>{spans}</tr><tr>"]
    lines += [f"<th>{escape(key)}</th>" for key in of.keys]
    lines += [f"<th class={c}>{escape(head)}</th>" for c, head in heads]
    for _, block in groupby(of.lines, key=lambda line: line[0]):
        lines.append("<tbody>")
        for _, keys, cells in block:
            lines += ["<tr>", *(f"<td>{escape(key)}</td>" for key in keys)]
            shown = (cell.text("<b>{}</b>", " <span class=i>{}</span>") for cell in cells)
            lines += [f"<td class={c}>{text}</td>" for c, text in zip(edge, shown, strict=True)]
    body = f"<div class=box><table>{''.join(lines)}</table></div>"
    return f"{body}<p class=note>{escape(' '.join(of.notes))}</p>"


def plain_table(rows: Sequence[dict]) -> str:
    """Dictionaries as a table."""
    shown = tabulate(rows, headers="keys", tablefmt="html", disable_numparse=True)
    return f'<div class="box plain">{shown}</div>'


def summary(differences: Table) -> str:
    """How often each figure is told from that of β = 0, in words, from the paired differences."""
    lines = []
    for block, rows in groupby(differences.lines, key=lambda line: line[0]):
        _, keys, every = zip(*rows, strict=True)
        said = []
        for i, head in enumerate(differences.heads):
            of = [cell for cells in every for cell in cells[i :: len(differences.heads)]]
            up = sum(cell.bold and cell.estimate.value > 0 for cell in of)
            down = sum(cell.bold for cell in of) - up
            said.append(f"{head.rstrip(' ↑↓')} lower in {down}, higher in {up}")
        setting, number = ", ".join(keys[0][: len(block)]), counted(len(of), "comparison")
        lines.append(f"<li><b>{escape(setting)}</b>, {number}: {escape('; '.join(said))}.")
    return f"<p>Told apart from β = 0:</p><ul>{''.join(lines)}</ul>"


def settings(results: Results) -> str:
    """How the records were made, and with which versions."""
    found = []
    for path in results.records:
        if known := meta(path):
            versions = {f"{name} version": v for name, v in (known.get("versions") or {}).items()}
            about = {"model": known.get("model")} | (known.get("settings") or {}) | versions
            text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in about.items()}
            found.append({"records": str(path)} | text)
    keys = dict.fromkeys(key for line in found for key in line)
    same = [key for key in keys if len({line.get(key) for line in found}) == 1]
    shared = [{"setting": key, "of every run": found[0][key]} for key in same]
    own = [{key: line.get(key) for key in keys if key not in same} for line in found]
    bare = counted(len(results.records) - len(found), "record file")
    return (
        f"<h2>Settings</h2>{plain_table(shared)}<p>{bare} without a sidecar that says how.</p>"
        f"<details><summary>by record file</summary>{plain_table(own)}</details>"
    )
