"""Other programs' logs as records.

lm-evaluation-harness (`lm_eval --log_samples --output_path DIR`): `samples_<task>_<time>.jsonl` has
a line a question, the log-probability of each choice after its prompt. `results_<time>.json` beside
it knows the model, the examples and the versions.

Inspect (`inspect eval … --logprobs --top-logprobs 20`; `inspect log convert --to json`), scored by
letters: a sample's answer is its last token that is one of the choices' letters; the
log-probabilities there of all letters are the record. A letter that is not among the top ones has
at most the least of these, and gets it. Of several epochs the first counts.
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from calibeval import records
from calibeval.io import InputError, counted, json_lines, read_text, sha256
from calibeval.request import checked
from calibeval.tasks import LETTERS

NAME = re.compile(r"samples_(.+?)(_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")
# What a log is read as: its task, what all records have, and each sample's place with what makes
# its record.
Log = tuple[str, dict, list[tuple[str, Callable[[], dict]]]]


def convert(paths: list[Path], out: Path) -> dict[str, int]:
    """Write logs as records, to a file `*.jsonl` or to a folder with a file a data set.

    Returns how many questions each file has. Raises `InputError`, naming file and place, for what
    is no multiple choice, and for files that do not belong into one.
    """
    made: dict[Path, tuple[list, dict]] = {}  # rows with their places, and where they are from
    for path in paths:
        engine, read, expected = INSPECT if path.suffix in (".json", ".eval") else LM_EVAL
        task, shared, samples = read(path)
        if not samples:
            raise InputError(f"{path}: no samples")
        name = "mmlu" if task.startswith("mmlu_") else task
        target = out if out.suffix == ".jsonl" else out / f"{name}.jsonl"
        if target.exists():
            raise InputError(f"{target}: exists; give another --out, or delete it")
        rows, sources = made.setdefault(target, ([], {"engine": engine, "samples": {}}))
        for where, make in samples:
            try:
                rows.append((where, make() | shared))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise InputError(f"{where}: {error!r}; expected {expected}") from error
        sources["samples"][path.name] = sha256(path)
    for target, (rows, _) in made.items():
        every = [(where, checked(records.Record, row, where)) for where, row in rows]
        records.joined(target, every)  # refuses what does not belong into one
    for target, (rows, sources) in made.items():
        first = rows[0][1]
        meta = {"settings": sources, "model": first["model"], "versions": first["versions"]}
        records.write(target, [row for _, row in rows], meta)
        how = f"{first.get('scoring', 'letters')} by {first.get('normalise', 'sum')}"
        print(f"{target}: {counted(len(rows), 'question')}, {how}", file=sys.stderr)
    return {str(target): len(rows) for target, (rows, _) in made.items()}


def lm_eval(path: Path) -> Log:
    """A file of samples, in the data's order."""
    if not (name := NAME.fullmatch(path.name)):
        names = "samples_<task>_<time>.jsonl of lm-eval, or Inspect's .json"
        raise InputError(f"{path}: expected a name like {names}")
    task, beside = name[1], path.with_name(f"results{name[2] or ''}.json")
    try:
        run = json.loads(read_text(beside)) if beside.is_file() else {}
        shots = run.get("n-shot", {}).get(task)
        delimiter = run.get("configs", {}).get(task, {}).get("target_delimiter", " ")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{beside}: not lm-eval's results ({error})") from error
    model = run.get("model_name") or path.absolute().parent.name
    versions = {k: run.get(f"{k}_version") for k in ("lm_eval", "transformers")}
    shared = {"shots": shots, "model": model, "versions": versions}
    samples = [*json_lines(path)]
    # Of several filters the first: the others have the same answers once more.
    samples = [one for one in samples if one[1].get("filter") == samples[0][1].get("filter")]
    samples.sort(key=lambda one: one[1].get("doc_id", 0))
    rows = [(where, partial(lm_eval_record, sample, task, delimiter)) for where, sample in samples]
    return task, shared, rows


def lm_eval_record(sample: dict, task: str, delimiter: str) -> dict:
    """A sample as a record; lengths are of the choices' texts without the delimiter."""
    pairs = [(pair["arg_0"], pair["arg_1"]) for pair in sample["arguments"].values()]
    scores = [float(score) for score, _ in sample["filtered_resps"]]
    half = len(pairs) // 2
    alone = [("", text) for _, text in pairs[:half]] == pairs[half:]
    k = half if alone else len(pairs)
    if len(scores) != len(pairs) or any(context != pairs[0][0] for context, _ in pairs[:k]):
        raise ValueError("its choices do not continue one prompt")
    texts = [text.removeprefix(delimiter) for _, text in pairs[:k]]
    target, doc = str(sample["target"]), sample["doc"]
    number = sample["doc_id"] if task != "hellaswag" else doc.get("ind", sample["doc_id"])
    subject = re.sub("^mmlu_(continuation_)?", "", task)
    row = {
        "id": doc["id"] if task.startswith("arc_") else f"{subject}/{number}",
        "subject": subject,
        "label": int(target) if target.isdecimal() else texts.index(target),
        "logprobs": scores[:k],
        "prompt_sha256": sample.get("prompt_hash"),
    }
    right = float(np.argmax(scores[:k]) == row["label"])
    if right != float(sample.get("acc", right)):
        raise ValueError(f"acc is {sample['acc']}, but {right} by log-probabilities and target")
    if texts == list(LETTERS[:k]):
        return row | {"letter_mass": math.fsum(map(math.exp, scores[:k]))}
    row |= {"scoring": "continuation", "normalise": "characters" if "acc_norm" in sample else "sum"}
    row["bytes"] = [len(text.encode()) for text in texts]
    row["characters"] = [len(text) for text in texts]
    return row


def inspect(path: Path) -> Log:
    """A log, as .json."""
    try:
        log = json.loads(read_text(path))
        about, samples = log["eval"], log["samples"]
        task = about["task"].split("/")[-1]
        shared = {"model": about["model"], "versions": about.get("packages") or {}}
        first = [sample for sample in samples if sample.get("epoch", 1) == 1]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "`inspect log convert --to json` makes one that is"
        raise InputError(f"{path}: not a log that can be read ({error!r}); {remedy}") from error
    if (status := log.get("status")) != "success":
        raise InputError(f"{path}: status is {status!r}, expected 'success'; finish it first")
    rows = [
        (f"{path}, sample {one.get('id')}", partial(inspect_record, one, task)) for one in first
    ]
    return task, shared, rows


def inspect_record(sample: dict, task: str) -> dict:
    """A sample as a record."""
    letters, target = LETTERS[: len(sample["choices"])], sample["target"]
    (target,) = target if isinstance(target, list) else [target]
    tokens = sample["output"]["choices"][0]["logprobs"]["content"]
    place = [t for t in tokens if t["token"].strip() in [*letters] and t.get("top_logprobs")][-1]
    by_score = {score.get("answer") for score in (sample.get("scores") or {}).values()}
    if other := by_score & {*letters} - {answer := place["token"].strip()}:
        raise ValueError(f"answers {answer}, {min(other)} by its score: were the choices shuffled?")
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


LM_EVAL = "lm-evaluation-harness", lm_eval, "a multiple-choice sample"
INSPECT = "inspect", inspect, "one target, and top log-probabilities where it answers"
