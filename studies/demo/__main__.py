"""From nothing to a calibration table: `python -m studies.demo` (what `make demo` runs).

world → base model → `sweeps launch studies/demo/config.yaml` → runs/demo/report/

A second call continues where the first was stopped. It takes no options: another sweep is another
YAML file.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from calibeval.io import InputError, finish, read_text, write_text
from studies.demo import files
from studies.demo.report import report

# One processor gives the same weights with and without AVX-512; another make may not.
ENVIRONMENT = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "5"}  # of a run; two train at a time
SWEEP, ROOT = Path("studies/demo/config.yaml"), Path("runs/demo")


def demo() -> None:
    """World, base model, sweep, report."""
    os.chdir(Path(__file__).parents[2])
    os.environ.update(ENVIRONMENT)
    from studies.demo.pretrain import pretrain  # torch comes along, which reads these once

    sources, recipe = [SWEEP, *sorted(Path(__file__).parent.glob("*.py"))], ROOT / "recipe.sha256"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if recipe.exists() and read_text(recipe) != digest:
        another = f"{ROOT}: was made by another version of the demo or of {SWEEP}"
        raise InputError(f"{another}; move it away (`mv {ROOT} {ROOT}-old`) and repeat")
    write_text(recipe, digest)
    print("1/4 a world: conversations to fine-tune on, an exam", flush=True)
    files.write(ROOT / "world")
    print("2/4 a base model reads its corpus", flush=True)
    pretrain(ROOT / "base")
    print(f"3/4 python -m sweeps launch {SWEEP} --executor local", flush=True)
    launch = [sys.executable, "-m", "sweeps", "launch", str(SWEEP), "--executor", "local"]
    if code := subprocess.run(launch, check=False).returncode:
        raise InputError(f"the sweep ended with exit code {code}; the same command goes on")
    print("4/4 temperatures fitted after training, and the report", flush=True)
    print(report(ROOT))
    print(f"{ROOT}/report/report.html; what it says: studies/demo/README.md")


if __name__ == "__main__":
    argparse.ArgumentParser("python -m studies.demo", description=__doc__).parse_args()
    sys.exit(finish(demo))
