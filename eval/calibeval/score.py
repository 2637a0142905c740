"""Scoring: questions → prompts → engine → records."""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from calibeval import __version__, prompts, records
from calibeval.engines import Engine, Job
from calibeval.errors import InputError
from calibeval.files import atomic_write
from calibeval.letters import encode, plan
from calibeval.tasks import Subject

LOW_MASS = 0.9  # below this the letters are not what the model wants to say


def check_model(model: str) -> None:
    """Refuse a run folder, or a model folder inside one, whose training is not `DONE`."""
    path = Path(model)
    if not path.exists():
        if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise InputError(f"{path}: no such folder")
        return  # a hub name; the loader says if it is not one
    for folder in (path, path.parent):
        if (folder / "manifest.json").is_file() and (folder / "config.yaml").is_file():
            if not (folder / "DONE").is_file():
                raise InputError(
                    f"{folder}: run folder without DONE; its training has not finished"
                )
            if folder == path:
                raise InputError(f"{folder}: is a run folder; its model is {folder / 'model'}")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: no config.json; expected a Hugging Face model folder")


def fit_prompts(subjects: list[Subject], shots: int, engine: Engine) -> list[tuple]:
    """(prompt, tokens, plan) of every question, with closing shots dropped until each prompt fits.

    As the official script does: k-shot, then k−1, … (hendrycks/test, evaluate.py). A question that
    does not fit even without examples raises `InputError`.
    """
    fitted, plans = {}, {}
    pending = [(s, q, shots) for s in subjects for q in s.questions]
    order = [q.id for _, q, _ in pending]
    while pending:
        built = [prompts.build(s, q, k) for s, q, k in pending]
        ids = encode(engine.tokenizer, [p.text for p in built])
        again = []
        for (subject, question, k), prompt, tokens in zip(pending, built, ids, strict=True):
            # The letters' ids depend on the context's end only: contexts that end alike share them.
            key = (tuple(tokens[-4:]), len(question.choices))
            if key not in plans:
                plans[key] = plan(engine.tokenizer, prompt.text, len(question.choices))
            length = len(tokens) - plans[key].merged + len(plans[key].spine)
            if length <= engine.max_length:
                fitted[question.id] = prompt, tokens, plans[key]
            elif k:
                again.append((subject, question, k - 1))
            else:
                raise InputError(
                    f"question {question.id}: {length} tokens without examples, but the model's "
                    f"context is {engine.max_length}; choose other --subjects or a longer context"
                )
        pending = again
    return [fitted[i] for i in order]


def jobs(fitted: list[tuple]) -> list[list[Job]]:
    """Group the questions that share subject and number of shots, so a prompt prefix."""
    groups: dict[tuple, list[Job]] = {}
    for index, (prompt, tokens, letters) in enumerate(fitted):
        context = tuple(tokens[: len(tokens) - letters.merged])
        job = Job(index, context, letters.spine, letters.letters)
        groups.setdefault((prompt.question.subject, prompt.shots), []).append(job)
    return list(groups.values())


def score(
    engine: Engine,
    model: str,
    subjects: list[Subject],
    out: Path,
    *,
    shots: int,
    settings: dict,
) -> None:
    """Score every question and write the records, then the sidecar."""
    started = time.perf_counter()
    fitted = fit_prompts(subjects, shots, engine)
    groups = jobs(fitted)
    versions = {"calibeval": __version__, **engine.versions()}
    rows: list[dict | None] = [None] * len(fitted)
    progress = tqdm(
        engine.score(groups), total=len(fitted), unit="question", file=sys.stderr, mininterval=0.5
    )
    for index, logprobs in progress:
        prompt = fitted[index][0]
        if not all(math.isfinite(value) for value in logprobs):
            raise InputError(
                f"question {prompt.question.id}: log-probabilities {logprobs}; "
                f"the model's output is not finite"
            )
        rows[index] = {
            "id": prompt.question.id,
            "subject": prompt.question.subject,
            "label": prompt.question.label,
            "logprobs": logprobs,
            "letter_mass": math.fsum(map(math.exp, logprobs)),
            "prompt_sha256": prompt.sha256,
            "shots": prompt.shots,
            "model": model,
            "versions": versions,
        }
    seconds = time.perf_counter() - started
    usage = engine.usage
    four = sum(len(job.tokens) * len(job.letters) for group in groups for job in group)
    saved = four / usage.computed_tokens
    meta = {
        "model": model,
        "settings": settings | engine.describe(),
        "versions": versions,
        "questions": len(rows),
        "seconds": round(seconds, 3),
        "usage": asdict(usage) | {"one_prompt_a_choice": four},
    }
    with atomic_write(out) as file:
        file.writelines(map(records.line, rows))
    with atomic_write(records.sidecar(out)) as file:
        json.dump(meta, file, indent=1)
    print(
        f"{len(rows)} questions in {seconds:.1f} s ({len(rows) / seconds:.1f} a second); prompt "
        f"tokens computed: {usage.computed_tokens:,}, {saved:.1f}x fewer than the {four:,} of one "
        f"prompt a choice",
        file=sys.stderr,
    )
    mass = sum(row["letter_mass"] for row in rows) / len(rows)
    if mass < LOW_MASS:
        print(
            f"warning: mean letter mass {mass:.3f} is below {LOW_MASS}: the model wants to say "
            f"something other than a letter, so read the figures with care",
            file=sys.stderr,
        )
