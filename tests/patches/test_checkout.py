"""apply.sh on a real checkout: apply, reverse, twice, beside other changes, and refusals."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.upstream, pytest.mark.slow]
APPLY = Path(__file__).parents[2] / "patches" / "apply.sh"
FILE = "open_instruct/finetune.py"


def apply(checkout, *options, **given):
    return subprocess.run([APPLY, checkout, *options], capture_output=True, text=True, **given)


def changed(checkout):
    status = ["git", "-C", checkout, "status", "--porcelain", "--untracked-files=no"]
    return subprocess.run(status, capture_output=True, text=True, check=True).stdout.split()


def place():
    """The number of the line under which the first patch adds its import."""
    text = next(iter(sorted(APPLY.parent.glob("*.patch")))).read_text()
    return int(text.split("@@ -")[1].split(",")[0])


@pytest.mark.parametrize("mine", ["nothing", "edits", "commits", -3, -2, 2, 3])
def test_apply_check_reverse(checkout, mine):
    """Changes of one's own are kept: in other files, and in the same one away from the patches'
    places, committed or not, or so many lines from the first place."""
    own = (checkout / FILE).read_text().splitlines(keepends=True)
    if mine in ("edits", "commits"):
        with open(checkout / "README.md", "a") as file:
            file.write("mine\n")
        # Lines above the first hunk and between others; the file grows: numbers are no guide.
        own = [*["# mine\n"] * 40, *own[:120], "# mine\n", *own[120:-1], "# mine\n", own[-1]]
    elif mine != "nothing":
        number = place() + mine
        own[number - 1] = own[number - 1].rstrip() + "  # mine\n"
    (checkout / FILE).write_text("".join(own))
    if mine == "commits":
        me = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *me, "-C", checkout, "commit", "--quiet", "-am", "mine"], check=True)
    before = changed(checkout)
    assert apply(checkout, "--check").returncode == 1
    done = apply(checkout)
    assert done.returncode == 0
    assert ("other changes too, which were kept" in done.stdout) == (mine != "nothing")
    patched = (checkout / FILE).read_text()
    compile(patched, FILE, "exec")
    added = [
        line[1:]
        for patch in sorted(APPLY.parent.glob("*.patch"))
        for line in patch.read_text().splitlines(keepends=True)
        if line.startswith("+") and not line.startswith("+++")
    ]
    assert sorted(patched.splitlines(keepends=True)) == sorted(own + added)
    assert set(changed(checkout)) == {*before, "M", FILE}
    for option, said in ((("--check",), "patched: "), ((), "already patched: ")):
        done = apply(checkout, *option)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(said)
    assert (checkout / FILE).read_text() == patched
    assert apply(checkout, "--reverse").returncode == 0
    assert (checkout / FILE).read_text() == "".join(own) and changed(checkout) == before
    again = apply(checkout, "--reverse")
    assert again.returncode == 0 and "nothing to undo" in again.stdout


def test_a_changed_series_leaves_the_checkout_alone(checkout, tmp_path):
    series = tmp_path / "patches"
    shutil.copytree(APPLY.parent, series)
    last = sorted(series.glob("*.patch"))[-1]
    last.write_text(last.read_text().replace("logits.float()", "logits.double()"))
    done = subprocess.run([series / "apply.sh", checkout], capture_output=True, text=True)
    assert done.returncode == 2 and "not as they were recorded" in done.stderr
    assert changed(checkout) == []


@pytest.mark.parametrize("awk", ["gawk", "mawk"])
@pytest.mark.parametrize("option", [(), ("--reverse",), ("--check",)])
def test_a_change_in_the_patches_place_is_refused_and_kept(checkout, tmp_path, option, awk):
    """Its lines are listed by any awk, and the runner, which needs no patch, is named."""
    if shutil.which(awk) is None:
        pytest.skip(f"needs {awk}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "awk").symlink_to(shutil.which(awk))
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    number = place()
    if option == ("--reverse",):
        apply(checkout)
    lines = (checkout / FILE).read_text().splitlines(keepends=True)
    lines[number - 1 : number] = [lines[number - 1].rstrip() + "  # mine\n"]
    (checkout / FILE).write_text("".join(lines))
    done = apply(checkout, *option, env=os.environ | path)
    assert done.returncode == 2 and "nothing was changed" in done.stderr
    assert f"\n  {lines[number - 1].strip()}\n" in done.stderr
    if option == ():
        assert f"python -m smoothed_open_instruct {checkout}" in done.stderr
    assert not any(word in done.stderr for word in ("checkout --", "stash", "restore", "reset"))
    assert f"-C {checkout} checkout" not in done.stderr
    assert (checkout / FILE).read_text() == "".join(lines)


def test_lines_of_another_series_are_named(checkout):
    apply(checkout)
    text = (checkout / FILE).read_text()
    (checkout / FILE).write_text(text.replace("ours.Checkpoints(", "ours.OlderCheckpoints("))
    done = apply(checkout)
    assert done.returncode == 2 and "another version of these patches" in done.stderr
    assert "ours.OlderCheckpoints(" in done.stderr


def test_a_variable_that_would_hide_the_patches_import_is_named(checkout):
    with open(checkout / FILE, "a") as file:
        file.write("ours.mine()\n")
    done = apply(checkout)
    assert done.returncode == 2 and "a variable `ours` of its own" in done.stderr


@pytest.mark.parametrize("option", [(), ("--check",), ("--reverse",)])
def test_what_plain_git_apply_leaves_is_named(checkout, option):
    """It adds the patches' lines at the end of the file, and says nothing."""
    for patch in sorted(APPLY.parent.glob("*.patch")):
        subprocess.run(["git", "-C", checkout, "apply", patch], check=True, capture_output=True)
    before = (checkout / FILE).read_bytes()
    done = apply(checkout, *option)
    assert done.returncode == 2 and "plain `git apply` adds them at the end" in done.stderr
    assert (checkout / FILE).read_bytes() == before


def test_an_archive_will_do(checkout):
    shutil.rmtree(checkout / ".git")
    assert apply(checkout, "--check").returncode == 1
    assert apply(checkout).returncode == apply(checkout, "--check").returncode == 0
    with open(checkout / FILE, "a") as file:
        file.write("# mine\n")
    done = apply(checkout, "--reverse")
    assert done.returncode == 2 and "cannot be merged" in done.stderr


@pytest.mark.parametrize("option", [(), ("--check",), ("--reverse",)])
def test_a_patched_line_that_was_deleted_is_shown(checkout, option):
    """`Your lines there:` was followed by nothing."""
    apply(checkout)
    lines = (checkout / FILE).read_text().splitlines(keepends=True)
    deleted = next(line for line in lines if line.startswith("maybe_use_ai2_wandb_entity = ours."))
    lines.remove(deleted)
    (checkout / FILE).write_text("".join(lines))
    done = apply(checkout, *option)
    assert done.returncode == 2 and done.stderr.endswith(f"Missing:\n{deleted}")
    assert (checkout / FILE).read_text() == "".join(lines)
