"""Records while they are made: finished parts survive kill -9, half-written ones never count.

RECORDS.jsonl.parts/settings.json     what is being scored, and how
RECORDS.jsonl.parts/000500.json       a finished part: {"seconds", "records"}
RECORDS.jsonl, RECORDS.jsonl.meta.json   at the end
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from calibeval import records
from calibeval.io import InputError, atomic_write

# What chooses the questions and examples. The prompts' hash tells whether two choices are the same;
# these say only in which option two hashes part.
CHOICE = ("data", "split", "shots", "examples", "subjects", "limit")


class Store:
    """The finished records of one scoring run, whoever made them; other settings are refused."""

    def __init__(self, out: Path, settings: dict, overwrite: bool = False):
        self.out, self.settings, self.folder = out, dict(settings), _parts_of(out)
        self.header = self.folder / "settings.json"
        if overwrite:
            clear(out)
        for there, header in ((out, records.sidecar(out)), (self.header, self.header)):
            if there.exists():
                made = _settings(header, out)
                _same(made, settings, out)
                self.settings["engine_settings"] = made.get("engine_settings")

    def finished(self) -> dict[str, dict]:
        """Records by question id: of the finished parts, and what is intact of the final file."""
        rows = records.intact(self.out) if self.out.exists() else []
        rows += [row for part in self._parts() for row in part["records"]]
        return {row["id"]: row for row in rows}

    def engine(self, describe: dict) -> None:
        """Keep the loaded engine's settings: what `dtype=auto` comes to is known only now.

        Raises `InputError`, naming both, where finished records are of another kind of engine or
        another precision.
        """
        found = self.settings.get("engine_settings") or {}
        compared = (k for k in found if k == "engine" or k.endswith("dtype"))
        _same(found, {k: describe[k] for k in compared if k in describe}, self.out)
        self.settings["engine_settings"] = describe

    def add(self, first: int, rows: list[dict], seconds: float) -> None:
        """Keep a finished part; `first` is the place of its first question in the task."""
        if not self.header.exists():
            with atomic_write(self.header) as file:
                json.dump({"settings": self.settings}, file, indent=1)
        with atomic_write(self.folder / f"{first:06}.json") as file:
            json.dump({"seconds": seconds, "records": rows}, file)

    def finish(self, rows: list[dict], about: dict) -> dict:
        """Write the final file and its sidecar, drop the parts, return the sidecar's content."""
        seconds = round(sum(part["seconds"] for part in self._parts()), 3)
        about = {"settings": self.settings, **about, "seconds": seconds}
        about = records.write(self.out, rows, about)
        shutil.rmtree(self.folder, ignore_errors=True)
        return about

    def _parts(self) -> list[dict]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            # One that a disk has damaged is scored anew; another process may just have merged all.
            with suppress(FileNotFoundError, ValueError):
                found.append(json.loads(path.read_text(encoding="utf-8")))
        return found


def _parts_of(out: Path) -> Path:
    return out.with_name(out.name + ".parts")


def clear(out: Path) -> None:
    """Forget what a scoring run has made so far."""
    shutil.rmtree(_parts_of(out), ignore_errors=True)
    out.unlink(missing_ok=True)


def _settings(path: Path, where: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        note = f"exists, but {path.name} does not say how it was made"
        raise InputError(f"{where}: {note}; give --overwrite to replace it") from error


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
