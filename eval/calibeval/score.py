"""Scoring: questions → prompts → engine → records, in shards that survive an interruption."""

import dataclasses
import hashlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from calibeval import __version__, models, prompts, stats
from calibeval.engines import Engine, Job, Usage
from calibeval.io import InputError, counted
from calibeval.letters import Plan, encode, plan
from calibeval.prompts import Prompt
from calibeval.store import Store
from calibeval.tasks import Subject

LOW_MASS = 0.9  # below this the letters are not what the model wants to say
SHARD = 500  # questions that an interruption loses at most


@dataclass(frozen=True)
class Style:
    """How questions become tokens."""

    shots: int = 5
    prompt: str = "official"
    chat_template: bool = False

    @property
    def space(self) -> str:
        """What stands before a letter: a chat turn begins with the letter itself."""
        return "" if self.chat_template else " "


@dataclass(frozen=True)
class Item:
    """A question as the engine gets it."""

    prompt: Prompt
    tokens: tuple[int, ...]
    letters: Plan

    def job(self, index: int) -> Job:
        """The engine's view."""
        context = self.tokens[: len(self.tokens) - self.letters.merged]
        return Job(index, context, self.letters.spine, self.letters.letters)


def fit_prompts(subjects: list[Subject], style: Style, tokenizer, max_length: int) -> list[Item]:
    """Every question's prompt, with closing shots dropped until it fits `max_length` tokens.

    As the official script does: k-shot, then k−1, … (hendrycks/test, evaluate.py). A question that
    does not fit even without examples raises `InputError`.
    """
    fitted: dict[str, Item] = {}
    plans: dict[tuple, Plan] = {}
    pending = [(s, q, style.shots) for s in subjects for q in s.questions]
    order = [q.id for _, q, _ in pending]
    while pending:
        built = [prompts.build(s, q, k, style.prompt) for s, q, k in pending]
        if style.chat_template:
            built = [dataclasses.replace(p, text=_chat(tokenizer, p.text)) for p in built]
        special = not style.chat_template  # a chat template writes its own start token
        ids = encode(tokenizer, [p.text for p in built], special)
        again = []
        for (subject, question, k), prompt, tokens in zip(pending, built, ids, strict=True):
            # The letters' ids depend on the context's end only: contexts ending alike share them.
            key = (tuple(tokens[-4:]), len(question.choices))
            if key not in plans:
                n = len(question.choices)
                plans[key] = plan(tokenizer, prompt.text, n, style.space, special)
            length = len(tokens) - plans[key].merged + len(plans[key].spine)
            if length <= max_length:
                fitted[question.id] = Item(prompt, tuple(tokens), plans[key])
            elif k:
                again.append((subject, question, k - 1))
            else:
                raise InputError(
                    f"question {question.id}: {length} tokens without examples, but the model "
                    f"takes {max_length}; choose other --subjects or a longer --max-length"
                )
        pending = again
    return [fitted[i] for i in order]


def _chat(tokenizer, text: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("--chat-template: the model's tokenizer has no chat template")
    turn = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def groups_of(items: list[Item], indices: list[int]) -> list[list[Job]]:
    """Group the questions that share subject and number of shots, so a prompt prefix."""
    groups: dict[tuple, list[Job]] = {}
    for index in indices:
        prompt = items[index].prompt
        key = prompt.question.subject, prompt.shots
        groups.setdefault(key, []).append(items[index].job(index))
    return list(groups.values())


def digest(items: list[Item]) -> str:
    """SHA-256 over the prompts' digests and labels, in order."""
    total = hashlib.sha256()
    for item in items:
        total.update(f"{item.prompt.sha256} {item.prompt.question.label}\n".encode())
    return total.hexdigest()


def score(
    model: str,
    items: list[Item],
    out: Path,
    make_engine: Callable[[], Engine],
    *,
    settings: dict,
    share: tuple[int, int] = (0, 1),
    overwrite: bool = False,
) -> None:
    """Score the questions that are not scored yet, of share i of n, and merge when all are.

    `make_engine` is called only if there is something to score.
    """
    store = Store(out, settings | {"prompts_sha256": digest(items)}, overwrite)
    finished = store.finished()
    ids = [item.prompt.question.id for item in items]
    part, parts = share
    mine = range(part * len(items) // parts, (part + 1) * len(items) // parts)
    pending = [i for i in mine if ids[i] not in finished]
    if not pending and out.exists() and len(finished) >= len(items):
        print(f"{out}: complete already, {counted(len(items), 'question')}", file=sys.stderr)
        return
    if pending:
        engine = make_engine()
        _score_shards(engine, model, items, pending, store, len(mine))
    finished = store.finished()
    missing = sum(i not in finished for i in ids)
    if missing:
        print(f"questions left to other shards: {missing}", file=sys.stderr)
        return
    rows = [finished[i] for i in ids]
    four = sum(len(item.tokens) * len(item.letters.letters) for item in items)
    extra = {"model": model, "versions": rows[-1]["versions"], "one_prompt_a_choice": four}
    revision = settings.get("revision")
    extra |= {"training": models.training(model)}
    extra |= {"architecture": models.architecture(model, revision)}
    report(store.finish(rows, extra), out)


def _score_shards(
    engine: Engine, model: str, items: list[Item], pending: list[int], store: Store, total: int
) -> None:
    versions = {"calibeval": __version__, **engine.versions()}
    progress = tqdm(total=total, initial=total - len(pending), unit="question", mininterval=0.5)
    with progress:
        for start in range(0, len(pending), SHARD):
            indices = pending[start : start + SHARD]
            engine.usage, began = Usage(), time.perf_counter()
            rows = {}
            for index, logprobs in engine.score(groups_of(items, indices)):
                rows[index] = record(items[index], logprobs, model, versions)
                progress.update()
            seconds = time.perf_counter() - began
            usage = dataclasses.asdict(engine.usage)
            store.settings.setdefault("engine_settings", engine.describe())
            store.add(indices[0], [rows[i] for i in indices], usage, seconds)


def record(item: Item, logprobs: list[float], model: str, versions: dict[str, str]) -> dict:
    """A question's record; log-probabilities that are not finite raise `InputError`."""
    prompt, question = item.prompt, item.prompt.question
    if not all(math.isfinite(value) for value in logprobs):
        raise InputError(
            f"question {question.id}: log-probabilities {logprobs}: the model's output is not "
            f"finite"
        )
    return {
        "id": question.id,
        "subject": question.subject,
        "label": question.label,
        "logprobs": logprobs,
        "letter_mass": math.fsum(map(math.exp, logprobs)),
        "prompt_sha256": prompt.sha256,
        "shots": prompt.shots,
        "model": model,
        "versions": versions,
    }


def report(meta: dict, out: Path) -> None:
    """Print what was saved and what came out; warn where the letters are not what is meant."""
    usage, seconds, questions = meta["usage"], meta["seconds"], meta["questions"]
    computed, four = usage.get("computed_tokens", 0), meta["one_prompt_a_choice"]
    if computed:
        print(
            f"{counted(questions, 'question')} in {seconds:.1f} s "
            f"({questions / seconds:.1f} a second); prompt tokens computed: {computed:,}, "
            f"{four / computed:.1f}x fewer than the {four:,} of one prompt a choice",
            file=sys.stderr,
        )
    run = stats.load(out)
    found = {m: stats.estimate([run], m, "choices") for m in ("accuracy", "ece", "rms_debiased")}
    print(", ".join(f"{name} {figure}" for name, figure in found.items()), file=sys.stderr)
    if run.letter_mass < LOW_MASS:
        print(
            f"warning: mean letter mass {run.letter_mass:.3f} is below {LOW_MASS}: the model "
            f"wants to say something other than a letter, so read the figures with care",
            file=sys.stderr,
        )
