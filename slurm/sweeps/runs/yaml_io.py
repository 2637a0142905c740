"""YAML files, dotted overrides, and error messages that name file, line, key and value."""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from calibeval.io import InputError, read_text

M = TypeVar("M", bound=BaseModel)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """Unlike YAML 1.1's, `2e-5` is a number, and `no`, `12:00:00` and `007` are words."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 PyYAML's own shape


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):
    """Quotes what _Loader would not read back as the same text."""


FLOAT = r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)"
WORDS = {"null": "|~|null|Null|NULL", "merge": "<<"}
WORDS |= {"bool": "true|True|TRUE|false|False|FALSE", "int": "[-+]?(0|[1-9][0-9]*)", "float": FLOAT}
for _side in (_Loader, _Dumper):
    for _tag, _form in WORDS.items():  # tried in order, so an integer stays one
        _side.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_form})$"), None)


def parse(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """The value of a YAML text, and `source:line` of each dotted key in it."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        places = {}
        for key, where in _places(node, source):
            if key in places:  # PyYAML lets the last of two values win
                raise InputError(f"{where}: {key}: is given twice")
            places[key] = where
        return loader.construct_document(node), places
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise InputError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from error


def _places(node: yaml.Node, source: str, above: str = "") -> Iterator[tuple[str, str]]:
    pairs = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(name.value, name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(number, value, value) for number, value in enumerate(node.value)]
    for name, at, value in pairs:
        yield f"{above}{name}", f"{source}:{at.start_mark.line + 1}"
        yield from _places(value, source, f"{above}{name}.")


def read_yaml(path: Path) -> tuple[dict, dict[str, str]]:
    """A YAML file that must hold a mapping, and where its keys stand."""
    value, places = parse(read_text(path), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(value).__name__}")
    return value, places


def dump_yaml(value: dict) -> str:
    """The one spelling in which this package writes YAML."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def override(raw: dict, assignments: Iterable[str]) -> dict[str, str]:
    """Apply `a.b.0.c=value` in place, values being YAML; returns where each key came from."""
    places = {}
    for assignment in assignments:
        dotted, _, text = assignment.partition("=")
        said, node, (*above, last) = f"command line ({assignment})", raw, dotted.split(".")
        value, places[dotted] = parse(text, said)[0], said
        try:
            for part in above:
                node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
            node[int(last) if isinstance(node, list) else last] = value
        except (AttributeError, IndexError, TypeError, ValueError):
            raise InputError(f"{said}: found {node!r}, which has no such place") from None
    return places


def cli_command(command: str, *words: str | Path) -> str:
    """A command of this package as it can be typed anywhere."""
    absolute = (word.absolute() if isinstance(word, Path) else word for word in words)
    start = os.environ.get("SWEEPS", "python -m sweeps")  # which sweeps.sh sets
    return f"{start} {shlex.join([command, *map(str, absolute)])}"


def check(
    model: type[M],
    raw: Any,
    source: str,
    places: Mapping[str, str],
    section: Callable[[str], str] = lambda key: "",
) -> M:
    """Build `model` from `raw`; raises InputError with a line for each problem.

    `places` says where keys stand, or those above them, `section` under which key of the file one
    of `raw` does.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        items, lines = error.errors(include_url=False), []
    for item in items:
        if item["type"] == "too_short" and item is not items[0]:
            continue  # of a list whose items are wrong
        parts = [str(part) for part in item["loc"]]
        dotted = ".".join([section(parts[0]), *parts]).strip(".") if parts else ""
        said = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            said = f"unknown key; all are printed by: {cli_command('keys')}"
        elif item["type"] == "missing":
            said = "is missing"
        elif item["type"] == "value_error":  # the text begins with one of several keys
            key, _, said = said.partition(": ")
            dotted = f"{dotted}.{key.lstrip('-')}".lstrip(".")
        else:
            said = f"found {item['input']!r}: {said.replace('tuple', 'list')}"
        above = dotted
        while above and above not in places:
            above = above.rpartition(".")[0]
        lines.append(f"{places.get(above, source)}: {dotted}: {said}")
    raise InputError("\n       ".join(dict.fromkeys(lines)))


def expand(where: str, value: Any) -> Any:
    """Every text in `value` as a shell reads it, `~` and variables replaced; InputError names one
    not set."""
    if isinstance(value, dict):
        return {name: expand(where, one) for name, one in value.items()}
    if isinstance(value, list):
        return [expand(where, one) for one in value]
    if not isinstance(value, str):
        return value
    found = os.path.expanduser(os.path.expandvars(value))
    if left := re.search(r"\$\{?(\w+)", found):
        raise InputError(f"{where}: {value}: ${left[1]} is not set here: export {left[1]}=…")
    return found
