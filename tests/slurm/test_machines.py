"""State machines driven by hypothesis: checkpoints on a bad disk, a sweep on a bad cluster."""

import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sweeps import launch
from sweeps.executors import slurm
from sweeps.executors.slurm import Element
from sweeps.files import write_text
from sweeps.rundir import RunDir
from sweeps.trainer import checkpoint

FACTS = {"processes": 1, "data": "d"}
KEEP = 2


class Checkpoints(RuleBasedStateMachine):
    """Saves, kills during a save, damaged files: a resume finds the newest whole checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.run = RunDir(Path(self.folder.name))
        self.step, self.whole = 0, {}  # step → what its weights file holds

    def teardown(self) -> None:
        self.folder.cleanup()

    def accelerator(self, fails: bool) -> SimpleNamespace:
        def save_state(folder: str, **_: object) -> None:
            (Path(folder) / "weights").write_text(f"weights of step {self.step}")
            if fails:
                raise OSError(28, "No space left on device")

        return SimpleNamespace(
            is_main_process=True, wait_for_everyone=lambda: None, save_state=save_state
        )

    @rule(ahead=st.integers(1, 5))
    def save(self, ahead: int) -> None:
        self.step += ahead
        checkpoint.save(self.run, self.accelerator(False), self.step, FACTS, KEEP)
        self.whole[self.step] = f"weights of step {self.step}"
        there = {int(p.name[5:]) for p in self.run.checkpoints.glob("step-*")}
        assert self.step in there and len(there) <= KEEP
        self.whole = {step: text for step, text in self.whole.items() if step in there}

    @rule()
    def the_disk_fills_during_a_save(self) -> None:
        try:
            checkpoint.save(self.run, self.accelerator(True), self.step + 1, FACTS, KEEP)
        except Exception as error:
            assert "No space left" in str(error) and "last whole checkpoint" in str(error)
        else:
            raise AssertionError("a failed save must say so")

    @rule(files=st.sampled_from(["", "weights", "weights state.json"]))
    def killed_during_a_save(self, files: str) -> None:
        part = self.run.checkpoints / f".step-{self.step + 1}.part"
        part.mkdir(parents=True, exist_ok=True)
        for name in files.split():
            (part / name).write_text("{")

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "lose", "state", "no state"]))
    def damage(self, data, how: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.whole)))
        folder = self.run.checkpoints / f"step-{step}"
        weights, state = folder / "weights", folder / "state.json"
        if how == "flip":
            content = bytearray(weights.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1
            weights.write_bytes(content)
        elif how == "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        elif how == "lose":
            weights.unlink()
        elif how == "state":
            state.write_text(state.read_text()[:-9])
        else:
            state.unlink()
        del self.whole[step]

    @rule()
    def resume(self) -> None:
        found = checkpoint.latest(self.run, FACTS)
        newest = max(self.whole, default=0)
        assert (found["step"] if found else 0) == newest
        self.step = newest  # training goes on from there
        if found:
            text = (self.run.checkpoints / f"step-{newest}" / "weights").read_text()
            assert text == self.whole[newest]

    @invariant()
    def status_never_promises_more_than_was_saved(self) -> None:
        steps = [int(p.name[5:]) for p in self.run.checkpoints.glob("step-*")]
        assert self.run.step() == max(steps, default=0)


class Cluster(RuleBasedStateMachine):
    """Submissions, ends, deaths and requeues in any order: no run twice, and all arrive."""

    RUNS = 5

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        path = folder / "sweep.yaml"
        sweep = {
            "name": "s",
            "output_root": str(folder / "out"),
            "train": {"model_name_or_path": "m", "train_file": "f"},
            "grid": {"seed": list(range(self.RUNS))},
        }
        path.write_text(json.dumps(sweep))
        self.plan = launch.plan(path, [])
        self.queue: dict[str, str] = {}  # run → PENDING or RUNNING
        self.trained: Counter = Counter()
        self.tag = 0

    def teardown(self) -> None:
        self.submit()
        while self.queue:
            run = next(iter(self.queue))
            self.queue[run] = "RUNNING"
            self.end(run)
        assert self.trained == Counter(c.config.name for c in self.plan.cells)
        assert self.missing() == []
        self.folder.cleanup()

    def missing(self) -> list[str]:
        busy = {("train", run): Element("1_0", s, "") for run, s in self.queue.items()}
        _, jobs = slurm.design(self.plan.sweep, self.plan.cells, busy, f"t{self.tag}")
        return [name for job in jobs if job.what == "train" for name in job.names]

    @rule()
    def submit(self) -> None:
        asked = self.missing()
        assert not set(asked) & set(self.queue)
        assert len(asked) == len(set(asked))
        self.queue |= dict.fromkeys(asked, "PENDING")
        self.tag += 1
        assert self.missing() == []  # at once again: nothing

    def end(self, run: str) -> None:
        (cell,) = [c for c in self.plan.cells if c.config.name == run]
        folder = RunDir(cell.folder)
        folder.create(cell.config)
        write_text(folder.path / "DONE", "", durable=False)
        self.trained[run] += 1
        del self.queue[run]

    @precondition(lambda self: self.queue)
    @rule(data=st.data(), what=st.sampled_from(["start", "end", "die", "requeue"]))
    def happen(self, data, what: str) -> None:
        run = data.draw(st.sampled_from(sorted(self.queue)))
        if what == "start" or self.queue[run] == "PENDING":
            self.queue[run] = "RUNNING"
        elif what == "end":
            self.end(run)
        elif what == "die":
            del self.queue[run]
        else:
            self.queue[run] = "PENDING"

    @rule()
    def a_folder_is_lost(self) -> None:
        """Someone deletes what is not finished: that costs time only."""
        for cell in self.plan.cells:
            if not RunDir(cell.folder).done:
                shutil.rmtree(cell.folder, ignore_errors=True)


for machine, count in ((Checkpoints, 60), (Cluster, 40)):
    machine.TestCase.settings = settings(max_examples=count, stateful_step_count=25, deadline=None)
TestCheckpoints = Checkpoints.TestCase
TestCluster = Cluster.TestCase
