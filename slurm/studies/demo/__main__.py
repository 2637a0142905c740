"""From nothing to a calibration table: `python -m studies.demo` (what `make demo` runs).

world → base model → `sweeps launch slurm/studies/demo/config.yaml` → runs/demo/report/

A second call continues where the first was stopped. It takes no options: another sweep is another
YAML file.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import studies
from calibeval.io import InputError, read_text, write_text
from studies.demo import files, world
from studies.demo.pretrain import pretrain
from studies.demo.report import report

# One processor gives the same weights with and without AVX-512; another make may not.
ARITHMETIC = {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ARITHMETIC |= {"OMP_NUM_THREADS": "1"}  # of a run; two train at a time
SWEEP, ROOT = Path("slurm/studies/demo/config.yaml"), Path("runs/demo")


def main(words: list[str] | None = None) -> int:
    """Run every step that is not done; returns the exit code."""
    argparse.ArgumentParser("python -m studies.demo", description=__doc__).parse_args(words)
    return studies.finish(demo)


def demo() -> None:
    """World, base model, sweep, report."""
    if not SWEEP.is_file():
        raise InputError(f"{SWEEP}: no such file; run the demo from the repository's folder")
    os.environ.update(ARITHMETIC)
    if not sys.stderr.isatty():  # a bar in a file writes a line each time
        os.environ["TQDM_MININTERVAL"] = "15"
    sources, recipe = [SWEEP, *sorted(Path(__file__).parent.glob("*.py"))], ROOT / "recipe.sha256"
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if recipe.exists() and read_text(recipe) != digest:
        another = f"{ROOT}: was made by another version of the demo or of {SWEEP}"
        raise InputError(f"{another}; move it away (`mv {ROOT} {ROOT}-old`) and repeat")
    write_text(recipe, digest)
    if (ROOT / "report" / "DONE").exists():
        print(f"All of this is there already; delete {ROOT} to make it anew.\n")
    else:
        step("1/4 a world: a corpus, conversations to fine-tune on, an exam")
        files.write(world.build(), ROOT / "world", documents=11_000)
        step("2/4 a base model reads the corpus")
        pretrain(ROOT / "world", ROOT / "base")
        step(f"3/4 python -m sweeps launch {SWEEP} --executor local")
        launch = [sys.executable, "-m", "sweeps", "launch", str(SWEEP), "--executor", "local"]
        if code := subprocess.run(launch, check=False).returncode:
            raise InputError(f"the sweep ended with exit code {code}; the same command goes on")
        step("4/4 temperatures fitted after training, and the report")
    print(report(ROOT))


def step(text: str) -> None:
    """Say what happens now, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
