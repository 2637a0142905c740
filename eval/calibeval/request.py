"""What is asked of a model: one object for the command line, sweeps and the records' sidecars."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from calibeval.io import InputError

T = TypeVar("T")
Seq = Annotated[tuple[T, ...], Field(strict=False)]  # a list in YAML and JSON
Text = Annotated[str, Field(pattern=r"\S")]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and never guesses a type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Task(Strict):
    """Questions, and how they are asked; records of a task go to `<key>.jsonl`."""

    task: Literal["mmlu", "hellaswag", "arc_easy", "arc_challenge", "jsonl"]
    """mmlu, hellaswag, arc_easy, arc_challenge or jsonl."""
    data: str
    """The task's folder or file; `hub:NAME` of mmlu."""
    name: str | None = None
    """File name of the records; the task's own unless given."""
    scoring: Literal["letters", "continuation"] | None = None
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

    @property
    def key(self) -> str:
        """The file name of its records, without .jsonl."""
        return self.name or self.task


class Request(Strict):
    """All that a model is asked, and of which engine."""

    tasks: Seq[Task] = Field(min_length=1)
    engine: Literal["transformers", "vllm"] = "transformers"
    """transformers or vllm."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto (the model's own on a GPU, float32 on a CPU), float32, bfloat16 or float16."""
    batch_size: Positive | None = None
    """Questions that transformers reads at once; as many as its memory is good for unless given."""
    revision: str | None = None
    """Of a model on the hub."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """vLLM's share of the GPU; its own default unless given."""

    @model_validator(mode="after")
    def _possible(self):
        if self.gpu_memory_utilization is not None and self.engine != "vllm":
            raise ValueError("gpu_memory_utilization: is for engine vllm")
        if again := {t.key for t in self.tasks if [u.key for u in self.tasks].count(t.key) > 1}:
            raise ValueError(f"tasks: {min(again)!r} twice; give one of them another name")
        return self


M = TypeVar("M", bound=BaseModel)
KINDS = ("int", "float", "str", "bool")  # of a value that may be of several, in pydantic's places


def checked(kind: type[M], values: Mapping, where: str, strict: bool | None = None) -> M:
    """The values as a model; the first that is wrong raises `InputError` with key and value."""
    try:
        return kind.model_validate(values, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
        key = ".".join(str(part) for part in first["loc"] if part not in KINDS)
        if first["type"] == "missing":
            reason = f"no {key!r}; found {', '.join(map(str, first['input']))}"
        elif first["type"] == "extra_forbidden":
            known = f"; known: {', '.join(kind.model_fields)}" * (len(first["loc"]) == 1)
            reason = f"{key}: no such key{known}"
        elif key:
            reason = f"{key} is {first['input']!r}: {reason}"
        raise InputError(f"{where}: {reason}") from error
