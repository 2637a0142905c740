"""Records while they are made: they survive kill -9, but for half a line.

    RECORDS.jsonl.part, RECORDS.jsonl.part.meta.json   so far: records and settings
    RECORDS.jsonl, RECORDS.jsonl.meta.json             at the end

`calibeval.ask.scoring` fills a store; what the files hold is `calibeval.records`' to say.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from calibeval import records
from calibeval.io import InputError, open_to_write, parse_json, regular_file, write_text
from calibeval.records import RawRecord, Record
from calibeval.validation import checked

ENGINE_SETTINGS = "engine_settings"
# What of an engine's settings all records of a file must share: its kind and its precision. Others,
# such as the device, may change.
DECISIVE_OF_ENGINES = ("engine", "dtype", "head_dtype")
# The settings of the engines that made the first records, where another has made the last ones.
EARLIER_ENGINES = "earlier_engine_settings"

# How settings are compared. Scoring goes on only with settings that make the same records, and
# several values of a setting may make the same ones:
#
#     a setting in …       is refused where it differs from the existing file's …
#     NEVER_COMPARED       never: the digests tell
#     SETTLED_BY_DIGESTS   unless all DIGESTS_AND_NORMALISER are known and equal
#     revision             unless the model's digest is known and the same
#     dtype                unless it is the dtype that the existing file's engine loaded
#     any other            always
#
# The existing file is the finished one where there is one, else the unfinished.
#
# A new option of `request.Task` is among the settings by itself, as "any other". Where two of its
# values can make the same records, it must be put into a row above that (`_says_the_same`).

# Two values of one of NEVER_COMPARED, such as two paths of `data`, may lead to the same prompts and
# the same chat template. What they decide is in `prompts_sha256` and `chat_template_sha256`, which
# are compared.
NEVER_COMPARED = (
    "data",
    "split",
    "shots",
    "examples",
    "subjects",
    "limit",
    "chat_template",
)
# Where all digests are the same, two values of one of SETTLED_BY_DIGESTS say the same: one task
# file by two paths, or `turns` where that is the default. Where a digest differs or is not known,
# they differ in earnest, and the message names them.
SETTLED_BY_DIGESTS = ("task", "few_shot", "chat_template_arguments", "system", "language")
# All that decides a record besides the weights and the engine; see `scoring._settings_of_items`.
DIGESTS_AND_NORMALISER = (
    "normalise",
    "chat_template_sha256",
    "prompts_sha256",
    "ids_sha256",
    "tokens_sha256",
)
# What differs where a digest does, if it has no setting of its own to be told by.
DIFFERENCES = {
    "prompts_sha256": "other questions or examples, or other words around them",
    "ids_sha256": "other ids or subjects of the same questions",
    "tokens_sha256": "other token ids of the same prompts, as another tokenizer gives",
}
# What scoring writes into each record, though a record of another program need not have it.
WRITTEN_BY_SCORING = ("model", "versions")


class Store:
    """The records of one model's answers to one task, some of which may be finished already.

    Files that were made with other settings raise `InputError`, and so do files without a sidecar
    that says with which.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        self.out = out
        self.part = part_of(out)
        # As they go into the sidecar: what is wanted, and the engines that have made the records.
        self.settings = dict(settings)
        # A part beside a whole file is left over from a kill between two steps of `finish`.
        existing = self.out if self.out.exists() else self.part
        if not existing.exists():
            return
        earlier = earlier_settings(existing)
        _refuse_other_settings(earlier, settings, existing)
        self.settings[ENGINE_SETTINGS] = earlier.get(ENGINE_SETTINGS)
        if EARLIER_ENGINES in earlier:
            self.settings[EARLIER_ENGINES] = earlier[EARLIER_ENGINES]

    def finished(self) -> dict[str, RawRecord]:
        """The whole records of what was made so far, by the question's id.

        A record that scoring did not write raises `InputError`.
        """
        if not self.part.exists():
            return {}
        rows: dict[str, RawRecord] = {}
        for record, row in _whole_records(self.part):
            for key in WRITTEN_BY_SCORING:
                if key not in row:
                    raise InputError(
                        f"{self.part}, question {record.id}: no {key!r}, which scoring writes into "
                        "every record; delete that line, and its question is scored again"
                    )
            rows.setdefault(record.id, row)
        if rows:
            self._refuse_rows_of_two_scorings(rows.values())
        return rows

    def keep_engine_settings(self, engine_settings: dict[str, Any]) -> None:
        """Write the loaded engine's settings beside the unfinished records.

        What `dtype=auto` comes to is known only when the engine is loaded. Where finished records
        were made with another value of a setting in DECISIVE_OF_ENGINES, `InputError` names both.
        Where another setting differs, such as the device, the sidecar tells both engines.
        """
        earlier = self.settings.get(ENGINE_SETTINGS) or {}
        if earlier:
            # Another dtype is refused here, as it must be. The table's rule for `dtype`, which asks
            # what "auto" has come to, does not apply: `earlier` lacks the key ENGINE_SETTINGS.
            decisive = {
                name: engine_settings[name]
                for name in DECISIVE_OF_ENGINES
                if name in engine_settings
            }
            _refuse_other_settings(earlier, decisive, self.part)
        if earlier and earlier != engine_settings:
            self.settings[EARLIER_ENGINES] = [*self.settings.get(EARLIER_ENGINES, []), earlier]
        self.settings[ENGINE_SETTINGS] = engine_settings
        write_text(records.sidecar(self.part), json.dumps({"settings": self.settings}, indent=1))

    @contextmanager
    def appending(self) -> Iterator[Callable[[RawRecord], None]]:
        """Yield a function that keeps a finished record; `InputError` where it is none.

        A record that cannot be written raises `InputError` as well. What else goes wrong in the
        block, as an engine's error does, passes through.
        """
        with open_to_write(self.part, "a") as file:
            print(file=file)  # what a kill has cut short stays a line of its own

            def append(row: RawRecord) -> None:
                checked(Record, row, f"question {row['id']}")
                # In ASCII, so that a line that a kill cuts short is text all the same.
                print(json.dumps(row), file=file, flush=True)

            yield append

    def finish(self, rows: list[RawRecord], about: Mapping[str, Any]) -> None:
        """Write the final file and its sidecar, and drop the part.

        Rows that nothing could read as one file raise `InputError` before that.
        """
        self._refuse_rows_of_two_scorings(rows)
        records.write(self.out, rows, {"settings": self.settings, **about})
        for file in (self.part, records.sidecar(self.part)):
            file.unlink(missing_ok=True)

    def _refuse_rows_of_two_scorings(self, rows: Iterable[RawRecord]) -> None:
        """Raise `InputError` where the rows would be no record file that can be read."""
        try:
            records.joined(self.part, self._placed_records(rows))
        except InputError as error:
            raise InputError(f"{error}; delete {self.part}, or give another --out") from error

    def _placed_records(self, rows: Iterable[RawRecord]) -> Iterator[tuple[str, Record]]:
        for row in rows:
            place = f"{self.part}, question {row['id']}"
            yield place, checked(Record, row, place)


def earlier_settings(file: Path) -> dict[str, Any]:
    """The settings that an existing record file was made with, finished or not.

    A file without a sidecar raises `InputError`: it may be anything, so it is not overwritten.
    """
    settings = records.settings_of_scoring(file)
    if not settings:
        raise InputError(
            f"{file}: exists, but no sidecar says how it was made; "
            "move it away, or give another --out"
        )
    return settings


def _whole_records(file: Path) -> Iterator[tuple[Record, RawRecord]]:
    """The records of a file that may have been cut short while it was written."""
    with open(file, encoding="utf-8", errors="replace", newline="\n", opener=regular_file) as lines:
        for line in lines:
            # A line that was cut short is no record; `InputError` is a ValueError.
            with suppress(ValueError, TypeError):
                row = parse_json(line)
                yield checked(Record, row, where=""), row


def part_of(out: Path) -> Path:
    """Where finished records are until all are."""
    return out.with_name(out.name + ".part")


def _refuse_other_settings(
    earlier: Mapping[str, Any], wanted: Mapping[str, Any], file: Path
) -> None:
    """Raise `InputError` where settings differ, naming the first with both values."""
    for key in wanted:
        if not _says_the_same(key, earlier, wanted):
            difference = _difference(key, earlier, wanted)
            raise InputError(
                f"{file}: was made with {difference}; delete it, or give another --out"
            )


def _says_the_same(key: str, earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a setting lets the records be what they were: the table at the head of this file."""
    value = wanted[key]
    if key in NEVER_COMPARED or earlier.get(key) == value:
        return True
    if key in SETTLED_BY_DIGESTS:
        return all(
            name in earlier and earlier[name] == wanted.get(name) for name in DIGESTS_AND_NORMALISER
        )
    if key == "revision":  # a branch is the commit that it leads to, which the digest is
        digest = wanted.get("model_digest")
        return digest is not None and digest == earlier.get("model_digest")
    if key == "dtype":  # "auto" has come to a precision when the engine was loaded
        return value == (earlier.get(ENGINE_SETTINGS) or {}).get("dtype")
    return False


def _difference(key: str, earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How two scorings differ in a setting, for a message."""
    if key in DIFFERENCES:
        return DIFFERENCES[key]
    if key == "chat_template_sha256":  # the user gave a name or a file, not its digest
        key = "chat_template"
    first = earlier.get(key)
    second = wanted.get(key)
    if first == second:
        return f"another text of {key} {first!r}"
    remedy = f"; --dtype {first} goes on" if key == "dtype" else ""
    return f"{key} {first!r} (now {second!r}{remedy})"
