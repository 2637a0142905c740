"""Runs on this machine: killed, resumed, locked, repeated."""

import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import real
import torch
from real import command, equal, prepare, runs_of

from sweeps import launch, score, status
from sweeps.cli import main
from sweeps.executors import local, slurm
from sweeps.files import lease, read_rows

pytestmark = pytest.mark.timeout(1200)  # whole trainings, on a machine that others keep busy


wait_for = partial(real.wait_for, pause=0.02)


EXITED = SimpleNamespace(wait=lambda seconds: 1, signal=lambda number: None)
LONG = {
    "num_train_epochs": 24,
    "checkpointing_steps": 20,
    "attention_dropout": 0.1,
    "weight_decay": 0.01,
    "lr_scheduler_type": "cosine",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "keep_last_n_checkpoints": 2,
    "learning_rate": 1e-3,
}


def test_kill_9_and_resume_give_the_same_weights_bit_for_bit(sweep_file, tmp_path):
    path = sweep_file(grid={}, train=LONG)
    calm = prepare(path, f"output_root={tmp_path}/calm")
    assert command("train", calm.path).returncode == 0
    assert calm.done and not calm.checkpoints.exists()

    killed = prepare(path, f"output_root={tmp_path}/killed")
    words = [sys.executable, "-m", "sweeps", "train", str(killed.path)]
    process = subprocess.Popen(words)
    # Once the trainer alone (the supervisor starts it again) …
    wait_for(lambda: killed.step() >= 20)
    psutil.Process(process.pid).children()[0].kill()
    wait_for(lambda: len(killed.manifest()["attempts"]) == 2)
    # … and once everything: the kernel takes the trainer along, the same command goes on.
    wait_for(lambda: killed.step() >= 60)
    trainer = psutil.Process(process.pid).children()[0]
    process.kill()
    process.wait()
    trainer.wait(300)
    assert not killed.done and not killed.model.exists()
    assert command("train", killed.path).returncode == 0

    assert killed.manifest()["restarts"] == 2
    assert killed.manifest()["attempts"][2]["from_step"] >= 60
    assert equal(calm.path, killed.path)
    rows, calm_rows = ([r for r in read_rows(run.metrics) if "loss" in r] for run in (killed, calm))
    assert [row["step"] for row in rows] == [row["step"] for row in calm_rows]
    assert [row["loss"] for row in rows] == [row["loss"] for row in calm_rows]
    assert (rows[0]["loss"] - rows[-1]["loss"]) > 1.0  # and it learned something


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_continues(sweep_file):
    run = prepare(sweep_file(grid={}, train=LONG | {"checkpointing_steps": None}))
    process = subprocess.Popen([sys.executable, "-m", "sweeps", "train", str(run.path)])
    wait_for(lambda: run.metrics.exists() and run.metrics.stat().st_size > 300)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(300) == 75
    assert run.step() > 0 and not run.done
    assert run.manifest()["state"] == "preempted"
    assert command("train", run.path).returncode == 0
    assert run.done and run.manifest()["restarts"] == 1


def test_cancel_stops_a_launch_without_slurm(sweep_file, tmp_path):
    """The running trainer saves, and the next run is not started."""
    path = sweep_file(train=LONG | {"num_train_epochs": 9999})  # until it is told to stop
    first, second = runs_of(path)
    bare = os.environ | {"PATH": str(tmp_path)}  # no Slurm, nor anything else
    nothing = "nothing of this sweep is queued or running\n"
    assert command("cancel", path, env=bare).stdout == nothing

    words = [sys.executable, "-m", "sweeps", "launch", str(path), "--executor", "local"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: first.step() >= 20)
    done = command("cancel", path, env=bare)
    assert (done.returncode, done.stdout) == (0, f"asked to save and stop: {first.name}\n")
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert f"stopped: {first.name}: saved at step" in said
    assert f"not started: {second.name}" in said
    assert first.step() > 20 and not first.done and not second.checkpoints.exists()
    assert command("cancel", path, env=bare).stdout == nothing


def test_cancel_stops_the_launches_under_way_and_no_later_one(sweep_file):
    run = prepare(path := sweep_file(grid={}))
    planned = launch.plan(path, [])
    under_way = local.Stopping(planned.sweep)
    with lease(run.lock, timeout=0):
        assert local.cancel(planned.sweep, planned.cells) == ([run.name], [])
    assert under_way.is_set() and not local.Stopping(planned.sweep).is_set()
    assert run.stop.exists()


def test_cancel_reaches_a_launch_while_it_scores(sweep_file, tiny, capsys):
    """No run is locked then, but the next one would start."""
    score_section = {"tasks": [{"task": "mmlu", "data": str(tiny / "mmlu")}]}
    prepare(path := sweep_file(score=score_section))
    planned = launch.plan(path, [])
    (base,) = score.bases(planned.sweep, planned.cells).values()
    under_way = local.Stopping(planned.sweep)
    base.scores.mkdir(parents=True)
    with lease(base.lock, timeout=0):
        assert main(["cancel", str(path)]) == 0
    said = capsys.readouterr().out
    assert said == f"a launch without Slurm starts nothing more after scoring {base.name}\n"
    assert under_way.is_set()


def test_a_launch_inside_an_allocation_is_no_job_of_the_sweep(sweep_file, tmp_path, monkeypatch):
    """Of salloc, say: the run has a job's number, but this sweep submitted none."""
    run = prepare(path := sweep_file(grid={}))
    planned = launch.plan(path, [])
    run.write_manifest(run.manifest() | {"state": "running", "attempts": [{"job": "7"}]})
    (tmp_path / "squeue").write_text("#!/bin/sh\n")  # an empty queue
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def found() -> tuple:
        ((running,), _) = status.of_sweep(planned.sweep, planned.cells)
        return running.state, local.cancel(planned.sweep, planned.cells)

    with lease(run.lock, timeout=0):
        assert found() == ("running", ([run.name], []))
        (slurm.jobs_root(planned.sweep) / "abc").mkdir(parents=True)
        assert found() == ("interrupted", ([], []))


def test_a_stop_that_comes_while_a_run_is_set_up_is_obeyed(sweep_file, monkeypatch):
    """The set-up removes stop files that earlier attempts left."""
    run = prepare(path := sweep_file(grid={}))
    planned = launch.plan(path, [])
    seen = []
    monkeypatch.setattr(local, "start_warm", lambda *_: seen.append(run.stop.exists()) or EXITED)
    asked = SimpleNamespace(is_set=iter([False, True]).__next__)
    said = local._run(planned.cells[0], run, planned.sweep, asked, local.Machine(1))
    assert seen == [True] and said.startswith(f"stopped: {run.name}")


def test_a_stop_file_that_goes_away_stops_nothing(sweep_file):
    planned = launch.plan(sweep_file(grid={}), [])
    file = local._stop_file(planned.sweep)
    file.parent.mkdir(parents=True)
    file.touch()
    under_way = local.Stopping(planned.sweep)
    file.unlink()
    assert not under_way.is_set()


def test_cancel_wants_slurm_only_for_what_was_submitted(sweep_file, tmp_path):
    path = sweep_file()
    jobs = tmp_path / "out" / "sweeps" / "tiny" / "jobs"
    (jobs / "abc").mkdir(parents=True)
    done = command("cancel", path, env=os.environ | {"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert f"error: {jobs}: this sweep was submitted to Slurm, and squeue or scancel" in done.stderr


def test_scoring_begun_with_another_limit_is_begun_anew(sweep_file, tiny):
    """calibeval alone would refuse to go on, and ask for an option that a sweep does not have."""
    task = {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 2}
    path = sweep_file(grid={}, score={"tasks": [task | {"limit": 2}]})
    planned = launch.plan(path, [])
    (base,) = score.bases(planned.sweep, planned.cells).values()
    parts = base.scores / "mmlu.jsonl.parts"
    parts.mkdir(parents=True)
    (parts / "settings.json").write_text('{"settings": {"limit": 1, "prompts_sha256": "x"}}')
    (base.scores / "mmlu.request.json").write_text('{"limit": 1}')
    done = command("score", path, "--executor", "local")
    assert done.returncode == 0, done.stderr
    assert score.scored(base, planned.sweep.score.tasks[0], planned.sweep.score)
    assert not parts.exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside(sweep_file, tmp_path):
    path = sweep_file(grid={}, train=LONG)
    run = prepare(path)
    process = subprocess.Popen([sys.executable, "-m", "sweeps", "train", str(run.path)])
    wait_for(lambda: run.step() >= 60)
    process.kill()
    process.wait()
    newest = run.checkpoints / f"step-{run.step()}"
    victim = newest / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = command("train", run.path)
    assert done.returncode == 0 and run.done
    log = run.log.read_text()
    assert f"{newest}: model.safetensors: size or checksum differs" in log
    calm = prepare(path, f"output_root={tmp_path}/calm")
    assert command("train", calm.path).returncode == 0
    assert equal(calm.path, run.path)


def test_a_failing_run_says_why_and_leaves_no_done(sweep_file, tiny):
    broken = tiny / "broken.jsonl"
    broken.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": 3}\n')
    run = prepare(sweep_file(grid={}, train={"train_file": str(broken)}))
    assert command("train", run.path).returncode == 1
    assert not run.done
    assert "broken.jsonl, line 2: expected" in run.manifest()["error"]


def test_a_held_run_is_left_alone(sweep_file):
    run = prepare(sweep_file(grid={}))
    with lease(run.lock, timeout=0):
        assert command("train", run.path).returncode == 3
    assert run.manifest()["attempts"] == []


def test_an_edited_config_is_refused(sweep_file):
    run = prepare(sweep_file(grid={}))
    run.config_file.write_text(run.config_file.read_text().replace("seed: 42", "seed: 43"))
    done = command("train", run.path)
    assert done.returncode == 2
    assert "was edited" in done.stderr


def test_a_finished_sweep_starts_nothing(sweep_file):
    path = sweep_file(workers=2)
    first = command("launch", path, "--executor", "local")
    assert first.returncode == 0, first.stderr
    runs = runs_of(path)
    assert all(run.done for run in runs)
    before = [run.manifest() for run in runs]
    assert command("launch", path, "--executor", "local").returncode == 0
    assert [run.manifest() for run in runs] == before
    assert "2 runs, 2 done, 0 to do" in command("plan", path).stdout


@pytest.mark.parametrize("reduction", ["mean", "sum", "token_mean"])
def test_the_reported_loss_is_torchs(sweep_file, tiny, reduction):
    """One step's loss and gradient norm, against transformers and torch.nn.functional alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sweeps.trainer.data import load_examples, set_template
    from sweeps.trainer.loop import train as train_here
    from sweeps.trainer.order import Order

    train = {
        "max_train_steps": 1,
        "logging_steps": 1,
        "reduce_loss": reduction,
        "label_smoothing": 0.1,
        "gradient_accumulation_steps": 3,
    }
    run = prepare(sweep_file(grid={}, train=train))
    train_here(run)
    row = read_rows(run.metrics)[0]

    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    set_template(tokenizer, None)
    examples = load_examples(tiny / "chat.jsonl", tokenizer, None)
    model = AutoModelForCausalLM.from_pretrained(tiny / "model").float()
    order = Order(len(examples), 42, 4, 1, 3)
    micros = order.padded(0, 0, examples.lengths, mean=reduction == "mean")
    sums, counts = [], []
    for number in range(3):
        batch = examples.collate(micros[number].rows, 4, tokenizer.pad_token_id)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1]
        sums.append(
            torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]),
                labels.reshape(-1),
                label_smoothing=0.1,
                ignore_index=-100,
                reduction="sum",
            )
        )
        counts.append((labels != -100).sum())
    total = {
        "mean": sum(s / n for s, n in zip(sums, counts, strict=True)) / 3,
        "sum": sum(sums) / 3,
        "token_mean": sum(sums) / sum(counts),
    }[reduction]
    total.backward()
    norm = torch.linalg.vector_norm(
        torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
    )
    assert row["loss"] == pytest.approx((sum(sums) / sum(counts)).item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
