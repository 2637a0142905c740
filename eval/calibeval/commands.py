"""What each command of the command line does; heavy imports wait until a command needs them."""

import argparse
import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path

from calibeval.io import InputError, counted, sha256


def load_task(a: argparse.Namespace) -> list:
    """The subjects that the options choose, cut to `--limit`; sets what `--task` implies."""
    from dataclasses import replace

    from calibeval import tasks

    a.scoring, a.normalise = tasks.convention(a.task, a.scoring)
    a.shots = tasks.SHOTS[a.scoring] if a.shots is None else a.shots
    source = tasks.Source(a.data, a.shots, a.subjects, a.split, a.examples)
    loaded = tasks.load(a.task, source)
    return [replace(s, questions=s.questions[: a.limit]) for s in loaded]


def run_prompts(a: argparse.Namespace) -> None:
    """Print id, subject, prompt, choices and label of every question."""
    from calibeval import prompts

    for subject in load_task(a):
        for q in subject.questions:
            prompt = prompts.build(subject, q, a.shots, a.style, a.scoring)
            line = {"id": q.id, "subject": q.subject, "prompt": prompt.text}
            line |= {"choices": prompt.endings or q.choices, "label": q.label}
            print(json.dumps(line, ensure_ascii=False))


def fit_items(a: argparse.Namespace, subjects: list) -> tuple[list, dict]:
    """The questions as the model gets them, and the options to load it with."""
    from calibeval import score
    from calibeval.engines import load_max_length, load_tokenizer

    style = score.Style(a.shots, a.style, a.chat_template, a.scoring, a.normalise, a.unconditional)
    if a.unconditional and a.scoring == "letters":
        raise InputError("--unconditional: needs --scoring continuation")
    a.max_length = a.max_length or load_max_length(a.model, a.revision)
    items = score.fit_prompts(subjects, style, load_tokenizer(a.model, a.revision), a.max_length)
    return items, {"dtype": a.dtype, "revision": a.revision}


def local_engine(a: argparse.Namespace, options: dict):
    """The transformers engine that the options describe."""
    from calibeval.engines.hf import TransformersEngine

    local = {"device": a.device, "batch_size": a.batch_size, "max_length": a.max_length}
    return TransformersEngine(a.model, **local, **options)


def run_score(a: argparse.Namespace) -> None:
    """Check everything that can be checked, then load the model and score."""
    from calibeval import models

    models.check_model(a.model)
    if a.calibrator and a.engine != "transformers":
        raise InputError(f"--calibrator: needs --engine transformers, found {a.engine}")
    if a.workers > 1:
        from calibeval.score import run_workers
        from calibeval.store import clear

        if a.overwrite:
            clear(a.out)
        models.digest(a.model, a.revision)  # read the weights once rather than in every process
        return run_workers(a.workers, a.arguments)

    from calibeval import score
    from calibeval.posthoc.calibrator import WEIGHTS, CalibratedEngine, Calibrator

    calibrator = Calibrator.from_pretrained(a.calibrator) if a.calibrator else None
    if calibrator and a.scoring == "continuation":
        raise InputError("--calibrator: was fitted to letters, but --scoring is continuation")
    a.scoring = "letters" if calibrator else a.scoring
    items, options = fit_items(a, load_task(a))
    model_digest = models.digest(a.model, a.revision)
    if calibrator:
        questions = [item.prompt.question for item in items]
        calibrator.check(a.calibrator, a.model, model_digest, questions)

    at_end = ExitStack()

    def make_engine():
        if a.engine == "vllm":
            from calibeval.engines.vllm import VllmEngine

            engine = VllmEngine(a.model, longest=max(item.longest for item in items), **options)
            return at_end.enter_context(closing(engine))
        if calibrator is None:
            return local_engine(a, options)
        local = {"device": a.device, "batch_size": a.batch_size, "max_length": a.max_length}
        return CalibratedEngine(a.model, calibrator, **options, **local)

    settings = {
        "model_digest": model_digest,
        "calibrator_sha256": sha256(a.calibrator / WEIGHTS) if a.calibrator else None,
        "revision": a.revision,
        "task": a.task,
        "data": a.data,
        "split": a.split,
        "shots": a.shots,
        "examples": a.examples,
        "subjects": list(a.subjects) if a.subjects else None,
        "limit": a.limit,
        "scoring": a.scoring,
        "unconditional": a.unconditional,
        "style": a.style,
        "chat_template": a.chat_template,
        "engine": a.engine,
        "dtype": a.dtype,
        "max_length": a.max_length,
    }
    how = {"settings": settings, "share": a.shard, "overwrite": a.overwrite}
    with at_end:  # with the records on disk
        score.score(a.model, items, a.out, make_engine, **how)


def run_fit(a: argparse.Namespace) -> None:
    """Ask the model, fit the head on its answers, save it."""
    from calibeval import models, score
    from calibeval.posthoc import fit
    from calibeval.posthoc.calibrator import question_digest

    models.check_model(a.model)
    a.split = fit.split_to_fit(a.task, a.split)
    loaded = load_task(a)
    subjects = fit.unseen(loaded, tested(a))
    left_out = sum(len(s.questions) for s in loaded) - sum(len(s.questions) for s in subjects)
    if left_out:
        note = "examples in the prompts, or among those that test the model"
        print(f"left out {counted(left_out, 'question')}: {note}", file=sys.stderr)
    items, options = fit_items(a, subjects)

    engine = local_engine(a, options)
    groups = score.groups_of(items, list(range(len(items))))
    labels = {i: item.prompt.question.label for i, item in enumerate(items)}
    seen = fit.answers(engine, groups, labels, over=a.over, context=a.head == "transformer")
    calibrator, report = fit.fit(seen, a.head, over=a.over, alpha=a.alpha)
    report |= {"model": a.model, "task": a.task, "split": a.split, "left_out": left_out}
    digests = sorted(question_digest(item.prompt.question) for item in items)
    kept = {"model_digest": models.digest(a.model, a.revision), "versions": engine.versions()}
    calibrator.save_pretrained(a.out, report | kept | {"questions": digests})
    print(f"{a.out}: {json.dumps(report)}", file=sys.stderr)


def tested(a: argparse.Namespace) -> list:
    """The questions that the task is scored on, where they are beside those to fit on."""
    from calibeval import tasks
    from calibeval.posthoc.fit import SPLITS

    scored, _ = SPLITS.get(a.task, (None, None))
    if not scored or Path(a.data).is_file():  # a single file is of no split
        return []
    try:
        loaded = tasks.load(a.task, tasks.Source(a.data, 0, None, scored))
    except InputError:  # not there; `score` compares the questions again
        return []
    return [question for subject in loaded for question in subject.questions]


def run_diagnose(a: argparse.Namespace) -> None:
    """Print the diagnosis, and write it with its figure if asked."""
    from calibeval.models import check_model

    check_model(a.model)
    if not 0 < a.temperature < float("inf"):
        raise InputError(f"--temperature is {a.temperature}, expected a number more than 0")
    items, options = fit_items(a, load_task(a))

    from calibeval import score
    from calibeval.diagnose import diagnose, plot_bound
    from calibeval.io import atomic_write

    groups = score.groups_of(items, list(range(len(items))))
    engine = local_engine(a, options)
    found = diagnose(engine, groups, a.label_smoothing, a.temperature)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    print(text)
    if a.out:
        with atomic_write(a.out / "diagnosis.json") as file:
            file.write(text + "\n")
        plot_bound(found, a.out / "entropy_bound")


def run_import(a: argparse.Namespace) -> None:
    """Turn lm-evaluation-harness's samples into records."""
    from calibeval import lm_eval

    lm_eval.convert(a.samples, a.out)


def run_metrics(a: argparse.Namespace) -> None:
    """Print the metrics of each record file: what a reader uses, or `--all`."""
    from calibeval import stats

    names = stats.METRICS if a.all or a.json else stats.DEFAULT
    for path in a.records:
        run = stats.load(path, a.normalise)
        groups = stats.breakdown(stats.read(path, a.normalise), a.by) if a.by else {}
        if a.json:
            found = {"records": str(path)} | as_dict(run, names)
            if a.by:
                found[f"by_{a.by}"] = {k: as_dict(g, stats.DEFAULT) for k, g in groups.items()}
            print(json.dumps(found, ensure_ascii=False))
            continue
        print_metrics(str(path), run, names)
        for name, group in groups.items():
            print_metrics(name, group, stats.DEFAULT)


def as_dict(run, names) -> dict:
    """A run's figures for JSON."""
    from dataclasses import asdict

    from calibeval.stats import estimate

    metrics = {c: {m: asdict(estimate([run], m, c)) for m in names} for c in run.confidences}
    about = {k: getattr(run, k) for k in ("model", "questions", "letter_mass", "reliability")}
    return about | {"metrics": metrics}


def print_metrics(title: str, run, names) -> None:
    """A table of metrics in each confidence."""
    from calibeval.stats import estimate

    mass = "" if run.letter_mass is None else f", letter mass {run.letter_mass:.3f}"
    print(f"{title}: {counted(run.questions, 'question')}{mass}")
    headings = {"choices": "among the choices", "vocabulary": "among all tokens"}
    print(f"  {'':16}" + "".join(f"{headings[c]:>46}" for c in run.confidences))
    for name in names:
        figures = (str(estimate([run], name, c)) for c in run.confidences)
        print(f"  {name:16}" + "".join(f"{figure:>46}" for figure in figures))


def run_compare(a: argparse.Namespace) -> None:
    """Print the paired comparison of two record files, the proper scores first."""
    from dataclasses import asdict

    from calibeval import stats

    first, second = (stats.load(path, a.normalise) for path in (a.a, a.b))
    stats.same_questions([first, second])
    if not a.json:
        print(f"A {a.a}\nB {a.b}\nWhich is better calibrated as a whole: read nll and brier first.")
    found = {}
    names = stats.METRICS if a.all or a.json else stats.DEFAULT
    for confidence in first.confidences:
        found[confidence] = {}
        for name in sorted(names, key=lambda name: name not in ("nll", "brier")):
            of_a, of_b = (stats.estimate([run], name, confidence) for run in (first, second))
            difference = stats.difference([first], [second], name, confidence)
            better = stats.better(name, difference)
            line = asdict(difference) | {"difference": difference.value, "better": better}
            found[confidence][name] = {"a": of_a.value, "b": of_b.value} | {
                key: line[key] for key in ("difference", "low", "high", "better")
            }
            if not a.json:
                print(sentence(name, confidence, found[confidence][name]))
    if a.json:
        print(json.dumps({"a": str(a.a), "b": str(a.b), "comparison": found}))


def sentence(name: str, confidence: str, found: dict) -> str:
    """One metric's comparison in plain words."""
    if found["difference"] is None:
        return f"{name} ({confidence}): not comparable, {found['a']} and {found['b']}"
    minus = "B² − A²" if name == "rms_debiased" else "B − A"
    text = (
        f"{name} ({confidence}): A {found['a']:.4f}, B {found['b']:.4f}, {minus} "
        f"{found['difference']:+.4f}"
    )
    if found["low"] is None:
        return f"{text}; no interval of it is known to cover"
    text += f" [{found['low']:+.4f}, {found['high']:+.4f}]"
    if name == "ece_signed" and not found["low"] <= 0 <= found["high"]:
        return f"{text}: B claims {'more' if found['low'] > 0 else 'less'}"
    verdict = {"a": "A is better", "b": "B is better", None: "no difference can be told"}
    return f"{text}: {verdict[found['better']]}"


def run_conformal(a: argparse.Namespace) -> None:
    """Print coverage and mean size of prediction sets for each record file."""
    from calibeval import conformal, records

    by = None if a.by == "none" else a.by
    other = records.read(a.calibrate) if a.calibrate else None
    how = f"calibrated on {a.calibrate}" if other else f"{a.splits} random halves calibrate"
    for path in a.records:
        of = records.read(path)
        found = conformal.evaluate(
            of,
            alpha=a.alpha,
            score=a.score,
            by=by,
            splits=a.splits,
            calibrate=other,
            penalty=a.penalty,
            free=a.k_reg,
        )
        questions = counted(len(of), "question")
        print(f"{path}: {questions}, {a.score} sets at 1 − α = {1 - a.alpha:g}, {how}")
        for name, group in {"all": found, **found.by}.items():
            print(
                f"  {name:36} coverage {group.coverage:.3f} ± {group.coverage_sd:.3f}, "
                f"mean size {group.size:.3f} ± {group.size_sd:.3f}, "
                f"{counted(group.questions, 'question')} tested"
            )


def run_collect(a: argparse.Namespace) -> None:
    """Write the tables, figures and report, and print the tables."""
    from calibeval.io import read_text
    from calibeval.report import collect

    sections = [read_text(path) for path in a.section]
    print(collect(a.index, a.out, a.columns, a.title, sections=sections), end="")
