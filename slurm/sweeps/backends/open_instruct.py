"""open-instruct's own finetune.py, with the patches of this project, in the user's checkout."""

import hashlib
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from calibeval import references
from sweeps.assets import dataset_names, on_hub
from sweeps.backends.base import FinetuneKeys, Program
from sweeps.backends.builtin import model_problems, train_file_problems, versions
from sweeps.config import Seq, World
from sweeps.files import SweepError, read_json, read_rows, write_text
from sweeps.rundir import RunDir

VARIABLE = "OPEN_INSTRUCT_DIR"
PATCHES = Path(__file__).resolve().parents[3] / "patches"
STATISTICS = "training statistics: "
TRAINED = "TRAINED"
# What finetune.py imports beyond this project's own training dependencies.
PACKAGES = ("deepspeed", "peft", "nltk", "langdetect", "immutabledict", "rich")
PACKAGES += ("antlr4-python3-runtime", "requests")


class OpenInstructKeys(FinetuneKeys):
    """The `train:` keys of finetune.py that a sweep may set, and those that the patches add."""

    model_revision: str | None = None  # a branch, tag or commit of the hub
    dataset_name: str | None = None
    dataset_mixer_list: Seq[str] | None = None  # dataset, weight, dataset, weight, …
    chat_template_name: str = "tulu"
    preprocessing_num_workers: int | None = Field(None, ge=1)  # None: tokenises in one process
    timeout: int = Field(1800, ge=1)  # seconds that other ranks wait for the first to tokenise
    use_flash_attn: bool = True
    attn_implementation: str | None = None  # such as sdpa; None: use_flash_attn decides
    use_slow_tokenizer: bool = True
    low_cpu_mem_usage: bool = False
    use_lora: bool = False
    lora_rank: int = 64
    lora_alpha: float = 16
    lora_dropout: float = 0.1
    loss_impl: Literal["auto", "fused", "torch"] = "fused"  # also where β is 0: one code for all β
    filter_eps: float | Literal["auto", "none"] = "none"


class OpenInstruct:
    """See sweeps.backends.base.Backend; the checkout is the one OPEN_INSTRUCT_DIR names."""

    name = "open-instruct"
    Train = OpenInstructKeys

    def packages(self, train: OpenInstructKeys, world: World) -> list[str]:
        chosen = train.attn_implementation
        flash = train.use_flash_attn if chosen is None else chosen == "flash_attention_2"
        return [*PACKAGES, *(["flash-attn"] if flash else [])]

    def missing(self, train: OpenInstructKeys, world: World) -> list[str]:
        problems = checkout_problems()
        problems += model_problems(train)
        return problems + data_problems(train) + clipping_problems(train, world)

    def provenance(self, train: OpenInstructKeys) -> dict:
        digest, finetune = hashlib.sha256(), checkout() / "open_instruct" / "finetune.py"
        for patch in sorted(PATCHES.glob("*.patch")):
            digest.update(patch.read_bytes())
        return {
            "trainer": "open-instruct",
            "open_instruct": str(checkout()),
            "upstream_commit": upstream("commit"),
            "finetune_sha256": hashlib.sha256(finetune.read_bytes()).hexdigest(),  # own changes too
            "patches_sha256": digest.hexdigest(),
            "versions": versions(),
        }

    def program(self, run: RunDir) -> Program:
        folder = checkout()
        recover_rows(run)
        arguments = run.path.absolute() / "finetune.yaml"
        write_text(arguments, yaml.safe_dump(finetune_arguments(run), sort_keys=False))
        paths = [str(folder), os.environ.get("PYTHONPATH", "")]
        return Program(
            script=str(folder / "open_instruct" / "finetune.py"),
            arguments=(str(arguments),),
            folder=str(folder),
            environment={"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )

    def metrics(self, line: str) -> dict | None:
        _, found, text = line.partition(STATISTICS)
        if not found:
            return None
        row = json.loads(text)
        names = {"train_loss": "loss", "total_tokens": "tokens"}
        names["tokens_per_s"] = "tokens_per_second"
        kept = "step steps train_loss learning_rate grad_norm grad_norm_max clipped kept_pairs "
        kept += "dropped_mass total_tokens tokens_per_s"
        return {names.get(key, key): row[key] for key in kept.split() if key in row}

    def finish(self, run: RunDir) -> bool:
        if (run.checkpoints / TRAINED).is_file():
            run.checkpoints.rename(run.model)
        return (run.model / TRAINED).is_file()

    def clean(self, run: RunDir) -> None:
        """finetune.py has removed its checkpoints itself."""


def checkout() -> Path:
    """The user's open-instruct checkout; raises SweepError saying how to make one."""
    if VARIABLE not in os.environ:
        raise SweepError(
            f"{VARIABLE} is not set: git clone {upstream('repository')} DIR && git -C DIR checkout "
            f"{upstream('commit')} && {PATCHES / 'apply.sh'} DIR; then export {VARIABLE}=DIR"
        )
    return Path(os.environ[VARIABLE]).absolute()


def upstream(key: str) -> str:
    """The value of `key` in patches/UPSTREAM."""
    lines = (PATCHES / "UPSTREAM").read_text(encoding="utf-8").splitlines()
    return dict(line.split(maxsplit=1) for line in lines)[key]


def checkout_problems() -> list[str]:
    """What keeps the checkout from training."""
    try:
        command = [PATCHES / "apply.sh", checkout(), "--check"]
    except SweepError as error:
        return [str(error)]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (check.stderr or check.stdout).strip().removeprefix("error: ")
    return [] if check.returncode == 0 else [f"{VARIABLE}: {said}"]


def data_problems(train: OpenInstructKeys) -> list[str]:
    """What is wrong with the training data; empty when nothing is."""
    sources = {
        "train_file": train.train_file,
        "dataset_name": train.dataset_name,
        "dataset_mixer_list": train.dataset_mixer_list,
    }
    given = [key for key, value in sources.items() if value]
    if len(given) != 1:
        return [f"train: give exactly one of {', '.join(sources)}; found {given or 'none'}"]
    if train.train_file:
        if not train.train_file.endswith((".json", ".jsonl")):
            return [f"train.train_file: {train.train_file}: finetune.py reads .json or .jsonl"]
        path = Path(train.train_file)
        if found := train_file_problems(path):
            return found
        _, where, row = next(references.rows(path))  # Alpaca's rows are the builtin trainer's alone
        only = f"train.train_file: {where}: finetune.py reads rows with `messages` only"
        return [] if "messages" in row else [only]
    return [
        f"train.{given[0]}: {name}: no such file or folder"
        for name in dataset_names(train.model_dump())
        if not Path(name).exists() and not on_hub(name)
    ]


def clipping_problems(train: OpenInstructKeys, world: World) -> list[str]:
    """Gradient clipping that would not be what the sweep file says; empty when it is."""
    if not world.deepspeed:
        return []
    if not Path(world.deepspeed).is_file():
        return [f"world.deepspeed: {world.deepspeed}: no such file"]
    limit = json.loads(Path(world.deepspeed).read_text(encoding="utf-8")).get("gradient_clipping")
    problems = []
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        problems.append(
            f"{world.deepspeed}: gradient_clipping is {limit!r}: give a number (0 for none); "
            "accelerate makes 1.0 of auto, which clips nearly every step of a summed loss"
        )
    if train.clip_grad_norm > 0:
        problems.append(
            f"train.clip_grad_norm: found {train.clip_grad_norm}, but DeepSpeed ignores it: leave "
            f"it out and set gradient_clipping in {world.deepspeed}"
        )
    return problems


def finetune_arguments(run: RunDir) -> dict:
    """The argument file of finetune.py: the run's keys, and what this backend decides."""
    keys = run.config().train
    arguments = {key: value for key, value in keys.items() if value is not None}
    for key in ("model_name_or_path", "tokenizer_name", "train_file", "dataset_name"):
        if key in arguments and Path(arguments[key]).exists():
            arguments[key] = str(Path(arguments[key]).absolute())
    if "dataset_mixer_list" in arguments:
        arguments["dataset_mixer_list"] = [str(word) for word in arguments["dataset_mixer_list"]]
    if "checkpointing_steps" in arguments:
        arguments["checkpointing_steps"] = str(arguments["checkpointing_steps"])
    # A run that was interrupted between its end and DONE finds its model in place, and leaves.
    trained = (run.model / TRAINED).is_file()
    return arguments | {
        "output_dir": str((run.model if trained else run.checkpoints).absolute()),
        "stop_file": str(run.stop.absolute()),
        "log_statistics": True,
        "push_to_hub": False,
        "try_launch_beaker_eval_jobs": False,
    }


def recover_rows(run: RunDir) -> None:
    """Cut metrics.jsonl at the checkpoint that the run resumes from, after which its rows come
    anew, and add those that only the log has: who copies them may have been killed first."""
    last = max((_step(mark.parent) for mark in run.checkpoints.glob("*_*/COMPLETED")), default=0)
    if (run.model / TRAINED).is_file():
        last = math.inf
    found = {}
    for log in sorted(run.path.glob("train*.log")):
        for line in log.read_bytes().split(b"\n")[:-1]:
            if row := BACKEND.metrics(line.decode("utf-8", "replace")):
                found[row["step"]] = row
    found |= {row["step"]: row for row in read_rows(run.metrics)}
    if found:
        kept = (json.dumps(found[step]) + "\n" for step in sorted(found) if step <= last)
        write_text(run.metrics, "".join(kept))


def _step(checkpoint: Path) -> int:
    """The step at which a checkpoint was saved; the name of one of an epoch does not say it."""
    state = checkpoint / "statistics.json"  # since the patches count over resumes
    if state.is_file():
        return read_json(state)["step"]
    kind, number = checkpoint.name.split("_")
    return int(number) if kind == "step" else 0


BACKEND = OpenInstruct()
