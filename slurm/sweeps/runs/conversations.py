"""Reading the conversations of a training file, and refusing rows that are none."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from calibeval.io import InputError, json_lines, parse_json, read_text, reading

# A chat template would write other roles too, and the model would learn nothing of an answer whose
# role is misspelt.
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function", "environment")
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}  # ShareGPT's → ours
EXPECTED = (
    f'{{"messages": [{{"role": …, "content": …}}, …]}} with roles {", ".join(ROLES)}, or '
    f'{{"conversations": [{{"from": …, "value": …}}, …]}} from {", ".join(SHAREGPT_ROLES)}, or '
    '{"instruction": …, "input": …, "output": …}'
)


def rows(path: Path) -> Iterator[tuple[str, dict]]:
    """The rows of a file of JSON lines, or of one JSON list, each with where it stands."""
    with reading(path) as lines:
        first_line = next(filter(str.strip, lines), "")
    if not first_line.lstrip().startswith("["):
        yield from json_lines(path)
        return
    try:
        listed = parse_json(read_text(path))
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error})") from error
    for number, row in enumerate(listed, 1):
        yield f"{path}, row {number}", row


def conversation(row: dict, where: str) -> list[dict]:
    """The turns of a row: its `messages`, ShareGPT's `conversations`, or two of Alpaca's keys.

    `where` names the row in the InputError that any other row raises.
    """
    wrong: Any = row
    match row:
        case {"messages": [_, *_] as turns}:
            strangers = [turn for turn in turns if not _is_turn(turn)]
            if not strangers:
                return turns
            wrong = strangers[0]
        case {"conversations": [{"from": _}, *_] as turns}:
            return conversation({"messages": from_sharegpt(turns)}, where)
        case {"instruction": str(instruction), "output": str(answer)}:
            prompt = instruction
            if row.get("input"):
                prompt += f"\n\n### Input:\n{row['input']}"
            return [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": answer},
            ]
    raise InputError(f"{where}: expected {EXPECTED}, found {json.dumps(wrong)[:80]}")


def from_sharegpt(turns: list[dict]) -> list[dict]:
    """ShareGPT's turns with our keys and roles."""
    return [
        {"role": SHAREGPT_ROLES.get(turn["from"], turn["from"]), "content": turn.get("value")}
        for turn in turns
    ]


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.get("role") in ROLES
        and isinstance(turn.get("content"), str)
    )


def conversations(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file, or all of them.

    InputError at the first row that is none, and where no conversation has an assistant's answer.
    """
    first_rows = itertools.islice(rows(path), limit)
    read = [conversation(row, where) for where, row in first_rows]
    turns = itertools.chain.from_iterable(read)
    if not any(turn["role"] == "assistant" for turn in turns):
        raise InputError(f"{path}: no conversation with an assistant's answer")
    return read
