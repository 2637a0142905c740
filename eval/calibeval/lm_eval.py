"""lm-evaluation-harness's samples (`lm_eval --log_samples --output_path DIR`) as records.

A file `samples_<task>_<time>.jsonl` has a line a question: the log-probability of each choice after
its prompt. `results_<time>.json` beside it knows the model, the examples and the versions.
"""

import json
import math
import re
from pathlib import Path

import numpy as np

from calibeval import records
from calibeval.io import InputError, json_lines, read_text
from calibeval.tasks import LETTERS

NAME = re.compile(r"samples_(.+?)(_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")


def read(path: Path) -> tuple[str, list[dict], dict]:
    """(task, records in the data's order, the run's options)."""
    if not (name := NAME.fullmatch(path.name)):
        names = "samples_<task>_<time>.jsonl of lm-eval, or Inspect's .eval or .json"
        raise InputError(f"{path}: expected a name like {names}")
    task, beside = name[1], path.with_name(f"results{name[2] or ''}.json")
    try:
        run = json.loads(read_text(beside)) if beside.is_file() else {}
        source = {"task": task, "shots": run.get("n-shot", {}).get(task)}
        delimiter = run.get("configs", {}).get(task, {}).get("target_delimiter", " ")
    except (ValueError, AttributeError) as error:
        raise InputError(f"{beside}: not lm-eval's results ({error})") from error
    model = run.get("model_name") or path.absolute().parent.name
    versions = {k: run.get(f"{k}_version") for k in ("lm_eval", "transformers")}
    shared = {"shots": source["shots"], "model": model, "versions": versions}
    rows, kept = {}, None
    for number, sample in json_lines(path):
        where, kept = f"{path}, line {number}", kept or sample.get("filter", "none")
        if sample.get("filter", "none") != kept:  # the same answers once more
            continue
        try:
            row = record(sample, task, delimiter) | shared
            records.check(row, where)
            right = float(np.argmax(row["logprobs"]) == row["label"])
            if right != float(sample.get("acc", right)):
                said = f"acc is {sample['acc']}, but {right} by its log-probabilities and target"
                raise InputError(f"{where}: {said}")
            if sample["doc_id"] in rows:
                raise InputError(f"{where}: doc_id {sample['doc_id']} was there already")
            rows[sample["doc_id"]] = row
        except InputError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where}: not a multiple-choice sample: {error!r}") from error
    if not rows:
        raise InputError(f"{path}: no samples")
    return task, [rows[i] for i in sorted(rows)], source | {"options": run.get("config")}


def record(sample: dict, task: str, delimiter: str) -> dict:
    """A sample as a record; lengths are of the choices' texts without the delimiter."""
    pairs = sample["arguments"]
    if isinstance(pairs, dict):
        pairs = [(pair["arg_0"], pair["arg_1"]) for pair in pairs.values()]
    scores = [float(score) for score, _ in sample["filtered_resps"]]
    half = len(pairs) // 2
    alone = [("", text) for _, text in pairs[:half]] == [tuple(pair) for pair in pairs[half:]]
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
    if texts == list(LETTERS[:k]):
        return row | {"letter_mass": math.fsum(map(math.exp, scores[:k]))}
    row |= {"scoring": "continuation", "normalise": "characters" if "acc_norm" in sample else "sum"}
    row["bytes"] = [len(text.encode()) for text in texts]
    row["characters"] = [len(text) for text in texts]
    return row
