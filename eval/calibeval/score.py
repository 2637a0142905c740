"""Scoring: questions → prompts → engine → records, in shards that survive an interruption."""

import dataclasses
import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from calibeval import __version__, models, prompts, stats
from calibeval.engines import Job, Usage
from calibeval.io import InputError, counted
from calibeval.prompts import Branches, Prompt
from calibeval.store import Store
from calibeval.tasks import Subject

SHARD = 500  # questions that an interruption loses at most


class Style(NamedTuple):
    """How questions become tokens, and their log-probabilities scores."""

    shots: int = 5
    prompt: str = "official"
    chat_template: bool = False
    scoring: str = "letters"
    normalise: str = "sum"
    unconditional: bool = False  # also ask for the choices' texts without the question


class Item(NamedTuple):
    """A question as the engine gets it."""

    prompt: Prompt
    tokens: tuple[int, ...]
    branches: Branches
    normalise: str = "sum"
    truncated: int = 0  # tokens cut from the left
    unconditional: tuple[list[int], Branches] | None = None  # the choices without the question

    def jobs(self, index: int) -> list[Job]:
        """The engine's view: the question, and as job −1 − index its choices without it."""
        found = [Job(index, self.tokens, self.branches)]
        if self.unconditional:
            tokens, branches = self.unconditional
            found.append(Job(~index, tuple(tokens), branches))
        return found

    @property
    def longest(self) -> int:
        """Tokens of context and longest choice."""
        return max(job.length for job in self.jobs(0)) + 1


def fit_prompts(
    subjects: list[Subject], style: Style, tokenizer, max_length: int | None
) -> list[Item]:
    """Every question's prompt, with closing shots dropped until it fits `max_length` tokens.

    As the official script does: k-shot, then k−1, … (hendrycks/test, evaluate.py). A question that
    does not fit even without examples loses tokens on the left, as lm-evaluation-harness has it;
    a warning names such questions, and their records say how many tokens.
    """
    letters, chat = style.scoring == "letters", style.chat_template
    known: dict[tuple, Branches] = {}
    fitted: dict[str, Item] = {}
    pending = [(s, q, style.shots) for s in subjects for q in s.questions]
    while pending:
        built = [prompts.build(s, q, k, style.prompt, style.scoring) for s, q, k in pending]
        if chat:
            built = [dataclasses.replace(p, text=_chat(tokenizer, p.text)) for p in built]
        texts = [prompt.text for prompt in built]
        rows = prompts.encode(tokenizer, texts, not chat) if letters else texts
        again = []
        for (subject, question, k), prompt, tokens in zip(pending, built, rows, strict=True):
            if letters:
                # Letters' ids depend on the context's end only: contexts ending alike share them.
                key = (tuple(tokens[-4:]), n := len(question.choices))
                if key not in known:
                    known[key] = prompts.letters(tokenizer, prompt.text, n, chat)
                branches = known[key]
            else:
                given = prompt.text, prompt.endings
                tokens, branches = prompts.continuation(tokenizer, *given, chat)
            after = max(map(len, branches)) - letters
            cut = max(len(tokens) + after - max_length, 0) if max_length else 0
            if cut and k:
                again.append((subject, question, k - 1))
                continue
            if cut >= len(tokens):
                raise InputError(
                    f"question {question.id}: its choices take {after} tokens, but the model "
                    f"takes {max_length}; choose other --subjects or a longer --max-length"
                )
            alone = None
            if style.unconditional:
                alone = prompts.continuation(tokenizer, question.unconditional, prompt.endings)
            tokens = tuple(tokens[cut:])
            fitted[question.id] = Item(prompt, tokens, branches, style.normalise, cut, alone)
        pending = again
    cut = [id for id, item in fitted.items() if item.truncated]
    if cut and len(cut) == len(fitted):
        raise InputError(
            f"no question fits in the {max_length} tokens that the model takes, even without "
            "examples; give a longer --max-length or another model"
        )
    if cut:
        print(
            f"warning: {len(cut)} of {counted(len(fitted), 'question')} do not fit in "
            f"{max_length} tokens even without examples and lose their beginning: "
            + ", ".join(cut[:5] + ["…"] * (len(cut) > 5)),
            file=sys.stderr,
        )
    return [fitted[q.id] for s in subjects for q in s.questions]


def _chat(tokenizer, text: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("--chat-template: the model's tokenizer has no chat template")
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def groups_of(items: list[Item], indices: Sequence[int] | None = None) -> list[list[Job]]:
    """Jobs, of all items by default, in groups of a subject and shots: they share a prefix."""
    groups: dict[tuple, list[Job]] = {}
    for index in range(len(items)) if indices is None else indices:
        item = items[index]
        key = item.prompt.question.subject, item.prompt.shots, item.truncated > 0
        for job in item.jobs(index):
            groups.setdefault((*key, job.index < 0), []).append(job)
    return list(groups.values())


def score(
    model: str,
    items: list[Item],
    out: Path,
    make_engine: Callable,
    settings: dict,
    share: tuple[int, int] = (0, 1),
    overwrite: bool = False,
) -> None:
    """Score the questions that are not scored yet, of share i of n, and merge when all are.

    `make_engine()` is called only if there is something to score.
    """
    asked = "".join(f"{i.prompt.sha256} {i.prompt.question.label}\n" for i in items)
    settings = settings | {"prompts_sha256": hashlib.sha256(asked.encode()).hexdigest()}
    engine = make_engine() if overwrite else None  # before anything is deleted
    store = Store(out, settings, overwrite)
    finished = store.finished()
    ids = [item.prompt.question.id for item in items]
    part, parts = share
    mine = range(part * len(items) // parts, (part + 1) * len(items) // parts)
    pending = [i for i in mine if ids[i] not in finished]
    if not pending and out.exists() and len(finished) >= len(items):
        print(f"{out}: complete already, {counted(len(items), 'question')}", file=sys.stderr)
        return
    if pending:
        _score_shards(engine or make_engine(), model, items, pending, store, len(mine))
        if not store.folder.exists():  # another process has just merged all
            return
        finished = store.finished()
    if missing := sum(i not in finished for i in ids):
        print(f"questions left to other shards: {missing}", file=sys.stderr)
        return
    rows = [finished[i] for i in ids]
    about = {"model": model, "versions": rows[-1]["versions"], "training": models.training(model)}
    about |= {"architecture": models.architecture(model, settings.get("revision"))}
    report(store.finish(rows, about), out)


def _score_shards(
    engine, model: str, items: list[Item], pending: list[int], store: Store, total: int
) -> None:
    shared = {"model": model, "versions": {"calibeval": __version__, **engine.versions()}}
    store.engine(engine.describe())
    with tqdm(total=total, initial=total - len(pending), unit="question", mininterval=0.5) as bar:
        for start in range(0, len(pending), SHARD):
            indices = pending[start : start + SHARD]
            engine.usage, began = Usage(), time.perf_counter()
            found = {}
            for index, logprobs in engine.score(groups_of(items, indices)):
                found[index] = logprobs
                bar.update(index >= 0)
            rows = [record(items[i], found[i], found.get(~i)) | shared for i in indices]
            seconds, usage = time.perf_counter() - began, dataclasses.asdict(engine.usage)
            store.add(indices[0], rows, usage, seconds)


def record(item: Item, logprobs: list[float], unconditional: list[float] | None) -> dict:
    """A question's record; log-probabilities that are not finite raise `InputError`.

    By continuation `logprobs` are of the choices' texts, whose lengths `bytes` and `characters`
    leave out the space before them, as lm-evaluation-harness does.
    """
    prompt, question = item.prompt, item.prompt.question
    if not all(map(math.isfinite, logprobs + (unconditional or []))):
        found = f"log-probabilities {logprobs}"
        raise InputError(f"question {question.id}: {found}: the model's output is not finite")
    row = {"id": question.id, "subject": question.subject, "label": question.label}
    row |= {"logprobs": logprobs, "letter_mass": math.fsum(map(math.exp, logprobs))}
    row |= {"prompt_sha256": prompt.sha256, "shots": prompt.shots}
    if prompt.endings is not None:
        row |= {"scoring": "continuation", "normalise": item.normalise}
        row["bytes"] = [len(text.encode()) for text in prompt.endings]
        row["characters"] = [len(text) for text in prompt.endings]
        row |= {"unconditional": unconditional} if unconditional else {}
    return row | ({"truncated": item.truncated} if item.truncated else {})


def report(meta: dict, out: Path) -> None:
    """Print what was saved and what came out; warn where the letters are not what is meant."""
    seconds, questions, usage = meta["seconds"], meta["questions"], meta["usage"]
    if computed := usage.get("computed_tokens"):
        print(
            f"{counted(questions, 'question')} in {seconds:.1f} s ({questions / seconds:.1f} a "
            f"second), {computed:,} of {usage['prompt_tokens']:,} prompt tokens computed",
            file=sys.stderr,
        )
    run = stats.load(out)
    found = {m: stats.estimate([run], m, "choices") for m in ("accuracy", "ece", "rms_debiased")}
    print(", ".join(f"{name} {figure}" for name, figure in found.items()), file=sys.stderr)
    tempered = meta["settings"]["calibrator_sha256"]  # spreads what it has over all tokens
    if "vocabulary" in run.confidences and run.letter_mass < stats.LOW_MASS and not tempered:
        print(
            f"warning: mean letter mass {run.letter_mass:.3f} is below {stats.LOW_MASS}: the model "
            "wants to say something other than a letter, so read the figures with care",
            file=sys.stderr,
        )


def run_workers(count: int, arguments: list[str]) -> None:
    """Run this command `count` times with --shard I/N, each on a GPU of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(count)]
    if len(gpus) < count:
        found = f"CUDA_VISIBLE_DEVICES lists {len(gpus)} GPUs, {visible}"
        raise InputError(f"--workers {count}: {found}")
    # Of an option given twice the last holds.
    command = [sys.executable, "-m", "calibeval", *arguments, "--no-overwrite", "--workers", "1"]
    processes = []
    try:
        for i in range(count):
            alone = os.environ | {"CUDA_VISIBLE_DEVICES": gpus[i]}
            processes.append(subprocess.Popen([*command, "--shard", f"{i}/{count}"], env=alone))
        failed = [i for i, process in enumerate(processes) if process.wait()]
    finally:
        for process in processes:
            process.terminate()
    if failed:
        raise InputError(
            f"worker {failed[0]} of {count} failed (its message is above); "
            f"run the same command again to go on from the finished shards"
        )
