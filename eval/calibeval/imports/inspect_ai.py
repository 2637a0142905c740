"""Logs of Inspect, scored by letters, or answers that the model wrote.

`inspect eval … --logprobs --top-logprobs 20` makes them, and `inspect log convert --to json`. A
sample's answer is the letter that Inspect's own scorer takes (`_answer_place`); the
log-probabilities there of all letters are the record. A letter that is not among the top ones has
at most the least of these, and gets it. Of several epochs one is read, which the user names.

A sample without choices holds a written answer, which is right where all its scorers say so. Its
confidence is the reply's likelihood, and the agreement with the other epochs' answers.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from calibeval import records
from calibeval.ask.questions import LETTERS
from calibeval.imports.logs import (
    LeftOut,
    Log,
    LogFormat,
    LogSample,
    versions_as_texts,
    written_fields,
)
from calibeval.io import LARGE_FILE, InputError, parse_json, read_text
from calibeval.records import RawRecord

# Inspect takes letters of either case behind ANSWER, and wrapped in $…$, **…** or brackets.
ANSWER = re.compile(r"ANSWER\s*:[\s$*(]*(?P<letter>[A-Z])(?![A-Z0-9])", re.IGNORECASE)
ANSWER_LINE = re.compile(rf"^[ \t]*{ANSWER.pattern}[ \t$*),.]*$", re.IGNORECASE | re.MULTILINE)
LONE_LETTER = re.compile(r"(?<!\w)(?P<letter>[A-Z])(?!\w)")
WORD_CHARACTER = re.compile(r"\w")
# What Inspect's scorers say of an answer.
IS_RIGHT = {"C": True, "I": False, 1: True, 0: False}
# How its scorer's explanation begins where the letters are not those of the log's choices.
SHUFFLED = "Choices were shuffled before generating"


def read_inspect(path: Path) -> Log:
    """A log, as .json."""
    remedy = f"`inspect log convert --to json --output-dir DIR {path}` makes one that is"
    if path.suffix == ".eval":
        raise InputError(f"{path}: an archive, not a log that can be read; {remedy}")
    try:
        log = parse_json(read_text(path, LARGE_FILE))
        status = log.get("status")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a log that can be read ({error!r}); {remedy}") from error
    if status is None and "configs" in log:
        raise InputError(
            f"{path}: lm-eval's results, which hold no answers; give samples_<task>_<time>.jsonl, "
            "which `lm_eval --log_samples` writes beside them"
        )
    # Before anything else of it, since the log of a run that has not ended may lack `samples`.
    if status != "success":
        raise InputError(f"{path}: status is {status!r}, expected 'success'; finish it first")
    try:
        task = log["eval"]["task"].split("/")[-1]
        shared = {
            "model": log["eval"]["model"],
            "versions": versions_as_texts(log["eval"].get("packages") or {}),
        }
        answers: dict[str, dict[int, str]] = defaultdict(dict)  # of each question, by epoch
        for sample in log["samples"]:
            if not sample.get("choices") and not sample.get("error"):
                answers[str(sample["id"])][_epoch(sample)] = _written_answer(sample)
        samples = [
            LogSample(
                place=f"{path}, sample {sample.get('id')}",
                make_row=partial(inspect_row, sample, task, answers[str(sample.get("id"))]),
                epoch=_epoch(sample),
            )
            for sample in log["samples"]
        ]
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a log that can be read ({error!r}); {remedy}") from error
    return Log(task, shared, samples, tells_of_chats=False)


def _epoch(sample: dict[str, Any]) -> int:
    epoch = sample.get("epoch", 1)
    if type(epoch) is not int:
        raise TypeError(f"epoch is {epoch!r}")
    return epoch


def inspect_row(
    sample: dict[str, Any], task: str, answers_by_epoch: Mapping[int, str]
) -> RawRecord:
    """A sample as a record; `LeftOut` where the model answered nothing."""
    if sample.get("error"):
        raise LeftOut("errored")
    scores = list((sample.get("scores") or {}).values())
    answers = [score["answer"] for score in scores if "answer" in score]
    replies = sample["output"]["choices"]
    if not replies or (answers and not any(answers)):
        raise LeftOut("unanswered")
    asked = json.dumps([sample["input"], sample.get("choices")], ensure_ascii=False)
    about = {
        "id": str(sample["id"]),
        "subject": str((sample.get("metadata") or {}).get("subject") or task),
        "prompt_sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }
    if not sample.get("choices"):
        return {**about, **_written_row(sample, answers_by_epoch)}
    if any(SHUFFLED in str(score.get("explanation")) for score in scores):
        raise ValueError(
            "`multiple_choice(shuffle=True)` showed the choices in another order than the log's; "
            "shuffle them by the data set's `shuffle_choices`"
        )
    letters = LETTERS[: len(sample["choices"])]
    target = sample["target"]
    if isinstance(target, list):
        (target,) = target
    # A list and not the text, in which "" and "BC" would be found too.
    if target not in list(letters):
        raise ValueError(f"target is {target!r}, expected one of {', '.join(letters)}")
    label = letters.index(target)
    logprobs = _letters_where_answered(replies[0].get("logprobs"), letters, answers)
    return {
        **about,
        "label": label,
        "logprobs": logprobs,
        "letter_mass": math.fsum(map(math.exp, logprobs)),
    }


def _written_row(sample: dict[str, Any], answers_by_epoch: Mapping[int, str]) -> RawRecord:
    """What a record holds of a sample whose answer the model wrote."""
    verdicts = set()
    for name, score in (sample.get("scores") or {}).items():
        if score["value"] not in IS_RIGHT:
            raise ValueError(f"{name} scores {score['value']!r}, expected C or I, or 1 or 0")
        verdicts.add(IS_RIGHT[score["value"]])
    if len(verdicts) != 1:
        found = "differ" if verdicts else "are none"
        raise ValueError(f"its scores {found}; import a log with one scorer")
    reply_logprobs = sample["output"]["choices"][0].get("logprobs") or {}
    token_logprobs = [float(token["logprob"]) for token in reply_logprobs.get("content") or []]
    epoch = _epoch(sample)
    others = [answer for other, answer in answers_by_epoch.items() if other != epoch]
    if not token_logprobs and not others:
        raise ValueError(
            "nothing tells how sure the model is of its answer; run `inspect eval` with "
            "--logprobs, or with --epochs 11"
        )
    (is_right,) = verdicts
    return written_fields(_written_answer(sample), is_right, token_logprobs, others)


def _written_answer(sample: dict[str, Any]) -> str:
    """The answer that the first of Inspect's scorers took, else the whole reply."""
    for score in (sample.get("scores") or {}).values():
        if isinstance(score.get("answer"), str):
            return str(score["answer"])
    return str(sample["output"].get("completion") or "")


def _letters_where_answered(
    reply_logprobs: dict[str, Any] | None, letters: str, answers: list[Any]
) -> list[float]:
    """The log-probability of each letter where the model answers with one.

    `answers` are what Inspect's scorers took. An alternative is a letter whatever space, colon or
    bracket its token holds beside it.
    """
    tokens = (reply_logprobs or {}).get("content") or []
    if not any(token.get("top_logprobs") for token in tokens):
        raise ValueError(
            "no top log-probabilities; run `inspect eval` with --logprobs --top-logprobs 20"
        )
    texts = [_plain(token["token"]) for token in tokens]
    place = _answer_place("".join(texts), letters, answers)
    ends = list(accumulate(map(len, texts)))
    number = next(number for number, end in enumerate(ends) if end > place)
    said = _bare(texts[number])
    if len(said) > 1:
        letter = "".join(texts)[place]
        raise ValueError(
            f"its answer {letter!r} is part of the token {texts[number]!r}, so its probability is "
            "not known"
        )
    if said.islower():
        letters = letters.lower()
    top = [
        (_bare(_plain(entry["token"])), entry["logprob"])
        for entry in tokens[number]["top_logprobs"]
    ]
    least = min(logprob for _, logprob in top)
    logprobs = []
    for letter in letters:
        # Several tokens may be the same letter: "B" and " B".
        of_letter = [logprob for text, logprob in top if text == letter]
        if of_letter:
            logprobs.append(min(float(np.logaddexp.reduce(of_letter)), 0.0))
        else:
            logprobs.append(least)
    total = sum(map(math.exp, logprobs))
    if total > records.MOST_PROBABILITY:
        raise ValueError(
            f"its letters sum to {total:.3g}, since those beyond the top {len(top)} tokens get the "
            "least of these; run `inspect eval` with --top-logprobs 20"
        )
    return logprobs


def _answer_place(reply: str, letters: str, answers: list[Any]) -> int:
    """Where the letter of the answer stands in a reply.

    As `choice` of Inspect finds it: in the last line that is nothing but `ANSWER: LETTER`, else
    behind the last `ANSWER:`. In a reply without one, which another scorer has read, it is the only
    letter that stands by itself, and `LeftOut` is raised where there are several.
    """
    scored = {answer.upper() for answer in answers if isinstance(answer, str)} & set(letters)
    found: list[str] = []
    for pattern in (ANSWER_LINE, ANSWER, LONE_LETTER):
        if pattern is LONE_LETTER and found:
            break
        places = []
        for match in pattern.finditer(reply):
            letter = match["letter"].upper()
            if letter in letters:
                found.append(letter)
                if not scored or scored == {letter}:
                    places.append(match.start("letter"))
        if pattern is LONE_LETTER and len(places) > 1:
            raise LeftOut("ambiguous")
        if places:
            return places[-1]
    if not found:
        raise ValueError("none of its tokens is a choice's letter")
    others = ", ".join(sorted(scored))
    raise ValueError(
        f"answers {found[0]}, {others} by its score: were the choices shuffled, or do its scorers "
        "differ?"
    )


def _plain(token: str) -> str:
    """A token's text, where tokenizers of the provider `hf` write spaces as other characters."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("<0x0A>", "\n")


def _bare(text: str) -> str:
    """A token's text without spaces, colons, brackets and the like around it."""
    first = WORD_CHARACTER.search(text)
    if first is None:
        return ""
    last = WORD_CHARACTER.search(text[::-1])
    assert last is not None
    return text[first.start() : len(text) - last.start()]


INSPECT = LogFormat(
    "inspect", read_inspect, "one target, and top log-probabilities where it answers"
)
