"""Command line: `python -m calibeval {prompts,score,fit-temperature,fit-ats,metrics,collect}`."""

import argparse
import json
import sys
from pathlib import Path

import calibeval
from calibeval.errors import InputError


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
    """The command line's grammar; heavy imports wait until a command needs them."""
    top = argparse.ArgumentParser(prog="python -m calibeval", description=calibeval.__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("prompts", help="print a task's prompts as JSON lines")
    add_task(p)
    p.set_defaults(run=run_prompts)

    p = commands.add_parser("score", help="score a model on a task and write records")
    add_task(p)
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
    p.set_defaults(run=run_score)

    p = commands.add_parser("fit-temperature", help="fit one temperature to a model's answers")
    add_fit(p)
    p.set_defaults(run=run_fit, head="constant", alpha=0.5)

    p = commands.add_parser("fit-ats", help="fit a head that predicts each answer's temperature")
    add_fit(p)
    p.add_argument("--head", choices=("linear", "mlp", "transformer"), default="linear")
    p.add_argument("--alpha", type=float, default=0.5, help="weight of wrong answers, 0 to 1")
    p.set_defaults(run=run_fit)

    p = commands.add_parser("metrics", help="recompute every metric from records")
    p.add_argument("records", nargs="+", type=Path, metavar="RECORDS.jsonl")
    p.add_argument("--json", action="store_true", help="one JSON object a record file")
    p.add_argument(
        "--by", choices=("subject", "category"), help="break down by subject or category"
    )
    p.set_defaults(run=run_metrics)

    p = commands.add_parser("compare", help="is run B better than run A, and by how much")
    p.add_argument("a", type=Path, metavar="A.jsonl")
    p.add_argument("b", type=Path, metavar="B.jsonl")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=run_compare)

    p = commands.add_parser("collect", help="tables and diagrams from an index of record files")
    p.add_argument("index", type=Path, metavar="INDEX.jsonl")
    p.add_argument("--out", required=True, type=Path, metavar="DIR")
    p.set_defaults(run=run_collect)
    return top


def add_task(p: argparse.ArgumentParser) -> None:
    """Options that choose questions and prompts."""
    p.add_argument("--task", required=True, help="mmlu, hellaswag, arc_easy, arc_challenge, jsonl")
    p.add_argument("--data", required=True, help="the task's folder or file; mmlu: or hub:NAME")
    p.add_argument("--split", help="default: test; hellaswag: val")
    p.add_argument("--shots", type=int, default=5)
    p.add_argument("--examples", metavar="FILE", help="few-shot examples of jsonl, arc, hellaswag")
    p.add_argument("--subjects", type=names, help="comma-separated; default: all")
    p.add_argument("--limit", type=positive, help="only the first N questions of each subject")
    p.add_argument("--style", choices=("official", "lm-eval"), default="official")


def add_model(p: argparse.ArgumentParser) -> None:
    """Options that choose a model and how it is run."""
    p.add_argument("--chat-template", action="store_true", help="ask as a user's turn of a chat")
    p.add_argument("--model", required=True, help="model folder or hub name")
    p.add_argument("--revision", help="hub revision of the model")
    p.add_argument("--batch-size", type=positive, default=16, help="transformers only")
    p.add_argument("--device", default="auto", help="transformers only: auto, cpu or cuda")
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
    p.set_defaults(split="val")
    p.add_argument("--out", required=True, type=Path, metavar="DIR", help="the calibrator's folder")
    p.add_argument(
        "--over",
        choices=("choices", "vocabulary"),
        default="choices",
        help="fit the probabilities among the choices (default) or among all tokens",
    )


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


def load_task(a: argparse.Namespace) -> list:
    """The subjects that the options choose, cut to `--limit`."""
    from dataclasses import replace

    from calibeval import tasks

    source = tasks.Source(a.data, a.shots, a.subjects, a.split, a.examples)
    loaded = tasks.load(a.task, source)
    return [replace(s, questions=s.questions[: a.limit]) for s in loaded]


def run_prompts(a: argparse.Namespace) -> None:
    """Print id, subject, prompt, choices and label of every question."""
    from calibeval import prompts

    for subject in load_task(a):
        for q in subject.questions:
            text = prompts.build(subject, q, a.shots, a.style).text
            line = {"id": q.id, "subject": q.subject, "prompt": text}
            line |= {"choices": q.choices, "label": q.label}
            print(json.dumps(line, ensure_ascii=False))


def fit_items(a: argparse.Namespace) -> tuple[list, dict]:
    """The chosen questions as the model gets them, and the options to load it with."""
    from calibeval import score
    from calibeval.engines import load_max_length, load_tokenizer

    subjects = load_task(a)
    style = score.Style(a.shots, a.style, a.chat_template)
    max_length = a.max_length or load_max_length(a.model, a.revision)
    items = score.fit_prompts(subjects, style, load_tokenizer(a.model, a.revision), max_length)
    return items, {"dtype": a.dtype, "max_length": max_length, "revision": a.revision}


def run_score(a: argparse.Namespace) -> None:
    """Check everything that can be checked, then load the model and score."""
    from calibeval.models import check_model

    check_model(a.model)
    if a.calibrator and a.engine != "transformers":
        raise InputError(f"--calibrator: needs --engine transformers, found {a.engine}")
    if a.workers > 1:
        from calibeval.store import clear
        from calibeval.workers import run_workers

        if a.overwrite:
            clear(a.out)
        return run_workers(a.workers, a.arguments)

    from calibeval import models, posthoc, score

    calibrator = posthoc.Calibrator.from_pretrained(a.calibrator) if a.calibrator else None
    items, options = fit_items(a)

    def make_engine():
        if a.engine == "vllm":
            from calibeval.engines.vllm import VllmEngine

            return VllmEngine(a.model, **options)
        from calibeval.engines.transformers import TransformersEngine

        local = options | {"device": a.device, "batch_size": a.batch_size}
        if calibrator is None:
            return TransformersEngine(a.model, **local)
        from calibeval.posthoc.engine import CalibratedEngine

        return CalibratedEngine(a.model, calibrator, **local)

    settings = {
        "model_sha256": models.digest(a.model),
        "calibrator_sha256": posthoc.digest(a.calibrator) if a.calibrator else None,
        "revision": a.revision,
        "task": a.task,
        "style": a.style,
        "chat_template": a.chat_template,
        "engine": a.engine,
        "dtype": a.dtype,
        "max_length": options["max_length"],
    }
    score.score(
        a.model,
        items,
        a.out,
        make_engine,
        settings=settings,
        share=a.shard,
        overwrite=a.overwrite,
    )


def run_fit(a: argparse.Namespace) -> None:
    """Ask the model, fit the head on its answers, save it."""
    from calibeval import models, posthoc, score

    models.check_model(a.model)
    if a.split == "test":
        raise InputError("--split test: a calibrator is fitted on questions that do not test it")
    items, options = fit_items(a)
    from calibeval.engines.transformers import TransformersEngine
    from calibeval.posthoc.engine import answers

    engine = TransformersEngine(a.model, device=a.device, batch_size=a.batch_size, **options)
    groups = score.groups_of(items, list(range(len(items))))
    labels = {i: item.prompt.question.label for i, item in enumerate(items)}
    seen = answers(engine, groups, labels, over=a.over, context=a.head == "transformer")
    calibrator, report = posthoc.fit(seen, a.head, over=a.over, alpha=a.alpha)
    report |= {"model": a.model, "model_sha256": models.digest(a.model), "task": a.task}
    calibrator.save_pretrained(a.out, report | {"split": a.split, "versions": engine.versions()})
    print(f"{a.out}: {json.dumps(report)}", file=sys.stderr)


def run_metrics(a: argparse.Namespace) -> None:
    """Print every metric of each record file."""
    from calibeval import records
    from calibeval.breakdown import breakdown
    from calibeval.results import result

    for path in a.records:
        found = result(path)
        groups = breakdown(records.read(path), a.by) if a.by else {}
        if a.json:
            extra = {f"by_{a.by}": groups} if a.by else {}
            print(json.dumps({"records": str(path)} | found | extra, ensure_ascii=False))
            continue
        print_metrics(str(path), found)
        for name, group in groups.items():
            print_metrics(name, group)


def print_metrics(title: str, found: dict) -> None:
    """A table of metrics in both confidences, with the noise floor where there is one."""
    mass = f", letter mass {found['letter_mass']:.3f}" if "letter_mass" in found else ""
    print(f"{title}: {found['questions']} questions{mass}")
    print(f"  {'':16}{'among the choices':>36}{'among all tokens':>36}")
    choices, vocabulary = (found["metrics"][c] for c in ("choices", "vocabulary"))
    for name in choices:
        print(f"  {name:16}{figure(choices[name]):>36}{figure(vocabulary[name]):>36}")


def figure(m: dict) -> str:
    """Value, interval and noise floor as text."""
    value, low, high = (
        f"{m[k]:.4f}" if m[k] is not None else "–" for k in ("value", "low", "high")
    )
    floor = f" floor {m['floor']:.3f}" if m.get("floor") is not None else ""
    return f"{value} [{low}, {high}]{floor}"


def run_compare(a: argparse.Namespace) -> None:
    """Print the paired comparison of two record files."""
    from calibeval.compare import compare, sentence

    found = compare(a.a, a.b)
    if a.json:
        print(json.dumps({"a": str(a.a), "b": str(a.b), "comparison": found}))
        return
    print(f"A {a.a}\nB {a.b}")
    for confidence, metrics in found.items():
        for name, comparison in metrics.items():
            print(sentence(name, comparison, confidence))


def run_collect(a: argparse.Namespace) -> None:
    """Write the tables and diagrams, and print the table."""
    from calibeval.collect import collect
    from calibeval.tables import markdown

    print(markdown(collect(a.index, a.out)))


if __name__ == "__main__":
    sys.exit(main())
