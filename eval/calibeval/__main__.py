"""Command line: `calibeval COMMAND`; `--help` lists the commands."""

import argparse
import sys
from pathlib import Path

import calibeval
from calibeval import commands
from calibeval.io import InputError


def main(argv: list[str] | None = None) -> int:
    """Run one command; bad input prints `error: …` and gives exit status 2."""
    arguments = parser().parse_args(argv)
    arguments.arguments = sys.argv[1:] if argv is None else argv
    try:
        arguments.run(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = argparse.ArgumentParser(prog="calibeval", description=calibeval.__doc__)
    subparsers = top.add_subparsers(required=True, metavar="COMMAND")

    p = subparsers.add_parser("prompts", help="print a task's prompts as JSON lines")
    add_task(p)
    add_scoring(p)
    p.set_defaults(run=commands.run_prompts)

    p = subparsers.add_parser("score", help="score a model on a task and write records")
    add_task(p)
    add_scoring(p)
    p.add_argument(
        "--unconditional",
        action="store_true",
        help="by continuation also score each choice without the question (PMI)",
    )
    add_model(p)
    p.add_argument("--out", required=True, type=Path, metavar="RECORDS.jsonl")
    p.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    p.add_argument(
        "--calibrator",
        type=Path,
        metavar="DIR",
        help="what fit-temperature or fit-ats made of this model; transformers only",
    )
    share = p.add_mutually_exclusive_group()
    share.add_argument(
        "--shard",
        type=share_of,
        default=(0, 1),
        metavar="I/N",
        help="score only the I-th of N parts, counted from 0; the last to finish merges",
    )
    share.add_argument(
        "--workers",
        type=positive,
        default=1,
        help="processes, each with a part and a GPU of its own",
    )
    p.add_argument("--overwrite", action="store_true", help="score anew whatever is there")
    p.set_defaults(run=commands.run_score)

    p = subparsers.add_parser("fit-temperature", help="fit one temperature to a model's answers")
    add_fit(p)
    p.set_defaults(run=commands.run_fit, head="constant", alpha=0.5)

    p = subparsers.add_parser("fit-ats", help="fit a head that predicts each answer's temperature")
    add_fit(p)
    p.add_argument("--head", choices=("linear", "mlp", "transformer"), default="linear")
    p.add_argument("--alpha", type=float, default=0.5, help="weight of wrong answers, 0 to 1")
    p.set_defaults(run=commands.run_fit)

    p = subparsers.add_parser("import-lm-eval", help="lm-evaluation-harness's samples to records")
    p.add_argument("samples", nargs="+", type=Path, metavar="samples_<task>_<time>.jsonl")
    p.add_argument(
        "--out", required=True, type=Path, metavar="DIR|FILE.jsonl", help="DIR: a file a data set"
    )
    p.set_defaults(run=commands.run_import)

    p = subparsers.add_parser("metrics", help="recompute every metric from records")
    p.add_argument("records", nargs="+", type=Path, metavar="RECORDS.jsonl")
    p.add_argument("--json", action="store_true", help="one JSON object a record file, with all")
    p.add_argument("--all", action="store_true", help="every metric, not only the usual ones")
    p.add_argument(
        "--by", choices=("subject", "category"), help="break down by subject or category"
    )
    add_normalise(p)
    p.set_defaults(run=commands.run_metrics)

    p = subparsers.add_parser("compare", help="is run B better than run A, and by how much")
    p.add_argument("a", type=Path, metavar="A.jsonl")
    p.add_argument("b", type=Path, metavar="B.jsonl")
    p.add_argument("--json", action="store_true")
    p.add_argument("--all", action="store_true", help="every metric, not only the usual ones")
    add_normalise(p)
    p.set_defaults(run=commands.run_compare)

    p = subparsers.add_parser(
        "conformal", help="prediction sets: do they hold the answer, how large"
    )
    p.add_argument("records", nargs="+", type=Path, metavar="RECORDS.jsonl")
    p.add_argument(
        "--calibrate", type=Path, metavar="OTHER.jsonl", help="default: random halves of each file"
    )
    p.add_argument(
        "--alpha", type=float, default=0.1, help="share of sets that may miss the answer"
    )
    p.add_argument("--score", choices=("lac", "aps", "raps"), default="lac")
    p.add_argument("--by", choices=("none", "category", "subject"), default="none")
    p.add_argument("--splits", type=positive, default=100)
    p.add_argument("--lambda", type=float, default=0.01, dest="penalty", help="raps only")
    p.add_argument("--k-reg", type=int, default=1, help="raps only: choices without penalty")
    p.set_defaults(run=commands.run_conformal)

    p = subparsers.add_parser("diagnose", help="can label smoothing help this model, and why")
    add_task(p)
    add_model(p)
    p.add_argument("--label-smoothing", type=fraction, default=0.1, metavar="β")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--out", type=Path, metavar="DIR", help="write diagnosis.json and the figure")
    p.set_defaults(run=commands.run_diagnose)

    p = subparsers.add_parser("collect", help="tables and diagrams from an index of record files")
    p.add_argument("index", type=Path, metavar="INDEX.jsonl")
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.add_argument(
        "--columns",
        default="accuracy,ece,rms",
        help="metrics of the printed table, METRIC or METRIC@vocabulary (default: %(default)s)",
    )
    p.add_argument("--title", default="Calibration", help="of the HTML report")
    p.add_argument(
        "--section",
        action="append",
        default=[],
        type=Path,
        metavar="FILE.html",
        help="a part of your own for the HTML report, after the figures; may be repeated",
    )
    p.set_defaults(run=commands.run_collect)
    return top


def add_normalise(p: argparse.ArgumentParser) -> None:
    """How scores of continuations become comparable."""
    p.add_argument(
        "--normalise",
        choices=("sum", "bytes", "characters", "unconditional"),
        help="scores of the choices' texts; default: the records' own convention",
    )


def add_task(p: argparse.ArgumentParser) -> None:
    """Options that choose questions and prompts; letters, unless `add_scoring` asks."""
    p.set_defaults(scoring="letters", unconditional=False)
    p.add_argument("--task", required=True, help="mmlu, hellaswag, arc_easy, arc_challenge, jsonl")
    p.add_argument("--data", required=True, help="the task's folder or file; mmlu: or hub:NAME")
    p.add_argument("--split", help="default: test; hellaswag: val")
    p.add_argument("--shots", type=int, help="default: 5; by continuation 0")
    p.add_argument("--examples", metavar="FILE", help="few-shot examples of jsonl, arc, hellaswag")
    p.add_argument("--subjects", type=names, help="comma-separated; default: all")
    p.add_argument("--limit", type=positive, help="only the first N questions of each subject")
    p.add_argument("--style", choices=("official", "lm-eval"), default="official")


def add_scoring(p: argparse.ArgumentParser) -> None:
    """What is scored: the choices' letters or their texts."""
    p.add_argument(
        "--scoring",
        choices=("letters", "continuation"),
        default=None,
        help="the choices' letters, or their texts after the question as lm-evaluation-harness "
        "scores them; default: mmlu and jsonl letters, hellaswag and arc continuation",
    )


def add_model(p: argparse.ArgumentParser) -> None:
    """Options that choose a model and how it is run."""
    p.add_argument("--chat-template", action="store_true", help="ask as a user's turn of a chat")
    p.add_argument("--model", required=True, help="model folder or hub name")
    p.add_argument("--revision", help="hub revision of the model")
    p.add_argument("--batch-size", type=positive, default=16, help="transformers only")
    p.add_argument("--device", default="auto", help="transformers only: auto, cpu, cuda or cuda:N")
    p.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto: the model's own on a GPU, float32 on a CPU",
    )
    p.add_argument("--max-length", type=positive, help="longest prompt; default: positions − 1")


def add_fit(p: argparse.ArgumentParser) -> None:
    """Options of the commands that fit a calibrator."""
    add_task(p)
    add_model(p)
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="the calibrator's folder")
    p.add_argument(
        "--over",
        choices=("choices", "vocabulary"),
        default="choices",
        help="fit the probabilities among the choices (default) or among all tokens",
    )


def fraction(text: str) -> float:
    """A number from 0 to 1, or argparse's error."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def share_of(text: str) -> tuple[int, int]:
    """I/N with 0 ≤ I < N, or argparse's error."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 ≤ I < N")
    return int(part), int(parts)


def positive(text: str) -> int:
    """An integer of at least 1, or argparse's error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
