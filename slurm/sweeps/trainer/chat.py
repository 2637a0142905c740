"""Conversations: the files that hold them, and the chat templates for tokenizers without one."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from sweeps.files import SweepError

EXPECTED = (
    'expected {"messages": [{"role": …, "content": …}, …]} or '
    '{"instruction": …, "input": …, "output": …}'
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
# row's input stands in the user's message under its heading, as `_alpaca` writes it.
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


def read_messages(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file: JSON lines, or one JSON list.

    A row is {"messages": [{"role", "content"}, …]} or Alpaca's {"instruction", "input", "output"}.
    Raises SweepError naming the line (of a list: the row) that is neither.
    """
    found = [
        _messages(row, where, shown) for where, row, shown in itertools.islice(_rows(path), limit)
    ]
    if not found:
        raise SweepError(f"{path}: no examples in this file")
    return found


def _rows(path: Path) -> Iterator[tuple[str, object, str]]:
    """Each row with the place to name and the text to show if it is wrong."""
    with open(path, encoding="utf-8") as lines:
        first = lines.readline()
        lines.seek(0)
        if first.lstrip().startswith("["):
            try:
                rows = json.load(lines)
            except json.JSONDecodeError as error:
                raise SweepError(f"{path}:{error.lineno}: {EXPECTED}, found {error.msg}") from None
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row, json.dumps(row, ensure_ascii=False)
            return
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    row = None
                yield f"{path}:{number}", row, line.strip()


def _messages(row: object, where: str, shown: str) -> list[dict]:
    try:
        messages = row["messages"] if "messages" in row else _alpaca(row)
        fine = bool(messages) and all(
            isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
        )
    except (KeyError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise SweepError(f"{where}: {EXPECTED}, found {shown[:80]!r}")
    return messages


def _alpaca(row: dict) -> list[dict]:
    given = f"\n\n### Input:\n{row['input']}" if row.get("input") else ""
    return [
        {"role": "user", "content": row["instruction"] + given},
        {"role": "assistant", "content": row["output"]},
    ]
