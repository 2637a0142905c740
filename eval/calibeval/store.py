"""Records while they are made: what is finished survives kill -9, half a line never counts.

    RECORDS.jsonl.part, RECORDS.jsonl.part.meta.json   so far: records and settings
    RECORDS.jsonl, RECORDS.jsonl.meta.json             at the end

`calibeval.scoring` fills a store; what the files hold is `calibeval.records`' to say.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from calibeval import records
from calibeval.io import InputError, write_text
from calibeval.records import RawRecord
from calibeval.validation import checked

# Settings that choose questions and examples are not compared: two choices may come to the same,
# and the digest of all prompts tells whether they do.
CHOICE_OF_QUESTIONS = ("data", "split", "shots", "examples", "subjects", "limit")


class Store:
    """The records of one model's answers to one task, some of which may be finished already.

    Files that were made with other settings raise `InputError`, and so do files without a sidecar
    that says with which.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]):
        self.out = out
        self.part = part_of(out)
        self.settings = dict(settings)
        for file in (self.out, self.part):
            if file.exists():
                earlier = earlier_settings(file)
                _refuse_other_settings(earlier, settings, file)
                self.settings["engine_settings"] = earlier.get("engine_settings")

    def finished(self) -> dict[str, RawRecord]:
        """The whole records of what was made so far, by the question's id."""
        if not self.part.exists():
            return {}
        rows: dict[str, RawRecord] = {}
        for line in self.part.read_text(encoding="utf-8", errors="replace").splitlines():
            # A line that was cut short is no record; `InputError` is a ValueError.
            with suppress(ValueError, TypeError):
                row = json.loads(line)
                record = checked(records.Record, row, where="")
                rows.setdefault(record.id, row)
        return rows

    def keep_engine_settings(
        self, engine_settings: dict[str, Any], decisive_names: Collection[str]
    ) -> None:
        """Write the loaded engine's settings beside the unfinished records.

        What `dtype=auto` comes to is known only when the engine is loaded. Where finished records
        were made with another value of a setting in `decisive_names`, `InputError` names both.
        """
        earlier = self.settings.get("engine_settings") or {}
        # An earlier version of the engine may not have written all of them.
        decisive = {name: engine_settings[name] for name in decisive_names if name in earlier}
        _refuse_other_settings(earlier, decisive, self.part)
        self.settings["engine_settings"] = engine_settings
        write_text(records.sidecar(self.part), json.dumps({"settings": self.settings}, indent=1))

    @contextmanager
    def appending(self) -> Iterator[Callable[[RawRecord], None]]:
        """Yield a function that keeps a finished record."""
        try:
            with open(self.part, "a", encoding="utf-8") as file:
                print(file=file)  # what a kill has cut short stays a line of its own

                def append(row: RawRecord) -> None:
                    # In ASCII: ids may hold U+2028, which would end the line elsewhere.
                    print(json.dumps(row), file=file, flush=True)

                yield append
        except OSError as error:
            raise InputError(f"{self.part}: could not be written ({error.strerror})") from error

    def finish(self, rows: list[RawRecord], about: Mapping[str, Any]) -> None:
        """Write the final file and its sidecar, and drop the part."""
        records.write(self.out, rows, {"settings": self.settings, **about})
        for file in (self.part, records.sidecar(self.part)):
            file.unlink(missing_ok=True)


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


def part_of(out: Path) -> Path:
    """Where finished records are until all are."""
    return out.with_name(out.name + ".part")


def _refuse_other_settings(
    earlier: Mapping[str, Any], wanted: Mapping[str, Any], file: Path
) -> None:
    """Raise `InputError` where settings differ, naming the first with both values."""
    for key, value in wanted.items():
        if key in CHOICE_OF_QUESTIONS or earlier.get(key) == value:
            continue
        if key == "prompts_sha256":
            difference = "other questions or examples"
        else:
            difference = f"{key} {earlier.get(key)!r} (now {value!r})"
        raise InputError(f"{file}: was made with {difference}; delete it, or give another --out")
