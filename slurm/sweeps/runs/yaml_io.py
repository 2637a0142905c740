"""YAML files, dotted overrides, and error messages that name file, line, key and value.

PyYAML reads YAML 1.1, in which `no` is false and `2e-5` a word. The loader here decides by rules of
its own which words are numbers, and keeps the line of every key. (ruamel.yaml knows YAML 1.2 and
lines, but still reads `2026-11-22` as a date, `1_000` and `007` as numbers, and returns numbers of
its own types: it would need as many rules. OmegaConf 2.4 reads `no` as false, `12:00:00` as 43200
and `007` as 7, knows no lines, and refuses an override of an item of a list.)
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from calibeval import yaml_text
from calibeval.io import InputError, read_text
from sweeps.runs.processes import cli_command

M = TypeVar("M", bound=BaseModel)

INTEGER = "[-+]?(0|[1-9][0-9]*)"
FLOAT = r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)"
# Which words are values of which type, tried in order, so that an integer is no float. All others
# are text: `no`, `12:00:00`, `2026-11-22`, `007`.
WORDS = {
    "null": "|~|null|Null|NULL",
    "merge": "<<",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": INTEGER,
    "float": FLOAT,
}

OVERRIDE = "command line ("  # begins the place of what was typed, before the words
KEY_ERROR = "key"  # the type of pydantic's errors that `key_error` makes

# A variable in a text, or two dollars, which stand for one.
VARIABLE = re.compile(r"\$\$|\$(?P<name>\w+)|\$\{(?P<braced>\w+)\}|\$\{", re.ASCII)

# The name of a variable that holds what nobody else may know.
SECRET_NAME = r"\w*(?:TOKEN|API_KEY|ACCESS_KEY|SECRET|SECRET_KEY|PASSWORD|PASSWD)"
# Is fetched from somebody else's server, so no variable is put in: `prefetch` refuses it.
ADDRESS = re.compile(r"prefetch\.archives\.\d+\.url")

if hasattr(yaml, "CSafeDumper"):
    from yaml import CSafeDumper as _BaseDumper
else:  # PyYAML was built without libyaml
    from yaml import SafeDumper as _BaseDumper  # type: ignore[assignment]


class _Loader(yaml_text.SafeLoader):  # type: ignore[misc]
    """Reads words as `WORDS` says."""

    # PyYAML declares it so; these are without YAML 1.1's.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _Dumper(_BaseDumper):
    """Quotes a text that `_Loader`, or a reader of YAML 1.1, would take for a number."""


for _type, _pattern in WORDS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_type}", re.compile(f"^({_pattern})$"), None
        )


def parse(text: str, source: str) -> tuple[Any, dict[str, str]]:
    """The value of a YAML text, and the place, `source:line`, of each dotted key in it.

    A place, here and elsewhere, is such a text, by which a message says where a key was given.
    Raises InputError where the text is no YAML, has aliases, or gives a key twice.
    """
    value, root = yaml_text.parse(text, source, _Loader)
    places: dict[str, str] = {}
    if root is not None:
        for key, place in _places(root, source):
            if key in places:  # PyYAML would let the last of two values win
                raise InputError(f"{place}: {key}: is given twice")
            places[key] = place
    return value, places


def _places(node: yaml.Node, source: str, above: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key below a node, list positions among them, and where it stands."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            dotted = f"{above}{key.value}"
            yield dotted, f"{source}:{key.start_mark.line + 1}"
            yield from _places(value, source, f"{dotted}.")
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            dotted = f"{above}{position}"
            yield dotted, f"{source}:{value.start_mark.line + 1}"
            yield from _places(value, source, f"{dotted}.")


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The mapping in a YAML file, and where each of its dotted keys stands.

    Raises InputError where the file cannot be read, or holds anything else.
    """
    value, places = parse(read_text(path, yaml_text.MOST_BYTES), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected `key: value` lines, found {type(value).__name__}")
    return value, places


def dump_yaml(value: Mapping[str, Any]) -> str:
    """The one spelling in which this package writes YAML; `parse` reads the same value from it."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def override(raw: dict[str, Any], assignments: Iterable[str]) -> dict[str, str]:
    """Apply overrides such as `a.b.0.c=value`, whose values are YAML, to `raw` in place.

    Returns where each overridden key came from. Raises InputError where `raw` has no such place.
    """
    places = {}
    for assignment in assignments:
        dotted, _, text = assignment.partition("=")
        place = f"{OVERRIDE}{assignment})"
        value, _ = parse(text, place)
        places[dotted] = place
        *above, last = dotted.split(".")
        node: Any = raw
        try:
            for part in above:
                if isinstance(node, dict):
                    node.setdefault(part, {})
                node = node[_index(node, part)]
            node[_index(node, last)] = value
        except (AttributeError, IndexError, TypeError, ValueError):
            raise InputError(f"{place}: found {node!r}, which has no such place") from None
    return places


def assignment(key: str, text: str) -> str:
    """The override that gives a key this text, whatever characters it has."""
    spelt = escape_dollars(text)
    try:
        value, _ = parse(spelt, key)
    except InputError:
        value = None
    if value != spelt:  # YAML would read something else in it
        spelt = json.dumps(spelt, ensure_ascii=False)
    return f"{key}={spelt}"


def _index(node: Any, part: str) -> int | str:
    """How a part of a dotted key indexes a value: a list by its position, a mapping by its key."""
    return int(part) if isinstance(node, list) else part


def build(
    model_class: type[M],
    raw: Any,
    source: str,
    places: Mapping[str, str],
    section: Callable[[str], str] = lambda key: "",
    keys_of: Sequence[str] = (),
) -> M:
    """Build a pydantic model from `raw`; raises InputError with a line for each problem.

    `places` says where dotted keys stand, or at least those above them; other problems are said
    to be in `source`. `section` says, of a key of `raw`, under which key of the file it was typed:
    `learning_rate` may stand under `train` or under `grid`. "" is for a key of the file itself.
    `keys_of` is the argument of the command `keys` that prints the keys of this model, the name of
    a backend; it prints those of sweep files and profiles without one.
    """
    try:
        return model_class.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    lines: dict[str, None] = {}  # in order, each once
    for problem in problems:
        if problem["type"] == "too_short" and problem is not problems[0]:
            continue  # the list is too short only because its items are wrong
        dotted, message = _describe(problem, raw, section, keys_of)
        lines[f"{nearest_place(dotted, places, source)}: {dotted}: {message}"] = None
    raise InputError("\n       ".join(lines))


def key_error(key: str, message: str) -> PydanticCustomError:
    """What a validator of a whole model raises, so that the message names the key it means.

    `key` is dotted, and seen from the model.
    """
    return PydanticCustomError(KEY_ERROR, "{message}", {"key": key, "message": message})


def _describe(
    problem: ErrorDetails, raw: Any, section: Callable[[str], str], keys_of: Sequence[str]
) -> tuple[str, str]:
    """The dotted key, in the file's terms, of what pydantic refused, and what is wrong with it."""
    parts = _keys_to(problem, raw)
    message = problem["msg"]
    if problem["type"] == "extra_forbidden":
        message = f"unknown key; all are printed by: {cli_command('keys', *keys_of)}"
    elif problem["type"] == "missing":
        message = "is missing"
    elif problem["type"] == KEY_ERROR:
        parts.append(problem["ctx"]["key"])
    elif problem["type"] == "value_error":
        message = message.removeprefix("Value error, ")
        # calibeval's validators, and those of a user's backend, begin with the key that they mean.
        match = re.fullmatch(r"-*(?P<key>[A-Za-z_][\w.-]*): (?P<rest>.+)", message, re.DOTALL)
        if match:
            parts.append(match["key"])
            message = match["rest"]
    elif problem["type"] == "string_type" and isinstance(problem["input"], (bool, int, float)):
        written = json.dumps(problem["input"])
        message = f"found {written}, a number or yes/no: write it as text: '{written}'"
    else:
        message = f"found {problem['input']!r}: {message.replace('tuple', 'list')}"
    # Not earlier: where the whole model is refused, the first key comes from the message.
    if parts and section(parts[0]):
        parts.insert(0, section(parts[0]))
    return ".".join(parts), message


def _keys_to(problem: ErrorDetails, raw: Any) -> list[str]:
    """The keys and list positions that lead through `raw` to what pydantic refused.

    Of a value that may be of several types, pydantic puts the name of the type that it tried behind
    the key. Nobody has typed such a name: it leads nowhere in `raw`, and is left out.
    """
    parts = []
    node = raw
    for part in problem["loc"]:
        is_key = isinstance(node, dict) and part in node
        is_position = isinstance(node, (list, tuple)) and isinstance(part, int)
        if is_key or is_position:
            node = node[part]
            parts.append(str(part))
    if problem["type"] == "missing":  # a key that leads nowhere because it is not there
        parts.append(str(problem["loc"][-1]))
    return parts


def nearest_place(dotted: str, places: Mapping[str, str], source: str) -> str:
    """Where a key stands, or else the nearest one above it; if none is in `places`, `source`."""
    while dotted:
        if dotted in places:
            return places[dotted]
        dotted = dotted.rpartition(".")[0]
    return source


def expand_all(
    value: Any, source: str, places: Mapping[str, str], key: str = "", *, is_folder: bool = False
) -> Any:
    """`value` with every text in it expanded: see `expand`.

    `source` and `places` are those of `build`. `key` is the dotted key of `value`; "" is for all
    that was read. Of a sweep's folder, whose file may be anybody's, the overrides alone may have
    variables.
    """
    above = f"{key}." if key else ""
    if isinstance(value, dict):
        return {
            name: expand_all(item, source, places, f"{above}{name}", is_folder=is_folder)
            for name, item in value.items()
        }
    if isinstance(value, list):
        return [
            expand_all(item, source, places, f"{above}{position}", is_folder=is_folder)
            for position, item in enumerate(value)
        ]
    if isinstance(value, str) and not ADDRESS.fullmatch(key):
        place = nearest_place(key, places, source)
        is_typed = place.startswith(OVERRIDE)
        return expand(f"{place}: {key}", value, has_variables=is_typed or not is_folder)
    return value


def expand(where: str, text: str, has_variables: bool = True) -> str:
    """A text with `~` and variables replaced, as a shell would; `$$` is a dollar.

    Raises InputError for a variable that is not set, or is a secret by its name: what is made of
    the text stands in files that others can read. So does any without `has_variables`, where `~`
    stays too. Its message begins with `where`, which names the key that holds the text.
    """

    def replacement(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name = match["name"] or match["braced"]
        if name is None:
            raise InputError(f"{where}: {text}: write $NAME or ${{NAME}}, or $$ for a dollar")
        if not has_variables:
            raise InputError(
                f"{where}: {text}: ${name}: a sweep's folder takes no variables of your shell: "
                "type the sweep's file"
            )
        if re.fullmatch(SECRET_NAME, name):
            raise InputError(
                f"{where}: {text}: ${name} is a secret by its name, and would stand in files: "
                "programs read it in their environment"
            )
        if name not in os.environ:
            raise InputError(
                f"{where}: {text}: ${name} is not set here: export {name}=…, or write $$ for a "
                "dollar"
            )
        return os.environ[name]

    expanded = re.sub(VARIABLE, replacement, text)
    return os.path.expanduser(expanded) if has_variables else expanded


def escape_dollars(value: Any) -> Any:
    """`value` with every text spelt so that `expand_all` gives it back."""
    if isinstance(value, dict):
        return {key: escape_dollars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_dollars(item) for item in value]
    if isinstance(value, str):
        return value.replace("$", "$$")
    return value
