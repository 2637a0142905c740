"""lm-evaluation-harness's samples (`lm_eval --log_samples --output_path DIR`) as records.

A file `samples_<task>_<time>.jsonl` has a line a question: the log-probability of each choice after
its prompt. `results_<time>.json` beside it knows the model, the examples and the versions.
"""

import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from calibeval.io import InputError, json_lines, read_text
from calibeval.tasks import LETTERS

ENGINE, EXPECTED = "lm-evaluation-harness", "a multiple-choice sample"
NAME = re.compile(r"samples_(.+?)(_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")


def read(path: Path) -> tuple[str, dict, dict, list[tuple[str, Callable[[], dict]]]]:
    """(task, what all records have, the run's options, each sample's place and what makes its
    record, in the data's order)."""
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
    samples = [(f"{path}, line {number}", sample) for number, sample in json_lines(path)]
    # Of several filters the first: the others have the same answers once more.
    samples = [one for one in samples if one[1].get("filter") == samples[0][1].get("filter")]
    samples.sort(key=lambda one: one[1].get("doc_id", 0))
    rows = [(where, partial(record, sample, task, delimiter)) for where, sample in samples]
    return task, shared, source | {"options": run.get("config")}, rows


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
    right = float(np.argmax(scores[:k]) == row["label"])
    if right != float(sample.get("acc", right)):
        raise ValueError(f"acc is {sample['acc']}, but {right} by log-probabilities and target")
    if texts == list(LETTERS[:k]):
        return row | {"letter_mass": math.fsum(map(math.exp, scores[:k]))}
    row |= {"scoring": "continuation", "normalise": "characters" if "acc_norm" in sample else "sum"}
    row["bytes"] = [len(text.encode()) for text in texts]
    row["characters"] = [len(text) for text in texts]
    return row
