"""What is asked of a model: the same object for the command line, Python, sweeps and sidecars.

A `Request` names tasks and an engine with its options. Its fields are the command line's options,
and their docstrings its help.

To add an option of engines, add it to `Request`, from which the command line has it, and to
`EngineOptions`, from which editors complete it (a test compares the two). To add an option of
tasks, add it to `Task`, from which the command line and the sidecars have it, and say at the head
of `records.store` how two of its values are compared where scoring goes on. A list is typed with
commas, which `request_from` in `calibeval.__main__` must split, as it does `subjects`.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import TypedDict

from calibeval.ask import task_files
from calibeval.ask.task_files import ScoringName
from calibeval.validation import Natural, Positive, Seq, Strict

EngineName = Literal["transformers", "vllm"]
DEFAULT_COLUMNS = "accuracy,ece,rms"  # of tables, as `--columns` and a sweep's `score.columns` say
FewShotForm = Literal["turns", "one_turn"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


class Task(Strict):
    """Questions, and how they are asked; records of a task go to `<key>.jsonl`."""

    task: str
    """A built-in task's name (mmlu, hellaswag, arc_easy, jsonl, …), or a task file, *.yaml."""
    data: str
    """Folder or file of the questions, or hub:NAME; may be left out if a task file names it."""
    name: str | None = None
    """File name of the records, without .jsonl; by default the task's name."""
    scoring: ScoringName | None = None
    """Whether letters are compared, or the choices' texts; by default as is usual for the task."""
    shots: Natural | None = None
    """Solved examples before a question; by default the task's, else 5 by letters, 0 by texts."""
    split: str | None = None
    """Split of the data that is asked; by default the one that the task's file names."""
    subjects: Seq[str] | None = None
    """Subjects that are asked, separated by commas on the command line; by default all."""
    limit: Positive | None = None
    """How many questions of each subject are asked, from the first; by default all."""
    examples: str | None = None
    """File of solved examples; tasks with a file for each subject, such as mmlu, take their own."""
    chat_template: str | None = None
    """Chat template to ask with: `tokenizer` for the model's, or FILE.jinja; by default none."""
    few_shot: FewShotForm | None = None
    """Whether a chat's examples are turns of their own, or all in one turn; by default turns."""
    chat_template_arguments: dict[str, bool | int | float | str] | None = None
    """Values of a chat template's own variables, such as enable_thinking=False, between commas."""
    system: str | None = None
    """System text of a chat, before the task's own header; by default none."""
    language: str | None = None
    """Of a task that is by language, such as global_mmlu: de, sw, …."""
    samples: Positive | None = None
    """Of written answers: how many more the model draws of each, for agreement; by default none."""
    sampling_temperature: Annotated[float, Field(ge=0)] | None = None
    """Temperature of the samples; by default 1."""

    @field_validator("task")
    @classmethod
    def _is_a_task(cls, task: str) -> str:
        if not task_files.is_task_name(task):
            names = ", ".join(task_files.BUILTIN_NAMES)
            raise ValueError(f"expected {names}, or a task file, *.yaml")
        return task

    @model_validator(mode="before")
    @classmethod
    def _takes_data_of_its_file(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("data") is None:
            task = values.get("task")
            if isinstance(task, str) and task_files.is_task_name(task):
                data = task_files.default_data(task)
                if data is not None:
                    return {**values, "data": data}
        return values

    @field_validator("chat_template_arguments", mode="before")
    @classmethod
    def _reads_typed_arguments(cls, arguments: Any) -> Any:
        if not isinstance(arguments, str):
            return arguments
        values = {}
        for part in arguments.split(","):
            name, sign, value = part.partition("=")
            if not sign or not name.strip():
                raise ValueError("expected NAME=VALUE, such as enable_thinking=False")
            values[name.strip()] = _typed_value(value.strip())
        return values

    @field_validator("name")
    @classmethod
    def _is_a_file_name(cls, name: str | None) -> str | None:
        if name is not None and (name in ("", ".", "..") or Path(name).name != name):
            raise ValueError("expected a file's name without a folder")
        return name

    @model_validator(mode="after")
    def _chat_options_are_of_a_chat(self) -> "Task":
        for name in ("few_shot", "chat_template_arguments", "system"):
            if getattr(self, name) is not None and self.chat_template is None:
                raise ValueError(f"{name}: is for a chat; give chat_template as well")
        return self

    @model_validator(mode="after")
    def _temperature_is_of_samples(self) -> "Task":
        if self.sampling_temperature is not None and self.samples is None:
            raise ValueError("sampling_temperature: is of samples; give samples as well")
        if self.sampling_temperature == 0:
            raise ValueError(
                "sampling_temperature: 0 gives the same answer each time; give one above 0, or "
                "leave out samples"
            )
        return self

    @property
    def key(self) -> str:
        """The file name of its records, without .jsonl."""
        return self.name or Path(self.task).stem


def _typed_value(text: str) -> Any:
    """The truth value or number that a text of the command line spells; else the text."""
    if text in ("True", "False"):
        text = text.lower()
    try:
        return json.loads(text)
    except ValueError:
        return text


class ResolvedTask(Task):
    """A task whose scoring and number of examples are known: see `tasks.resolved`."""

    scoring: ScoringName
    shots: Natural


class Request(Strict):
    """All that a model is asked, and of which engine."""

    tasks: Seq[Task] = Field(min_length=1)
    engine: EngineName = "transformers"
    """Program that computes the probabilities."""
    dtype: Precision = "auto"
    """Precision of the model; auto takes its own on a GPU and float32 on a CPU."""
    batch_size: Positive | None = None
    """Questions that transformers reads at once; by default as many as fit into memory."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; by default the newest."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the GPU's memory that vLLM takes, from 0 to 1; by default vLLM's own."""
    temperature_head: str | None = None
    """File of `calibeval temperature-head`, whose temperature divides each token's logits."""

    @model_validator(mode="after")
    def _options_are_the_engines(self) -> "Request":
        if self.gpu_memory_utilization is not None and self.engine != "vllm":
            raise ValueError("gpu_memory_utilization: is for engine vllm")
        if self.batch_size is not None and self.engine != "transformers":
            raise ValueError("batch_size: is for engine transformers; vLLM finds its own")
        if self.temperature_head is not None and self.engine != "transformers":
            raise ValueError("temperature_head: is for engine transformers")
        return self

    @model_validator(mode="after")
    def _each_task_has_a_file_of_its_own(self) -> "Request":
        counts = Counter(task.key for task in self.tasks)
        repeated = sorted(key for key, count in counts.items() if count > 1)
        if repeated:
            raise ValueError(f"tasks: {repeated[0]!r} twice; give one of them another name")
        return self


class EngineOptions(TypedDict, total=False):
    """The fields of `Request` but its tasks, for functions that take them as keywords."""

    engine: EngineName
    dtype: Precision
    batch_size: int | None
    revision: str | None
    gpu_memory_utilization: float | None
    temperature_head: str | None
