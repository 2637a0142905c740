"""Scoring: questions → prompts → engine → records.

Records of a model that is given as a folder or by name are kept as they are made, and an
interrupted scoring goes on from them; those of a model in memory are made anew.

`score` is what the command line, sweeps and `CalibrationCallback` call. It reads all data, fits the
prompts into the model's context (`fit_prompts`), and fills a file of records for each task
(`calibeval.records.store`), with an engine that is loaded only if something is left to score.
"""

import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm
from typing_extensions import Unpack

from calibeval import __version__, records
from calibeval.ask import chat, engines, model_digest, task_files, written
from calibeval.ask.chat import ChatFormat
from calibeval.ask.engines import Engine, Job
from calibeval.ask.items import Item
from calibeval.ask.prompts import SCORING_MODES, ScoringMode
from calibeval.ask.questions import Subject
from calibeval.ask.request import EngineOptions, Request, ResolvedTask, Task
from calibeval.ask.tasks import load, normaliser_of, resolved
from calibeval.io import InputError, counted, sha256
from calibeval.measures import METRICS, SUMMARY, Sample, scores_of_records, stats
from calibeval.records import RawRecord, Records
from calibeval.records.store import Store, earlier_settings, part_of
from calibeval.validation import checked

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BAR_SECONDS = 0.5  # between two updates of the progress bar


def score(
    model: "str | Path | PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    tasks: Sequence[Task | Mapping[str, Any]] = (),
    *,
    out: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[EngineOptions],
) -> dict[str, Records]:
    """Score a model on tasks, through one load of it.

    Args:
        model: A folder, a name on the hub, or a loaded `transformers` model, which is left as it
            was; it may be wrapped in DistributedDataParallel.
        tokenizer: The model's folder's unless given; a loaded model without a `name_or_path` needs
            it.
        tasks: `Task`s, or their keys: {"task": "mmlu", "data": "DATA"}.
        out: A folder for the records, `<out>/<task.key>.jsonl`, each beside a sidecar with its
            settings. What is there already of the same folder's weights is not scored again.
        progress: Whether stderr shows a bar and what came out.
        **options: Fields of `Request`, such as `engine` and `batch_size`.

    Returns:
        {task.key: its records}

    Raises:
        InputError: data, options or a model that cannot be used, or records of other settings. All
            input is read before the model.
        OSError: `out` is a folder that cannot be made or written.
    """
    request = checked(Request, {"tasks": list(tasks), **options}, "score")
    source = _describe_model(model, request)
    if tokenizer is None and not source.folder:
        raise InputError(
            f"{source.name}: has no `name_or_path`, which would be the tokenizer's folder; give "
            "`tokenizer`"
        )
    if tokenizer is None:
        tokenizer = engines.load_tokenizer(source.folder, request.revision)
    items, digest = _read_input(source, request, tokenizer, wants_digest=bool(out))
    max_model_length = engines.max_model_length(
        item.job for items_of_task in items.values() for item in items_of_task
    )
    settings = {
        "model_digest": digest,
        **request.model_dump(include={"revision", "engine", "dtype"}),
        "temperature_head": None,
    }
    if request.temperature_head is not None:
        settings["temperature_head"] = sha256(request.temperature_head)
    with ExitStack() as at_end:
        folder, working_folder = _open_folders(out, source, request.tasks, at_end)

        @cache
        def get_engine() -> Engine:
            """The engine, which is loaded when it is first asked for."""
            engine = engines.create_engine(source.model, request, max_model_length)
            at_end.callback(engine.close)  # vLLM's is a process of its own
            return engine

        results = {}
        for task in request.tasks:
            filling = _TaskFilling(
                resolved(task), items[task.key], source.name, get_engine, tokenizer, progress
            )
            results[task.key] = filling.fill(settings, working_folder, folder)
    return results


@dataclass(frozen=True)
class _ModelSource:
    """A model to be scored, loaded or not."""

    model: "str | PreTrainedModel"
    name: str  # in records
    folder: str  # or name on the hub; empty where a loaded model does not tell it
    config: "PretrainedConfig"


def _describe_model(model: "str | Path | PreTrainedModel", request: Request) -> _ModelSource:
    if isinstance(model, (str, Path)):
        folder = str(model)
        config = engines.load_config(folder, request.revision)
        return _ModelSource(folder, folder, folder, config)
    # DistributedDataParallel has neither a name nor a configuration; its `module` has them.
    loaded: PreTrainedModel = getattr(model, "module", model)
    return _ModelSource(
        model=loaded,
        name=f"a {type(loaded).__name__}",
        folder=loaded.name_or_path or "",
        config=loaded.config,
    )


def _read_input(
    source: _ModelSource,
    request: Request,
    tokenizer: "PreTrainedTokenizerBase",
    wants_digest: bool,
) -> tuple[dict[str, list[Item]], str | None]:
    """The questions of each task, by its key, and the digest of the model if wanted."""
    prompt_limit = engines.prompt_limit(source.config)
    items = {}
    # The digest and the prompts take seconds each, and neither holds the interpreter's lock.
    with ThreadPoolExecutor(max_workers=1) as background:
        digest: Future[str | None] | None = None
        if wants_digest:
            if isinstance(source.model, str):
                digest = background.submit(model_digest.digest, source.folder, request.revision)
            else:
                digest = background.submit(model_digest.digest_of_loaded, source.model)
        for task in request.tasks:
            items[task.key] = fit_prompts(load(task), task, tokenizer, prompt_limit)
    return items, digest.result() if digest else None


def _open_folders(
    out: str | Path | None, source: _ModelSource, tasks: Sequence[Task], at_end: ExitStack
) -> tuple[Path, Path]:
    """The folder where records go, and the one in which they are written until they are whole.

    Both folders are made now, so that one that cannot be made stops the call before the scoring.
    `at_end` deletes temporary ones.
    """
    if not out:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory()))
        return folder, folder
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(source.model, str):
        return folder, folder
    # A loaded model's records are made anew, whichever weights the older ones are of. They are
    # written elsewhere, so that the older ones stay until the new ones are whole.
    for task in tasks:
        file = folder / f"{task.key}.jsonl"
        for existing in (file, part_of(file)):
            if existing.exists():
                earlier_settings(existing)  # refuses a file without a sidecar
    return folder, Path(at_end.enter_context(tempfile.TemporaryDirectory(dir=folder)))


@dataclass(frozen=True)
class _TaskFilling:
    """The filling of one task's record file."""

    task: ResolvedTask
    items: list[Item]
    model: str  # its name in records
    get_engine: Callable[[], Engine]
    tokenizer: "PreTrainedTokenizerBase"
    progress: bool

    def fill(self, settings: Mapping[str, Any], working_folder: Path, folder: Path) -> Records:
        """Score what is not scored yet, and return all records of the task.

        They are made in `working_folder`, then moved to `folder` if that is another.
        `settings` are those of the model and the engine.
        """
        path = working_folder / f"{self.task.key}.jsonl"
        settings = {**settings, **self.task.model_dump(exclude={"name"})}
        if self.task.scoring == "generate":
            task_file = task_files.read(self.task.task)
            settings["stop"] = list(task_file.stop)
            settings["max_tokens"] = task_file.max_tokens
        was_complete = self._make_complete(path, settings)
        if working_folder != folder:
            sidecar = records.sidecar(path)
            sidecar.replace(folder / sidecar.name)
            path = path.replace(folder / path.name)
        scored = records.read(path)
        if self.progress and was_complete:
            questions = counted(len(scored), "question")
            print(f"{path}: complete already, {questions}", file=sys.stderr)
        elif self.progress:
            print_summary(scored)
        return scored

    def _make_complete(self, out: Path, settings: Mapping[str, Any]) -> bool:
        """Score what is not scored yet, and write all; True if all was there already."""
        # A file of other settings is refused here, a whole one too.
        store = Store(out, {**settings, **_settings_of_items(self.items)})
        if out.exists():
            return True
        row_of_id = store.finished()
        if any(item.id not in row_of_id for item in self.items):
            row_of_id = {**row_of_id, **self._score_missing(store, row_of_id)}
        rows = [row_of_id[item.id] for item in self.items]
        last_made = [*row_of_id.values()][-1]  # new rows stand behind those that were there
        about = {
            "model": last_made["model"],
            "versions": last_made["versions"],
            "questions_of_shots": records.questions_of_shots(
                item.prompt.shots for item in self.items
            ),
        }
        store.finish(rows, about)
        if self.task.scoring == "generate":
            written.warn(rows, self.task)
        return False

    def _score_missing(
        self, store: Store, finished: Mapping[str, RawRecord]
    ) -> dict[str, RawRecord]:
        """Score all questions but those that are finished; the new records, by id.

        Each goes into the store as soon as it is made. A job's `index` is its item's place in
        `self.items` (`fit_prompts`), and so is what the engine answers with.
        """
        finished_indices = {index for index, item in enumerate(self.items) if item.id in finished}
        engine = self.get_engine()
        store.keep_engine_settings(engine.describe())
        # By another path it is the same model, or the store would refuse it.
        first = next(iter(finished.values()), {"model": self.model})
        shared = {
            "model": first["model"],
            "versions": {"calibeval": __version__, **engine.versions},
        }
        new: dict[str, RawRecord] = {}
        bar = tqdm(
            total=len(self.items),
            initial=len(finished_indices),
            unit="question",
            mininterval=BAR_SECONDS,
            disable=not self.progress,
        )
        with store.appending() as append, bar:
            for index, logprobs, fields in self._answers(engine, finished_indices):
                if index in finished_indices:
                    continue
                item = self.items[index]
                row = {**make_record(item, logprobs), **fields, **shared}
                append(row)
                new[item.id] = row
                bar.update()
        return new

    def _answers(
        self, engine: Engine, finished: Container[int]
    ) -> Iterator[tuple[int, list[float], RawRecord]]:
        """Yield each question's index, its log-probabilities, and more of its record."""
        if self.task.scoring == "generate":
            writer = written.Writer(engine, self.tokenizer, self.task)
            yield from writer.answers(self.items, finished)
            return
        for index, logprobs in engine.score(grouped_jobs(self.items), finished):
            yield index, logprobs, {}


def _settings_of_items(items: Sequence[Item]) -> dict[str, Any]:
    """What decides a task's records beside the model, the engine and the task's own keys.

    These follow from files that may change under the same name, and from a tokenizer that is given
    from Python.
    """
    # In this order, since the first that differs is told: "other questions" says more than "other
    # ids", and whoever asks other questions mostly has both.
    return {
        "normalise": items[0].normalise,
        "chat_template_sha256": items[0].prompt.chat_template_sha256,
        "prompts_sha256": records.prompts_digest(
            (item.prompt.sha256, item.prompt.question.label) for item in items
        ),
        "ids_sha256": _ids_digest(items),
        "tokens_sha256": _tokens_digest(items),
    }


def _ids_digest(items: Iterable[Item]) -> str:
    """SHA-256 of all questions' ids and subjects."""
    total = hashlib.sha256()
    for item in items:
        question = item.prompt.question
        total.update(f"{json.dumps([question.id, question.subject])}\n".encode())
    return total.hexdigest()


def _tokens_digest(items: Iterable[Item]) -> str:
    """SHA-256 of all token ids that the model reads or is asked about."""
    total = hashlib.sha256()
    for item in items:
        for tokens in (item.job.context, *item.job.branches):
            total.update(f"{len(tokens)} ".encode())
            total.update(np.array(tokens, "<u4").tobytes())
    return total.hexdigest()


def fit_prompts(
    subjects: list[Subject],
    task: Task,
    tokenizer: "PreTrainedTokenizerBase",
    prompt_limit: int | None,
) -> list[Item]:
    """Every question's prompt, with closing shots dropped until it fits.

    It fits if its context and what `ScoringMode.length_after_context` counts of its choices have
    `prompt_limit` tokens or fewer (`engines.prompt_limit`).

    As the official script does: k-shot, then k−1, … (hendrycks/test, evaluate.py). A question that
    does not fit even without examples loses tokens on the left, the start token and a chat's first
    turn among them. lm-evaluation-harness does so too, but for each choice by itself, and it keeps
    up to two tokens more; here all choices share one context, cut until the longest choice fits
    behind it. Warnings count the questions with fewer examples and those that were cut, and the
    records say how many examples stand before each and how many tokens it lost. Choices that
    do not fit by themselves raise `InputError`. `prompt_limit=None` lets everything fit.
    """
    task = resolved(task)
    chat_format = chat.of_task(task, tokenizer)
    answer_room = 0
    if task.scoring == "generate":
        answer_room = written.room(task_files.read(task.task), tokenizer)
    mode = SCORING_MODES[task.scoring](tokenizer, chat_format, answer_room)
    normalise = normaliser_of(task)
    asked = [(subject, question) for subject in subjects for question in subject.questions]
    # How many examples are tried before each question that has no item yet, by its place.
    pending = dict.fromkeys(range(len(asked)), task.shots)
    items: dict[int, Item] = {}
    while pending:
        prompts = [
            mode.build(*asked[index], shots, chat_format) for index, shots in pending.items()
        ]
        tokenized_prompts = mode.tokenize(prompts)
        too_long = {}
        for index, prompt, tokenized in zip(pending, prompts, tokenized_prompts, strict=True):
            context = tuple(tokenized.context)
            length_after = mode.length_after_context(tokenized.branches)
            excess = 0
            if prompt_limit:
                excess = max(len(context) + length_after - prompt_limit, 0)
            if excess and prompt.shots:
                too_long[index] = prompt.shots - 1
                continue
            if not context:
                raise InputError(
                    f"question {prompt.question.id}: no token stands before its choices: its "
                    f"context is {prompt.text!r}, and the tokenizer adds no start token; write a "
                    "context that is not empty"
                )
            if excess >= len(context):
                raise InputError(
                    f"question {prompt.question.id}: its choices take {length_after} tokens, "
                    f"but the model takes {prompt_limit}"
                )
            job = Job(index, context[excess:], tokenized.branches)
            items[index] = Item(prompt, job, task.scoring, normalise, excess)
        pending = too_long
    _warn_of_dropped_examples(items, task, prompt_limit)
    _warn_of_truncated(items, prompt_limit)
    if chat_format is not None and not chat_format.takes_system:
        _warn_of_lost_headers(chat_format, subjects, mode)
    return [items[index] for index in sorted(items)]


def _warn_of_dropped_examples(
    items: Mapping[int, Item], task: ResolvedTask, prompt_limit: int | None
) -> None:
    shown = records.questions_of_shots(item.prompt.shots for item in items.values())
    if set(shown) != {task.shots}:
        print(
            f"warning: {task.key}: {counted(task.shots, 'example')} wanted before each question, "
            f"but not all fit in {prompt_limit} tokens: there are {records.described_shots(shown)}",
            file=sys.stderr,
        )


def _warn_of_truncated(items: Mapping[int, Item], prompt_limit: int | None) -> None:
    truncated = sum(1 for item in items.values() if item.truncated)
    if truncated:
        print(
            f"warning: {truncated} of {counted(len(items), 'question')} do not fit in "
            f"{prompt_limit} tokens even without examples and lose their beginning",
            file=sys.stderr,
        )


def _warn_of_lost_headers(
    chat_format: ChatFormat, subjects: Sequence[Subject], mode: ScoringMode
) -> None:
    if any(mode.header(subject, in_chat=True) for subject in subjects):
        print(
            f"warning: {chat_format.source}: has no place for a system text, so the task's header "
            "is left out, as lm-evaluation-harness does",
            file=sys.stderr,
        )


def grouped_jobs(items: Sequence[Item]) -> list[list[Job]]:
    """The items' jobs in groups that share a prefix: of one subject and as many examples.

    Prompts that were cut at their beginning are apart from those that were not.
    """
    groups: dict[tuple[str, int, bool], list[Job]] = {}
    for item in items:
        key = (item.prompt.question.subject, item.prompt.shots, item.truncated > 0)
        groups.setdefault(key, []).append(item.job)
    return list(groups.values())


def make_record(item: Item, logprobs: list[float]) -> RawRecord:
    """A question's record; log-probabilities that are not finite raise `InputError`."""
    question = item.prompt.question
    if not all(map(math.isfinite, logprobs)):
        raise InputError(
            f"question {question.id}: log-probabilities {logprobs}: "
            "the model's output is not finite"
        )
    row = {
        "id": question.id,
        "subject": question.subject,
        "label": question.label,
        "logprobs": logprobs,
    }
    if item.scoring == "letters":
        row["letter_mass"] = math.fsum(map(math.exp, logprobs))
    row["prompt_sha256"] = item.prompt.sha256
    row["shots"] = item.prompt.shots
    row.update(SCORING_MODES[item.scoring].record_fields(item.prompt, item.normalise))
    if item.prompt.chat_template_sha256 is not None:
        row["chat_template"] = item.prompt.chat_template_sha256
    if item.truncated:
        row["truncated"] = item.truncated
    return row


def print_summary(of: Records) -> None:
    """Print what came out; warn where the letters are not what is meant."""
    sample = Sample.observed(scores_of_records(of, "choices"))
    texts = [f"{name} {METRICS[name](sample)[0]:.4f}" for name in SUMMARY]
    print(f"{counted(len(of), 'question')}: {', '.join(texts)}", file=sys.stderr)
    records.warn_of_ties(of.path, of.tied, len(of))
    letter_mass = of.letter_mass.mean()  # of texts NaN, which is not below
    if letter_mass < stats.LOW_MASS:
        print(
            f"warning: mean letter mass {letter_mass:.3f} is below {stats.LOW_MASS}: the model "
            "wants to say something other than a letter, so read with care",
            file=sys.stderr,
        )
