"""What sbatch is handed: golden files, what it exports, the scripts that users type.

To accept changed scripts after reading the difference: `python tests/slurm/test_scripts.py`.
"""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from sweep_tools import PROJECT, command

from sweeps.launch import sbatch, slurm
from sweeps.launch.hub_cache import VARIABLES_OF_PARTS
from sweeps.launch.sbatch import JobKind
from sweeps.runs import slurm_queue
from sweeps.runs.grid import plan_sweep
from sweeps.runs.schema import Cluster, load_cluster
from sweeps.runs.slurm_queue import LiveElement

GOLDEN = Path(__file__).with_name("golden")
CASES = {
    "generic": [],
    "alliance": ["world.processes_per_node=4"],
    "cloud": ["world.processes_per_node=8"],
}


def render(case: str) -> str:
    """All scripts of a sweep of 24 runs under a profile, with this machine's paths named."""
    file = f"configs/cluster/{case}.yaml"
    os.chdir(PROJECT)
    overrides = [f"cluster={file}", "output_root=/project/runs", "score.base=false", *CASES[case]]
    plan = plan_sweep(PROJECT / "configs" / "sweeps" / "grid.yaml", overrides)
    cluster = load_cluster(file)
    code = plan.folder / "code" / "5eed5eed"
    text = ""
    with mock.patch.dict(os.environ):
        for name in ("HF_HOME", "XDG_CACHE_HOME", *VARIABLES_OF_PARTS):
            os.environ.pop(name, None)  # jobs would have them
        for job in slurm.design(plan, []):
            place = plan.folder / "jobs" / f"{job.kind.value}1"
            dependency = job.dependency(["8"], ["7"])
            text += sbatch.script(plan.sweep, cluster, job, place, code, dependency)
    return text.replace(sys.executable, "PYTHON").replace(str(PROJECT), "/project")


@pytest.mark.parametrize("case", CASES)
def test_the_scripts_are_the_golden_ones_and_bash_can_read_them(case, monkeypatch):
    monkeypatch.chdir(PROJECT)
    text = render(case)
    assert text == (GOLDEN / f"{case}.txt").read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_dry_run_needs_no_slurm_and_writes_nothing(toy_file, tmp_path):
    path = toy_file(cluster=str(PROJECT / "configs" / "cluster" / "alliance.yaml"))
    bare = {**os.environ, "PATH": "/nonexistent"}
    done = command("launch", path, "--dry-run", env=bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/out/toy: 2 runs: 2 to do\n")
    assert "JOB0 trains 2 runs: --time=" in done.stdout and "#SBATCH" not in done.stdout
    done = command("launch", path, "--dry-run", "--scripts", env=bare)
    assert "#SBATCH --array=0-1%2" in done.stdout
    assert "--dependency=afterany:JOB0\n" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.fixture
def three_seeds(toy_file) -> Path:
    """A sweep with scores, of whose three runs the first is trained."""
    path = toy_file(grid={"seed": [1, 2, 3]}, score={"tasks": [{"task": "mmlu", "data": "x"}]})
    for overrides in ([], ["world.processes_per_node=2"]):
        plan = plan_sweep(path, overrides)
        plan.create()
        plan.runs[0].model.mkdir()
    return path


def test_what_is_queued_is_not_submitted_again(three_seeds):
    plan = plan_sweep(three_seeds, [])
    train, score, collect = slurm.design(plan, [])
    busy = [LiveElement(f"9_{n}", "PENDING", "", name) for n, name in enumerate(train.runs)]
    assert slurm.design(plan, busy) == [score, collect]
    busy += [LiveElement(f"8_{n}", "PENDING", "", name) for n, name in enumerate(score.runs)]
    assert slurm.design(plan, busy) == [collect]
    busy.append(LiveElement("10", "PENDING", "", None))
    assert slurm.design(plan, busy) == []


def test_a_run_that_is_done_and_still_there_is_counted_once(three_seeds):
    plan = plan_sweep(three_seeds, ["score=null"])  # whose first run is done
    elements = [LiveElement(f"9_{n}", "RUNNING", "", run.name) for n, run in enumerate(plan.runs)]
    present = slurm.Submission({}, "", elements[:2], [], [], [])
    assert present.describe_present(plan) == "1 done, 1 queued or running"


def script_with(three_seeds: Path, *extra: str, **keys) -> str:
    """The script of the first job of a sweep under a profile with these extra options."""
    plan = plan_sweep(three_seeds, [])
    cluster = Cluster(extra=extra, **keys)
    job = slurm.design(plan, [])[0]
    return sbatch.script(plan.sweep, cluster, job, Path("/s/jobs/tag"), Path("/c"), "")


def test_an_extra_option_stands_alone_and_holds_for_srun_too(three_seeds):
    """Of two lines sbatch takes the last, whichever that is."""
    script = script_with(three_seeds, "--cpus-per-task=7", "--gpus-per-node=a100:2", "--mem=3G")
    assert script.count("#SBATCH --cpus-per-task=") == 1 and "#SBATCH --cpus-per-task=7\n" in script
    assert "srun --unbuffered --output /s/jobs/tag/%A_%a_%t_log.out --cpus-per-task=7 " in script
    assert script.count("--gpus-per-node=") == 1 and "#SBATCH --gpus-per-node=a100:2\n" in script
    assert script.count("#SBATCH --mem=") == 1 and "#SBATCH --mem=3G\n" in script


@pytest.fixture
def nine(toy_file) -> Path:
    """A sweep with scores of nine runs, of which the last six are trained."""
    score = {"tasks": [{"task": "mmlu", "data": "x"}], "base": False}
    path = toy_file(grid={"seed": list(range(9))}, score=score)
    for overrides in ([], ["world.processes_per_node=2"]):
        plan = plan_sweep(path, overrides)
        plan.create()
        for run in plan.runs[3:]:
            run.model.mkdir()
    return path


TWO_NODES = ("world.nodes=2", "world.processes_per_node=4")


def scripts_on_two_nodes(three_seeds: Path, **keys) -> list[str]:
    """The scripts of the jobs of a sweep whose runs have two nodes, under a profile of keys."""
    plan = plan_sweep(three_seeds, list(TWO_NODES))
    return [
        sbatch.script(plan.sweep, Cluster(**keys), job, Path("/s/jobs/tag"), Path("/c"), "")
        for job in slurm.design(plan, [])
    ]


def test_a_run_on_two_nodes_has_one_element_that_is_the_batch_job_itself(three_seeds):
    """Scoring and tables have one node, as ever."""
    train, *others = scripts_on_two_nodes(three_seeds, cpus_per_process=3, signal_seconds=70)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in train
    assert "#SBATCH --cpus-per-task=12\n" in train and "#SBATCH --gpus-per-node=4\n" in train
    assert "#SBATCH --signal=B:USR2@70\n" in train
    assert "srun --" not in train
    assert f"exec {sys.executable} -u -m submitit.core._submit /s/jobs/tag\n" in train
    for script in others:
        assert "#SBATCH --nodes=1\n" in script and "#SBATCH --signal=USR2@70\n" in script
        assert "srun --unbuffered" in script


TWO = "world.processes_per_node=2"
SPLIT = {
    "all fit": ([], None, ["train 3", "score 6", "collect 0"]),
    "split": ([], 4, ["train 3", "score 4", "score 2", "collect 0"]),
    "exactly": ([], 3, ["train 3", "score 3", "score 3", "collect 0"]),
    "one each": ([], 1, ["train 1"] * 3 + ["score 1"] * 6 + ["collect 0"]),
    "no arrays": (
        [TWO, "throttle=2"], 0,
        ["train 1", "score 1 afterok:1", "train 1", "score 1 afterok:3",
         "train 1 afterany:1", "score 1 afterok:5,afterany:2",
         "score 1", "score 1", *(f"score 1 afterany:{number}" for number in (7, 8, 9, 10)),
         "collect 0"],
    ),
    "a throttle holds for all parts": (
        ["throttle=1"], 4, ["train 3", "score 4", "score 2 afterany:2", "collect 0"],
    ),
    "scores stay beside their training": (
        [TWO], 2,
        ["train 2", "score 2 aftercorr:1", "train 1", "score 1 aftercorr:3",
         "score 2", "score 2", "score 2", "collect 0"],
    ),
    "and with a throttle": (
        [TWO, "throttle=1"], 2,
        ["train 2", "score 2 aftercorr:1", "train 1 afterany:1",
         "score 1 aftercorr:3,afterany:2", "score 2", "score 2 afterany:5", "score 2 afterany:6",
         "collect 0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("overrides", "limit", "expected"), SPLIT.values(), ids=list(SPLIT))
def test_arrays_that_are_too_large_are_split(nine, overrides, limit, expected):
    """Each job with the number of its runs, and for which jobs it waits, counted from 1."""
    plan = plan_sweep(nine, overrides)
    shown = []
    submitted: list[str] = []
    for job in slurm.design(plan, [], limit):
        dependency = job.dependency(submitted)
        asked = sbatch.parameters(plan.sweep, Cluster(), job, Path("jobs/tag"), dependency)
        words = [job.kind.value, str(len(job.runs))]
        if job.kind is not JobKind.COLLECT:  # which waits for all
            words += filter(None, [asked["additional_parameters"].get("dependency")])
        shown.append(" ".join(words))
        submitted.append(str(len(submitted) + 1))
    assert shown == expected


def test_what_another_user_of_the_folder_has_queued_is_queued(tmp_path, monkeypatch):
    names = tmp_path / "jobs" / "abc123" / "names"
    names.parent.mkdir(parents=True)
    names.write_text("one\n")
    if not os.geteuid():  # root may give the file to another user
        os.chown(names, 12345, -1)
    owner = names.stat().st_uid
    squeue = tmp_path / "squeue"
    line = "9|0|R|x.train.abc123|None"
    squeue.write_text(f"#!/bin/sh\ncase $* in *--user=*{owner}*) echo '{line}'; esac\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_queue.live_elements(tmp_path) == [LiveElement("9_0", "R", "None", "one", "abc123")]


@pytest.mark.parametrize(
    ("tag", "job_name", "noted_id", "user", "output", "is_cancelled"),
    [
        ("abc123", "x.train.abc123", "9", None, "abc123/9_0_log.out", True),
        ("abc123", "x.train.abc123", None, None, "abc123/9_0_log.out", True),  # killed launch
        ("abc123", "x.train.abc123", "9", 12345, "abc123/9_0_log.out", False),
        ("abc123", "x.train.abc123", "9", None, "../../y/jobs/abc123/9_0_log.out", False),
        ("abc123", "x.train.abc123", "9", None, None, False),  # Slurm does not say
        ("train", "x.y.train", "9", None, "train/9_0_log.out", False),
        ("abc123", "x.other.abc123", "9", None, "abc123/9_0_log.out", False),
        ("abc124", "x.train.abc124", "8", None, "abc124/9_0_log.out", False),  # of another job
    ],
)
def test_a_planted_folder_cancels_no_other_job(
    toy_file, tmp_path, monkeypatch, tag, job_name, noted_id, user, output, is_cancelled
):
    """It cancelled whatever job of the user's was called like it."""
    plan = plan_sweep(toy_file(), [])
    names = plan.folder / "jobs" / tag / "names"
    names.parent.mkdir(parents=True)
    names.write_text("one\n")
    if noted_id is not None:
        (names.parent / "id").write_text(f"{noted_id}\n")
    shown = f"   UserId=me({os.getuid() if user is None else user}) GroupId=us(1)"
    if output is not None:
        shown += f"\n   StdOut={plan.folder.absolute() / 'jobs' / output}"
    scripts = {
        "squeue": f"echo '9|0|R|{job_name}|None'",
        "scontrol": f"echo '{shown}'",
        "scancel": f"echo $@ > {tmp_path}/cancelled",
    }
    for program, text in scripts.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cancelled, _ = slurm.cancel(plan, of_whole_folder=True)
    assert [element.label for element in cancelled] == ["9_0"] * is_cancelled
    assert (tmp_path / "cancelled").exists() is is_cancelled


def run_setup(code: Path, before: str = "", after: str = "", **keys) -> subprocess.CompletedProcess:
    """Run the setup lines of a profile with these keys, between other lines."""
    lines = [before, *sbatch.setup(Cluster(**keys), code), after]
    return subprocess.run(
        ["bash"], input="\n".join(lines), text=True, capture_output=True, check=False
    )


def test_what_set_up_lines_export_holds(tmp_path):
    done = run_setup(tmp_path, setup=("export PYTHONPATH=/mine",), after='echo "$PYTHONPATH"')
    assert done.stdout == f"{tmp_path}:/mine\n"


def test_a_profiles_home_is_the_submitting_shells(tmp_path, monkeypatch):
    """A job's shell would read `"~/hf"` as it stands."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.yaml").write_text("cache: ~/hf\nsecrets_file: ~/.tokens\n")
    lines = sbatch.setup(load_cluster(str(tmp_path / "mine.yaml")), tmp_path)
    assert 'export HF_HOME="/home/me/hf"' in lines
    assert 'secrets_file="/home/me/.tokens"' in lines


def test_jobs_look_for_hub_files_where_their_launch_did(tmp_path, monkeypatch):
    """Unless the profile has a `cache`; modules and setup lines come later, and win."""
    monkeypatch.setenv("HF_HOME", "/my hf")
    monkeypatch.setenv("HF_HUB_CACHE", "/hub")
    show = 'echo "$HF_HOME|$HF_HUB_CACHE"'
    in_job = "unset HF_HOME HF_HUB_CACHE"
    assert run_setup(tmp_path, before=in_job, after=show).stdout == "/my hf|/hub\n"
    done = run_setup(tmp_path, before=in_job, after=show, setup=("export HF_HOME=/site",))
    assert done.stdout == "/site|/hub\n"
    done = run_setup(tmp_path, before=in_job, after='echo "$HF_HOME"', cache="/cache")
    assert done.stdout == "/cache\n"
    assert not any("HUB_CACHE" in line for line in sbatch.setup(Cluster(cache="/c"), tmp_path))


def test_two_dollars_of_a_profile_are_a_literal_one_in_jobs(tmp_path, monkeypatch):
    """Of others, a job's shell makes the job's variables."""
    secrets = tmp_path / "a$b" / "secrets"
    secrets.parent.mkdir()
    secrets.write_text("TOKEN=t\n")
    keys = {"cache": "/c$$d/$MINE", "secrets_file": f"{tmp_path}/a$$b/secrets"}
    monkeypatch.setenv("MINE", "me")
    done = run_setup(tmp_path, after='echo "$HF_HOME $TOKEN"', **keys)
    assert done.stdout == "/c$d/me t\n", done.stderr


def test_jobs_read_a_secrets_file_and_do_not_run_it(tmp_path):
    secrets = tmp_path / "secrets"
    secrets.write_text("# mine\n\nexport A='two words'\nB=\"b\"\nC='$(touch ran)=='\nD=last")
    show = 'echo "$A|$B|$C|$D"; bash -c \'echo "$D"\''
    done = run_setup(tmp_path, after=show, secrets_file=str(secrets))
    assert done.stdout == "two words|b|$(touch ran)==|last\nlast\n", done.stderr


@pytest.mark.parametrize("line", ["HF_TOKEN= hf_5ecret", "hf_5ecret", "A B=hf_5ecret"])
def test_a_job_names_the_line_of_its_secrets_file_and_not_its_value(tmp_path, line):
    secrets = tmp_path / "secrets"
    secrets.write_text(f"A=b\n{line}\n")
    done = run_setup(tmp_path, after="echo went on", secrets_file=str(secrets))
    assert f"error: {secrets}, line 2: write NAME=value" in done.stderr
    assert "5ecret" not in done.stderr + done.stdout and "went on" not in done.stdout


def test_a_path_of_a_profile_is_a_path_whatever_characters_it_has(tmp_path):
    cache = '/a"b/`date`/c\\d/$(date)/5$/$HOME'
    done = run_setup(tmp_path, after='echo "$HF_HOME"', cache=cache)
    assert done.stdout == cache.replace("$HOME", os.environ["HOME"]) + "\n", done.stderr


def dry_run_of(script: str, *words: str, cwd: Path) -> str:
    """What one of the scripts that users type prints with --dry-run --scripts."""
    done = subprocess.run(
        ["bash", PROJECT / "slurm" / f"{script}.sh", *words, "--dry-run", "--scripts"],
        text=True,
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, "PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_scripts_take_files_from_where_they_are_typed(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "mine.yaml").write_text("account: def-mine\ngpus_per_process: 0\n")
    shipped = (PROJECT / "configs/sweeps/beta.yaml").read_text()
    (there / "own.yaml").write_text(shipped.replace("name: beta", "name: own"))
    words = ("--config", "own.yaml", "--cluster=../mine.yaml", "throttle=3")
    printed = dry_run_of("sweep_beta", *words, cwd=there)
    assert "#SBATCH --account=def-mine" in printed and "--job-name=own.train" in printed
    assert "--array=0-5%3" in printed


if __name__ == "__main__":
    for name in CASES:
        (GOLDEN / f"{name}.txt").write_text(render(name), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ("MaxArraySize            = 1001\nMaxJobCount = 5", 1001),
        ("MaxArraySize = 9\nSchedulerParameters = a=1,max_array_tasks=4,b", 4),
        ("MaxArraySize = 0", 0),
        ("", None),
    ],
)
def test_how_large_an_array_may_be(monkeypatch, config, limit):
    monkeypatch.setattr(slurm_queue, "slurm_or_empty", lambda *words, cluster: config)
    assert slurm_queue.largest_array(None) == limit
