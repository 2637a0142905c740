"""Checking values from files and command lines against pydantic models.

Models of what a user writes derive from `Strict`. `checked` makes a model of some values, or
raises `InputError` with one line about the first thing that is wrong. A caller that reports every
problem, or knows in which line each key stands, catches pydantic's error itself:

    except ValidationError as error:
        for problem in problems(error):
            lines.append(f"{problem.place(places, path)}: {problem.describe()}")
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from calibeval.io import InputError

__all__ = [
    "Natural",
    "Positive",
    "Problem",
    "ProblemKind",
    "Seq",
    "Strict",
    "Text",
    "Unicode",
    "checked",
    "encodable",
    "problems",
]

Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)


def encodable(text: str) -> str:
    """The text, unless it holds what JSON can spell and no file can hold: `ValueError`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("expected text, found half of a surrogate pair") from error
    return text


# Types of fields
Seq = Annotated[tuple[Item, ...], Field(strict=False)]  # a list in YAML and JSON
Unicode = Annotated[str, AfterValidator(encodable)]
Text = Annotated[str, Field(pattern=r"\S")]  # not only white space
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]

# Where a value may be of several types, pydantic puts the type that it tried into the value's
# place: ("answer", "int").
TRIED_TYPES = ("int", "float", "str", "bool")


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and never guesses a type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ProblemKind(Enum):
    """In what way a value is wrong."""

    MISSING = "a key is not there"
    UNKNOWN = "a key is there that the model does not have"
    RULE = "a model's own rule (`model_validator`) is broken; the message names the key"
    VALUE = "a value is of another type or out of its range"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with some values."""

    kind: ProblemKind
    path: tuple[str, ...]
    """The keys and indices that lead to it, such as ("tasks", "0", "data")."""
    value: Any
    """What stands there; for a missing key the mapping that lacks it."""
    message: str
    """pydantic's sentence about it, or the rule's."""

    @property
    def key(self) -> str:
        """The path as one dotted key, such as "tasks.0.data"; empty for the values as a whole."""
        return ".".join(self.path)

    def place(self, places: Mapping[str, str], default: str) -> str:
        """Where the key stands, or the nearest key above it; `default` where no place is known.

        `places` maps dotted keys to places such as "sweep.yaml:12".
        """
        for length in range(len(self.path), 0, -1):
            key = ".".join(self.path[:length])
            if key in places:
                return places[key]
        return default

    def describe(self, known_keys: Collection[str] = ()) -> str:
        """The problem in one line; `known_keys` are listed where a key is unknown."""
        if self.kind is ProblemKind.MISSING:
            return f"no {self.key!r}; found {', '.join(map(str, self.value))}"
        if self.kind is ProblemKind.UNKNOWN:
            if known_keys:
                return f"{self.key}: no such key; known: {', '.join(known_keys)}"
            return f"{self.key}: no such key"
        message = self.message.replace("Input should be", "expected")
        if self.key:
            return f"{self.key} is {self.value!r}: {message}"
        return message


def problems(error: ValidationError) -> list[Problem]:
    """All that pydantic found wrong, in its order."""
    kinds = {
        "missing": ProblemKind.MISSING,
        "extra_forbidden": ProblemKind.UNKNOWN,
        "value_error": ProblemKind.RULE,
    }
    found: list[Problem] = []
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and found:
            continue  # pydantic counts a list's right items alone: the wrong ones were told already
        path = tuple(str(part) for part in details["loc"] if part not in TRIED_TYPES)
        message = details["msg"].removeprefix("Value error, ")
        kind = kinds.get(details["type"], ProblemKind.VALUE)
        found.append(Problem(kind, path, details["input"], message))
    return found


def checked(
    model: type[Model], values: Mapping[str, Any], where: str, strict: bool | None = None
) -> Model:
    """The values as a `model`; the first that is wrong raises `InputError` with key and value.

    `where` says in the message what the values are of: a file and its line, or an option. With
    `strict=False` texts are turned into numbers, as a command line needs; None leaves that to the
    model.
    """
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        first = problems(error)[0]
        known_keys = list(model.model_fields) if len(first.path) == 1 else []
        raise InputError(f"{where}: {first.describe(known_keys)}") from error
