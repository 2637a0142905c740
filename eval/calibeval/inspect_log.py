"""Inspect's logs (`inspect eval … --logprobs --top-logprobs 20`) as records, scored by letters.

A sample's answer is its last token that is one of the choices' letters; the log-probabilities there
of all letters are the record. A letter that is not among the top ones has at most the least of
these, and gets it. Of several epochs the first counts.
"""

import hashlib
import json
import math
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from calibeval.io import InputError, read_text
from calibeval.tasks import LETTERS

ENGINE = "inspect"
EXPECTED = "a multiple choice with one target, and top log-probabilities where it answers"


def read(path: Path) -> tuple[str, dict, dict, list[tuple[str, Callable[[], dict]]]]:
    """(task, what all records have, the log's account of itself, each sample's place and what makes
    its record)."""
    try:
        log = _members(path) if zipfile.is_zipfile(path) else json.loads(read_text(path))
        about, samples = log["eval"], log["samples"]
        task = about["task"].split("/")[-1]
        shared = {"model": about["model"], "versions": about.get("packages") or {}}
        source = {"task": about["task"], "created": about.get("created")}
    # NotImplementedError: a compression that zipfile lacks
    except (ValueError, LookupError, TypeError, NotImplementedError) as error:
        remedy = "`inspect log convert --to json` makes one that is"
        raise InputError(f"{path}: not a log that can be read ({error!r}); {remedy}") from error
    first = [sample for sample in samples if sample.get("epoch", 1) == 1]
    rows = [(f"{path}, sample {one.get('id')}", partial(record, one, task)) for one in first]
    return task, shared, source, rows


def _members(path: Path) -> dict:
    """The same from the parts of an .eval archive."""
    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("samples/"))
        header = json.loads(archive.read("header.json"))
        return header | {"samples": [json.loads(archive.read(name)) for name in names]}


def record(sample: dict, task: str) -> dict:
    """A sample as a record."""
    letters, target = LETTERS[: len(sample["choices"])], sample["target"]
    (target,) = target if isinstance(target, list) else [target]
    tokens = sample["output"]["choices"][0]["logprobs"]["content"]
    answers = [t for t in tokens if t["token"].strip() in [*letters]]
    place = [t for t in answers if t.get("top_logprobs")][-1]
    top = [(one["token"].strip(), one["logprob"]) for one in place["top_logprobs"]]
    found, least = [], min(value for _, value in top)
    for letter in letters:
        same = [math.exp(value) for token, value in top if token == letter]  # "B" and " B"
        found.append(min(math.log(sum(same)), 0.0) if same else least)
    asked = json.dumps([sample["input"], sample["choices"]], ensure_ascii=False)
    return {
        "id": str(sample["id"]),
        "subject": str((sample.get("metadata") or {}).get("subject") or task),
        "label": letters.index(target),
        "logprobs": found,
        "letter_mass": math.fsum(map(math.exp, found)),
        "prompt_sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }
