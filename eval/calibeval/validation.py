"""Checking values from files and command lines against pydantic models.

Models of what a user writes derive from `Strict`. `checked` makes a model of some values, or
raises `InputError` with one line about the first thing that is wrong.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import Enum
from typing import Annotated, Any, TypeVar, get_args

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
    "did_you_mean",
    "encodable",
    "is_unicode",
    "known_keys",
    "problems",
    "raise_of_other_file",
]

Item = TypeVar("Item")
Model = TypeVar("Model", bound=BaseModel)


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can write the text: JSON can spell what no file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """The text; `ValueError` where UTF-8 cannot write it."""
    if not is_unicode(text):
        raise ValueError("expected text, found half of a surrogate pair")
    return text


# Types of fields
Seq = Annotated[tuple[Item, ...], Field(strict=False)]  # a list in YAML and JSON
Unicode = Annotated[str, AfterValidator(encodable)]
# Not only white space; see `NOT_EMPTY`. Half of a surrogate pair matches no pattern, so a `Text` is
# `Unicode` as well.
Text = Annotated[str, Field(pattern=r"\S")]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]

# pydantic's sentences in the words of whoever wrote the value, by the type of its error.
SENTENCES = {
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "string_type": "expected a text",
    "int_type": "expected a whole number",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "dict_type": "expected keys with values",
    "model_type": "expected keys with values",
    "model_attributes_type": "expected keys with values",
    "greater_than_equal": "expected {ge} or more",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected {le} or less",
    "less_than": "expected less than {lt}",
    "too_short": "expected {min_length} or more, found {actual_length}",
    "too_long": "expected {max_length} or fewer, found {actual_length}",
}
NOT_EMPTY = r"\S"

# Where a value may be of several types, pydantic tells an error for each, and appends the type that
# it tried to the value's place: ("answer", "int") and ("answer", "str"). By type, how the names of
# its errors begin:
ERRORS_OF_TRIED_TYPES = {
    "int": ("int_",),
    "float": ("float_", "finite_number"),
    "str": ("string_",),
    "bool": ("bool_",),
}


class Strict(BaseModel):
    """A frozen model that refuses unknown keys and never guesses a type."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ProblemKind(Enum):
    """In what way a value is wrong."""

    MISSING = "a key is not there"
    UNKNOWN = "a key is there that the model does not have"
    VALUE = "a value is of another type or out of its range, or a rule in code is broken"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with some values."""

    kind: ProblemKind
    path: tuple[str, ...]
    """The keys and indices that lead to it, such as ("tasks", "0", "data")."""
    value: Any
    """What stands there; for a missing key the mapping that lacks it."""
    message: str
    """What was expected there, or the rule's sentence."""

    @property
    def key(self) -> str:
        """The path as one dotted key, such as "tasks.0.data"; empty for the values as a whole."""
        return ".".join(self.path)

    def describe(self, known_keys: Collection[str] = ()) -> str:
        """The problem in one line; `known_keys` are listed where a key is unknown."""
        if self.kind is ProblemKind.MISSING:
            found = [str(key) for key in self.value]
            text = f"no {self.key!r}; found {', '.join(found)}"
            return text + did_you_mean(self.path[-1], found)
        if self.kind is ProblemKind.UNKNOWN:
            text = f"{self.key}: no such key"
            if known_keys:
                text += f"; known: {', '.join(known_keys)}"
            return text + did_you_mean(self.path[-1], known_keys)
        if self.key:
            return f"{self.key} is {self.value!r}: {self.message}"
        return self.message


def did_you_mean(name: str, others: Collection[str]) -> str:
    """ "; did you mean 'name'?" where one of the others is spelt nearly alike, else nothing."""
    nearest = get_close_matches(name, others, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def problems(error: ValidationError) -> list[Problem]:
    """All that pydantic found wrong, in its order."""
    kinds = {
        "missing": ProblemKind.MISSING,
        "extra_forbidden": ProblemKind.UNKNOWN,
    }
    found: list[Problem] = []
    tried_before = False
    errors = error.errors(include_url=False)
    for details in errors:
        is_one_of_several = _is_one_of_several(details, errors)
        location = details["loc"][:-1] if is_one_of_several else details["loc"]
        path = tuple(map(str, location))
        if details["type"] == "too_short" and _has_problem_below(path, found):
            continue  # pydantic counts a list's right items alone: the wrong ones were told already
        kind = kinds.get(details["type"], ProblemKind.VALUE)
        problem = Problem(kind, path, details["input"], _sentence(details))
        if is_one_of_several and tried_before and found[-1].path == path:
            other = problem.message.removeprefix("expected ")
            found[-1] = replace(found[-1], message=f"{found[-1].message} or {other}")
        else:
            found.append(problem)
        tried_before = is_one_of_several
    return found


def _is_one_of_several(details: Any, errors: Sequence[Any]) -> bool:
    """Whether pydantic tells this error because a value may be of several types.

    Its place then ends with the name of the type that was tried (`ERRORS_OF_TRIED_TYPES`). A user's
    own key may be called like a type, so the place alone does not tell: the error must be
    that type's, and another of the `errors` must be another type's at the same value.
    """
    if not _ends_with_its_type(details):
        return False
    value_place = details["loc"][:-1]
    return any(
        other["loc"][:-1] == value_place
        and other["loc"] != details["loc"]
        and _ends_with_its_type(other)
        for other in errors
    )


def _ends_with_its_type(details: Any) -> bool:
    """Whether an error's place ends with the name of the type that the error is of."""
    if not details["loc"]:  # of a rule of a whole model
        return False
    # Of a last part that is no type's name there are no beginnings, and nothing starts with these.
    beginnings = ERRORS_OF_TRIED_TYPES.get(details["loc"][-1], ())
    return details["type"].startswith(beginnings)


def _has_problem_below(path: tuple[str, ...], found: Sequence[Problem]) -> bool:
    """Whether something in the list or mapping at a path is wrong itself."""
    return any(problem.path[: len(path)] == path for problem in found)


def _sentence(details: Any) -> str:
    """What one of pydantic's errors says, in the words of whoever wrote the value."""
    context = details.get("ctx", {})
    if details["type"] == "string_pattern_mismatch" and context["pattern"] == NOT_EMPTY:
        return "expected a text that is not empty"
    if details["type"] in SENTENCES:
        return SENTENCES[details["type"]].format(**context)
    message: str = details["msg"]
    return message.removeprefix("Value error, ").replace("Input should be", "expected")


def known_keys(model: type[BaseModel], path: Collection[str]) -> list[str]:
    """The keys that may stand where the last of `path` does; none where that is no model."""
    for key in [*path][:-1]:
        if key.isdecimal():  # a place in a list, whose items' model was found with the list
            continue
        field = model.model_fields.get(key)
        inner = None if field is None else _model_in(field.annotation)
        if inner is None:
            return []
        model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that a field's type is, or is a list of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        model = _model_in(part)
        if model is not None:
            return model
    return None


def checked(
    model: type[Model], values: Mapping[str, Any], where: str, strict: bool | None = None
) -> Model:
    """The values as a `model`; the first that is wrong raises `InputError` with key and value.

    `where` says in the message what the values are of: a file and its line, or an option. Where a
    rule of the model has read another file, the error is that file's and names it itself. With
    `strict=False` texts are turned into numbers, as a command line needs; None leaves that to the
    model.
    """
    try:
        return model.model_validate(values, strict=strict)
    except ValidationError as error:
        raise_of_other_file(error)
        first = problems(error)[0]
        raise InputError(f"{where}: {first.describe(known_keys(model, first.path))}") from error


def raise_of_other_file(error: ValidationError) -> None:
    """Raise the `InputError` that a model's rule met, which names its own file; or return."""
    for details in error.errors(include_url=False):
        cause = details.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            raise cause from error
