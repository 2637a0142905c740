"""Records while they are made: what is finished survives kill -9, half a line never counts.

RECORDS.jsonl.part, RECORDS.jsonl.part.meta.json   so far: records and settings
RECORDS.jsonl, RECORDS.jsonl.meta.json             at the end
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from calibeval import records
from calibeval.io import InputError, write_text
from calibeval.request import checked

# What chooses the questions and examples: the prompts' hash tells whether two choices are the same.
CHOICE = ("data", "split", "shots", "examples", "subjects", "limit")


class Store:
    """The finished records of one scoring run, whoever made them; other settings are refused."""

    def __init__(self, out: Path, settings: dict):
        self.out, self.part, self.settings = out, part_of(out), dict(settings)
        for file in filter(Path.exists, (self.out, self.part)):
            if not (made := records.asked(file)):
                note = "exists, but no sidecar says how it was made"
                raise InputError(f"{file}: {note}; move it away, or give another --out")
            _same(made, settings, file)
            self.settings["engine_settings"] = made.get("engine_settings")

    def finished(self) -> dict[str, dict]:
        """Records by question id: the whole ones of what was made so far."""
        if not self.part.exists():
            return {}
        found = {}
        for text in self.part.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError):  # cut short; `InputError` is a ValueError
                row = json.loads(text)
                found.setdefault(checked(records.Record, row, "").id, row)
        return found

    def engine(self, describe: dict) -> None:
        """Keep the loaded engine's settings: what `dtype=auto` comes to is known only now.

        Raises `InputError`, naming both, where finished records are of another kind of engine or
        another precision.
        """
        found = self.settings.get("engine_settings") or {}
        compared = (k for k in found if k == "engine" or k.endswith("dtype"))
        _same(found, {k: describe[k] for k in compared if k in describe}, self.out)
        self.settings["engine_settings"] = describe
        write_text(records.sidecar(self.part), json.dumps({"settings": self.settings}, indent=1))

    @contextmanager
    def adding(self) -> Iterator[Callable[[dict], None]]:
        """Yield what keeps a finished record."""
        try:
            with open(self.part, "a", encoding="utf-8") as file:
                print(file=file)  # what a kill has cut short stays a line of its own
                # ASCII: ids may hold U+2028
                yield lambda row: print(json.dumps(row), file=file, flush=True)
        except OSError as error:
            raise InputError(f"{self.part}: could not be written ({error.strerror})") from error

    def finish(self, rows: list[dict], about: dict) -> None:
        """Write the final file and its sidecar, and drop the part."""
        records.write(self.out, rows, {"settings": self.settings, **about})
        for file in (self.part, records.sidecar(self.part)):
            file.unlink(missing_ok=True)


def part_of(out: Path) -> Path:
    """Where finished records are until all are."""
    return out.with_name(out.name + ".part")


def _same(found: dict, wanted: dict, where: Path) -> None:
    """Raise `InputError` where settings differ, naming the first with both values."""
    for key, now in wanted.items():
        if key not in CHOICE and (before := found.get(key)) != now:
            said = f"{key} {before!r} (now {now!r})"
            said = "other questions or examples" if key == "prompts_sha256" else said
            raise InputError(f"{where}: was made with {said}; delete it, or give another --out")
