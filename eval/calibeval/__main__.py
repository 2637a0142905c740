"""Command line: `calibeval COMMAND …`; `--help` lists the commands.

A command imports what it needs itself: NumPy and the model libraries take seconds to load.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import calibeval
from calibeval.io import InputError, counted, finish
from calibeval.request import Request, Task, checked


def main(argv: list[str] | None = None) -> int:
    """Run a command; bad input prints `error: …` and gives exit status 2."""
    a = parser().parse_args(argv)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a file has a thread already
    return finish(lambda: a.run(a))


def add_keys(add: Callable, model: type, keys: Iterable[str]) -> None:
    """An option for each key of a model, which checks the values and whose documentation helps."""
    for key in keys:
        field = model.model_fields[key]
        about = {"required": field.is_required(), "metavar": "VALUE", "help": field.description}
        add(f"--{key.replace('_', '-')}", dest=key, **about)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="calibeval", description=calibeval.__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, *shared, **defaults) -> Callable:
        p = commands.add_parser(name, help=run.__doc__, parents=shared)
        p.add_argument("--json", action="store_true", help="what came out as JSON")
        p.set_defaults(run=run, **defaults)
        return p.add_argument

    # What several commands have.
    normalise = argparse.ArgumentParser(add_help=False)
    help = "texts' scores; default: the records' convention"
    normalise.add_argument("--normalise", choices=("sum", "bytes", "characters"), help=help)

    add = command("score", run_score)
    add("--model", required=True, help="model folder or hub name")
    add_keys(add, Task, [key for key in Task.model_fields if key != "name"])
    add_keys(add, Request, ("engine", "dtype", "batch_size", "revision", "gpu_memory_utilization"))
    add("--out", required=True, type=Path, metavar="RECORDS.jsonl")

    add = command("import", run_import)
    help = "lm-evaluation-harness's samples_<task>_<time>.jsonl, Inspect's logs (.json)"
    add("files", nargs="+", type=Path, metavar="FILE", help=help)
    add("--out", required=True, type=Path, metavar="DIR|FILE.jsonl", help="DIR: a file a data set")

    add = command("metrics", run_metrics, normalise)
    add("records", nargs="+", type=Path, metavar="RECORDS.jsonl")

    add = command("compare", run_compare, normalise)
    add("a", type=Path, metavar="A.jsonl")
    add("b", type=Path, metavar="B.jsonl")
    help = "the questions were asked in other words, which is meant"
    add("--different-prompts", action="store_true", help=help)

    add = command("temperature", run_temperature)
    add("validation", type=Path, metavar="VALIDATION.jsonl", help="to fit it on")
    add("test", type=Path, metavar="TEST.jsonl", help="of the same model, on other questions")
    add("--out", required=True, type=Path, metavar="RECORDS.jsonl", help="TEST's at it")

    add = command("conformal", run_conformal)
    add("records", nargs="+", type=Path, metavar="RECORDS.jsonl")
    add("--alpha", type=float, default=0.1, help="share of sets that may miss the answer")
    add("--score", choices=("lac", "aps"), default="lac")

    add = command("collect", run_collect)
    add("index", type=Path, metavar="INDEX.jsonl")
    add("--out", required=True, type=Path, metavar="DIR")
    add("--columns", default="accuracy,ece,rms", help="METRIC or METRIC@vocabulary; %(default)s")
    add("--title", default="Calibration", help="of the HTML report")
    return top


def requested(a: argparse.Namespace) -> Request:
    """The options as a `Request` of one task."""
    given = {k: v for k, v in vars(a).items() if v is not None}
    task = {k: given[k] for k in Task.model_fields if k in given}
    if a.subjects:
        task["subjects"] = a.subjects.split(",")
    engine = {k: given[k] for k in Request.model_fields if k in given}
    return checked(Request, {"tasks": [task]} | engine, f"--task {a.task}", strict=False)


def run_score(a: argparse.Namespace) -> None:
    """Score a model on a task and write records."""
    if a.out.suffix != ".jsonl" or a.out.is_dir():
        raise InputError(f"--out {a.out}: expected a file's name such as RECORDS.jsonl")
    a.name = a.out.stem
    request = requested(a)
    how = request.model_dump(exclude={"tasks"})
    calibeval.score(a.model, tasks=request.tasks, out=a.out.parent, **how)
    if a.json:
        print_json(figures_of(a.out))


def run_import(a: argparse.Namespace) -> None:
    """Turn lm-evaluation-harness's samples or Inspect's logs into records."""
    from calibeval import imports

    made = imports.convert(a.files, a.out)
    if a.json:
        print_json(made)


def run_metrics(a: argparse.Namespace) -> None:
    """Recompute metrics from records."""
    import pandas as pd

    for path in a.records:
        found = figures_of(path, a.normalise)
        if a.json:
            print_json(found)
            continue
        mass, by = found["letter_mass"], found["normalise"]
        how = f"log-probability by {by}" if mass is None else f"letter mass {mass:.3f}"
        print(f"{path}: {counted(found['questions'], 'question')}, {how}")
        headings = {"choices": "among the choices", "vocabulary": "among all tokens"}
        print(pd.DataFrame(found["metrics"]).map(str).rename(columns=headings).to_string())


def figures_of(path: Path, normalise: str | None = None) -> dict:
    """A record file's metrics in each confidence, and what its reliability diagrams show."""
    from calibeval import api, stats

    run = stats.load(path, normalise)
    about = {k: getattr(run, k) for k in ("model", "questions", "letter_mass", "reliability")}
    return {"records": str(path), "normalise": run.convention, "metrics": api.metrics(run)} | about


def print_json(value: dict) -> None:
    """One JSON object on a line."""
    print(json.dumps(value, default=lambda figures: figures.as_dict(), ensure_ascii=False))


def run_compare(a: argparse.Namespace) -> None:
    """Say whether run B is better than run A, and by how much."""
    import pandas as pd

    from calibeval import api, stats

    runs = (stats.load(path, a.normalise) for path in (a.a, a.b))
    found = api.compare(*runs, a.different_prompts)
    if a.json:
        return print_json({"a": str(a.a), "b": str(a.b), "comparison": found})
    print(f"A {a.a}\nB {a.b}\nWhich is better calibrated as a whole: read nll and brier first.")
    for confidence, metrics in found.items():
        table = pd.DataFrame(metrics).T.rename_axis(columns=confidence)
        text = table.map(lambda x: x if isinstance(x, str) else f"{x:.4f}", na_action="ignore")
        print(text.fillna("–").to_string())
    print("difference: b − a, of rms_debiased b² − a²; low and high: 95 %, where known to cover")


def run_temperature(a: argparse.Namespace) -> None:
    """Fit a temperature to some records, and apply it to others."""
    found = calibeval.temperature(a.validation, a.test, a.out)
    print(json.dumps(found) if a.json else f"{a.out}: {json.dumps(found)}")


def run_conformal(a: argparse.Namespace) -> None:
    """Say how often prediction sets hold the answer, and how large they are."""
    from calibeval import conformal, records

    options = {"alpha": a.alpha, "score": a.score}
    for path in a.records:
        of = records.read(path)
        found = conformal.evaluate(of, **options)
        if a.json:
            print_json({"records": str(path)} | options | {"sets": found})
            continue
        print(
            f"{path}: {counted(len(of), 'question')}, {a.score} sets at 1 − α = {1 - a.alpha:g}, "
            f"random halves calibrate: coverage {found.coverage:.3f} ± {found.coverage_sd:.3f}, "
            f"mean size {found.size:.3f} ± {found.size_sd:.3f}, {found.questions} tested"
        )


def run_collect(a: argparse.Namespace) -> None:
    """Make tables, figures and a report from an index of record files."""
    from calibeval import index, report

    text = report.collect(a.index, a.out, a.columns, a.title)
    tidy = report.tidy(index.read(a.index)) if a.json else None
    print(text if tidy is None else tidy.to_json(orient="records", lines=True), end="")


if __name__ == "__main__":
    sys.exit(main())
