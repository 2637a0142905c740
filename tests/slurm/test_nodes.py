"""Runs over several machines: the launcher's flags, ports, and two nodes of a real Slurm."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from real import MARKS, command, empty, logs, runs_of, wait_for

from sweeps import launch, rendezvous
from sweeps.config import World
from sweeps.files import read_rows
from sweeps.rundir import RunDir

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


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("deepspeed", [None, "zero.json"])
def test_every_machine_launches_its_own_part(nodes, deepspeed, monkeypatch):
    monkeypatch.setattr(rendezvous, "_has_gpu", lambda: True)
    world = World(nodes=nodes, processes_per_node=4, mixed_precision="bf16", deepspeed=deepspeed)
    for machine in range(nodes):
        words = rendezvous.launch_arguments(world, machine=machine, address="first", port=12345)
        assert words[0] == "accelerate.commands.launch"
        for flag in (
            f"--num_processes={4 * nodes}",
            f"--num_machines={nodes}",
            f"--machine_rank={machine}",
            "--main_process_ip=first",
            "--main_process_port=12345",
            "--mixed_precision=bf16",
        ):
            assert flag in words
        assert ("--use_deepspeed" in words) == bool(deepspeed)
        assert ("--multi_gpu" in words) == (not deepspeed)
        # pdsh, accelerate's default, would start every machine again over ssh
        assert ("--deepspeed_multinode_launcher=standard" in words) == (
            nodes > 1 and bool(deepspeed)
        )


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
    cell = launch.plan(sweep_file(grid={}, name="one-process", train=whole), []).cells[0]
    alone = RunDir(cell.folder)
    alone.create(cell.config)
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
def test_a_wrong_number_of_tasks_is_refused(cluster, profile, sweep_file, tmp_path):
    path = sweep_file(grid={}, cluster=profile)
    cell = launch.plan(path, []).cells[0]
    run = RunDir(cell.folder)
    run.create(cell.config)
    done = subprocess.run(
        ["srun", "--ntasks=2", "--mem=500M", sys.executable, "-m", "sweeps", "train", run.path],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "1 node with one task each asked for, Slurm started 2 tasks" in done.stderr
    assert run.manifest()["attempts"] == []


HOLD = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
import os
(folder / f"up-{os.environ['MASTER_PORT']}").touch()
end = time.monotonic() + 120
while not (folder / "go").exists() and time.monotonic() < end:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_64_starts_at_once_on_one_machine_meet_each_on_its_own_port(tmp_path):
    """64 launchers, started at the same moment with the flags that runs get, all up together.

    Each is torch's launcher in a fork of this process (64 interpreters with torch would not fit
    everywhere): it probes its port as a run does, opens the store on it and starts its worker,
    which holds on until all 64 are up.
    """
    (tmp_path / "hold.py").write_text(HOLD)
    (tmp_path / "log").mkdir()
    import torch.distributed.run as launcher

    pids, begin = [], time.time() + 2
    for number in range(64):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                out = os.open(tmp_path / "log" / str(number), os.O_WRONLY | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                time.sleep(max(0.0, begin - time.time()))
                _, *flags = rendezvous.launch_arguments(World(processes_per_node=2))
                flags[1] = "--nproc_per_node=1"
                launcher.main([*flags, str(tmp_path / "hold.py"), str(tmp_path)])
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    end = time.monotonic() + 150
    while (up := len(list(tmp_path.glob("up-*")))) < 64 and time.monotonic() < end:
        time.sleep(0.2)
    (tmp_path / "go").touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    said = "".join(path.read_text()[-300:] for path in (tmp_path / "log").iterdir())
    assert (up, codes) == (64, [0] * 64), said
