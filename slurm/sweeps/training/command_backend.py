"""`backend: command`: a training script of the user's own, started with the values of each run.

slurm/README.md ("A script of your own") says what the script has to do.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from calibeval.io import InputError
from calibeval.validation import Strict
from sweeps.runs.files import flush_folder
from sweeps.runs.processes import end_with_parent_and_ignore_warnings, node_number
from sweeps.runs.run import Run
from sweeps.runs.schema import World, option
from sweeps.runs.stages import Outcome
from sweeps.runs.yaml_io import key_error
from sweeps.training import starting_ranks

trains_on_several_nodes = True
PLACEHOLDER = re.compile(r"\{(\w+)\}")
RUN_DIR = "run_dir"  # the placeholder of the run's folder, which no key gives
# Keys that mean something to sweeps itself, so that no placeholder needs to use them.
KNOWN_KEYS = (
    "model_name_or_path",
    "model_revision",
    "tokenizer_name",
    "train_file",
    "label_smoothing",
    "num_train_epochs",
    "held_out",
)
POLL = 0.2  # seconds between looks at the script and at the stop file


def _word(value: Any) -> str:
    """A value as a word of the command: a text as it is, another one as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value)


def _number_as_text(value: Any) -> Any:
    """A word as it was typed, also where YAML has read a number."""
    return _word(value) if isinstance(value, int | float) else value


class CommandOptions(Strict):
    """The `train:` keys of backend command: the command, and any key that it has a placeholder for.

    `model_name_or_path` and the others of `KNOWN_KEYS` mean what they do in every backend.
    """

    model_config = ConfigDict(extra="allow")

    command: Annotated[
        list[Annotated[str, BeforeValidator(_number_as_text)]], Field(min_length=1)
    ] = option(
        ...,
        "Words of the command that trains a run, for example [python, my_sft.py, --lr, "
        "'{learning_rate}', --out, '{run_dir}/model']. {KEY} is the value of any other key of "
        "`train:` or `grid:`, under whatever name, and {run_dir} the run's folder; `python` is "
        "the interpreter of the runs.",
    )

    @model_validator(mode="after")
    def _placeholders_and_keys_belong_together(self) -> "CommandOptions":
        keys = dict(self.model_extra or {})
        used = {name for word in self.command for name in PLACEHOLDER.findall(word)}
        unknown = sorted(used - {*keys, RUN_DIR})
        if unknown:
            known = ", ".join([*keys, RUN_DIR])
            raise key_error(
                "command", f"no key of train or grid gives {{{unknown[0]}}}; known: {known}"
            )
        unused = [key for key in keys if key not in {*used, *KNOWN_KEYS} or key == RUN_DIR]
        if unused:
            raise key_error(
                unused[0], f"is used nowhere: write {{{unused[0]}}} into a word of train.command"
            )
        if RUN_DIR not in used:
            raise key_error(
                "command",
                "no word has {run_dir}: the script must leave its model in {run_dir}/model",
            )
        return self


Train = CommandOptions  # what every backend calls its options


def packages(train_options: CommandOptions, world: World) -> list[str]:
    """Modules that a run imports beyond those that every run does: torchrun, which starts ranks."""
    return [] if world.single_process else ["torch"]


def missing(train_options: CommandOptions, world: World) -> list[str]:
    """A program or script that is not there, and keys of `world:` that nobody hands on."""
    problems = []
    program, *words = train_options.command
    if program != "python" and "{" not in program and not shutil.which(program):
        problems.append(
            f"train.command: {program}: no such program here; if only jobs find it, write "
            f"[env, {program}, …]"
        )
    if re.fullmatch(r"python[\d.]*", Path(program).name) and words:
        script = words[0]
        is_path = not script.startswith("-") and "{" not in script
        if is_path and not Path(script).is_file():
            problems.append(f"train.command: {Path(script).absolute()}: no such file")
    for key in ("mixed_precision", "deepspeed", "fsdp"):
        if getattr(world, key) not in (None, "no"):
            problems.append(
                f"world.{key}: backend command hands it to nobody: give it to the script in "
                "train.command"
            )
    return problems


def scoring_problem(train_options: CommandOptions) -> str | None:
    """Why the tables of scores would not know what the model of such a run is."""
    from calibeval.report.index import RESERVED_COLUMNS

    keys = dict(train_options.model_extra or {})
    taken = sorted({*RESERVED_COLUMNS, "dataset", "model", "records", "run"} & set(keys))
    if taken:
        return (
            f"train.{taken[0]}: is the name of a column in the tables of scores: call the key "
            f"otherwise, for example my_{taken[0]}"
        )
    needed = ""
    smoothing = keys.get("label_smoothing")
    if not isinstance(keys.get("model_name_or_path"), str):
        needed = "model_name_or_path: the model before fine-tuning"
    elif not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        needed = "label_smoothing: a number from 0 to 1, 0 for a script without any"
    elif not isinstance(keys.get("seed", 0), int):
        needed = "seed: a whole number, or no such key"
    return f"train.{needed}: the tables of scores need it; or score=null" if needed else None


def train(run: Run) -> None:
    """Run the command, in one process or as each of torchrun's ranks, until it ends.

    Raises SystemExit(75) where it was asked to stop and has left, InputError where it ends well
    without a model, and SystemExit with its exit code, or 128 + its signal, where it fails.
    """
    world = run.config().world
    command = command_of(run)
    if "LOCAL_RANK" in os.environ:
        os.execvp(command[0], command)
    print(f"command: {shlex.join(command)}", flush=True)
    before = end_with_parent_and_ignore_warnings
    if not world.single_process:
        folder = str(run.path.absolute())
        command = starting_ranks.torchrun_command(world, "sweeps", "train", folder)
        before = starting_ranks.leave_signals_to_parent
    # Until the command ends well, model/ may be there and not be whole.
    run.unfinished_file.touch()
    exit_code, was_told_to_stop = _run_until_asked(command, run.stop_file, before)
    if was_told_to_stop and exit_code == -signal.SIGTERM:
        exit_code = Outcome.STOPPED.value  # it did not handle TERM, and had to leave
    if exit_code != 0:
        print(f"the command has ended with exit code {exit_code}", flush=True)
        raise SystemExit(exit_code if exit_code > 0 else 128 - exit_code)
    if world.nodes > 1 and node_number() > 0:
        return  # the first node sees to the model
    if not run.model.is_dir() or not any(run.model.iterdir()):
        if was_told_to_stop:
            raise SystemExit(Outcome.STOPPED.value)
        raise InputError(f"the command has ended well, and left nothing in {run.model.absolute()}")
    flush_folder(run.model)
    run.unfinished_file.unlink()


def command_of(run: Run) -> list[str]:
    """The words of a run's command, with the values of its keys."""
    train_options: CommandOptions = run.config().train_options
    values = {**(train_options.model_extra or {}), RUN_DIR: str(run.path.absolute())}

    def value(match: re.Match[str]) -> str:
        return _word(values[match[1]])

    words = [PLACEHOLDER.sub(value, word) for word in train_options.command]
    if words[0] == "python":
        words[0] = sys.executable
    return words


def _run_until_asked(
    command: list[str], stop_file: Path, before: Callable[[], None]
) -> tuple[int, bool]:
    """Run a command to its end, and send it TERM once this process or the run is asked to stop.

    `before` is called in the new process first. Returns the exit code, and whether TERM was sent.
    """
    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked_to_stop.set())
    program = subprocess.Popen(command, preexec_fn=before)
    was_told_to_stop = False
    while program.poll() is None:
        if not was_told_to_stop and (asked_to_stop.is_set() or stop_file.exists()):
            was_told_to_stop = True
            program.terminate()
        time.sleep(POLL)
    return program.returncode, was_told_to_stop
