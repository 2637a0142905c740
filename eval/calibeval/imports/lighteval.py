"""Logs of lighteval.

`lighteval accelerate … --save-details` writes `details_<task>_<time>.parquet`, with a row a
question that has the log-probability of each choice where the task's metric needs them, such as
`loglikelihood_acc`. Of tasks whose answers are written it has none.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calibeval.ask.questions import LETTERS
from calibeval.imports.logs import (
    NOT_A_SAMPLE,
    Log,
    LogFormat,
    LogSample,
    choice_fields,
    possible,
    split_task,
)
from calibeval.io import InputError, refuse_larger, regular_file
from calibeval.records import RawRecord

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

OLDEST_PYARROW = (14, 1)
MOST_UNPACKED = 1 << 30  # characters of a file of details
ROWS_AT_ONCE = 16  # of a file of details, whose rows may be long


def read_lighteval(path: Path) -> Log:
    """A file of details, which are one task's, in its order."""
    try:
        import pyarrow
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise InputError(
            f"{path}: {error}; `pip install pyarrow` gives what reads lighteval's files"
        ) from error
    if tuple(map(int, pyarrow.__version__.split(".")[:2])) < OLDEST_PYARROW:
        raise InputError(
            f"{path}: pyarrow {pyarrow.__version__} runs code that a file may hold "
            "(CVE-2023-47248); type: pip install --upgrade pyarrow"
        )
    try:
        with open(path, "rb", opener=regular_file) as file:
            rows = _unpacked(path, ParquetFile(file))
        # "mmlu:anatomy|5" is the task mmlu:anatomy with five examples.
        name = rows[0]["doc"]["task_name"] if rows else ""
        task = name.rpartition("|")[0].replace(":", "_")
    except (ArrowException, OSError, *NOT_A_SAMPLE) as error:
        raise InputError(
            f"{path}: not lighteval's details ({' '.join(str(error).split())}); expected "
            "details_<task>_<time>.parquet, which `lighteval … --save-details` writes"
        ) from error
    samples = [
        LogSample(f"{path}, row {number}", partial(lighteval_row, row, task))
        for number, row in enumerate(rows, start=1)
    ]
    shared = {"model": _lighteval_model(path), "versions": {}}
    return Log(split_task(task)[0], shared, samples, tells_of_chats=False)


def _unpacked(path: Path, file: "ParquetFile", most: int = MOST_UNPACKED) -> list[dict[str, Any]]:
    """The file's rows; `InputError` where they have more than `most` characters.

    A small file may unpack into any number of them. What it says of its size need not be true, and
    of equal values it holds one, so the rows are measured too, one by one.
    """
    metadata = file.metadata
    groups = range(metadata.num_row_groups)
    refuse_larger(path, sum(metadata.row_group(group).total_byte_size for group in groups), most)
    size = 0
    rows: list[dict[str, Any]] = []
    for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
        refuse_larger(path, batch.nbytes, most)
        for number in range(batch.num_rows):
            (row,) = batch.slice(number, 1).to_pylist()
            size += len(str(row))
            refuse_larger(path, size, most)
            rows.append(row)
    return rows


def _lighteval_model(path: Path) -> str:
    """The model's name: the folders between `details` and the one of the run's time."""
    folders = path.absolute().parent.parts[:-1]
    if "details" not in folders:
        return folders[-1]
    start = len(folders) - folders[::-1].index("details")
    return "/".join(folders[start:]) or "?"


def lighteval_row(row: dict[str, Any], task: str) -> RawRecord:
    """A row of details as a record; lengths are of the choices as lighteval has them.

    Most begin with a space, which its `acc_norm` counts.
    """
    document = row["doc"]
    texts = document["choices"]
    # For `acc_pmi` those of the choices without the question stand behind them.
    logprobs = possible(row["model_response"]["logprobs"][: len(texts)])
    if len(logprobs) != len(texts):
        raise ValueError(f"{len(logprobs)} log-probabilities of {len(texts)} choices")
    label = document["gold_index"]
    if isinstance(label, list):
        (label,) = label
    right = float(np.argmax(logprobs) == label)
    accuracy = row["metric"].get("acc")
    if accuracy is not None and right != float(accuracy):
        raise ValueError(f"acc is {accuracy}, but {right} by log-probabilities and gold_index")
    examples = document.get("fewshot_samples") or []
    shown = [[example["query"], example["choices"], example["gold_index"]] for example in examples]
    asked = json.dumps([document["instruction"], shown, document["query"], texts])
    _, subject = split_task(task)
    record = {
        "id": f"{subject}/{document['id']}",
        "subject": subject,
        "label": label,
        "logprobs": logprobs,
        "prompt_sha256": hashlib.sha256(asked.encode()).hexdigest(),
        "shots": len(examples),
    }
    truncated = row["model_response"].get("truncated_tokens_count")
    if truncated:
        record["truncated"] = truncated
    are_letters = [text.strip() for text in texts] == list(LETTERS[: len(texts)])
    record.update(choice_fields(texts, logprobs, are_letters, row["metric"]))
    return record


LIGHTEVAL = LogFormat(
    "lighteval",
    read_lighteval,
    "a choice's log-probability each, which tasks of the metric loglikelihood_acc have",
)
