"""Command line: `python -m calibeval {prompts,score,metrics,collect}`."""

import argparse
import json
import sys
from pathlib import Path

import calibeval
from calibeval.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Run one command; bad input prints `error: …` and gives exit status 2."""
    arguments = parser().parse_args(argv)
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
    """The command line's grammar; heavy imports wait until a command needs them."""
    top = argparse.ArgumentParser(prog="python -m calibeval", description=calibeval.__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("prompts", help="print a task's prompts as JSON lines")
    add_task(p)
    p.set_defaults(run=run_prompts)

    p = commands.add_parser("score", help="score a model on a task and write records")
    add_task(p)
    p.add_argument("--model", required=True, help="model folder or hub name")
    p.add_argument("--revision", help="hub revision of the model")
    p.add_argument("--out", required=True, type=Path, metavar="RECORDS.jsonl")
    p.add_argument("--engine", choices=("transformers",), default="transformers")
    p.add_argument("--batch-size", type=positive, default=16)
    p.add_argument("--device", default="auto", help="auto, cpu or cuda")
    p.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="auto: the model's own on a GPU, float32 on a CPU",
    )
    p.add_argument(
        "--max-length", type=positive, help="context in tokens; default: the model's positions"
    )
    p.add_argument("--overwrite", action="store_true", help="replace an existing record file")
    p.set_defaults(run=run_score)

    p = commands.add_parser("metrics", help="recompute every metric from records")
    p.add_argument("records", nargs="+", type=Path, metavar="RECORDS.jsonl")
    p.add_argument("--json", action="store_true", help="one JSON object a record file")
    p.set_defaults(run=run_metrics)

    p = commands.add_parser("collect", help="tables and diagrams from an index of record files")
    p.add_argument("index", type=Path, metavar="INDEX.jsonl")
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.set_defaults(run=run_collect)
    return top


def add_task(p: argparse.ArgumentParser) -> None:
    """Options that choose questions and prompts."""
    p.add_argument("--task", required=True, help="mmlu")
    p.add_argument("--data", required=True, type=Path, help="the task's folder or file")
    p.add_argument("--split", default="test")
    p.add_argument("--shots", type=int, default=5)
    p.add_argument("--subjects", type=names, help="comma-separated; default: all")
    p.add_argument("--limit", type=positive, help="only the first N questions of each subject")


def positive(text: str) -> int:
    """An integer of at least 1, or argparse's error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def names(text: str) -> list[str]:
    """Comma-separated names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def load_task(a: argparse.Namespace) -> list:
    """The subjects that the options choose, cut to `--limit`."""
    from dataclasses import replace

    from calibeval import tasks

    subjects = tasks.load(a.task, a.data, a.shots, a.subjects, a.split)
    return [replace(s, questions=s.questions[: a.limit]) for s in subjects]


def run_prompts(a: argparse.Namespace) -> None:
    """Print id, subject, prompt, choices and label of every question."""
    from calibeval import prompts

    for subject in load_task(a):
        for q in subject.questions:
            text = prompts.build(subject, q, a.shots).text
            line = {"id": q.id, "subject": q.subject, "prompt": text}
            line |= {"choices": q.choices, "label": q.label}
            print(json.dumps(line, ensure_ascii=False))


def run_score(a: argparse.Namespace) -> None:
    """Check everything that can be checked, then load the model and score."""
    from calibeval.score import check_model, score

    check_model(a.model)
    if a.out.exists() and not a.overwrite:
        raise InputError(f"{a.out}: exists already; give --overwrite to replace it")
    subjects = load_task(a)
    from calibeval.engines.transformers import TransformersEngine

    engine = TransformersEngine(
        a.model,
        device=a.device,
        dtype=a.dtype,
        batch_size=a.batch_size,
        max_length=a.max_length,
        revision=a.revision,
    )
    settings = {"task": a.task, "data": str(a.data), "split": a.split, "shots": a.shots}
    settings |= {"subjects": a.subjects, "limit": a.limit, "revision": a.revision}
    score(engine, a.model, subjects, a.out, shots=a.shots, settings=settings)


def run_metrics(a: argparse.Namespace) -> None:
    """Print every metric of each record file."""
    from calibeval.results import result

    for path in a.records:
        found = result(path)
        if a.json:
            print(json.dumps({"records": str(path)} | found, ensure_ascii=False))
            continue
        print(f"{path}: {found['questions']} questions, letter mass {found['letter_mass']:.3f}")
        print(f"  {'':24}{'among the choices':>26}{'among all tokens':>26}")
        for name in found["metrics"]["choices"]:
            cells = []
            for confidence in ("choices", "vocabulary"):
                m = found["metrics"][confidence][name]
                cells.append(f"{m['value']:.4f} [{m['low']:.4f}, {m['high']:.4f}]")
            print(f"  {name:24}{cells[0]:>26}{cells[1]:>26}")


def run_collect(a: argparse.Namespace) -> None:
    """Write the tables and diagrams, and print the table."""
    from calibeval.collect import collect
    from calibeval.tables import markdown

    print(markdown(collect(a.index, a.out)))


if __name__ == "__main__":
    sys.exit(main())
