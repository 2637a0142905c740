"""One reader of pydantic's errors: the first as one line, or all with the places of their keys."""

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from calibeval.io import InputError
from calibeval.validation import (
    Natural,
    Positive,
    Problem,
    ProblemKind,
    Seq,
    Strict,
    checked,
    problems,
)


class Part(Strict):
    size: Positive
    label: int | str = 0


class Whole(Strict):
    name: str
    count: Natural = 0
    parts: Seq[Part] = ()

    @model_validator(mode="after")
    def _parts_are_counted(self) -> "Whole":
        if self.count and self.count != len(self.parts):
            raise ValueError("count: is not that of the parts")
        return self


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "here: no 'name'; found "),
        ({"name": "a", "size": 1}, "here: size: no such key; known: name, count, parts"),
        ({"name": 1}, "here: name is 1: expected a text"),
        ({"name": "a", "count": -1}, "here: count is -1: expected 0 or more"),
        ({"name": "a", "count": 2}, "here: count: is not that of the parts"),
        ({"name": "a", "parts": [{}]}, "here: no 'parts.0.size'; found "),
        (
            {"name": "a", "parts": [{"size": 1, "x": 2}]},
            "here: parts.0.x: no such key; known: size, label",
        ),
        (
            {"name": "a", "parts": [{"size": 1, "label": None}]},
            "here: parts.0.label is None: expected a whole number or a text",
        ),
    ],
)
def test_the_first_problem_is_one_line(values, expected):
    with pytest.raises(InputError) as raised:
        checked(Whole, values, "here")
    assert str(raised.value) == expected


class OwnKeys(BaseModel, extra="allow", strict=True):
    """A model whose user names keys of their own, which may be called like a type."""

    __pydantic_extra__: dict[str, bool | int | float | str | None]
    texts: dict[str, str] = {}


@pytest.mark.parametrize(
    ("model", "values", "expected"),
    [
        (Whole, {"name": "a", "int": 1}, "int: no such key; known: name, count, parts"),
        (OwnKeys, {"texts": {"str": 1}}, "texts.str is 1: expected a text"),
        (OwnKeys, {"texts": {"str": 1, "int": 1}}, "texts.str is 1: expected a text"),
        (OwnKeys, {"texts": {"int": 1, "str": 1}}, "texts.int is 1: expected a text"),
        (
            OwnKeys,
            {"float": [1]},
            "float is [1]: expected true or false or a whole number or a number or a text",
        ),
    ],
)
def test_a_key_that_is_called_like_a_type_is_named(model, values, expected):
    """It was taken for the type that pydantic tried, and left out of the path."""
    with pytest.raises(InputError) as raised:
        checked(model, values, "here")
    assert str(raised.value) == f"here: {expected}"


def test_texts_become_numbers_unless_strict():
    assert checked(Whole, {"name": "a", "count": "3", "parts": [{"size": "1"}] * 3}, "", False)
    with pytest.raises(InputError, match="count is '3': expected a whole number"):
        checked(Whole, {"name": "a", "count": "3"}, "")


def problems_of(values: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ValidationError) as raised:
        Whole.model_validate(values)
    return problems(raised.value)


def test_every_problem_has_its_kind_and_path():
    found = problems_of({"count": "x", "parts": [{"size": 0}, {"size": 1, "z": 1}], "sum": 2})
    assert [(problem.kind, problem.key) for problem in found] == [
        (ProblemKind.MISSING, "name"),
        (ProblemKind.VALUE, "count"),
        (ProblemKind.VALUE, "parts.0.size"),
        (ProblemKind.UNKNOWN, "parts.1.z"),
        (ProblemKind.UNKNOWN, "sum"),
    ]
    (rule,) = problems_of({"name": "a", "count": 2})
    assert (rule.kind, rule.path) == (ProblemKind.RULE, ())


class Lists(Strict):
    name: str
    first: Annotated[Seq[Positive], Field(min_length=1)]
    second: Annotated[Seq[Positive], Field(min_length=1)]


def test_a_list_that_is_too_short_is_told_beside_other_problems():
    """It was left out wherever anything else was wrong before it."""
    with pytest.raises(ValidationError) as raised:
        Lists.model_validate({"name": 1, "first": [0], "second": []})
    assert [(problem.key, problem.message) for problem in problems(raised.value)] == [
        ("name", "expected a text"),
        # Of a list with wrong items, only these: pydantic counts its right items alone.
        ("first.0", "expected 1 or more"),
        ("second", "expected 1 or more, found 0"),
    ]


def test_a_problem_stands_where_its_key_does_or_the_nearest_above():
    places = {"parts": "file:3", "parts.0": "file:4", "count": "file:2"}
    inner, outer = problems_of({"name": "a", "parts": [{"size": 0}, {"size": 0}]})
    assert inner.place(places, "file") == "file:4"
    assert outer.place(places, "file") == "file:3"
    (whole,) = problems_of({})
    assert whole.place(places, "file") == "file"
