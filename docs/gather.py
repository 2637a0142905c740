"""Gather the pages of all folders for the site: python docs/gather.py FOLDER

The pages stay beside the code that they describe. A page is a Markdown file of the checkout that is
not hidden, not in a hidden folder, and not ignored by git. This copies every page, and every file
that a page links to, into FOLDER under the same relative path, so that the links between them hold
on the site too; the site's style, docs/extra.css, becomes FOLDER/extra.css. FOLDER is made anew: if
an earlier call has filled it, it is deleted with all that is in it; if it has other files, it is
refused. `make docs` calls this before `mkdocs build --strict`, which fails on any link or anchor
that leads nowhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = ".gathered"  # in a folder with this file, all is this script's to delete
# The targets of [text](target#anchor), [name]: target and <img src="target">.
LINKS = (
    re.compile(r"\]\(([^)#\s]+)"),
    re.compile(r"^\[[^\]]+\]: *([^#\s]+)", re.MULTILINE),
    re.compile(r"<img[^>]*\ssrc=[\"']([^\"'#]+)"),
)


def pages() -> list[Path]:
    """Every page of the checkout, committed or new, relative to its root; no hidden ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = [Path(name) for name in listed.split("\0") if name]
    visible = [page for page in found if not any(part.startswith(".") for part in page.parts)]
    # Git still lists a committed page that was deleted in the work tree.
    return [page for page in visible if (ROOT / page).is_file()]


def linked_files(page: Path) -> set[Path]:
    """The files that a page links to, relative to the root; addresses and folders are left out."""
    files = set()
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in [target for link in LINKS for target in link.findall(text)]:
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (ROOT / page.parent / target).resolve()
        if file.is_file() and file.is_relative_to(ROOT):
            files.add(file.relative_to(ROOT))
    return files


def gather(folder: Path) -> None:
    """Copy pages and what they link to into a folder, which is emptied if this script filled it."""
    if (folder / MARK).exists():
        shutil.rmtree(folder)
    elif folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder}: has files that gather.py did not put there; delete it or name another")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    files = set(pages())
    for page in sorted(files):
        files |= linked_files(page)
    for file in sorted(files):
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, target)
    shutil.copyfile(ROOT / "docs" / "extra.css", folder / "extra.css")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pages are copied to")
    gather(parser.parse_args().folder.resolve())
