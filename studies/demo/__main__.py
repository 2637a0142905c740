"""From nothing to a calibration table: `python -m studies.demo` (what `make demo` runs).

world → base model → `sweeps launch studies/demo/config.yaml` → runs/demo/report/

A second call continues where the first was stopped. It takes no options: another sweep is another
YAML file.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import studies
from calibeval.io import CONTINUES, InputError, finish
from studies.demo import files
from studies.demo.report import report

# The variables of the demo and its runs. With them, processors of one maker give the same weights
# whether or not they have AVX-512; those of another maker may give others.
ENVIRONMENT = {
    "MKL_CBWR": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",  # of a run; two train at a time
    "TQDM_MININTERVAL": "5",
}
SWEEP = Path("studies/demo/config.yaml")
ROOT = Path("runs/demo")


def demo() -> None:
    """Make the world and the base model, launch the sweep, and report."""
    os.chdir(Path(__file__).parents[2])
    os.environ.update(ENVIRONMENT)
    # Imported here: torch comes along, which reads the environment once.
    from studies.demo.pretrain import pretrain

    folder = Path(__file__).parent
    shared = [folder.parent / "pretraining.py", folder.parent / "temperatures.py"]
    sources = [SWEEP, *sorted(folder.glob("*.py")), *shared]
    studies.refuse_other_versions(ROOT, sources, f"the demo or of {SWEEP}")
    print("1/4 a world: conversations to fine-tune on, an exam", flush=True)
    files.write(ROOT / "world")
    print("2/4 a base model reads its corpus", flush=True)
    pretrain(ROOT / "base")
    print(f"3/4 python -m sweeps launch {SWEEP} --executor local", flush=True)
    launch = [sys.executable, "-m", "sweeps", "launch", str(SWEEP), "--executor", "local"]
    exit_code = subprocess.run(launch, check=False).returncode
    if exit_code != 0:
        raise InputError(f"the sweep ended with exit code {exit_code}; the same command goes on")
    print("4/4 temperatures fitted after training, and the report", flush=True)
    print(report(ROOT))
    print(f"{ROOT}/report/report.html; what it says: studies/demo/README.md")


if __name__ == "__main__":
    argparse.ArgumentParser("python -m studies.demo", description=__doc__).parse_args()
    sys.exit(finish(demo, CONTINUES))
