"""Records of a model's folder while they are made: they survive kill -9, but for half a line.

    RECORDS.jsonl.part, RECORDS.jsonl.part.meta.json   so far: records and settings
    RECORDS.jsonl, RECORDS.jsonl.meta.json             at the end

`calibeval.scoring` fills a store; what the files hold is `calibeval.records`' to say.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from calibeval import records
from calibeval.io import InputError, write_text
from calibeval.records import RawRecord, Record
from calibeval.validation import checked

# Settings that choose questions and examples are not compared: two choices may come to the same,
# and the digest of all prompts tells whether they do. Two paths may be of the same chat template,
# and the digest of its text tells whether they are.
COMPARED_BY_DIGEST = (
    "data",
    "split",
    "shots",
    "examples",
    "subjects",
    "limit",
    "chat_template",
)
# The settings of the engines that made the first records, where another has made the last ones.
EARLIER_ENGINES = "earlier_engine_settings"
# Settings that sidecars of earlier versions lack; what these were made with is not known then.
OF_LATER_VERSIONS = ("normalise", "chat_template_sha256", "ids_sha256", "tokens_sha256")
# What differs where a digest does, if it has no setting of its own to be told by.
DIFFERENCES = {
    "prompts_sha256": "other questions or examples, or other words around them",
    "ids_sha256": "other ids or subjects of the same questions",
    "tokens_sha256": "other token ids of the same prompts, as another tokenizer gives",
}


class Store:
    """The records of one model's answers to one task, some of which may be finished already.

    Files that were made with other settings raise `InputError`, and so do files without a sidecar
    that says with which.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        self.out = out
        self.part = part_of(out)
        self.settings = dict(settings)
        # Of a part beside a whole file the whole one is returned, so it does not matter which of
        # the two has told the engine's settings.
        for file in (self.out, self.part):
            if file.exists():
                earlier = earlier_settings(file)
                known = {**_settings_of_records(file), **earlier}
                _refuse_other_settings(known, settings, file)
                self.settings["engine_settings"] = earlier.get("engine_settings")
                if EARLIER_ENGINES in earlier:
                    self.settings[EARLIER_ENGINES] = earlier[EARLIER_ENGINES]

    def finished(self) -> dict[str, RawRecord]:
        """The whole records of what was made so far, by the question's id.

        All have the first one's name of the model: the digest of the weights, which the settings
        hold, has told that another path leads to the same model.
        """
        if not self.part.exists():
            return {}
        rows: dict[str, RawRecord] = {}
        model: str | None = None
        for record, row in _whole_records(self.part):
            if model is None:
                model = record.model
            if "model" in row:
                row["model"] = model
            rows.setdefault(record.id, row)
        if rows:
            self._refuse_rows_of_two_scorings(rows.values())
        return rows

    def keep_engine_settings(
        self, engine_settings: dict[str, Any], decisive_names: Collection[str]
    ) -> None:
        """Write the loaded engine's settings beside the unfinished records.

        What `dtype=auto` comes to is known only when the engine is loaded. Where finished records
        were made with another value of a setting in `decisive_names`, `InputError` names both.
        Where another setting differs, such as the device, the sidecar tells both engines.
        """
        earlier = self.settings.get("engine_settings") or {}
        # An earlier version of the engine may not have written all of them.
        decisive = {name: engine_settings[name] for name in decisive_names if name in earlier}
        _refuse_other_settings(earlier, decisive, self.part)
        if earlier and earlier != engine_settings:
            self.settings[EARLIER_ENGINES] = [*self.settings.get(EARLIER_ENGINES, []), earlier]
        self.settings["engine_settings"] = engine_settings
        write_text(records.sidecar(self.part), json.dumps({"settings": self.settings}, indent=1))

    @contextmanager
    def appending(self) -> Iterator[Callable[[RawRecord], None]]:
        """Yield a function that keeps a finished record; `InputError` where it is none."""
        try:
            with open(self.part, "a", encoding="utf-8") as file:
                print(file=file)  # what a kill has cut short stays a line of its own

                def append(row: RawRecord) -> None:
                    checked(Record, row, f"question {row['id']}")
                    # In ASCII: ids may hold U+2028, which would end the line elsewhere.
                    print(json.dumps(row), file=file, flush=True)

                yield append
        except OSError as error:
            raise InputError(f"{self.part}: could not be written ({error.strerror})") from error

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
    settings = records.asked(file)
    if not settings:
        raise InputError(
            f"{file}: exists, but no sidecar says how it was made; "
            "move it away, or give another --out"
        )
    return settings


def _whole_records(file: Path) -> Iterator[tuple[Record, RawRecord]]:
    """The records of a file that may have been cut short while it was written."""
    with open(file, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            # A line that was cut short is no record; `InputError` is a ValueError.
            with suppress(ValueError, TypeError):
                row = json.loads(line)
                yield checked(Record, row, where=""), row


def _settings_of_records(file: Path) -> dict[str, Any]:
    """The settings that a file's records tell by themselves; none where it has no whole record."""
    for record, _ in _whole_records(file):
        return {"normalise": record.normalise, "chat_template_sha256": record.chat_template}
    return {}


def part_of(out: Path) -> Path:
    """Where finished records are until all are."""
    return out.with_name(out.name + ".part")


def _refuse_other_settings(
    earlier: Mapping[str, Any], wanted: Mapping[str, Any], file: Path
) -> None:
    """Raise `InputError` where settings differ, naming the first with both values."""
    for key, value in wanted.items():
        if key in COMPARED_BY_DIGEST or earlier.get(key) == value:
            continue
        if key in OF_LATER_VERSIONS and key not in earlier:
            continue
        if key in DIFFERENCES:
            difference = DIFFERENCES[key]
        elif key == "chat_template_sha256":
            difference = _difference_of_chats(earlier, wanted)
        else:
            difference = f"{key} {earlier.get(key)!r} (now {value!r})"
        raise InputError(f"{file}: was made with {difference}; delete it, or give another --out")


def _difference_of_chats(earlier: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """How the chat templates of two scorings differ, as the user gave them."""
    first = earlier.get("chat_template")
    second = wanted.get("chat_template")
    if first == second:
        return f"another text of chat_template {first!r}"
    return f"chat_template {first!r} (now {second!r})"
