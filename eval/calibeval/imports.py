"""Other programs' logs as records.

lm-evaluation-harness (`lm_eval --log_samples --output_path DIR`): `samples_<task>_<time>.jsonl` has
a line a question, the log-probability of each choice after its prompt. `results_<time>.json` beside
it knows the model, the examples and the versions.

Inspect (`inspect eval … --logprobs --top-logprobs 20`; `inspect log convert --to json`), scored by
letters: a sample's answer is the letter that Inspect's own scorer takes (`_answer_place`); the
log-probabilities there of all letters are the record. A letter that is not among the top ones has
at most the least of these, and gets it. Of several epochs one is read, which the user names.

lighteval (`lighteval accelerate … --save-details`): `details_<task>_<time>.parquet` has a row a
question, with the log-probability of each choice where the task's metric needs them, such as
`loglikelihood_acc`. Of tasks whose answers are written it has none.

Samples of which nothing is known, such as those in which Inspect found no answer, are left out,
counted and said: `LEFT_OUT` lists why.

Whether the model was asked in its chat is known only where lm-evaluation-harness's results say. Of
other logs the sidecar says that it is not known, and `compare` takes them as asked in either way.

To add a program, write a function that reads its log as a `Log`, and a `LogFormat` of it that
`format_of` chooses: by the end of the file's name, so two programs that both write .json would have
to be told apart by what is in the file. What a row must hold is `records.Record`'s to say; one
without `scoring` is of letters. All rows of a file must have the same values of
`records.ALIKE_IF_PROMPTS_UNKNOWN`, `shots` among them. The help of `import` in `__main__`, the
error of `read_lm_eval` and the page of this folder name the programs too.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from calibeval import records, task_files
from calibeval.io import (
    LARGE_FILE,
    InputError,
    counted,
    json_lines,
    parse_json,
    read_text,
    reading,
    regular_file,
    sha256,
    show,
)
from calibeval.questions import LETTERS
from calibeval.records import RawRecord
from calibeval.task_files import Normaliser
from calibeval.validation import checked, is_unicode

SAMPLES_NAME = re.compile(r"samples_(?P<task>.+?)(?P<time>_\d{4}-\d\d-\d\dT[\d.-]+)?\.jsonl")
# What makes a file's name: a data set's may be anything in a log.
DATA_SET_NAME = re.compile(r"\w[\w.+=-]{0,199}")
# What is added to the log-probability of a question's least likely choice to make that of an
# impossible one, which has −∞ where a model's softmax in 16 bits comes to 0. It is just below the
# logarithm of the least positive float32, −103.3.
IMPOSSIBLE = -104.0
MMLU_SUBJECTS = (
    *("abstract_algebra", "anatomy", "astronomy", "business_ethics", "clinical_knowledge"),
    *("college_biology", "college_chemistry", "college_computer_science", "college_mathematics"),
    *("college_medicine", "college_physics", "computer_security", "conceptual_physics"),
    *("econometrics", "electrical_engineering", "elementary_mathematics", "formal_logic"),
    *("global_facts", "high_school_biology", "high_school_chemistry"),
    *("high_school_computer_science", "high_school_european_history", "high_school_geography"),
    *("high_school_government_and_politics", "high_school_macroeconomics"),
    *("high_school_mathematics", "high_school_microeconomics", "high_school_physics"),
    *("high_school_psychology", "high_school_statistics", "high_school_us_history"),
    *("high_school_world_history", "human_aging", "human_sexuality", "international_law"),
    *("jurisprudence", "logical_fallacies", "machine_learning", "management", "marketing"),
    *("medical_genetics", "miscellaneous", "moral_disputes", "moral_scenarios", "nutrition"),
    *("philosophy", "prehistory", "professional_accounting", "professional_law"),
    *("professional_medicine", "professional_psychology", "public_relations", "security_studies"),
    *("sociology", "us_foreign_policy", "virology", "world_religions"),
)
# What a sample that is no multiple choice makes its reader raise.
NOT_A_SAMPLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# Why a sample is left out: a key of the sidecar's settings, and what follows "2 samples".
LEFT_OUT = {
    "errored": "that ended in an error",
    "unanswered": "without an answer",
    "ambiguous": "whose reply does not show which letter is its answer",
    "impossible": "whose choices all have probability 0",
}


class LeftOut(Exception):
    """A sample of which nothing is known; `reason` is a key of `LEFT_OUT`."""

    def __init__(self, reason: str):
        super().__init__(LEFT_OUT[reason])
        self.reason = reason


@dataclass(frozen=True)
class LogSample:
    """One question of a log, and the function that makes its record."""

    place: str  # for messages: the file, and the line or the sample's id
    make_row: Callable[[], RawRecord]  # may raise `LeftOut`
    epoch: int = 1  # which time it is that the question is asked


@dataclass(frozen=True)
class Log:
    """What a log file is read as."""

    data_set: str  # names the file of its records
    shared: RawRecord  # what all its records have
    samples: list[LogSample]
    tells_of_chats: bool  # whether no `chat_template` in `shared` means that no chat was asked


@dataclass(frozen=True)
class LogFormat:
    """How the logs of a program are read."""

    program: str  # goes into the sidecar as the engine
    read: Callable[[Path], Log]
    expected: str  # what a sample must have, for messages


@dataclass(frozen=True)
class _LoggedRow:
    """A row of a record file, and where it was logged."""

    log: Path
    place: str
    row: RawRecord


@dataclass
class _Target:
    """A record file to be written."""

    program: str
    rows: list[_LoggedRow] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # SHA-256 of each log, by its name
    left_out: Counter[str] = field(default_factory=Counter)  # by the reason, of `LEFT_OUT`
    tells_of_chats: bool = True  # whether all its logs do
    tied: int = 0  # questions with several likeliest choices


def convert(paths: list[Path], out: Path, epoch: int | None = None) -> dict[str, int]:
    """Write logs as records, to a file `*.jsonl` or to a folder with a file a data set.

    `epoch` says which answers are read of a log that asks each question several times.

    Returns how many questions each file has. Raises `InputError`, naming file and place, for what
    is no multiple choice, and for files that do not belong into one, as those with other examples
    do not; then nothing is written.
    """
    targets: dict[Path, _Target] = {}
    for path in paths:
        _add_log(path, out, targets, epoch)
    for file, target in targets.items():
        placed_records = [
            (logged.place, checked(records.Record, logged.row, logged.place))
            for logged in target.rows
        ]
        _refuse_unlike_records(placed_records, target)
        target.tied = records.joined(file, placed_records).tied  # refuses an id that is there twice
    for file, target in targets.items():
        _write(file, target)
    return {str(file): len(target.rows) for file, target in targets.items()}


def _refuse_unlike_records(
    placed_records: list[tuple[str, records.Record]], target: _Target
) -> None:
    """Raise `InputError`, naming both places, where `records.read` would refuse the written file.

    `placed_records` are those of the target's rows, in their order.
    """
    first_place, first = placed_records[0]
    for logged, (place, record) in zip(target.rows, placed_records, strict=True):
        for key in records.ALIKE_IF_PROMPTS_UNKNOWN:
            value = getattr(record, key)
            first_value = getattr(first, key)
            if value == first_value:
                continue
            remedy = "give the logs of each another --out"
            if logged.log == target.rows[0].log:
                remedy = "ask all questions of this log alike"
            raise InputError(
                f"{place}: {key} {value!r}, but {first_place}: {key} {first_value!r}; "
                f"expected the same in a record file; {remedy}"
            )


def _add_log(path: Path, out: Path, targets: dict[Path, _Target], epoch: int | None) -> None:
    """Read a log, and add its rows to the file that they belong to."""
    log_format = format_of(path)
    log = log_format.read(path)
    if not log.samples:
        raise InputError(f"{path}: no samples")
    file = out
    if out.suffix != ".jsonl":
        if not DATA_SET_NAME.fullmatch(log.data_set):
            raise InputError(
                f"{path}: its task {log.data_set[:60]!r} does not make a file's name; "
                "give --out FILE.jsonl"
            )
        file = out / f"{log.data_set}.jsonl"
    if file.exists():
        raise InputError(f"{file}: exists; give another --out, or delete it")
    target = targets.setdefault(file, _Target(log_format.program))
    if target.program != log_format.program:
        raise InputError(
            f"{path}: is of {log_format.program}, but other logs for {file} are of "
            f"{target.program}; give each program's logs another --out"
        )
    left_out: Counter[str] = Counter()
    samples = _samples_of_epoch(log, epoch, path)
    for sample in samples:
        try:
            row = sample.make_row()
        except LeftOut as reason:
            left_out[reason.reason] += 1
            continue
        except NOT_A_SAMPLE as error:
            problem = str(error) if type(error) is ValueError else repr(error)
            raise InputError(
                f"{sample.place}: {problem}; expected {log_format.expected}"
            ) from error
        target.rows.append(_LoggedRow(path, sample.place, {**row, **log.shared}))
    if left_out.total() == len(samples):
        raise InputError(
            f"{path}: none of {counted(len(samples), 'sample')} can be used: "
            f"{_described_as_left_out(left_out)}"
        )
    # Logs of two runs may have one name; then the second is known by its path as it was given.
    name = str(path) if path.name in target.digests else path.name
    target.digests[name] = sha256(path)
    target.left_out += left_out
    target.tells_of_chats = target.tells_of_chats and log.tells_of_chats


def _samples_of_epoch(log: Log, epoch: int | None, path: Path) -> list[LogSample]:
    """The samples in which each question is asked once; `InputError` where none is chosen."""
    epochs = sorted({sample.epoch for sample in log.samples})
    if epoch is None and len(epochs) > 1:
        raise InputError(
            f"{path}: its questions were asked in {len(epochs)} epochs, and records hold one "
            f"answer to each; give --epoch {epochs[0]}, or another up to {epochs[-1]}"
        )
    if epoch is not None and epoch not in epochs:
        raise InputError(f"{path}: no epoch {epoch}; there are {', '.join(map(str, epochs))}")
    return [sample for sample in log.samples if epoch in (None, sample.epoch)]


def _described_as_left_out(left_out: Counter[str]) -> str:
    """How many samples are left out, and why."""
    parts = []
    for reason, words in LEFT_OUT.items():
        if left_out[reason]:
            parts.append(f"{counted(left_out[reason], 'sample')} {words}")
    return ", ".join(parts)


def _write(file: Path, target: _Target) -> None:
    """Write a record file with its sidecar, and say so."""
    rows = [logged.row for logged in target.rows]
    first = rows[0]
    settings: dict[str, Any] = {"engine": target.program, "samples": target.digests}
    if not target.tells_of_chats:
        settings[records.TEMPLATE_IS_KNOWN] = False
    settings.update(target.left_out)
    if target.left_out:
        show(
            f"warning: {file}: {_described_as_left_out(target.left_out)} left out, "
            f"{len(rows)} kept: every metric is of those that are kept",
            to_stderr=True,
        )
    about = {
        "settings": settings,
        "model": first["model"],
        "versions": first["versions"],
    }
    records.write(file, rows, about)
    scoring = first.get("scoring", "letters")
    normalise = first.get("normalise", "sum")
    records.warn_of_ties(file, target.tied, len(rows))
    questions = counted(len(rows), "question")
    show(f"{file}: {questions}, {scoring} by {normalise}", to_stderr=True)


# --- lm-evaluation-harness ---


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
            "versions": _texts(
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


def _texts(versions: dict[str, Any]) -> dict[str, str]:
    """The packages' versions that are texts which a file can hold."""
    return {
        name: version
        for name, version in versions.items()
        if isinstance(version, str) and is_unicode(name) and is_unicode(version)
    }


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


def split_task(task: str) -> tuple[str, str]:
    """The data set and the subject of a task: mmlu_anatomy is of mmlu, arc_easy of itself."""
    name = task.removesuffix("_continuation")
    for subject in MMLU_SUBJECTS:
        if name.endswith(f"_{subject}"):
            return name.removesuffix(f"_{subject}").removesuffix("_continuation"), subject
    return task, task


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
    logprobs_of_requests = [float(logprob) for logprob, _ in sample["filtered_resps"]]
    n_choices = _number_of_choices(requests)
    texts = [text for _, text in requests[:n_choices]]
    if delimiter is None:
        delimiter = _common_white_space(texts)
    texts = [text.removeprefix(delimiter) for text in texts]
    logprobs = _possible(logprobs_of_requests[:n_choices])
    if len(logprobs_of_requests) != len(requests):
        raise ValueError(f"{len(logprobs_of_requests)} scores of {len(requests)} requests")
    label = _lm_eval_label(sample, requests[:n_choices], texts, digits_are_texts)
    right = float(np.argmax(logprobs) == label)
    if right != float(sample.get("acc", right)):
        raise ValueError(f"acc is {sample['acc']}, but {right} by log-probabilities and target")
    question_id, subject = _id_and_subject(sample, task)
    row = {
        "id": question_id,
        "subject": subject,
        "label": label,
        "logprobs": logprobs,
        "prompt_sha256": sample.get("prompt_hash"),
    }
    if texts == list(LETTERS[:n_choices]):
        row["letter_mass"] = math.fsum(map(math.exp, logprobs))
        return row
    row["scoring"] = "continuation"
    row["normalise"] = _normaliser(sample)
    row["bytes"] = [len(text.encode()) for text in texts]
    row["characters"] = [len(text) for text in texts]
    return row


def _normaliser(metrics: Mapping[str, Any]) -> Normaliser:
    """By what texts' log-probabilities are divided, as the metrics that a log has say."""
    if "acc_norm" in metrics:
        return "characters"
    return "bytes" if "acc_bytes" in metrics else "sum"


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


def _possible(logprobs: list[float]) -> list[float]:
    """The log-probabilities, with a finite one for choices of probability 0.

    `LeftOut` where all are impossible: by texts' lengths one would be the model's answer.
    """
    possible = [value for value in logprobs if value != -math.inf]
    if logprobs and not possible:
        raise LeftOut("impossible")
    least = min(possible, default=0.0)
    return [least + IMPOSSIBLE if value == -math.inf else value for value in logprobs]


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
    task's file makes both from it, as it does when `calibeval.tasks` reads the row, so that
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


# --- Inspect ---

# Inspect takes letters of either case behind ANSWER, and wrapped in $…$, **…** or brackets.
ANSWER = re.compile(r"ANSWER\s*:[\s$*(]*(?P<letter>[A-Z])(?![A-Z0-9])", re.IGNORECASE)
ANSWER_LINE = re.compile(rf"^[ \t]*{ANSWER.pattern}[ \t$*),.]*$", re.IGNORECASE | re.MULTILINE)
LONE_LETTER = re.compile(r"(?<!\w)(?P<letter>[A-Z])(?!\w)")
WORD_CHARACTER = re.compile(r"\w")
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
            "versions": _texts(log["eval"].get("packages") or {}),
        }
        samples = [
            LogSample(
                place=f"{path}, sample {sample.get('id')}",
                make_row=partial(inspect_row, sample, task),
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


def inspect_row(sample: dict[str, Any], task: str) -> RawRecord:
    """A sample as a record; `LeftOut` where the model answered nothing."""
    if sample.get("error"):
        raise LeftOut("errored")
    scores = list((sample.get("scores") or {}).values())
    answers = [score["answer"] for score in scores if "answer" in score]
    replies = sample["output"]["choices"]
    if not replies or (answers and not any(answers)):
        raise LeftOut("unanswered")
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
    asked = json.dumps([sample["input"], sample["choices"]], ensure_ascii=False)
    return {
        "id": str(sample["id"]),
        "subject": str((sample.get("metadata") or {}).get("subject") or task),
        "label": label,
        "logprobs": logprobs,
        "letter_mass": math.fsum(map(math.exp, logprobs)),
        "prompt_sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }


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
        probabilities = [math.exp(logprob) for text, logprob in top if text == letter]
        if probabilities:
            logprobs.append(min(math.log(sum(probabilities)), 0.0))
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
    raise ValueError(f"answers {found[0]}, {others} by its score: were the choices shuffled?")


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


# --- lighteval ---


def read_lighteval(path: Path) -> Log:
    """A file of details, which are one task's, in its order."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise InputError(
            f"{path}: {error}; `pip install pyarrow` gives what reads lighteval's files"
        ) from error
    try:
        with open(path, "rb", opener=regular_file) as file:
            rows = read_table(file).to_pylist()
        names = [row["doc"]["task_name"] for row in rows]
        # "mmlu:anatomy|5" is the task mmlu:anatomy with five examples.
        task = names[0].rpartition("|")[0].replace(":", "_") if names else ""
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
    logprobs = _possible(row["model_response"]["logprobs"][: len(texts)])
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
    if [text.strip() for text in texts] == list(LETTERS[: len(texts)]):
        record["letter_mass"] = math.fsum(map(math.exp, logprobs))
        return record
    record["scoring"] = "continuation"
    record["normalise"] = _normaliser(row["metric"])
    record["bytes"] = [len(text.encode()) for text in texts]
    record["characters"] = [len(text) for text in texts]
    return record


# --- The formats ---

LM_EVAL = LogFormat("lm-evaluation-harness", read_lm_eval, "a multiple-choice sample")
INSPECT = LogFormat(
    "inspect", read_inspect, "one target, and top log-probabilities where it answers"
)
LIGHTEVAL = LogFormat(
    "lighteval",
    read_lighteval,
    "a choice's log-probability each, which tasks of the metric loglikelihood_acc have",
)


def format_of(path: Path) -> LogFormat:
    """The format of a log, by its name's end."""
    if path.suffix == ".parquet":
        return LIGHTEVAL
    return INSPECT if path.suffix in (".json", ".eval") else LM_EVAL
