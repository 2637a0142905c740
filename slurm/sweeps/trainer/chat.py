"""Conversations to train on: the files that hold them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from calibeval.references import alpaca
from sweeps.files import SweepError

EXPECTED = (
    'expected {"messages": [{"role": …, "content": …}, …]} or '
    '{"instruction": …, "input": …, "output": …}'
)


def read_messages(path: Path, limit: int | None = None) -> list[list[dict]]:
    """The first `limit` conversations of a file: JSON lines, or one JSON list.

    A row is {"messages": [{"role", "content"}, …]} or Alpaca's {"instruction", "input", "output"}.
    Raises SweepError naming the line (of a list: the row) that is neither.
    """
    found = [
        _messages(row, where, shown) for where, row, shown in itertools.islice(rows(path), limit)
    ]
    if not found:
        raise SweepError(f"{path}: no examples in this file")
    return found


def rows(path: Path) -> Iterator[tuple[str, object, str]]:
    """Each row with the place to name and the text to show if it is wrong."""
    with open(path, encoding="utf-8") as lines:
        first = lines.readline()
        lines.seek(0)
        if first.lstrip().startswith("["):
            try:
                listed = json.load(lines)
            except json.JSONDecodeError as error:
                raise SweepError(f"{path}:{error.lineno}: {EXPECTED}, found {error.msg}") from None
            for number, row in enumerate(listed, start=1):
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
        messages = row["messages"] if "messages" in row else alpaca(row)
        fine = bool(messages) and all(
            isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
        )
    except (KeyError, TypeError, AttributeError):
        fine = False
    if not fine:
        raise SweepError(f"{where}: {EXPECTED}, found {shown[:80]!r}")
    return messages
