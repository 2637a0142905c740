"""Runs over several machines: the launcher's flags, ports, and two nodes of a real Slurm."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chaos
import pytest
import yaml
from real import LONG, MARKS, command, empty, equal, logs, prepare, runs_of, wait_for

from sweeps import supervise
from sweeps.backends.base import Program
from sweeps.config import World
from sweeps.files import read_rows

ZERO2 = {
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


def on_slurm(test):
    """Mark a test as one that starts a real Slurm."""
    for mark in MARKS:
        test = mark(test)
    return test


@pytest.mark.parametrize("deepspeed", [None, "zero.json"])
def test_every_machine_launches_its_own_part(deepspeed, monkeypatch):
    world = World(nodes=4, processes_per_node=8, mixed_precision="bf16", deepspeed=deepspeed)
    said = {("hostnames", "n[7-10]"): "n7\nn8\nn9\nn10\n", ("node", "n7"): "NodeAddr=10.0.0.7 P=1"}
    monkeypatch.setattr(supervise, "_scontrol", lambda *words: said[words])
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[7-10]")
    endpoints = set()
    for job in ("64", "65"):  # two elements of one array, perhaps on the same machines
        monkeypatch.setenv("SLURM_JOB_ID", job)
        for machine in range(4):
            monkeypatch.setenv("SLURM_PROCID", str(machine))
            words = supervise.launched(Program(module="x", arguments=("run",)), world).words
            assert words[1:3] == ["-m", "torch.distributed.run"]
            assert words[-5:] == ["-m", "sweeps.children", "-m", "x", "run"]
            assert {"--nnodes=4", "--nproc-per-node=8", "--rdzv-backend=c10d"} <= set(words)
            (conf,) = [word for word in words if word.startswith("--rdzv-conf=")]
            assert ("is_host=true" in conf) == (machine == 0)
            endpoints |= {word for word in words if word.startswith("--rdzv-endpoint=10.0.0.7:")}
    assert len(endpoints) == 2


def test_a_program_is_told_what_accelerate_launch_would_tell_it(tmp_path):
    program = Program(module="x", arguments=(), environment={"OTHER": "1"})
    plain = supervise.launched(program, World(mixed_precision="bf16"))
    assert plain.environment == {"OTHER": "1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert plain.words[1:] == ["-m", "x"]
    zero = World(deepspeed=str(tmp_path / "zero.json"))
    told = supervise.launched(program, zero).environment
    assert told["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert told["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == zero.deepspeed
    assert "--standalone" in supervise.launched(program, zero).words


SUPERVISOR = """
import sys
from pathlib import Path

from sweeps import children, supervise
from sweeps.backends.base import Program
from sweeps.config import World

script, log = sys.argv[1:]
program = Program(script=script, arguments=(str(Path(log).parent),))
program = supervise.launched(program, World(processes_per_node=2))
children.start_cold(program, Path(log)).wait()
"""
RANK = """
import os, pathlib, sys, time
assert sys.path[0] == os.path.dirname(__file__) and __name__ == "__main__"
(pathlib.Path(sys.argv[1]) / f"pid-{os.getpid()}").touch()
time.sleep(120)
"""


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_no_rank_outlives_a_killed_supervisor(tmp_path):
    script, log = tmp_path / "rank.py", tmp_path / "log"
    script.write_text(RANK)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(script), str(log)])

    def ranks() -> list[int]:
        return [int(path.name[4:]) for path in tmp_path.glob("pid-*")]

    try:
        wait_for(lambda: len(ranks()) == 2, 120)
    finally:
        supervisor.kill()
        supervisor.wait()
    try:
        wait_for(lambda: not any(map(running, ranks())), 10)
    finally:
        chaos.tell(ranks(), signal.SIGKILL)


@on_slurm
@pytest.mark.parametrize("deepspeed", [False, True], ids=["gloo", "deepspeed"])
def test_two_nodes_train_one_model(cluster, profile, sweep_file, tmp_path, deepspeed):
    """One task a node over srun, gloo between them; equal to one process that sees both batches.

    With DeepSpeed this is `accelerate launch --use_deepspeed` on each node, ZeRO-2 across them.
    """
    if deepspeed and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    train = {"max_train_steps": 6, "reduce_loss": "token_mean", "logging_steps": 1}
    train |= {"clip_grad_norm": 1.0, "learning_rate": 1e-3}
    (tmp_path / "zero2.json").write_text(json.dumps(ZERO2))
    keys = yaml.safe_load(Path(profile).read_text()) | {"environment": {"DS_BUILD_OPS": "0"}}
    Path(profile).write_text(yaml.safe_dump(keys))
    two = {"nodes": 2} | ({"deepspeed": str(tmp_path / "zero2.json")} if deepspeed else {})
    path = sweep_file(grid={}, name="two-nodes", train=train, cluster=profile, world=two)
    launched = command("launch", path, "--executor", "slurm")
    assert launched.returncode == 0, launched.stderr
    wait_for(empty)
    both = runs_of(path)[0]
    assert both.done, logs(tmp_path)
    whole = train | {"per_device_train_batch_size": 8}
    alone = prepare(sweep_file(grid={}, name="one-process", train=whole))
    assert command("train", alone.path).returncode == 0
    losses = [
        [row["loss"] for row in read_rows(run.metrics) if "loss" in row] for run in (both, alone)
    ]
    assert len(losses[0]) == 6 and losses[0][0] - losses[0][-1] > 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    parts = logs(both.path)
    assert "train.node1.log" in parts
    assert ("deepspeed" in parts.lower()) == deepspeed


@on_slurm
@pytest.mark.parametrize("number", [0, 1], ids=["first", "second"])
def test_a_killed_rank_starts_all_machines_again(cluster, profile, sweep_file, tmp_path, number):
    """From the last checkpoint, whichever machine it was on; with an undisturbed run's weights."""
    path = sweep_file(grid={}, train=LONG, cluster=profile, world={"nodes": 2})
    calm = ("--executor", "slurm", f"output_root={tmp_path / 'calm'}")
    assert command("launch", path, "--executor", "slurm").returncode == 0
    (run,) = runs_of(path)
    with chaos.held(run):  # torchrun or a rank: of either the others wait for it
        ranks = {rank(pid): pid for pid in chaos.processes("sweeps.trainer", run.name)}
        os.kill(ranks[str(number)], signal.SIGKILL)
    wait_for(empty)
    assert run.done, logs(tmp_path)
    attempts = run.manifest()["attempts"]
    assert len(attempts) == 2 and attempts[1]["from_step"] >= 20
    assert command("launch", path, *calm).returncode == 0
    wait_for(empty)
    assert equal(run.path, tmp_path / "calm" / "runs" / run.name), logs(tmp_path)


def rank(pid: int) -> str | None:
    """The global rank of a trainer's process; torchrun itself has none."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in variables if "=" in line).get("RANK")


@on_slurm
def test_a_wrong_number_of_tasks_is_refused(cluster, profile, sweep_file, tmp_path):
    path = sweep_file(grid={}, cluster=profile)
    run = prepare(path)
    done = subprocess.run(
        ["srun", "--ntasks=2", "--mem=500M", sys.executable, "-m", "sweeps", "train", run.path],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "1 node with one task each asked for, Slurm started 2 tasks" in done.stderr
    assert run.manifest()["attempts"] == []


COUNT = 16  # launchers; each takes seconds of a core to start
HOLD = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
import os
(folder / f"up-{os.environ['MASTER_PORT']}").touch()
end = time.monotonic() + 300
while not (folder / "go").exists() and time.monotonic() < end:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_starts_at_once_on_one_machine_meet_each_on_its_own_port(tmp_path):
    """Launchers, started at the same moment with the flags that runs get, all up together.

    Each is torch's launcher in a fork of this process (as many interpreters with torch would not
    fit everywhere): it opens its store and starts its worker, which holds on until all are up.
    """
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "log").mkdir()
    import torch.distributed.run as launcher

    pids, begin = [], time.time() + 2
    for number in range(COUNT):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                out = os.open(tmp_path / "log" / str(number), os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                time.sleep(max(0.0, begin - time.time()))
                hold = Program(script=str(tmp_path / "hold.py"), arguments=(str(tmp_path),))
                _, _, _, *words = supervise.launched(hold, World(processes_per_node=2)).words
                words[words.index("--nproc-per-node=2")] = "--nproc-per-node=1"
                launcher.main(words)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    end = time.monotonic() + 300
    while (up := len(list(tmp_path.glob("up-*")))) < COUNT and time.monotonic() < end:
        time.sleep(0.2)
    (tmp_path / "go").touch()
    if up < COUNT:
        chaos.tell(pids, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "".join(path.read_text()[-300:] for path in (tmp_path / "log").iterdir())
    assert (up, codes) == (COUNT, [0] * COUNT), said
