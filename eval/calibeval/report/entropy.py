"""Tables and figure of entropy records: EntCE by setting, over seeds, against log loss."""

import csv
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tabulate import tabulate

from calibeval import records
from calibeval.entropy import CURVES, ENTCE, SETTING, curve, order, read, summaries, zero
from calibeval.io import atomic_write
from calibeval.report.figures import SHADES, STYLE, save


def collect(entries: Sequence[dict], csv_file: Path | None = None) -> str:
    """Two Markdown tables, by setting and of the temperature where EntCE is 0, seeds together.

    An entry has "records", "run", "seed" and what else tells models apart. Three seeds or more: the
    mean ± half of its 95 % t interval; else the values, one with its documents' interval if there
    is one. `csv_file` gets a line a run and setting, beside what `draw` makes.
    """
    rows, recommended = [], []
    for entry in entries:
        about = {k: v for k, v in entry.items() if k not in ("records", "dataset")}
        found = summaries(entry["records"])
        rows += [about | of for of in found]
        recommended.append(about | zero(found))
    if csv_file:
        with atomic_write(csv_file) as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(k for row in rows for k in row)))
            writer.writeheader()
            writer.writerows(rows)
        draw(entries, csv_file.with_suffix(""))
    about = {k for entry in entries for k in entry} | {*SETTING}
    tables = (over_seeds(of, about) for of in (rows, recommended))
    options = {"headers": "keys", "tablefmt": "github", "stralign": "right"}
    return "\n".join(f"{tabulate(of, disable_numparse=True, **options)}\n" for of in tables)


def draw(entries: Sequence[dict], stem: Path) -> None:
    """EntCE against log loss, a point a temperature; and by position at the highest temperature.

    Without truncation, means over runs of one β; by position nats a document, a point a sixteenth.
    """
    import matplotlib
    from matplotlib.figure import Figure

    models = {entry.get("model") for entry in entries}
    groups: dict[str, list[tuple[Path, list[dict]]]] = {}
    for entry in sorted(entries, key=lambda entry: entry.get("label_smoothing") or -1):
        about = {"learning_rate": "lr ", "label_smoothing": "β = "}
        name = [f"{said}{entry[k]:g}" for k, said in about.items() if entry.get(k) is not None]
        name = [str(entry.get("model"))] * (len(models) > 1 or not name) + name
        found = [s for s in summaries(entry["records"]) if s["top_p"] == 1 and s["min_p"] == 0]
        if found:
            groups.setdefault(", ".join(name), []).append((entry["records"], found))
    with matplotlib.rc_context(STYLE):
        page = Figure(figsize=(6.9, 2.6), layout="constrained")
        trade, along = page.subplots(1, 2)
        shades = matplotlib.colormaps["viridis"](np.linspace(*SHADES, len(groups)))
        for (name, runs), colour in zip(groups.items(), shades, strict=True):
            by: dict[float, list[dict]] = {}
            for s in itertools.chain(*(found for _, found in runs)):
                by.setdefault(s["temperature"], []).append(s)
            x, y = (
                [np.mean([s[k] for s in of]) for of in by.values()] for k in ("log loss", ENTCE)
            )
            trade.plot(x, y, "o-", color=colour, label=name)
            for temperature, *at in zip(by, x, y, strict=True):
                trade.annotate(f"{temperature:g}", at, (3, 3), textcoords="offset points", size=6)
            gaps = np.mean([positions(path, of[0]["temperature"]) for path, of in runs], axis=0)
            parts = np.array_split(np.arange(1, len(gaps) + 1), min(16, len(gaps)))
            along.plot([p.mean() for p in parts], [gaps[p - 1].mean() for p in parts], color=colour)
        for axis in (trade, along):
            axis.axhline(0, color="#888888", lw=0.6)
        trade.set(xlabel="log loss, nats a token", ylabel=ENTCE)
        along.set(xlabel="position", ylabel="EntCE, nats a document")
        if groups:
            page.legend(loc="outside lower center", ncols=min(len(groups), 5))
        save(page, stem)


def positions(path: Path, temperature: float) -> np.ndarray:
    """Mean over documents of EntCE (T,) at each position, of samples that nothing truncates."""
    rows = [row for row in read(path) if order(row) == (-temperature, -1, 0)]
    most = records.meta(path)["settings"]["max_new_tokens"]
    return np.mean(curve(rows, "entropies", most) - curve(rows, CURVES[0], most), axis=0)


def over_seeds(rows: Sequence[dict], about: set[str]) -> list[dict[str, str]]:
    """Rows alike in all of `about` but run and seed as one, as text; what never varies is left out,
    but for model, β and temperature."""
    values = {k: {row[k] for row in rows if row.get(k) is not None} for k in about}
    kept = {"model", "label_smoothing", "temperature"}
    names = {k for k in about - {"run", "seed"} if k in kept or len(values[k]) > 1}
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple((k, row[k]) for k in row if k in names), []).append(row)
    said = []
    for key, group in groups.items():
        line = {
            k: "" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for k, v in key
        }
        line |= {"seeds": str(len(group))} if "seed" in group[0] else {}
        ends = (" low", " high")
        figures = [k for k in group[0] if k not in about and not k.endswith(ends)]
        said.append(line | {k: figure(group, k) for k in figures})
    return said


def figure(rows: Sequence[dict], name: str) -> str:
    """A figure over seeds."""
    values = [row[name] for row in rows]
    if None in values:
        return "–"
    if math.inf in values:
        return "inf"
    if (n := len(values)) >= 3:
        from scipy.special import stdtrit  # for which every command would wait

        half = stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n)
        return f"{np.mean(values):.3f} ± {half:.3f}"
    low, high = (rows[0].get(f"{name} {end}") for end in ("low", "high"))
    if n == 1 and low != high:  # alike of one document, whose resamples are all itself
        return f"{values[0]:+.3f} [{low:+.3f}, {high:+.3f}]"
    return ", ".join(f"{v:.3f}" for v in values)
