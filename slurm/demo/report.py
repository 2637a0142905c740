"""The sweep's table with the oracle beside it, and in words what the figures say."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path

import calibeval.report
from calibeval.report.figures import AMONG
from calibeval.report.index import Results, Row, read
from calibeval.report.tables import Column, difference, told_apart
from demo.posthoc import FITS, calibrate
from sweeps.files import make_folder, read_rows, write_text

BETAS = (0.0, 0.1)  # whose runs are also calibrated after training
# AUROC and the size of prediction sets beside ECE: a model equally unsure of all is no use. EntCE:
# what smoothing does to the model's own text.
COLUMNS = "accuracy,ece,auroc,set_size,ece@vocabulary,entce"


def report(root: Path) -> str:
    """Write `root`/report/ (table, diagrams, summary.md) once; returns the summary."""
    out = root / "report"
    if not (out / "DONE").exists():
        make_folder(out)
        sweep = root / "sweeps" / "demo"
        entries = read_rows(sweep / "index.jsonl")
        chosen = [entry for entry in entries if entry["label_smoothing"] in BETAS]
        fitted = calibrate(chosen, sweep, root / "world" / "mmlu", root / "posthoc")
        for entry in entries:
            for key in ("records", "entropy"):
                entry[key] = os.path.relpath(sweep / entry[key], out)
        for entry in fitted:
            entry["records"] = os.path.relpath(entry["records"], out)
        oracle = {"dataset": "mmlu", "model": "oracle", "label_smoothing": None}
        oracle["records"] = os.path.relpath(root / "world" / "oracle.jsonl", out)
        lines = "".join(json.dumps(entry) + "\n" for entry in [*entries, *fitted, oracle])
        write_text(out / "index.jsonl", lines)
        table = calibeval.report.collect(out / "index.jsonl", out, COLUMNS, "Demo")
        text = f"{table}\n{summary(read(out / 'index.jsonl'))}\n\n`make demo`, CPU, "
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
        text += f"Python {sys.version.split()[0]}, {packages}.\n"
        write_text(out / "summary.md", text)
        write_text(out / "DONE", "")
    pictures = sorted(path.name for path in out.glob("*.png"))
    return (out / "summary.md").read_text(encoding="utf-8") + f"\n{out}: {', '.join(pictures)}"


def summary(results: Results) -> str:
    """What the figures say, in both confidences, from paired differences.

    Base against β = 0, β = 0 against each β, and at each of BETAS, ATS against temperature scaling.
    """
    rows = {(r.keys["model"], r.beta, r.keys.get("calibrator")): r for r in results.rows}
    base, plain, oracle = (rows[k] for k in (("demo", None, None), ("demo", 0, None),
                                             ("oracle", None, None)))  # fmt: skip
    smoothed = [
        row for (model, beta, fit), row in rows.items() if model == "demo" and beta and not fit
    ]
    lines = []
    for confidence, among in AMONG.items():
        said = [f"ECE among {among}: {ece(base, confidence)} before fine-tuning"]
        said.append(f"{ece(plain, confidence)} at β = 0 ({change(base, plain, confidence)})")
        for row in smoothed:
            changed = change(plain, row, confidence)
            said.append(f"{ece(row, confidence)} at β = {row.beta:g} (against β = 0 {changed})")
        lines.append("; ".join(said) + ".")
    right = [f"{row.estimate('mmlu', 'accuracy', 'choices').value:.3f}" for row in (base, plain)]
    right[1] += " at β = 0"
    for row in smoothed:
        d = difference(plain, row, "mmlu", Column("accuracy"))
        right.append(f"{d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}] at β = {row.beta:g}")
    lines.append(f"Accuracy: {right[0]} before, {', '.join(right[1:])}.")
    for beta in BETAS:
        one, adaptive = (rows["demo", beta, fit] for fit in FITS)
        lines.append(
            f"At β = {beta:g}, calibrated after training: ECE among the choices {ece(one)} with "
            f"temperature scaling, {ece(adaptive)} with ATS ({change(one, adaptive)})."
        )
    lines.append(
        f"The oracle, who is calibrated, reads ECE {ece(oracle)} on these "
        f"{oracle.runs['mmlu'][0].questions} questions."
    )
    return "\n".join(f"- {line}" for line in lines)


def ece(row: Row, confidence: str = "choices") -> str:
    """An ECE as it is printed."""
    return f"{row.estimate('mmlu', 'ece', confidence).value:.3f}"


def change(a: Row, b: Row, confidence: str = "choices") -> str:
    """The squared calibration error of b less a's, a direction only where the interval allows."""
    d = difference(a, b, "mmlu", Column("rms_debiased", confidence))
    words = ("better", "worse")[d.value > 0] if told_apart(d) else "not told from no change"
    return f"squared error {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]: {words}"
