"""A training script that knows nothing of sweeps, as slurm/README.md asks for one.

    python script.py --beta 0.1 --seed 1 --out RUN_DIR [--steps 20] [--pace 0.02] [--end CODE]

Its weights are a chain of hashes, so that a resume that forgets or repeats a step shows.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--beta", type=float, required=True)
parser.add_argument("--seed", type=int, required=True)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--pace", type=float, default=0.02)
parser.add_argument("--end", default="well")  # or: nothing, deaf, an exit code
options = parser.parse_args()
signals = []
if options.end != "deaf":
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
is_first_rank = os.environ.get("RANK", "0") == "0"
model = options.out / "model"
checkpoints = options.out / "checkpoints"
steps = [int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")]
step = max(steps, default=0)
state = (checkpoints / f"step-{step}").read_text() if step else str(options.seed)
print(f"from step {step} in {os.getcwd()}, {os.environ.get('WORLD_SIZE', 1)} processes", flush=True)
if is_first_rank:
    model.mkdir(exist_ok=True)  # long before it is whole, as a Trainer's output_dir
while step < options.steps:
    time.sleep(options.pace)
    while step >= 10 and os.path.exists(os.environ.get("TOY_HOLD", "")) and not signals:
        time.sleep(0.02)
    step += 1
    state = hashlib.sha256(f"{state} {step} {options.beta}".encode()).hexdigest()
    if signals and step < options.steps:
        if is_first_rank:
            checkpoints.mkdir(exist_ok=True)
            (checkpoints / f"step-{step}").write_text(state)
        sys.exit(75)
if options.end.isdigit():
    print("ValueError: the data make no sense")
    sys.exit(int(options.end))
if is_first_rank and options.end != "nothing":
    (model / "state").write_text(state)
