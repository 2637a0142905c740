"""The patch files hold this project's lines alone; no checkout is needed to see that."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

PATCHES = sorted(Path(__file__).parents[2].glob("patches/*.patch"))
UPSTREAM = (PATCHES[0].parent / "UPSTREAM").read_text()
# A hunk that only adds, without the heading in which git would quote the upstream file.
HUNK = re.compile(r"@@ -\d+,0 \+\d+(,\d+)? @@")


def body(patch: Path) -> list[str]:
    lines = patch.read_text().splitlines()
    return lines[next(i for i, line in enumerate(lines) if line.startswith("diff --git")) :]


def test_numbered_in_order_from_the_recorded_file():
    assert [patch.name[:4] for patch in PATCHES] == [f"{n:04}" for n in range(1, len(PATCHES) + 1)]
    recorded = re.search(r"^blob ([0-9a-f]{40}) open_instruct/finetune.py$", UPSTREAM, re.M)
    assert re.search(r"^commit e363290[0-9a-f]{33}$", UPSTREAM, re.M)
    assert body(PATCHES[0])[1].startswith(f"index {recorded[1]}..")


def test_applies_to_a_file_of_the_recorded_length(tmp_path):
    """Hunks carry no context, so any file of upstream's length takes them and keeps its lines."""
    length = int(re.search(r"^lines (\d+)$", UPSTREAM, re.M)[1])
    before = [f"upstream {number}" for number in range(1, length + 1)]
    script = tmp_path / "open_instruct" / "finetune.py"
    script.parent.mkdir()
    script.write_text("\n".join(before) + "\n")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "apply", "--unidiff-zero", *PATCHES], check=True)
    after = script.read_text().splitlines()
    lines = [line for patch in PATCHES for line in body(patch)[4:]]
    added = [line for line in lines if not HUNK.fullmatch(line)]
    assert added and all(line.startswith("+") for line in added)
    assert len(after) == length + len(added)
    assert [line for line in after if line.startswith("upstream ")] == before


def test_series_is_the_one_that_was_tried_on_upstream():
    """An edited patch names the wrong result, and then apply.sh refuses what it has patched."""
    series = hashlib.sha256(b"".join(patch.read_bytes() for patch in PATCHES)).hexdigest()
    assert series == re.search(r"^series (\w+)$", UPSTREAM, re.M)[1], (
        f"a patch changed: correct its index line (patches/README.md, Tests), run `pytest -m "
        f"upstream tests/patches/test_checkout.py`, then put {series} into patches/UPSTREAM"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage:"),
        (["nowhere/at-all"], "is not a folder"),
        (["--undo"], "unknown option --undo"),
        (["empty"], "has no open_instruct/finetune.py"),
        (["one", "two"], "one checkout only"),
        (["other"], "not that of e363290be272, and its repository lacks that commit"),
    ],
)
def test_apply_refuses_what_is_no_checkout(tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (other := tmp_path / "other" / "open_instruct" / "finetune.py").parent.mkdir(parents=True)
    other.write_text("pass\n")
    subprocess.run(["git", "-C", tmp_path / "other", "init", "--quiet"], check=True)
    apply = PATCHES[0].parent / "apply.sh"
    done = subprocess.run([apply, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
    assert "-C other checkout" not in done.stderr and other.read_text() == "pass\n"
