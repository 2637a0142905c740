"""Scoring: questions → prompts → engine → records, kept as they are made."""

import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from calibeval import __version__, engines, measures, model_digest, prompts, records, stats
from calibeval.engines import Job
from calibeval.io import InputError, counted
from calibeval.prompts import Branches, Prompt
from calibeval.records import Records
from calibeval.request import Request, Task, checked
from calibeval.store import Store
from calibeval.tasks import Subject, load, normalisation, resolved


class Item(NamedTuple):
    """A question, what an engine is asked of it, and how its users compare the answers."""

    prompt: Prompt
    job: Job
    normalise: str
    truncated: int  # tokens cut from the left


def fit_prompts(
    subjects: list[Subject], task: Task, tokenizer, max_length: int | None
) -> list[Item]:
    """Every question's prompt, with closing shots dropped until it fits `max_length` tokens.

    As the official script does: k-shot, then k−1, … (hendrycks/test, evaluate.py). A question that
    does not fit even without examples loses tokens on the left, as lm-evaluation-harness has it;
    a warning counts such questions, and their records say how many tokens.
    """
    task = resolved(task)
    letters, normalise = task.scoring == "letters", normalisation(task)
    known: dict[tuple, Branches] = {}
    fitted: dict[int, Item] = {}
    asked = ((s, q) for s in subjects for q in s.questions)
    pending = [(i, s, q, task.shots) for i, (s, q) in enumerate(asked)]
    while pending:
        built = [prompts.build(s, q, k, task.scoring) for _, s, q, k in pending]
        if letters:
            ids = prompts.encode(tokenizer, [p.text for p in built])
            # Letters' ids depend on the context's end only: one last line, "Answer:", is all.
            kinds = [(p.text.rpartition("\n")[2], len(p.question.choices)) for p in built]
            for kind, prompt in zip(kinds, built, strict=True):
                if kind not in known:
                    known[kind] = prompts.letters(tokenizer, prompt.text, kind[1])
            rows = [(tokens, known[kind]) for tokens, kind in zip(ids, kinds, strict=True)]
        else:
            rows = prompts.continuations(tokenizer, built)
        again = []
        for (i, subject, question, k), prompt, (tokens, branches) in zip(
            pending, built, rows, strict=True
        ):
            after = max(map(len, branches)) - letters
            cut = max(len(tokens) + after - max_length, 0) if max_length else 0
            if cut and k:
                again.append((i, subject, question, k - 1))
                continue
            if cut >= len(tokens):
                taken = f"its choices take {after} tokens, but the model takes {max_length}"
                raise InputError(f"question {question.id}: {taken}")
            fitted[i] = Item(prompt, Job(i, tuple(tokens[cut:]), branches), normalise, cut)
        pending = again
    if cut := sum(item.truncated > 0 for item in fitted.values()):
        many = f"{cut} of {counted(len(fitted), 'question')} do not fit in {max_length} tokens"
        print(f"warning: {many} even without examples and lose their beginning", file=sys.stderr)
    return [fitted[i] for i in sorted(fitted)]


def groups_of(items: Sequence[Item]) -> list[list[Job]]:
    """The items' jobs in groups of a subject and shots: they share a prefix."""
    groups: dict[tuple, list[Job]] = {}
    for item in items:
        key = item.prompt.question.subject, item.prompt.shots, item.truncated > 0
        groups.setdefault(key, []).append(item.job)
    return list(groups.values())


def score(
    model,
    tokenizer=None,
    tasks: Sequence[Task | Mapping] = (),
    *,
    out: str | Path | None = None,
    progress: bool = True,
    **options,
) -> dict[str, Records]:
    """Score a model on tasks, {task.key: Records}, through one load of it.

    `model` is a folder, a name on the hub, or a loaded `transformers` model, which is left as it
    was; `tokenizer` is its folder's unless given. With `out` the records go to
    `<out>/<task.key>.jsonl`, each beside a sidecar with its settings; what is there already of the
    same folder's weights is not scored again. `options` are keys of `Request`, such as `engine` and
    `batch_size`. All input is read before the model.

    Raises:
        InputError: data, options or a model that cannot be used, or records of other settings.
    """
    request = checked(Request, {"tasks": list(tasks)} | options, "score")
    loaded = not isinstance(model, (str, Path))
    if loaded:
        name, words, config = f"a {type(model).__name__}", model.name_or_path, model.config
    else:
        from transformers import AutoConfig

        name = words = model = str(model)
        config = engines.load(AutoConfig, name, "a config", request.revision)
    tokenizer = tokenizer or engines.load_tokenizer(words, request.revision)
    longest = engines.context_length(config)
    every = [resolved(task) for task in request.tasks]
    with ThreadPoolExecutor(1) as meanwhile:  # both take seconds, and neither holds the GIL
        digest = (
            out and not loaded and meanwhile.submit(model_digest.digest, name, request.revision)
        )
        items = {t.key: fit_prompts(load(t), t, tokenizer, longest) for t in every}

    @cache
    def engine():
        most = max(item.job.length for of in items.values() for item in of)
        made = _engine(model, request, most + 1)
        at_end.callback(made.close)  # vLLM's is a process of its own
        return made

    found = {}
    with ExitStack() as at_end:
        out = Path(out or at_end.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)  # or says before the scoring that it cannot be
        # A loaded model's are made anew: nobody knows of which weights older ones are.
        for task in every if loaded else ():
            Store(out / f"{task.key}.jsonl", {})  # refuses a file whose making nobody knows
        folder = (loaded and at_end.enter_context(tempfile.TemporaryDirectory(dir=out))) or out
        for task in every:
            path = Path(folder, f"{task.key}.jsonl")
            # What decides the records, under the names that sidecars have for it.
            settings = {"model_digest": digest.result() if digest else None}
            settings |= request.model_dump(include={"revision", "engine", "dtype"})
            settings |= task.model_dump(exclude={"name"})
            made = _fill(path, items[task.key], settings, name, engine, progress)
            if loaded:
                for file in (records.sidecar(path), path):
                    path = file.replace(out / file.name)
            found[task.key] = of = records.read(path)
            if not made:
                print(f"{path}: complete already, {counted(len(of), 'question')}", file=sys.stderr)
            elif progress:
                report(of)
    return found


def _engine(model, request: Request, longest: int):
    """The engine that the request asks for; `longest` is the longest prompt that it will see."""
    options = request.model_dump(exclude={"tasks", "engine", "batch_size"}, exclude_none=True)
    if request.engine == "vllm":
        from calibeval.engines.vllm import VllmEngine

        if not isinstance(model, str):
            raise InputError("engine vllm: loads a folder or a name on the hub, not a loaded model")
        return VllmEngine(model, longest=longest, **options)
    from calibeval.engines.hf import TransformersEngine

    return TransformersEngine(model, batch_size=request.batch_size, **options)


def _fill(
    out: Path, items: list[Item], settings: dict, model: str, engine: Callable, progress: bool
) -> bool:
    """Score what is not scored yet, and write all; False if all is there already.

    `engine()` is called only if there is something to score.
    """
    asked = ((item.prompt.sha256, item.prompt.question.label) for item in items)
    store = Store(out, settings | {"prompts_sha256": records.prompts_digest(asked)})
    if out.exists():
        return False
    finished = store.finished()
    ids = [item.prompt.question.id for item in items]
    done = {i for i, id in enumerate(ids) if id in finished}
    if len(done) < len(items):
        store.engine(engine().describe())
        shared = {"model": model, "versions": {"calibeval": __version__, **engine().versions}}
        bar = {"initial": len(done), "unit": "question", "mininterval": 0.5}
        with store.adding() as add, tqdm(total=len(items), disable=not progress, **bar) as shown:
            for i, logprobs in engine().score(groups_of(items), done):
                if i not in done:
                    row = finished[ids[i]] = record(items[i], logprobs) | shared
                    add(row)
                    shown.update()
    rows = [finished[i] for i in ids]
    store.finish(rows, {"model": model, "versions": rows[-1]["versions"]})
    return True


def record(item: Item, logprobs: list[float]) -> dict:
    """A question's record; log-probabilities that are not finite raise `InputError`.

    By continuation `logprobs` are of the choices' texts, whose lengths `bytes` and `characters`
    leave out the space before them, as lm-evaluation-harness does.
    """
    prompt, question = item.prompt, item.prompt.question
    if not all(map(math.isfinite, logprobs)):
        found = f"log-probabilities {logprobs}"
        raise InputError(f"question {question.id}: {found}: the model's output is not finite")
    row = {"id": question.id, "subject": question.subject, "label": question.label}
    row |= {"logprobs": logprobs, "letter_mass": math.fsum(map(math.exp, logprobs))}
    row |= {"prompt_sha256": prompt.sha256, "shots": prompt.shots}
    if prompt.endings is not None:
        row |= {"scoring": "continuation", "normalise": item.normalise}
        row["bytes"] = [len(text.encode()) for text in prompt.endings]
        row["characters"] = [len(text) for text in prompt.endings]
    return row | ({"truncated": item.truncated} if item.truncated else {})


def report(of: Records) -> None:
    """Print what came out; warn where the letters are not what is meant."""
    sample = measures.Sample(measures.scores(of, "choices"))
    found = {m: measures.METRICS[m](sample)[0] for m in ("accuracy", "nll", "ece")}
    figures = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    print(f"{counted(len(of), 'question')}: {figures}", file=sys.stderr)
    mass, least = of.letter_mass.mean(), stats.LOW_MASS  # of texts NaN, which is not below
    if mass < least:
        said = f"warning: mean letter mass {mass:.3f} is below {least}: the model wants to say"
        print(f"{said} something other than a letter, so read with care", file=sys.stderr)
