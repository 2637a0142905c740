"""The sweep's table with the oracle beside it, and in words what the figures say."""

import csv
import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from sweeps.demo.posthoc import BETAS, FITS, calibrate
from sweeps.errors import SweepError
from sweeps.files import make_folder, read_rows, write_text

NAMES = {"choices": "among the choices", "vocabulary": "among all tokens"}


class Figure(NamedTuple):
    """A mean and the half-width of its 95 % interval."""

    value: float
    half: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ±{self.half:.3f}"

    def minus(self, other: "Figure") -> "Figure":
        """The difference; both answer the same questions, so this interval is rather too wide."""
        return Figure(self.value - other.value, math.hypot(self.half, other.half))


def report(root: Path) -> str:
    """Write `root`/report/ (table, diagrams, summary.md) once; returns the summary."""
    out = root / "report"
    if not (out / "DONE").exists():
        make_folder(out)
        sweep = root / "sweeps" / "demo"
        entries = read_rows(sweep / "index.jsonl")
        fitted = calibrate(entries, sweep, root / "world" / "mmlu", root / "posthoc")
        for entry in entries:
            entry["records"] = os.path.relpath(sweep / entry["records"], out)
        for entry in fitted:
            entry["records"] = os.path.relpath(entry["records"], out)
        oracle = {"dataset": "mmlu", "model": "oracle", "label_smoothing": None}
        oracle["records"] = os.path.relpath(root / "world" / "oracle.jsonl", out)
        index = "".join(json.dumps(entry) + "\n" for entry in [*entries, *fitted, oracle])
        write_text(out / "index.jsonl", index)
        collect(out)
        table = (out / "table.md").read_text(encoding="utf-8")
        text = f"{table}\n{summary(read_table(out / 'table.csv'))}\n\n{made_with()}\n"
        write_text(out / "summary.md", text)
        write_text(out / "DONE", "")
    pictures = sorted(path.name for path in out.glob("*.png"))
    return (out / "summary.md").read_text(encoding="utf-8") + f"\n{out}: {', '.join(pictures)}"


def collect(out: Path) -> None:
    """Let calibeval make the tables and diagrams."""
    command = [sys.executable, "-m", "calibeval", "collect", str(out / "index.jsonl")]
    done = subprocess.run(
        [*command, "--out", str(out)], text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise SweepError(done.stderr.strip().removeprefix("error: "))


def read_table(path: Path) -> dict[tuple[str, float | None, str], dict[str, str]]:
    """The rows of calibeval's table by model, β and calibrator ("" for none)."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {
        (
            row["model"],
            float(row["label_smoothing"]) if row["label_smoothing"] else None,
            row["calibrator"],
        ): row
        for row in rows
    }


def figure(row: dict[str, str], name: str) -> Figure:
    """A metric of a row with its interval."""
    return Figure(float(row[name]), float(row[f"{name}_half_width_95"]))


def summary(table: dict[tuple[str, float | None, str], dict[str, str]]) -> str:
    """What the figures say, in both confidences.

    Base against β = 0, β = 0 against each β, and at each of BETAS, ATS against temperature scaling.
    """
    base, plain = table["demo", None, ""], table["demo", 0.0, ""]
    smoothed = {
        beta: row for (m, beta, fit), row in table.items() if m == "demo" and beta and not fit
    }
    lines = []
    for kind, name in NAMES.items():
        metric = f"ece_{kind}"
        before, after = figure(base, metric), figure(plain, metric)
        parts = [f"ECE {name}: {before} before fine-tuning, {after} at β = 0"]
        parts[0] += f" ({change(after.minus(before))})"
        for beta, row in smoothed.items():
            parts.append(f"β = {beta:g} {against(figure(row, metric), after, 'β = 0')}")
        lines.append("; ".join(parts) + ".")
    accuracy = [f"{figure(base, 'accuracy_choices')} before, "]
    accuracy += [f"{figure(plain, 'accuracy_choices')} at β = 0"]
    accuracy += [f", {figure(r, 'accuracy_choices')} at {b:g}" for b, r in smoothed.items()]
    lines.append(f"Accuracy: {''.join(accuracy)}.")
    for beta in BETAS:
        one, adaptive = (figure(table["demo", beta, fit], "ece_choices") for fit in FITS)
        lines.append(
            f"At β = {beta:g}, calibrated after training: ECE among the choices {one} with "
            f"temperature scaling; ATS {against(adaptive, one, 'that')}."
        )
    oracle = table["oracle", None, ""]
    lines.append(
        f"The oracle, who is calibrated, reads ECE {figure(oracle, 'ece_choices')} and accuracy "
        f"{figure(oracle, 'accuracy_choices')} on these {base['questions']} questions."
    )
    return "\n".join(lines)


def against(found: Figure, reference: Figure, name: str) -> str:
    """A figure as a share of another, with the difference."""
    share = 1 - found.value / reference.value
    direction = "less" if share >= 0 else "more"
    return f"{found}, {abs(share):.0%} {direction} than {name} ({change(found.minus(reference))})"


def change(difference: Figure) -> str:
    """A difference in words: a direction only where the interval leaves out zero."""
    if abs(difference.value) <= difference.half:
        return f"{difference.value:+.3f} ±{difference.half:.3f}: not told from no change"
    direction = "worse" if difference.value > 0 else "better"
    return f"{difference.value:+.3f} ±{difference.half:.3f}: {direction}"


def made_with() -> str:
    """The command and the versions behind the figures."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"`make demo`, CPU, Python {sys.version.split()[0]}, {packages}."
