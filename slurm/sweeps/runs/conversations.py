"""The conversations of a file."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from calibeval.io import InputError, json_lines, read_text, reading

# A template writes others too, and learns no word of a misspelt assistant.
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function", "environment")
EXPECTED = (
    f'{{"messages": [{{"role": …, "content": …}}, …]}} with roles {", ".join(ROLES)}, or '
    '{"instruction": …, "input": …, "output": …}'
)


def rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of JSON lines or of one JSON list."""
    with reading(path) as lines:
        first = next(filter(str.strip, lines), "")
    if not first.lstrip().startswith("["):
        yield from json_lines(path)
    else:
        try:
            listed = enumerate(json.loads(read_text(path)), 1)
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from error
        yield from ((f"{path}, row {n}", row) for n, row in listed)


def conversation(row: dict, where: str) -> list[dict]:
    """The turns of `messages`, or of Alpaca's row; another one raises `InputError`."""
    match row:
        case {"messages": [_, *_] as turns}:
            fits = [
                isinstance(x, dict) and x.get("role") in ROLES and isinstance(x.get("content"), str)
                for x in turns
            ]
            if all(fits):
                return turns
            row = turns[fits.index(False)]
        case {"instruction": str(prompt), "output": str(answer)}:
            given = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
            asked = {"role": "user", "content": prompt + given}
            return [asked, {"role": "assistant", "content": answer}]
    raise InputError(f"{where}: expected {EXPECTED}, found {json.dumps(row)[:80]}")


def conversations(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file; the first bad row raises `InputError`."""
    found = [conversation(row, where) for where, row in itertools.islice(rows(path), limit)]
    if not any(turn["role"] == "assistant" for turns in found for turn in turns):
        raise InputError(f"{path}: no conversation with an assistant's answer")
    return found
