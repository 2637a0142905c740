"""open-instruct's own finetune.py, with the patches of this project, in the user's checkout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import yaml

from calibeval.io import sha256, write_rows, write_text
from calibeval.request import Positive
from sweeps.runs import processes
from sweeps.runs.conversations import rows
from sweeps.runs.files import read_rows
from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig, option
from sweeps.runs.stages import Outcome
from sweeps.training import torchrun
from sweeps.training.options import Common

VARIABLE = "OPEN_INSTRUCT_DIR"
environment_variables = (VARIABLE,)  # where jobs find the checkout
PATCHES = Path(__file__).resolve().parents[3] / "patches"
TRAINED = "TRAINED"
# What finetune.py imports beyond what every run does.
MODULES = ("deepspeed", "peft", "nltk", "langdetect", "immutabledict", "rich", "antlr4", "requests")


class Train(Common):
    """The `train:` keys of backend open-instruct: finetune.py's and the patches', and no others."""

    clip_grad_norm: float = option(-1.0, "the gradient's norm; not above 0: no clipping")
    fused_optimizer: bool = option(True, "torch's fused AdamW")
    model_revision: str | None = option(None, "a branch, tag or commit of the hub")
    chat_template_name: str = option("tulu", "one of open-instruct's")
    preprocessing_num_workers: Positive | None = option(None, "null: tokenises in one process")
    timeout: Positive = option(1800, "seconds that other ranks wait for the first to tokenise")
    use_flash_attn: bool = option(True, "needs flash-attn")
    attn_implementation: str | None = option(None, "such as sdpa; null: use_flash_attn decides")
    use_slow_tokenizer: bool = option(True, "the Python tokenizer")
    use_lora: bool = option(False, "train adapters")
    lora_rank: int = option(64, "of the adapters")
    lora_alpha: float = option(16, "of the adapters")
    lora_dropout: float = option(0.1, "of the adapters")
    loss_impl: Literal["auto", "fused"] = option("fused", "one code for all β, also 0")
    filter_eps: float | Literal["auto"] | None = option(None, "null: the exact gradient")


def packages(train: Train, world: DistributedConfig) -> list[str]:
    """Modules that must be importable, beyond those of every run."""
    chosen = train.attn_implementation
    flash = train.use_flash_attn if chosen is None else chosen == "flash_attention_2"
    return [*MODULES, *["flash_attn"] * flash]


def missing(train: Train, world: DistributedConfig) -> list[str]:
    """What else would keep a run from starting."""
    return checkout_problems() + data_problems(train) + clipping_problems(train, world)


def checkout_problems() -> list[str]:
    """What keeps the checkout from training."""
    if VARIABLE not in os.environ:
        return [f"{VARIABLE} is not set: reproduce.md makes a patched checkout"]
    command = [PATCHES / "apply.sh", os.path.abspath(os.environ[VARIABLE]), "--check"]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (check.stderr or check.stdout).strip().removeprefix("error: ")
    return [] if check.returncode == 0 else [f"{VARIABLE}: {said}"]


def data_problems(train: Train) -> list[str]:
    """What finetune.py cannot read of the training data; empty when it can."""
    file = Path(train.train_file)
    if file.suffix not in (".json", ".jsonl"):
        return [f"train.train_file: {file}: finetune.py reads .json or .jsonl"]
    where, row = next(rows(file))
    only = f"train.train_file: {where}: finetune.py reads rows with `messages` only"
    return [] if "messages" in row else [only]


def clipping_problems(train: Train, world: DistributedConfig) -> list[str]:
    """Gradient clipping that would not be what the sweep file says; empty when it is."""
    if not world.deepspeed:
        return []
    limit = world.read("deepspeed").get("gradient_clipping")
    where, problems = f"gradient_clipping in {world.deepspeed}", []
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        problems.append(f"{where}: found {limit!r}, expected a number, 0 for none: auto would be 1")
    if train.clip_grad_norm > 0:
        problems.append(f"train.clip_grad_norm: DeepSpeed ignores it; leave it out and set {where}")
    return problems


def train(run: Run) -> None:
    """Run finetune.py on this machine's processes; its Monitor writes metrics.jsonl."""
    world, folder = run.config().world, Path(os.environ[VARIABLE]).absolute()
    arguments = run.path.absolute() / "finetune.yaml"
    write_text(arguments, yaml.safe_dump(finetune_arguments(run), sort_keys=False))
    digest = sha256(folder / "open_instruct" / "finetune.py")
    print(f"checkout: {folder}, finetune.py {digest}", flush=True)  # with the user's changes
    torchrun.block_sigterm()
    module = "open_instruct.finetune", str(arguments)
    words = (
        [sys.executable, "-m", *module]
        if world.single_process
        else torchrun.torchrun_command(world, *module)
    )
    paths = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": paths, "STATISTICS_FILE": str(run.metrics.absolute())}
    own["ACCELERATE_MIXED_PRECISION"] = world.mixed_precision  # as `accelerate launch` says it
    if world.deepspeed:
        own["ACCELERATE_USE_DEEPSPEED"] = "true"
        own["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = os.path.abspath(world.deepspeed)
    end = {"check": False, "preexec_fn": processes.end_with_parent}
    code = subprocess.run(words, env=os.environ | own, **end).returncode
    keep_rows(run)
    if code:
        raise SystemExit(code if code > 0 else 128 - code)
    if not (run.checkpoints / TRAINED).is_file():
        raise SystemExit(Outcome.STOPPED.value)  # it has saved, because run.stop appeared
    run.checkpoints.rename(run.model)


def finetune_arguments(run: Run) -> dict:
    """The argument file of finetune.py: the run's keys, and what this backend decides."""
    keys = run.config().train
    arguments = {key: value for key, value in keys.items() if value is not None}
    if "checkpointing_steps" in arguments:
        arguments["checkpointing_steps"] = str(arguments["checkpointing_steps"])
    return arguments | {
        "output_dir": str(run.checkpoints.absolute()),
        "stop_file": str(run.stop.absolute()),
        "log_statistics": True,
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }


def keep_rows(run: Run) -> None:
    """Keep one row a step in metrics.jsonl, the last one where an attempt came again."""
    found = {row["step"]: row for row in read_rows(run.metrics)}
    write_rows(run.metrics, (found[step] for step in sorted(found)))
