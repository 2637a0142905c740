"""Other programs' logs as records.

lm-evaluation-harness (`lm_eval --log_samples --output_path DIR`): `samples_<task>_<time>.jsonl` has
a line a question, the log-probability of each choice after its prompt. `results_<time>.json` beside
it knows the model, the examples and the versions.

Inspect (`inspect eval … --logprobs --top-logprobs 20`; `inspect log convert --to json`), scored by
letters: a sample's answer is its last token that is one of the choices' letters; the
log-probabilities there of all letters are the record. A letter that is not among the top ones has
at most the least of these, and gets it. Of several epochs the first counts.

To add a program, write a function that reads its log as a `Log`, and a `LogFormat` of it that
`format_of` chooses.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibeval import records
from calibeval.io import InputError, counted, json_lines, read_text, sha256
from calibeval.questions import LETTERS
from calibeval.validation import checked

Row = dict[str, Any]  # a record as it is written
SAMPLES_NAME = re.compile(r"samples_(?P<task>.+?)(?P<time>_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")
# What a sample that is no multiple choice makes its reader raise.
NOT_A_SAMPLE = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Sample:
    """One question of a log, and the function that makes its record."""

    place: str  # for messages: the file, and the line or the sample's id
    make_row: Callable[[], Row]


@dataclass(frozen=True)
class Log:
    """What a log file is read as."""

    task: str
    shared: Row  # what all its records have
    samples: list[Sample]


@dataclass(frozen=True)
class LogFormat:
    """How the logs of a program are read."""

    program: str  # goes into the sidecar as the engine
    read: Callable[[Path], Log]
    expected: str  # what a sample must have, for messages


@dataclass
class _Target:
    """A record file to be written."""

    program: str
    rows: list[tuple[str, Row]] = field(default_factory=list)  # each with its place
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of the logs, by their names


def convert(paths: list[Path], out: Path) -> dict[str, int]:
    """Write logs as records, to a file `*.jsonl` or to a folder with a file a data set.

    Returns how many questions each file has. Raises `InputError`, naming file and place, for what
    is no multiple choice, and for files that do not belong into one; then nothing is written.
    """
    targets: dict[Path, _Target] = {}
    for path in paths:
        _add_log(path, out, targets)
    for file, target in targets.items():
        checked_rows = [(place, checked(records.Record, row, place)) for place, row in target.rows]
        records.joined(file, checked_rows)  # refuses what does not belong into one
    for file, target in targets.items():
        _write(file, target)
    return {str(file): len(target.rows) for file, target in targets.items()}


def _add_log(path: Path, out: Path, targets: dict[Path, _Target]) -> None:
    """Read a log, and add its rows to the file that they belong to."""
    log_format = format_of(path)
    log = log_format.read(path)
    if not log.samples:
        raise InputError(f"{path}: no samples")
    file = out
    if out.suffix != ".jsonl":
        data_set = "mmlu" if log.task.startswith("mmlu_") else log.task
        file = out / f"{data_set}.jsonl"
    if file.exists():
        raise InputError(f"{file}: exists; give another --out, or delete it")
    target = targets.setdefault(file, _Target(log_format.program))
    for sample in log.samples:
        try:
            row = sample.make_row()
        except NOT_A_SAMPLE as error:
            raise InputError(
                f"{sample.place}: {error!r}; expected {log_format.expected}"
            ) from error
        target.rows.append((sample.place, {**row, **log.shared}))
    target.digests[path.name] = sha256(path)


def _write(file: Path, target: _Target) -> None:
    """Write a record file with its sidecar, and say so."""
    rows = [row for _, row in target.rows]
    first = rows[0]
    about = {
        "settings": {"engine": target.program, "samples": target.digests},
        "model": first["model"],
        "versions": first["versions"],
    }
    records.write(file, rows, about)
    scoring = first.get("scoring", "letters")
    normalise = first.get("normalise", "sum")
    questions = counted(len(rows), "question")
    print(f"{file}: {questions}, {scoring} by {normalise}", file=sys.stderr)


# --- lm-evaluation-harness ---


def read_lm_eval(path: Path) -> Log:
    """A file of samples, in the data's order."""
    name = SAMPLES_NAME.fullmatch(path.name)
    if name is None:
        raise InputError(
            f"{path}: expected a name like samples_<task>_<time>.jsonl of lm-eval, "
            "or Inspect's .json"
        )
    task = name["task"]
    results_file = path.with_name(f"results{name['time'] or ''}.json")
    results: dict[str, Any] = {}
    try:
        if results_file.is_file():
            results = json.loads(read_text(results_file))
        shots = results.get("n-shot", {}).get(task)
        delimiter = results.get("configs", {}).get(task, {}).get("target_delimiter", " ")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{results_file}: not lm-eval's results ({error})") from error
    shared = {
        "shots": shots,
        "model": results.get("model_name") or path.absolute().parent.name,
        "versions": {
            "lm_eval": results.get("lm_eval_version"),
            "transformers": results.get("transformers_version"),
        },
    }
    lines = list(json_lines(path))
    if lines:
        # Of several filters the first: the others have the same answers once more.
        first_filter = lines[0][1].get("filter")
        lines = [(place, sample) for place, sample in lines if sample.get("filter") == first_filter]
    lines.sort(key=lambda line: line[1].get("doc_id", 0))
    samples = [
        Sample(place, partial(lm_eval_row, sample, task, delimiter)) for place, sample in lines
    ]
    return Log(task, shared, samples)


def lm_eval_row(sample: dict[str, Any], task: str, delimiter: str) -> Row:
    """A sample as a record; lengths are of the choices' texts without the delimiter."""
    requests = [(request["arg_0"], request["arg_1"]) for request in sample["arguments"].values()]
    scores = [float(score) for score, _ in sample["filtered_resps"]]
    n_choices = _number_of_choices(requests)
    contexts = {context for context, _ in requests[:n_choices]}
    if len(scores) != len(requests) or len(contexts) > 1:
        raise ValueError("its choices do not continue one prompt")
    texts = [text.removeprefix(delimiter) for _, text in requests[:n_choices]]
    logprobs = scores[:n_choices]
    target = str(sample["target"])
    label = int(target) if target.isdecimal() else texts.index(target)
    right = float(np.argmax(logprobs) == label)
    if right != float(sample.get("acc", right)):
        raise ValueError(f"acc is {sample['acc']}, but {right} by log-probabilities and target")
    subject = re.sub("^mmlu_(continuation_)?", "", task)
    row = {
        "id": _lm_eval_id(sample, task, subject),
        "subject": subject,
        "label": label,
        "logprobs": logprobs,
        "prompt_sha256": sample.get("prompt_hash"),
    }
    if texts == list(LETTERS[:n_choices]):
        row["letter_mass"] = math.fsum(map(math.exp, logprobs))
        return row
    row["scoring"] = "continuation"
    row["normalise"] = "characters" if "acc_norm" in sample else "sum"
    row["bytes"] = [len(text.encode()) for text in texts]
    row["characters"] = [len(text) for text in texts]
    return row


def _number_of_choices(requests: list[tuple[str, str]]) -> int:
    """How many of the requests are choices after the prompt.

    For `acc_mutual_info` lm-eval asks for every choice without a prompt as well; then it is half.
    """
    half = len(requests) // 2
    without_prompt = [("", text) for _, text in requests[:half]]
    if requests[half:] == without_prompt:
        return half
    return len(requests)


def _lm_eval_id(sample: dict[str, Any], task: str, subject: str) -> str:
    """The id that `calibeval.tasks` gives the same question, as far as the sample knows it."""
    document = sample["doc"]
    if task.startswith("arc_"):
        return document["id"]
    number = sample["doc_id"]
    if task == "hellaswag":
        number = document.get("ind", number)
    return f"{subject}/{number}"


# --- Inspect ---


def read_inspect(path: Path) -> Log:
    """A log, as .json."""
    try:
        log = json.loads(read_text(path))
        task = log["eval"]["task"].split("/")[-1]
        shared = {
            "model": log["eval"]["model"],
            "versions": log["eval"].get("packages") or {},
        }
        first_epoch = [sample for sample in log["samples"] if sample.get("epoch", 1) == 1]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: not a log that can be read ({error!r}); "
            "`inspect log convert --to json` makes one that is"
        ) from error
    status = log.get("status")
    if status != "success":
        raise InputError(f"{path}: status is {status!r}, expected 'success'; finish it first")
    samples = [
        Sample(f"{path}, sample {sample.get('id')}", partial(inspect_row, sample, task))
        for sample in first_epoch
    ]
    return Log(task, shared, samples)


def inspect_row(sample: dict[str, Any], task: str) -> Row:
    """A sample as a record."""
    letters = LETTERS[: len(sample["choices"])]
    target = sample["target"]
    if isinstance(target, list):
        (target,) = target
    label = letters.index(target)
    answer, logprobs = _letters_where_answered(sample, letters)
    _refuse_shuffled_choices(sample, letters, answer)
    asked = json.dumps([sample["input"], sample["choices"]], ensure_ascii=False)
    return {
        "id": str(sample["id"]),
        "subject": str((sample.get("metadata") or {}).get("subject") or task),
        "label": label,
        "logprobs": logprobs,
        "letter_mass": math.fsum(map(math.exp, logprobs)),
        "prompt_sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }


def _letters_where_answered(sample: dict[str, Any], letters: str) -> tuple[str, list[float]]:
    """The letter of the last token that is one, and the log-probability of each letter there."""
    answers = [
        token
        for token in sample["output"]["choices"][0]["logprobs"]["content"]
        if token["token"].strip() in list(letters) and token.get("top_logprobs")
    ]
    last = answers[-1]
    top = [(entry["token"].strip(), entry["logprob"]) for entry in last["top_logprobs"]]
    least = min(logprob for _, logprob in top)
    logprobs = []
    for letter in letters:
        # Several tokens may be the same letter: "B" and " B".
        probabilities = [math.exp(logprob) for token, logprob in top if token == letter]
        if probabilities:
            logprobs.append(min(math.log(sum(probabilities)), 0.0))
        else:
            logprobs.append(least)
    return last["token"].strip(), logprobs


def _refuse_shuffled_choices(sample: dict[str, Any], letters: str, answer: str) -> None:
    """Raise where the sample's score knows another answer: the letters were not the target's."""
    scored = {score.get("answer") for score in (sample.get("scores") or {}).values()}
    others = sorted((scored & set(letters)) - {answer})
    if others:
        raise ValueError(f"answers {answer}, {others[0]} by its score: were the choices shuffled?")


# --- The formats ---

LM_EVAL = LogFormat("lm-evaluation-harness", read_lm_eval, "a multiple-choice sample")
INSPECT = LogFormat(
    "inspect", read_inspect, "one target, and top log-probabilities where it answers"
)


def format_of(path: Path) -> LogFormat:
    """The format of a log, by its name's end."""
    return INSPECT if path.suffix in (".json", ".eval") else LM_EVAL
