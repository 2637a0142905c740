"""What is asked of a model: the same object for the command line, Python, sweeps and sidecars.

A `Request` names tasks and an engine with its options. Its fields are the command line's options,
and their docstrings its help.

To add a task, see `calibeval.tasks`. To add a way of scoring or an engine, add its name to
`task_files.ScoringName` or to `EngineName` here, and write it where `calibeval.prompts` or
`calibeval.engines` say. To add an option of engines, add it to `Request` and `EngineOptions`.

The names of `calibeval.validation` are importable from here as well.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import TypedDict

from calibeval import task_files
from calibeval.task_files import Normalization, ScoringName
from calibeval.validation import Natural, Positive, Seq, Strict, Text, checked

__all__ = [
    "EngineName",
    "EngineOptions",
    "FewShotForm",
    "Natural",
    "Normalization",
    "Positive",
    "Precision",
    "Request",
    "ResolvedTask",
    "ScoringName",
    "Seq",
    "Strict",
    "Task",
    "Text",
    "checked",
]

EngineName = Literal["transformers", "vllm"]
FewShotForm = Literal["turns", "one_turn"]
Precision = Literal["auto", "float32", "bfloat16", "float16"]


class Task(Strict):
    """Questions, and how they are asked; records of a task go to `<key>.jsonl`."""

    task: str
    """A built-in task's name (mmlu, hellaswag, arc_easy, jsonl, …), or a task file, *.yaml."""
    data: str
    """The task's folder or file, or `hub:NAME`; what its file says unless given."""
    name: str | None = None
    """File name of the records; the task's own unless given."""
    scoring: ScoringName | None = None
    """letters or continuation, the choices' texts; the task's convention unless given."""
    shots: Natural | None = None
    """Few-shot examples; 5, by continuation 0, unless given."""
    split: str | None = None
    """Of the data; test, HellaSwag val, unless given."""
    subjects: Seq[str] | None = None
    """All unless given."""
    limit: Positive | None = None
    """Only the first so many questions of each subject."""
    examples: str | None = None
    """A file of few-shot examples, of tasks that are files."""
    chat_template: str | None = None
    """Ask in a chat: tokenizer (the model's own template), or a file in Jinja."""
    few_shot: FewShotForm | None = None
    """Of a chat: turns (each example two turns, unless given) or one_turn (all in the user's)."""
    system: str | None = None
    """Of a chat: the system text, before the task's own header."""
    language: str | None = None
    """Of a task that is by language, such as global_mmlu: de, sw, …."""

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
        if isinstance(values, dict) and "data" not in values:
            task = values.get("task")
            if isinstance(task, str) and task_files.is_task_name(task):
                data = task_files.default_data(task)
                if data is not None:
                    return {**values, "data": data}
        return values

    @model_validator(mode="after")
    def _chat_options_are_of_a_chat(self) -> "Task":
        for name in ("few_shot", "system"):
            if getattr(self, name) is not None and self.chat_template is None:
                raise ValueError(f"{name}: is for a chat; give chat_template as well")
        return self

    @property
    def key(self) -> str:
        """The file name of its records, without .jsonl."""
        return self.name or Path(self.task).stem


class ResolvedTask(Task):
    """A task whose scoring and number of examples are known: see `tasks.resolved`."""

    scoring: ScoringName
    shots: Natural


class Request(Strict):
    """All that a model is asked, and of which engine."""

    tasks: Seq[Task] = Field(min_length=1)
    engine: EngineName = "transformers"
    """transformers or vllm."""
    dtype: Precision = "auto"
    """auto (the model's own on a GPU, float32 on a CPU), float32, bfloat16 or float16."""
    batch_size: Positive | None = None
    """Questions that transformers reads at once; as many as its memory is good for unless given."""
    revision: str | None = None
    """Of a model on the hub."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """vLLM's share of the GPU; its own default unless given."""

    @model_validator(mode="after")
    def _options_are_the_engines(self) -> "Request":
        if self.gpu_memory_utilization is not None and self.engine != "vllm":
            raise ValueError("gpu_memory_utilization: is for engine vllm")
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
