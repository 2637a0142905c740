"""Command line: `calibeval COMMAND …`; `--help` lists the commands.

To add a command, write a function that adds its options and one that runs it, and list both in
`COMMANDS`. A command imports what it needs itself: NumPy and the model libraries take seconds.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ValidationError

import calibeval
from calibeval.ask.request import DEFAULT_COLUMNS, Request, Task
from calibeval.io import CONTINUES, CommandLine, InputError, counted, finish, hanging, show
from calibeval.validation import Problem, ProblemKind, problems, raise_of_other_file

if TYPE_CHECKING:
    from calibeval.measures import Evaluation, SubjectSummary

RECORDS = "RECORDS.jsonl"
TASK_FIELDS = [name for name in Task.model_fields if name != "name"]
ENGINE_FIELDS = [name for name in Request.model_fields if name != "tasks"]


def main(argv: list[str] | None = None) -> int:
    """Run a command; bad input prints `error: …` and gives exit status 2."""
    arguments = parser().parse_args(argv)
    # Record files are read by a thread each, so linear algebra needs no threads of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if_stopped = CONTINUES if arguments.continues else "stopped"
    return finish(lambda: arguments.run(arguments), if_stopped)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = CommandLine(
        prog="calibeval",
        description=calibeval.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        description = inspect.cleandoc(command.run.__doc__ or "")
        grammar = commands.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command.takes_normalise:
            add_normalise(grammar)
        grammar.add_argument("--json", action="store_true", help="what came out as JSON")
        grammar.set_defaults(run=command.run, continues=command.continues)
        command.add_options(grammar)
    return top


def add_fields(
    grammar: argparse.ArgumentParser, model: type[BaseModel], names: Iterable[str]
) -> None:
    """Add an option for each of a model's fields, which documents it and checks its value."""
    for name in names:
        field = model.model_fields[name]
        grammar.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            required=field.is_required() and name != "data",  # which a task's file may say
            metavar="VALUE",
            help=field.description,
        )


def add_normalise(grammar: argparse.ArgumentParser) -> None:
    """Add the option by what texts' log-probabilities are compared."""
    grammar.add_argument(
        "--normalise",
        choices=("sum", "bytes", "characters", "tokens", "p_true", "agreement"),
        help="texts' scores, or the confidence of written answers; default: the records' "
        "convention",
    )


def add_cluster(grammar: argparse.ArgumentParser) -> None:
    """Add the option by what questions are resampled."""
    grammar.add_argument(
        "--cluster",
        choices=("subject",),
        help="resample whole subjects (ten or more): intervals for subjects like these; "
        "default: single questions, for these subjects",
    )


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on a line."""
    show(json.dumps(value, default=lambda result: result.as_dict(), ensure_ascii=False))


# --- score ---


def add_score_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("--model", required=True, help="model folder or hub name")
    add_fields(grammar, Task, TASK_FIELDS)
    add_fields(grammar, Request, ENGINE_FIELDS)
    grammar.add_argument("--out", required=True, type=Path, metavar=RECORDS)


def run_score(arguments: argparse.Namespace) -> None:
    """Score a model on a task and write records."""
    out: Path = arguments.out
    if out.suffix != ".jsonl" or out.is_dir():
        raise InputError(f"--out {out}: expected a file's name such as {RECORDS}")
    score_model(arguments, arguments.model, out)
    if arguments.json:
        from calibeval import measures

        print_json(summary_of(measures.load(out)))


def score_model(arguments: argparse.Namespace, model: str, out: Path) -> None:
    """Score a model on the task that the options name; its records go to the file `out`."""
    request = request_from(arguments, out.stem)
    calibeval.score(
        model, tasks=request.tasks, out=out.parent, **request.model_dump(exclude={"tasks"})
    )


def request_from(arguments: argparse.Namespace, name: str) -> Request:
    """The options as a `Request` of one task, whose records have this name."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    task = {name: given[name] for name in TASK_FIELDS if name in given}
    task["name"] = name
    if arguments.subjects:
        task["subjects"] = arguments.subjects.split(",")
    values = {name: given[name] for name in ENGINE_FIELDS if name in given}
    values["tasks"] = [task]
    try:
        return Request.model_validate(values, strict=False)
    except ValidationError as error:
        raise_of_other_file(error)
        raise InputError(_described_option(problems(error)[0], arguments.task)) from error


def _described_option(problem: Problem, task: str) -> str:
    """What is wrong with an option, as it is typed."""
    path = problem.path[2:] if problem.path[:2] == ("tasks", "0") else problem.path
    if not path:  # a rule of several options, whose message begins with the name of one
        name, _, rule = problem.message.partition(": ")
        if name in (*TASK_FIELDS, *ENGINE_FIELDS):
            return f"--{name.replace('_', '-')}: {rule}"
        return f"--task {task}: {problem.message}"
    option = f"--{path[0].replace('_', '-')}"
    if problem.kind is ProblemKind.MISSING:
        return f"--task {task}: give {option} as well; neither it nor a task file names the data"
    return f"{option} {problem.value}: {problem.message}"


# --- import ---


def add_import_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="lm-evaluation-harness's samples_<task>_<time>.jsonl, Inspect's logs (.json), "
        "lighteval's details_<task>_<time>.parquet",
    )
    grammar.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR|FILE.jsonl",
        help="DIR: a file a data set",
    )
    grammar.add_argument(
        "--epoch", type=int, metavar="N", help="of Inspect's logs of several: the one to read"
    )


def run_import(arguments: argparse.Namespace) -> None:
    """Turn logs of lm-evaluation-harness, Inspect or lighteval into records."""
    from calibeval import imports

    questions_of_file = imports.convert(arguments.files, arguments.out, arguments.epoch)
    if arguments.json:
        print_json(questions_of_file)


# --- metrics ---


def add_metrics_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("records", nargs="+", type=Path, metavar=RECORDS)
    grammar.add_argument(
        "--metrics", nargs="+", metavar="NAME", help="these alone, which takes less time"
    )
    grammar.add_argument(
        "--subjects", action="store_true", help="each subject's figures too, and their means"
    )
    add_cluster(grammar)


def run_metrics(arguments: argparse.Namespace) -> None:
    """Recompute metrics from records."""
    from calibeval import measures, records
    from calibeval.measures import stats

    for path in arguments.records:
        has_curves = arguments.json and not arguments.metrics
        parts = measures.PARTS if has_curves else measures.SUMMARY_PARTS
        evaluation = measures.load(
            path, arguments.normalise, arguments.cluster, parts, arguments.metrics
        )
        summary = summary_of(evaluation)
        records.warn_of_ties(path, summary["tied"], summary["questions"])
        if arguments.subjects:
            summary["by_subject"] = measures.summarize_subjects(path, arguments.normalise)
        if arguments.json:
            print_json(summary)
        else:
            print_metrics(path, summary)
            left_out = stats.left_out_bins(evaluation)
            if left_out is not None and "rms_debiased" in evaluation.metrics:
                show(left_out)


def summary_of(evaluation: "Evaluation") -> dict[str, Any]:
    """A record file's metrics in each confidence, and what its reliability diagrams show."""
    from calibeval import measures
    from calibeval.measures import stats

    return {
        "records": str(evaluation.path),
        "normalise": evaluation.normalise,
        "intervals": stats.coverage_of([evaluation]),
        "metrics": measures.summarize(evaluation),
        "model": evaluation.model,
        "scoring": evaluation.scoring,
        "cluster": evaluation.cluster,
        "questions": evaluation.questions,
        "tied": evaluation.tied,
        "letter_mass": evaluation.letter_mass,
        "bins_of_one": evaluation.bins_of_one,
        "reliability": evaluation.reliability,
    }


def print_metrics(path: Path, summary: dict[str, Any]) -> None:
    """Print a record file's metrics as a table."""
    import pandas as pd

    if summary["scoring"] == "generate":
        asked = f"written answers, confidence by {summary['normalise']}"
    elif summary["scoring"] == "continuation":
        asked = f"log-probability by {summary['normalise']}"
    elif summary["letter_mass"] is None:
        asked = "letters, whose mass among all tokens is not known"
    else:
        asked = f"letter mass {summary['letter_mass']:.3f}"
    show(hanging(f"{path}: {counted(summary['questions'], 'question')}, {asked}"))
    headings = {"choices": "among the choices", "vocabulary": "among all tokens"}
    if summary["scoring"] == "generate":
        headings["choices"] = "the answers"
    table = pd.DataFrame(summary["metrics"]).map(str)
    show(table.rename(columns=headings).to_string())
    print(f"[low, high]: 95 % intervals {summary['intervals']}")
    if summary["cluster"] is not None:
        print("floor and p: of answers simulated question by question, without --cluster")
    if "by_subject" in summary:
        print_subjects(summary["by_subject"])


def print_subjects(by_subject: "SubjectSummary") -> None:
    """Print a line a subject, and their means."""
    import pandas as pd

    table = pd.DataFrame(by_subject["subjects"]).T
    questions = table.pop("questions").astype(int).astype(str)
    table.loc["mean of subjects"] = by_subject["macro"]
    table = table.map("{:.4f}".format)
    table.insert(0, "questions", questions)
    show(table.fillna("").rename_axis(columns="among the choices").to_string())


# --- compare ---


def add_compare_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("a", type=Path, metavar="A.jsonl")
    grammar.add_argument("b", type=Path, metavar="B.jsonl")
    grammar.add_argument(
        "--different-prompts",
        action="store_true",
        help="the questions were asked in other words, which is meant",
    )
    grammar.add_argument(
        "--common", action="store_true", help="compare the questions that both files have"
    )
    add_cluster(grammar)


def run_compare(arguments: argparse.Namespace) -> None:
    """Say whether model B is better than model A, and by how much."""
    from calibeval import measures, records
    from calibeval.measures import stats

    if arguments.common:
        evaluation_a, evaluation_b = (
            measures.measure(common, arguments.cluster, parts=["draws"])
            for common in records.common(arguments.a, arguments.b, arguments.normalise)
        )
    else:
        evaluation_a, evaluation_b = (
            measures.load(path, arguments.normalise, arguments.cluster, ["draws"])
            for path in (arguments.a, arguments.b)
        )
    for evaluation in (evaluation_a, evaluation_b):
        records.warn_of_ties(evaluation.path, evaluation.tied, evaluation.questions)
    comparisons = measures.compare(evaluation_a, evaluation_b, arguments.different_prompts)
    if arguments.json:
        print_json({"a": str(arguments.a), "b": str(arguments.b), "comparison": comparisons})
        return
    show(hanging(f"A {arguments.a}"))
    show(hanging(f"B {arguments.b}"))
    print("Which is better calibrated as a whole: read nll and brier first.")
    for confidence, comparison_of_metric in comparisons.items():
        print_comparisons(confidence, comparison_of_metric)
    by_square = ", ".join(measures.COMPARED_BY_SQUARE)
    print(f"difference: b − a; of {by_square} T_b − T_a, the squares before they are cut at 0")
    for name, evaluation in (("A", evaluation_a), ("B", evaluation_b)):
        left_out = stats.left_out_bins(evaluation)
        if left_out is not None:
            show(f"{name}: {left_out}")
    print(f"low, high: 95 % intervals {stats.coverage_of([evaluation_a])}, where known to cover")
    differing = stats.differing_answers(evaluation_a, evaluation_b)
    if differing < stats.ENOUGH_ANSWERS and evaluation_a.cluster is None:
        print(
            f"{differing} of {evaluation_a.questions:,} answers are right in one of the two alone: "
            "accuracy and ece_signed have Bonett and Price's interval, and a difference that fewer "
            f"than {stats.FEWEST_OF_DIFFERENCE} questions make up has none"
        )
    made = [one for by_metric in comparisons.values() for one in by_metric.values()]
    count = sum(one["p"] is not None for one in made)
    print(
        f"p: of no difference, by itself; better: what survives Holm's correction of all {count} "
        "comparisons here (5 % for one false finding or more)"
    )


def print_comparisons(confidence: str, comparison_of_metric: dict[str, Any]) -> None:
    """Print a line a metric; what is not known is a dash."""
    import pandas as pd

    def cell(value: str | float) -> str:
        return value if isinstance(value, str) else f"{value:.4f}"

    table = pd.DataFrame(comparison_of_metric).T.rename_axis(columns=confidence)
    table = table.map(cell, na_action="ignore").fillna("–")
    table["p"] = table["p"].replace("0.0000", "<0.0001")
    show(table.to_string())


# --- check ---


def add_check_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument(
        "base", metavar="BASE", help="the model before fine-tuning, or its RECORDS.jsonl"
    )
    grammar.add_argument(
        "tuned", metavar="TUNED", help="the model after fine-tuning, or its RECORDS.jsonl"
    )
    grammar.add_argument("--task", metavar="VALUE", help="to score models: as of `score`")
    grammar.add_argument("--data", metavar="VALUE", help="to score models: as of `score`")
    add_fields(grammar, Task, [name for name in TASK_FIELDS if name not in ("task", "data")])
    add_fields(grammar, Request, ENGINE_FIELDS)
    grammar.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="to score models: the folder of their records, which another check uses again",
    )
    grammar.add_argument(
        "--figure", type=Path, metavar="FILE.png", help="draw reliability diagrams of both models"
    )


def run_check(arguments: argparse.Namespace) -> None:
    """Say how a model errs before and after fine-tuning, and what to do.

    Of two record files of the same questions, 40 or more:

        calibeval check base.jsonl tuned.jsonl --figure check.png

    Of two models, which are scored first; the options from --task to --gpu-memory-utilization are
    those of `calibeval score` and say how:

        calibeval check BASE TUNED --task mmlu --data DATA --out check
    """
    from calibeval.report import diagnosis

    if arguments.figure is not None and arguments.figure.suffix != ".png":
        raise InputError(f"--figure {arguments.figure}: expected a file's name such as check.png")
    base = records_for_check(arguments, arguments.base, "base")
    tuned = records_for_check(arguments, arguments.tuned, "tuned")
    found = diagnosis.check(base, tuned, arguments.figure)
    if arguments.json:
        print_json(found.as_dict())
        return
    for sentence in found.sentences:
        show(sentence)
    if arguments.figure is not None:
        show(f"Drawn: {arguments.figure}")


def records_for_check(arguments: argparse.Namespace, model: str, name: str) -> Path:
    """The records of a model, which is scored unless its records are given."""
    if model.endswith(".jsonl"):
        return Path(model)
    if arguments.task is None or arguments.out is None:
        raise InputError(
            f"{model}: a model to be scored needs --task, --data and --out; or give its records"
        )
    out: Path = arguments.out / f"{name}.jsonl"
    score_model(arguments, model, out)
    return out


# --- temperature ---


def add_temperature_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("validation", type=Path, metavar="VALIDATION.jsonl", help="to fit it on")
    grammar.add_argument(
        "test", type=Path, metavar="TEST.jsonl", help="of the same model, on other questions"
    )
    grammar.add_argument("--out", required=True, type=Path, metavar=RECORDS, help="TEST's at it")
    add_normalise(grammar)


def run_temperature(arguments: argparse.Namespace) -> None:
    """Fit a temperature to some records, and apply it to others."""
    fit = calibeval.temperature(
        arguments.validation, arguments.test, arguments.out, normalise=arguments.normalise
    )
    text = json.dumps(fit)
    show(text if arguments.json else f"{arguments.out}: {text}")


# --- temperature-head ---


def add_temperature_head_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("--model", required=True, help="model folder or hub name")
    grammar.add_argument(
        "--data", required=True, type=Path, metavar="ALPACA.json", help="whose responses it reads"
    )
    grammar.add_argument("--out", required=True, type=Path, metavar="HEAD.pt")
    grammar.add_argument("--head", choices=("transformer", "linear"), default="transformer")
    grammar.add_argument(
        "--alpha", type=float, default=0.5, help="weight of tokens that the model has wrong"
    )
    grammar.add_argument("--seed", type=int, default=0)


def run_temperature_head(arguments: argparse.Namespace) -> None:
    """Train what gives each token a temperature, for `score --temperature-head`."""
    from calibeval.ask import adaptive

    adaptive.train(
        arguments.model,
        arguments.data,
        arguments.out,
        kind=arguments.head,
        alpha=arguments.alpha,
        seed=arguments.seed,
    )
    show(f"{arguments.out}: a head for {arguments.model}", to_stderr=arguments.json)


# --- conformal ---


def add_conformal_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("records", nargs="+", type=Path, metavar=RECORDS)
    grammar.add_argument(
        "--alpha", type=float, default=0.1, help="share of sets that may miss the answer"
    )
    grammar.add_argument("--score", choices=("lac", "aps"), default="lac")


def run_conformal(arguments: argparse.Namespace) -> None:
    """Say how often prediction sets hold the answer, and how large they are."""
    from calibeval import records
    from calibeval.measures import conformal

    alpha: float = arguments.alpha
    score: str = arguments.score
    for path in arguments.records:
        scored = records.read(path)
        sets = conformal.evaluate(scored, alpha=alpha, score=score)
        if arguments.json:
            print_json({"records": str(path), "alpha": alpha, "score": score, "sets": sets})
            continue
        line = (
            f"{path}: {counted(len(scored), 'question')}, {score} sets at 1 − α = {1 - alpha:g}, "
            f"random halves calibrate: coverage {sets.coverage:.3f} ± {sets.coverage_sd:.3f}, "
            f"mean size {sets.size:.3f} ± {sets.size_sd:.3f}, {sets.questions} tested"
        )
        show(hanging(line))


# --- collect ---


def add_collect_options(grammar: argparse.ArgumentParser) -> None:
    grammar.add_argument("index", type=Path, metavar="INDEX.jsonl")
    grammar.add_argument("--out", required=True, type=Path, metavar="DIR")
    grammar.add_argument(
        "--columns",
        default=DEFAULT_COLUMNS,
        help="METRIC or METRIC@vocabulary; %(default)s",
    )
    grammar.add_argument("--title", default="Calibration", help="of the HTML report")
    add_cluster(grammar)


def run_collect(arguments: argparse.Namespace) -> None:
    """Make tables, figures and a report from an index of record files."""
    from calibeval import report
    from calibeval.report import index

    columns = report.read_columns(arguments.columns)
    results = index.read(arguments.index, arguments.cluster)
    tables = report.write(results, arguments.out, columns, arguments.title)
    if arguments.json:
        show(report.tidy(results).to_json(orient="records", lines=True), end="")
    else:
        show(tables, end="")


class Command(NamedTuple):
    """A command's functions; its help is `run`'s docstring, in the list the first line of that."""

    run: Callable[[argparse.Namespace], None]
    add_options: Callable[[argparse.ArgumentParser], None]
    takes_normalise: bool = False
    continues: bool = False  # whether the same command goes on where it was stopped


COMMANDS = {
    "score": Command(run_score, add_score_options, continues=True),
    "import": Command(run_import, add_import_options),
    "metrics": Command(run_metrics, add_metrics_options, takes_normalise=True),
    "compare": Command(run_compare, add_compare_options, takes_normalise=True),
    "check": Command(run_check, add_check_options, continues=True),
    "temperature": Command(run_temperature, add_temperature_options),
    "temperature-head": Command(run_temperature_head, add_temperature_head_options),
    "conformal": Command(run_conformal, add_conformal_options),
    "collect": Command(run_collect, add_collect_options),
}

if __name__ == "__main__":
    sys.exit(main())
