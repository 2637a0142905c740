"""Conversations of a file, and the templates that they are written with."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from calibeval.io import InputError, json_lines, read_text, reading

EXPECTED = (
    '{"messages": [{"role": …, "content": …}, …]} or {"instruction": …, "input": …, "output": …}'
)
# The Tulu format, for tokenizers without a template of their own.
TULU = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# The prompt of Stanford Alpaca (train.py, PROMPT_DICT), which its own rows were published with; a
# row's input stands in the user's message under its heading, as `conversation` writes it.
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'Below is an instruction that describes a task' }}"
    "{% if '\n\n### Input:\n' in message['content'] %}"
    "{{ ', paired with an input that provides further context' }}{% endif %}"
    "{{ '. Write a response that appropriately completes the request.\n\n### Instruction:\n' }}"
    "{{ message['content'] + '\n\n### Response:' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% else %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
TEMPLATES = {"tulu": TULU, "alpaca": ALPACA}


def rows(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of JSON lines or of one JSON list."""
    with reading(path) as lines:
        first = next(filter(str.strip, lines), "")
    if not first.lstrip().startswith("["):
        yield from ((f"{path}, line {n}", row) for n, row in json_lines(path))
    else:
        try:
            listed = enumerate(json.loads(read_text(path)), 1)
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error})") from error
        yield from ((f"{path}, row {n}", row) for n, row in listed)


def conversation(row: dict, where: str) -> list[dict]:
    """The turns of `messages`, or of Alpaca's row; another one raises `InputError`."""
    match row:
        case {"messages": [_, *_] as turns} if all(
            isinstance(turn, dict) and {type(turn.get(key)) for key in ("role", "content")} == {str}
            for turn in turns
        ):
            return turns
        case {"instruction": str(prompt), "output": str(answer)}:
            given = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
            asked = {"role": "user", "content": prompt + given}
            return [asked, {"role": "assistant", "content": answer}]
    raise InputError(f"{where}: expected {EXPECTED}, found {json.dumps(row)[:80]}")


def conversations(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file; the first bad row raises `InputError`."""
    found = [conversation(row, where) for where, row in itertools.islice(rows(path), limit)]
    if not found:
        raise InputError(f"{path}: no examples in this file")
    return found
