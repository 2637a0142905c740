"""The HTML report: one file that opens without a network, on a phone as well."""

import base64
import html
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from calibeval.io import atomic_write, counted, read_text
from calibeval.records import sidecar
from calibeval.report.figures import AMONG, Figure
from calibeval.report.index import Results
from calibeval.report.tables import Cell, Column, Table, difference, told_apart
from calibeval.stats import Estimate

STYLE = """:root{color-scheme:light dark;--line:#8886;--soft:#8882}
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem}
h1{line-height:1.2;margin-bottom:.3rem}h2{margin:2.2rem 0 .6rem}
.box{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.22rem .6rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{vertical-align:bottom}.n{text-align:right}tr.block td{border-top:2px solid var(--line)}
.i{opacity:.65;font-size:.85em}.first{border-left:1px solid var(--line)}.note{font-size:.87rem}
figure{margin:1.2rem 0}figure img{background:#fff;border-radius:4px}
figure img.column{width:min(100%,34rem)}figure img.page{width:100%;min-width:40rem}
figcaption{font-size:.87rem;opacity:.85}.pair{display:grid;gap:0 2rem}
@media(min-width:60rem){.pair{grid-template-columns:1fr 1fr}}
code,pre{font-size:.82rem}pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--soft)}
pre{padding:.5rem .7rem}td.long{white-space:normal;overflow-wrap:anywhere;min-width:16rem}
.done{color:#198754}.failed,.gap{color:#d6455a;font-weight:600}.running{color:#3d8bfd}
.preempted,.interrupted{color:#c76a10}"""
OPTIONS = ("task", "data", "split", "shots", "examples", "subjects", "limit", "style", "engine")
OPTIONS += ("dtype", "max_length", "revision")


def escape(value: object) -> str:
    """Text for HTML."""
    return html.escape("" if value is None else str(value))


def page(title: str, parts: Sequence[str], path: Path) -> None:
    """Write a report of HTML parts under its title."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    with atomic_write(path) as file:
        file.write(
            f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>{''.join(parts)}"
            f"</body></html>\n"
        )


def collected(results: Results, tables: Sequence[Table], figures: Sequence[Figure]) -> list[str]:
    """Summary and differences first, then the table and the figures with their captions."""
    main, *paired = tables
    parts = [f"<h2>In words</h2>{summary(results)}"]
    parts += ["<h2>Differences to β = 0</h2>" + table(one) for one in paired]
    parts += ["<h2>Accuracy and calibration</h2>" + table(main), "<h2>Figures</h2>"]
    # Of what is there in both widths, a column's: it can be read on a phone.
    twins = {figure.stem.name.removesuffix("_column") + "_page" for figure in figures}
    shown = [figure for figure in figures if figure.stem.name not in twins]
    shown.sort(key=lambda figure: figure.width)
    drawn = [_figure(i, figure) for i, figure in enumerate(shown, 1)]
    narrow = sum(figure.width == "column" for figure in shown)
    return [*parts, "<div class=pair>", *drawn[:narrow], "</div>", *drawn[narrow:]]


def _figure(number: int, figure: Figure) -> str:
    svg = figure.stem.with_name(figure.stem.name + ".svg").read_bytes()
    caption = escape(f"{number}. {figure.caption}")
    return (
        f'<figure><div class=box><img class={figure.width} alt="{caption}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"></div>'
        f"<figcaption>{caption} <code>{escape(figure.stem.name)}.pdf</code></figcaption></figure>"
    )


def table(of: Table) -> str:
    """A table in a box of its own that scrolls."""
    each = len(of.heads)
    edge = [" class='n first'"] + [" class=n"] * (each - 1)
    spans = "".join(f"<th class=first colspan={each}>{escape(group)}</th>" for group in of.groups)
    heads = "".join(f"<th{c}>{escape(h)}</th>" for c, h in zip(edge, of.heads, strict=True))
    keys = "".join(f"<th>{escape(key)}</th>" for key in of.keys)
    lines = [f"<tr><th colspan={len(of.keys)}></th>{spans}</tr><tr>{keys}{heads * len(of.groups)}"]
    last = None
    for block, keys, cells in of.lines:
        shown = [f"<td>{escape(key)}</td>" for key in keys]
        for c, cell in zip(edge * len(of.groups), cells, strict=False):
            value = f"<b>{cell.value}</b>" if cell.bold else cell.value
            interval = f" <span class=i>{cell.interval}</span>" if cell.interval else ""
            shown.append(f"<td{c}>{value}{cell.dagger}{interval}</td>")
        lines.append(f"<tr{' class=block' * (block != last)}>{''.join(shown)}")
        last = block
    body = f"<div class=box><table>{''.join(lines)}</table></div>"
    return f"{body}<p class=note>{escape(' '.join(of.notes))}</p>"


def plain_table(rows: Sequence[dict]) -> str:
    """Dictionaries as a table; a cell under `state` has its value as its class."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["".join(f"<th>{escape(key)}</th>" for key in keys)]
    for row in rows:
        state = [f" class={escape(row[k])}" if k == "state" and row[k] else "" for k in keys]
        cells = [escape(row.get(key)) for key in keys]
        long = [s or " class=long" * (len(c) > 60) for s, c in zip(state, cells, strict=True)]
        lines.append("".join(f"<td{c}>{text}</td>" for c, text in zip(long, cells, strict=True)))
    return f"<div class=box><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def summary(results: Results) -> str:
    """What each setting changes against β = 0, in words, from paired differences."""
    found: dict[str, dict[str, list]] = {}
    for row in results.rows:
        base = results.reference(row)
        for group in row.runs if base else ():
            columns = {"accuracy": Column("accuracy")}
            for confidence in row.runs[group][0].confidences:
                name = f"squared calibration error among {AMONG[confidence]}"
                columns[name] = Column("rms_debiased", confidence)
            every = found.setdefault(", ".join(row.name("train_data", "model")), {})
            for name, column in columns.items():
                every.setdefault(name, []).append(difference(base, row, group, column))
    if not found:
        return "<p>No row has β = 0 beside another of its kind, so there is nothing to compare.</p>"
    lines = []
    for setting, every in found.items():
        said = (f"{name} is {changed(ds)}" for name, ds in every.items())
        lines.append(f"<li><b>{escape(setting)}</b> against β = 0: {escape('; '.join(said))}.")
    return f"<ul>{''.join(lines)}</ul>"


def changed(ds: Sequence[Estimate]) -> str:
    """Differences as words: lower (−0.1 [−0.2, 0]) for one, in how many of them for several."""
    lower, higher = ([d for d in ds if told_apart(d) and (d.value > 0) == up] for up in (0, 1))
    if len(ds) > 1:
        return f"lower in {len(lower)} and higher in {len(higher)} of {len(ds)} comparisons"
    word = "lower" if lower else "higher" if higher else "not told apart"
    cell = Cell(ds[0], Column("accuracy"), sign="+")
    return f"{word} ({cell.value} {cell.interval})"


def settings(results: Results, command: str) -> list[str]:
    """How the records were made, the versions, and the commands that make all of it again."""
    found = []
    for path in filter(lambda path: sidecar(path).is_file(), results.records):
        meta = json.loads(read_text(sidecar(path)))
        flat = {"records": str(path), "model": meta.get("model")} | (meta.get("settings") or {})
        flat |= {f"{name} version": text for name, text in (meta.get("versions") or {}).items()}
        found.append({k: v if isinstance(v, str) else json.dumps(v) for k, v in flat.items()})
    keys = list(dict.fromkeys(key for flat in found for key in flat))
    same = [key for key in keys if len({flat.get(key) for flat in found}) == 1]
    parts = ["<h2>Settings</h2>"]
    if found:
        parts.append(plain_table([{"setting": k, "of every run": found[0][k]} for k in same]))
        other = [{key: flat.get(key) for key in keys if key not in same} for flat in found]
        parts.append(f"<details><summary>by record file</summary>{plain_table(other)}</details>")
    if bare := len(results.records) - len(found):
        parts.append(f"<p>{counted(bare, 'record file')} without a sidecar that says how.</p>")
    parts.append(f"<h2>Commands</h2><pre>{escape(command)}</pre>")
    scores = "\n".join(score_command(flat) for flat in found if "task" in flat)
    return [*parts, f"<details><summary>scoring</summary><pre>{escape(scores)}</pre></details>"]


def score_command(flat: dict) -> str:
    """The command that scores these records anew."""
    words = ["python", "-m", "calibeval", "score", "--model", flat["model"]]
    for key in OPTIONS:
        if (value := flat.get(key, "null")) != "null":
            value = ",".join(json.loads(value)) if key == "subjects" else value
            words += [f"--{key.replace('_', '-')}", value]
    words += ["--chat-template"] if flat.get("chat_template") == "true" else []
    return shlex.join([*words, "--out", flat["records"]])
