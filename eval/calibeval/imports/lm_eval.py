"""Logs of lm-evaluation-harness.

`lm_eval --log_samples --output_path DIR` writes `samples_<task>_<time>.jsonl`, with a line a
question that has the log-probability of each choice after its prompt, or what the model wrote.
`results_<time>.json` beside it knows the model, the examples and the versions.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from calibeval.ask import task_files
from calibeval.ask.questions import LETTERS
from calibeval.ask.written import normalized
from calibeval.imports.logs import (
    NOT_A_SAMPLE,
    Log,
    LogFormat,
    LogSample,
    choice_fields,
    possible,
    split_task,
    versions_as_texts,
    written_fields,
)
from calibeval.io import LARGE_FILE, InputError, counted, json_lines, parse_json, read_text, reading
from calibeval.records import RawRecord

IS_RIGHT = ("exact_match", "em", "acc")  # metrics that are 1 where a written answer is right
SAMPLES_NAME = re.compile(r"samples_(?P<task>.+?)(?P<time>_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")


def read_lm_eval(path: Path) -> Log:
    """A file of samples, in the data's order."""
    name = SAMPLES_NAME.fullmatch(path.name)
    if name is None and _is_array(path):
        raise InputError(
            f"{path}: of lm-eval before 0.4.3: rename it to samples_<task>.jsonl, and the results "
            "beside it to results.json"
        )
    if name is None:
        raise InputError(
            f"{path}: expected a name like samples_<task>_<time>.jsonl of lm-eval, "
            "Inspect's .json, or details_<task>_<time>.parquet of lighteval"
        )
    task = name["task"]
    results_file = path.with_name(f"results{name['time'] or ''}.json")
    results = _lm_eval_results(results_file, task)
    lines = _lines_of_first_filter(path)
    digits_are_texts = _digits_are_texts([sample for _, sample in lines])
    samples = [
        LogSample(place, partial(lm_eval_row, sample, task, results.delimiter, digits_are_texts))
        for place, sample in lines
    ]
    if results.questions is not None and len(samples) != results.questions:
        raise InputError(
            f"{path}: {counted(len(samples), 'sample')}, but {results_file.name} says "
            f"{results.questions}; it was cut short, or is of another run"
        )
    shared = {**results.shared, "model": results.model or path.absolute().parent.name}
    return Log(split_task(task)[0], shared, samples, results.tells_of_chats)


@dataclass(frozen=True)
class _Results:
    """What lm-evaluation-harness's results file says of a task; it may be absent."""

    shared: RawRecord
    model: str | None
    delimiter: str | None  # between a prompt and its choices
    questions: int | None
    tells_of_chats: bool


def _lm_eval_results(file: Path, task: str) -> _Results:
    results: dict[str, Any] = {}
    try:
        if file.is_file():
            results = parse_json(read_text(file))
        shared: RawRecord = {
            "shots": results.get("n-shot", {}).get(task),
            "versions": versions_as_texts(
                {
                    "lm_eval": results.get("lm_eval_version"),
                    "transformers": results.get("transformers_version"),
                }
            ),
        }
        chat_template = results.get("chat_template_sha")
        if chat_template is not None:
            shared["chat_template"] = str(chat_template)
        delimiter = None
        if results:
            delimiter = results.get("configs", {}).get(task, {}).get("target_delimiter", " ")
            if chat_template is not None:
                delimiter = ""  # a choice begins the assistant's turn
        questions = results.get("n-samples", {}).get(task, {}).get("effective")
        return _Results(
            shared=shared,
            model=results.get("model_name"),
            delimiter=delimiter,
            questions=questions,
            tells_of_chats="chat_template_sha" in results,
        )
    except (ValueError, AttributeError) as error:
        raise InputError(f"{file}: not lm-eval's results ({error})") from error


def _lines_of_first_filter(path: Path) -> list[tuple[str, RawRecord]]:
    """The samples in the data's order; `InputError` where they are not whole.

    Of several filters the first: the others have the same answers once more, so they must have
    the same questions.
    """
    by_filter: dict[str, list[tuple[str, RawRecord]]] = {}
    for place, sample in _placed_samples(path):
        number = sample.get("doc_id")
        if type(number) is not int:
            raise InputError(f"{place}: doc_id is {number!r}, expected a whole number")
        by_filter.setdefault(str(sample.get("filter")), []).append((place, sample))
    if not by_filter:
        return []
    first_filter = next(iter(by_filter))
    lines = by_filter[first_filter]
    questions = {sample["doc_id"] for _, sample in lines}
    for name, others in by_filter.items():
        if {sample["doc_id"] for _, sample in others} != questions:
            raise InputError(
                f"{path}: filter {first_filter!r} has {counted(len(lines), 'sample')} and {name!r} "
                f"{len(others)}, of other questions; expected the same ones, so it is not whole"
            )
    return sorted(lines, key=lambda line: line[1]["doc_id"])


def _placed_samples(path: Path) -> Iterator[tuple[str, RawRecord]]:
    """The samples and their places: a line each, or one array of all before lm-eval 0.4.3."""
    if not _is_array(path):
        yield from json_lines(path)
        return
    try:
        samples = parse_json(read_text(path, LARGE_FILE))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    for number, sample in enumerate(samples, start=1):
        place = f"{path}, item {number}"
        if not isinstance(sample, dict):
            kind = type(sample).__name__
            raise InputError(f"{place}: expected a JSON object, found {kind}")
        yield place, sample


def _is_array(path: Path) -> bool:
    with reading(path) as file:
        return file.read(1) == "["


def _digits_are_texts(samples: list[dict[str, Any]]) -> bool:
    """Whether a target of digits is a choice's text in a file, and not the index of a choice.

    An index is the rule: lm-evaluation-harness turns digits that a task's template writes into one.
    It leaves them a text where a task's own function returns them, and logs both alike. A file is
    of such a task if some `acc` contradicts the indices and none contradicts the texts.
    """
    agrees_with_texts: list[bool] = []
    agrees_with_indices: list[bool] = []
    for sample in samples:
        with suppress(*NOT_A_SAMPLE):  # the reader of each sample says what is wrong with it
            target = str(sample["target"])
            requests = _requests(sample)
            texts = [text.strip() for _, text in requests[: _number_of_choices(requests)]]
            if target.isdecimal() and target in texts:
                agrees_with_text = _acc_agrees(sample, texts.index(target))
                agrees_with_index = _acc_agrees(sample, int(target))
                agrees_with_texts.append(agrees_with_text)
                agrees_with_indices.append(agrees_with_index)
    # No sample contradicts the texts, and some sample contradicts the indices.
    return all(agrees_with_texts) and not all(agrees_with_indices)


def _acc_agrees(sample: dict[str, Any], label: int) -> bool:
    """Whether the sample's `acc` is what it would be if `label` were the right choice's index."""
    n_choices = _number_of_choices(_requests(sample))
    logprobs = [float(logprob) for logprob, _ in sample["filtered_resps"][:n_choices]]
    chosen = logprobs.index(max(logprobs))
    return bool(sample["acc"]) == (chosen == label)


def lm_eval_row(
    sample: dict[str, Any], task: str, delimiter: str | None, digits_are_texts: bool = False
) -> RawRecord:
    """A sample as a record; lengths are of the choices' texts without the delimiter.

    Without a results file nobody knows the delimiter: it is the white space that all have. A target
    of digits is an index, unless `digits_are_texts`.
    """
    requests = _requests(sample)
    question_id, subject = _id_and_subject(sample, task)
    about = {"id": question_id, "subject": subject, "prompt_sha256": sample.get("prompt_hash")}
    if isinstance(requests[0][1], dict):  # how to generate, and not a text
        return {**about, **_written_row(sample)}
    logprobs_of_requests = [float(logprob) for logprob, _ in sample["filtered_resps"]]
    n_choices = _number_of_choices(requests)
    texts = [text for _, text in requests[:n_choices]]
    if delimiter is None:
        delimiter = _common_white_space(texts)
    texts = [text.removeprefix(delimiter) for text in texts]
    logprobs = possible(logprobs_of_requests[:n_choices])
    if len(logprobs_of_requests) != len(requests):
        raise ValueError(f"{len(logprobs_of_requests)} scores of {len(requests)} requests")
    label = _lm_eval_label(sample, requests[:n_choices], texts, digits_are_texts)
    right = float(np.argmax(logprobs) == label)
    if right != float(sample.get("acc", right)):
        raise ValueError(f"acc is {sample['acc']}, but {right} by log-probabilities and target")
    are_letters = texts == list(LETTERS[:n_choices])
    return {
        **about,
        "label": label,
        "logprobs": logprobs,
        **choice_fields(texts, logprobs, are_letters, sample),
    }


def _written_row(sample: dict[str, Any]) -> RawRecord:
    """What a record holds of a sample whose answer the model wrote (`generate_until`).

    The log has no probability of it, so that its confidence is the agreement of the task's
    `repeats`.
    """
    (answer,) = sample["filtered_resps"]
    (replies,) = sample["resps"]
    if len(replies) < 2:
        raise ValueError(
            "nothing tells how sure the model is of its answer: lm-eval logs no probability of "
            "what a model writes. Give the task `repeats: 10` and sampling, or ask by `calibeval "
            "score`, whose tasks trivia_qa, nq_open and answers know it"
        )
    normalized_replies = [normalized(reply) for reply in replies]
    if normalized(answer) not in normalized_replies:
        raise ValueError(
            f"filter {sample.get('filter')!r} makes {answer!r} of its replies, so which of them "
            "agree is not known; give the task no filter but take_first"
        )
    others = list(replies)
    del others[normalized_replies.index(normalized(answer))]
    metric = next((name for name in IS_RIGHT if name in sample), None)
    if metric is None or sample[metric] not in (0, 1):
        raise ValueError(f"expected one of {', '.join(IS_RIGHT)}, 0 or 1")
    return written_fields(answer, sample[metric] == 1, [], others)


def _lm_eval_label(
    sample: dict[str, Any],
    requests: list[tuple[str, str]],
    texts: list[str],
    digits_are_texts: bool,
) -> int:
    """The index of the right choice."""
    contexts = {context for context, _ in requests}
    if len(contexts) == 1:
        target = str(sample["target"])
        is_text = not target.isdecimal() or (digits_are_texts and target in texts)
        return texts.index(target) if is_text else int(target)
    # WinoGrande's choices stand in the contexts, and one text goes on after each of them.
    document = sample["doc"]
    if len(set(texts)) > 1 or "option1" not in document:
        raise ValueError("its choices do not continue one prompt")
    return ("1", "2").index(document["answer"])


def _common_white_space(texts: list[str]) -> str:
    """The white space that all texts begin with."""
    first = min(texts)
    length = 0
    for character, other in zip(first, max(texts), strict=False):
        if character != other or not character.isspace():
            break
        length += 1
    return first[:length]


def _requests(sample: dict[str, Any]) -> list[tuple[str, str]]:
    """Context and text of each request of lm-evaluation-harness."""
    arguments = sample["arguments"]
    if isinstance(arguments, list):  # before 0.4.3
        return [(context, text) for context, text in arguments]
    return [(request["arg_0"], request["arg_1"]) for request in arguments.values()]


def _number_of_choices(requests: list[tuple[str, str]]) -> int:
    """How many of the requests are choices after the prompt.

    For `acc_mutual_info` lm-eval asks for every choice without a prompt as well; then it is half.
    """
    half = len(requests) // 2
    without_prompt = [("", text) for _, text in requests[:half]]
    if requests[half:] == without_prompt:
        return half
    return len(requests)


def _id_and_subject(sample: dict[str, Any], task: str) -> tuple[str, str]:
    """The id and the subject of a sample's question.

    A sample's `doc` is a row of its data set on the hub. Of a task that is built in here, the
    task's file makes both from it, as it does when `calibeval.ask.tasks` reads the row, so that
    imported records can be compared with those of `score`. An id that neither the row nor the file
    gives is the subject and the question's number, there as here.

    A subject that the task's name ends in, as mmlu_anatomy does, is kept. Other tasks, and rows
    without the columns that the file asks for (data of one's own), have the task's name as subject
    and that with the number as id. Translations of ARC, such as arc_de, have ids in their rows.
    """
    document = sample["doc"]
    question_id = None
    _, subject = split_task(task)
    builtin_task = _builtin_task(task)
    if builtin_task is not None:
        task_file = task_files.read(builtin_task)
        row = task_file.data.completed(document)
        if subject == task:  # the name tells no subject
            with suppress(task_files.UnknownColumn):
                subject = str(task_file.row.value("subject", row) or subject)
        with suppress(task_files.UnknownColumn):
            question_id = task_file.row.value("id", row)
    elif task.startswith("arc_"):
        question_id = document["id"]
    if question_id is None:
        question_id = f"{subject}/{sample['doc_id']}"
    return str(question_id), subject


def _builtin_task(task: str) -> str | None:
    """The built-in task that asks the same rows as a task of lm-evaluation-harness, if one does."""
    data_set, _ = split_task(task)
    if data_set == "leaderboard_mmlu_pro":
        return "mmlu_pro"
    if data_set.startswith("global_mmlu_"):  # and the language
        return "global_mmlu"
    return data_set if data_set in task_files.BUILTIN_NAMES else None


LM_EVAL = LogFormat(
    "lm-evaluation-harness", read_lm_eval, "a multiple-choice sample, or answers with repeats"
)
