"""Records while they are made: what is finished survives kill -9, half a line never counts.

RECORDS.jsonl.part, RECORDS.jsonl.part.meta.json   so far: records, settings and seconds
RECORDS.jsonl, RECORDS.jsonl.meta.json             at the end
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from calibeval import records
from calibeval.io import InputError, atomic_write
from calibeval.request import checked

# What chooses the questions and examples. The prompts' hash tells whether two choices are the same;
# these say only in which option two hashes part.
CHOICE = ("data", "split", "shots", "examples", "subjects", "limit")


class Store:
    """The finished records of one scoring run, whoever made them; other settings are refused."""

    def __init__(self, out: Path, settings: dict, overwrite: bool = False):
        self.out, self.part, self.settings = out, part_of(out), dict(settings)
        self.seconds = 0.0
        if overwrite:
            clear(out)
        for file in filter(Path.exists, (self.out, self.part)):
            about = records.meta(file)
            if not (made := about.get("settings")):
                note = "exists, but no sidecar says how it was made"
                raise InputError(f"{file}: {note}; give --overwrite to replace it")
            _same(made, settings, file)
            self.settings["engine_settings"] = made.get("engine_settings")
            self.seconds = about.get("seconds", 0.0)

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

    def add(self, rows: list[dict], seconds: float) -> None:
        """Keep some finished records."""
        self.seconds += seconds
        with atomic_write(records.sidecar(self.part)) as file:
            json.dump({"settings": self.settings, "seconds": self.seconds}, file, indent=1)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)  # ASCII: ids may hold U+2028
        try:
            with open(self.part, "a", encoding="utf-8") as file:
                file.write(f"\n{lines}")  # what a kill has cut short stays a line of its own
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self.part}: could not be written ({error.strerror})") from error

    def finish(self, rows: list[dict], about: dict) -> dict:
        """Write the final file and its sidecar, drop the part, return the sidecar's content."""
        about = {"settings": self.settings, **about, "seconds": round(self.seconds, 3)}
        about = records.write(self.out, rows, about)
        clear(self.out, final=False)
        return about


def part_of(out: Path) -> Path:
    """Where finished records are until all are."""
    return out.with_name(out.name + ".part")


def clear(out: Path, final: bool = True) -> None:
    """Forget what a scoring run has made so far, the final file as well if asked."""
    for file in (out,) * final + (part_of(out), records.sidecar(part_of(out))):
        file.unlink(missing_ok=True)


def _same(found: dict, wanted: dict, where: Path) -> None:
    """Raise `InputError` where settings differ, naming each with both values."""
    differ = [k for k in wanted if found.get(k) != wanted[k]]
    if "prompts_sha256" not in differ:
        differ = [k for k in differ if k not in CHOICE]
    if differ:
        named = [k for k in differ if k != "prompts_sha256"]
        said = ", ".join(f"{k} {found.get(k)!r} (now {wanted[k]!r})" for k in named)
        said = said or "other questions or examples"
        raise InputError(f"{where}: was made with {said}; give --overwrite or another --out")
