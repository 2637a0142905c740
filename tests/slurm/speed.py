"""How long the sweep tools take themselves: python tests/slurm/speed.py

A 1,000-run sweep planned, submitted (sbatch and squeue replaced by programs that answer at once)
and shown; and what `python -m sweeps train` adds to its trainer, on a two-step run.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def seconds(*command: object, **options) -> float:
    """Wall time of a command that must succeed."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", *map(str, command)], check=True, **options)
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    import world

    from sweeps import launch
    from sweeps.rundir import RunDir

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world.make_model(folder / "model")
        world.make_chat(folder / "chat.jsonl")
        (folder / "cluster.yaml").write_text("gpus_per_process: 0\n")
        sweep = {
            "name": "thousand",
            "output_root": str(folder / "out"),
            "cluster": str(folder / "cluster.yaml"),
            "train": {
                "model_name_or_path": str(folder / "model"),
                "train_file": str(folder / "chat.jsonl"),
                "max_train_steps": 2,
            },
            "grid": {
                "seed": list(range(100)),
                "label_smoothing": [round(0.1 * i, 1) for i in range(10)],
            },
        }
        path = folder / "sweep.yaml"
        path.write_text(yaml.safe_dump(sweep))
        tools = folder / "bin"
        tools.mkdir()
        answer = {"sbatch": "echo Submitted batch job 1"}
        for name in ("sbatch", "squeue", "scontrol", "srun"):
            line = answer.get(name, "exit 0")
            (tools / name).write_text(f"#!/bin/sh\n{line}\n")
            (tools / name).chmod(0o755)
        quiet = {
            "env": os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"},
            "stdout": subprocess.DEVNULL,
        }
        for arguments in (
            ("plan", path),
            ("launch", path, "--dry-run"),
            ("launch", path, "--executor", "slurm"),
            ("status", path),
        ):
            words = " ".join(str(a) for a in arguments if a != path)
            print(f"{words}: {seconds('sweeps', *arguments, **quiet):.2f} s for 1,000 runs")
        quiet |= {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stderr": subprocess.DEVNULL}
        cells = launch.plan(path, []).cells
        added = []
        for left, right in zip(cells[:6:2], cells[1:6:2], strict=True):
            alone = seconds("sweeps.trainer", left.folder, **quiet)
            added.append(seconds("sweeps", "train", right.folder, **quiet) - alone)
            assert RunDir(right.folder).done
        print(f"sweeps train adds {sorted(added)[1]:.2f} s to its trainer (median of three)")


if __name__ == "__main__":
    main()
