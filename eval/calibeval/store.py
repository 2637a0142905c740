"""Records while they are made: finished shards survive kill -9, half-written ones never count.

RECORDS.jsonl.parts/settings.json     what is being scored, and how
RECORDS.jsonl.parts/000500.json       a finished shard: {"engine_settings", "usage", "seconds",
                                       "records"}
RECORDS.jsonl, RECORDS.jsonl.meta.json   at the end
"""

import json
import shutil
from pathlib import Path

from calibeval import records
from calibeval.io import InputError, atomic_write

# What chooses the questions and examples. The prompts' hash tells whether two choices are the same;
# these say only in which option two hashes part.
CHOICE = ("data", "split", "shots", "examples", "subjects", "limit")


class Store:
    """The finished records of one scoring run, whoever made them."""

    def __init__(self, out: Path, settings: dict, overwrite: bool = False):
        self.out, self.settings = out, dict(settings)
        self.folder = out.with_name(out.name + ".parts")
        if overwrite:
            clear(out)
        if out.exists():
            _same(_settings(records.sidecar(out), out), settings, out)
        self.header = self.folder / "settings.json"
        if self.header.exists():
            _same(_settings(self.header, out), settings, self.folder)

    def finished(self) -> dict[str, dict]:
        """Records by question id: of the finished shards, and what is intact of the final file."""
        found = {}
        if self.out.exists():
            found |= {row["id"]: row for row in records.intact(self.out)}
        for part in self._parts():
            found |= {row["id"]: row for row in part["records"]}
        return found

    def engine(self, describe: dict) -> None:
        """Keep the loaded engine's settings: what `dtype=auto` comes to is known only now.

        Raises `InputError`, naming both, where finished records are of another kind of engine or
        another precision.
        """
        made = [(self.folder, part.get("engine_settings")) for part in self._parts()]
        for where, path in ((self.out, records.sidecar(self.out)), (self.folder, self.header)):
            if where.exists() and path.exists():
                made.append((where, _settings(path, self.out).get("engine_settings")))
        compared = {k: v for k, v in describe.items() if k == "engine" or k.endswith("dtype")}
        for where, found in made:
            found = found or {}
            _same(found, {k: v for k, v in compared.items() if k in found}, where)
        self.settings["engine_settings"] = describe

    def add(self, first: int, rows: list[dict], usage: dict, seconds: float) -> None:
        """Keep a finished shard; `first` is the place of its first question in the task."""
        if not self.header.exists():
            with atomic_write(self.header) as file:
                json.dump({"settings": self.settings}, file, indent=1)
        part = {"engine_settings": self.settings.get("engine_settings"), "usage": usage}
        with atomic_write(self.folder / f"{first:06}.json") as file:
            json.dump(part | {"seconds": seconds, "records": rows}, file)

    def finish(self, rows: list[dict], meta: dict) -> dict:
        """Write the final file and its sidecar, drop the shards, return the sidecar's content."""
        parts = self._parts()
        engine = self.settings.get("engine_settings") or parts[-1].get("engine_settings")
        self.engine(engine or {})  # processes that started together could not see each other's
        usage: dict[str, int] = {}
        for part in parts:
            for key, value in part["usage"].items():
                usage[key] = usage.get(key, 0) + value
        seconds = round(sum(part["seconds"] for part in parts), 3)
        meta = {"settings": self.settings, **meta, "questions": len(rows)}
        meta |= {"seconds": seconds, "usage": usage}
        # The sidecar first: records without their settings would be unusable.
        with atomic_write(records.sidecar(self.out)) as file:
            json.dump(meta, file, indent=1)
        with atomic_write(self.out) as file:
            file.writelines(map(records.line, rows))
        shutil.rmtree(self.folder, ignore_errors=True)
        return meta

    def _parts(self) -> list[dict]:
        found = []
        for path in sorted(self.folder.glob("[0-9]*.json")):
            try:
                found.append(json.loads(path.read_text(encoding="utf-8")))
            except FileNotFoundError:
                continue  # another process has just merged and dropped the shards
            except ValueError as error:
                raise InputError(
                    f"{path}: not JSON ({error}); delete it to score it anew"
                ) from error
        return found


def clear(out: Path) -> None:
    """Forget what a scoring run has made so far."""
    shutil.rmtree(out.with_name(out.name + ".parts"), ignore_errors=True)
    out.unlink(missing_ok=True)


def _settings(path: Path, out: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{out}: exists, but {path.name} does not say how it was made; "
            f"give --overwrite to replace it"
        ) from error


def _same(found: dict, wanted: dict, where: Path) -> None:
    differ = [k for k in wanted if k not in CHOICE and found.get(k) != wanted[k]]
    if not differ:
        return
    if "prompts_sha256" in differ:
        causes = [k for k in CHOICE if k in found and found[k] != wanted.get(k)]
        differ = [k for k in differ if k != "prompts_sha256"] + causes
    changes = ", ".join(f"{k} {found.get(k)!r} (now {wanted.get(k)!r})" for k in differ)
    changes = changes or "other questions or examples"  # the data itself, or an older record
    raise InputError(
        f"{where}: was made with {changes}; give --overwrite to score anew, or another --out"
    )
