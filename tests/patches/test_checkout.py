"""apply.sh on a real checkout: apply, reverse, twice, and what it refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
APPLY = Path(__file__).parents[2] / "patches" / "apply.sh"
FILE = "open_instruct/finetune.py"


def apply(checkout, *options):
    return subprocess.run([APPLY, checkout, *options], capture_output=True, text=True)


def changed(checkout):
    status = ["git", "-C", checkout, "status", "--porcelain", "--untracked-files=no"]
    return subprocess.run(status, capture_output=True, text=True, check=True).stdout.split()


def test_apply_check_reverse(checkout):
    before = (checkout / FILE).read_bytes()
    assert apply(checkout, "--check").returncode == 1
    assert apply(checkout).returncode == 0
    patched = (checkout / FILE).read_bytes()
    assert changed(checkout) == ["M", FILE]
    assert apply(checkout, "--check").returncode == 0
    again = apply(checkout)
    assert again.returncode == 0 and "already patched" in again.stdout
    assert (checkout / FILE).read_bytes() == patched
    assert apply(checkout, "--reverse").returncode == 0
    assert (checkout / FILE).read_bytes() == before and changed(checkout) == []
    again = apply(checkout, "--reverse")
    assert again.returncode == 0 and "nothing to undo" in again.stdout


def test_patched_script_keeps_every_upstream_line_in_order(checkout):
    before = (checkout / FILE).read_text().splitlines()
    apply(checkout)
    after = iter((checkout / FILE).read_text().splitlines())
    assert all(line in after for line in before)


def test_each_patch_names_its_result(checkout):
    patches = sorted(APPLY.parent.glob("*.patch"))
    for patch in patches:
        subprocess.run(["git", "-C", checkout, "apply", "--unidiff-zero", patch], check=True)
        hashed = ["git", "-C", checkout, "hash-object", FILE]
        blob = subprocess.run(hashed, capture_output=True, text=True, check=True).stdout.strip()
        assert f"..{blob} 100644" in patch.read_text()


def test_a_changed_series_leaves_the_checkout_alone(checkout, tmp_path):
    series = tmp_path / "patches"
    shutil.copytree(APPLY.parent, series)
    last = sorted(series.glob("*.patch"))[-1]
    last.write_text(last.read_text().replace("logits.float()", "logits.double()"))
    done = subprocess.run([series / "apply.sh", checkout], capture_output=True, text=True)
    assert done.returncode == 2 and "not as they were recorded" in done.stderr
    assert changed(checkout) == []


@pytest.mark.parametrize("option", [(), ("--reverse",), ("--check",)])
def test_refuses_a_file_with_other_changes(checkout, option):
    if option == ("--reverse",):
        apply(checkout)
    with open(checkout / FILE, "a") as file:
        file.write("# mine\n")
    before = (checkout / FILE).read_bytes()
    done = apply(checkout, *option)
    assert done.returncode == 2
    assert f"{FILE} in {checkout} is neither the upstream file nor the patched one" in done.stderr
    assert (checkout / FILE).read_bytes() == before


def test_refuses_other_changes_in_the_checkout(checkout):
    with open(checkout / "README.md", "a") as file:
        file.write("mine\n")
    done = apply(checkout)
    assert done.returncode == 2 and "README.md" in done.stderr
    assert changed(checkout) == ["M", "README.md"]


def test_untracked_files_do_not_matter(checkout):
    (checkout / "output").mkdir()
    (checkout / "output" / "log").write_text("")
    assert apply(checkout).returncode == 0


def test_refuses_another_commit(checkout):
    subprocess.run(["git", "-C", checkout, "checkout", "--quiet", "HEAD~1"], check=True)
    done = apply(checkout)
    assert done.returncode == 2 and f"git -C {checkout} checkout e363290" in done.stderr
    assert changed(checkout) == []
