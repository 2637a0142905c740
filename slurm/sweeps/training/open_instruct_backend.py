"""`backend: open-instruct`: open-instruct's own finetune.py, in the user's patched checkout.

The environment variable OPEN_INSTRUCT_DIR names the checkout, which `patches/apply.sh` patches.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import yaml

from calibeval.io import sha256, write_rows, write_text
from calibeval.validation import Positive
from sweeps.runs.conversations import rows
from sweeps.runs.files import read_rows, replace_folder, touch
from sweeps.runs.run import Run
from sweeps.runs.schema import World, option
from sweeps.runs.stages import Outcome
from sweeps.training import starting_ranks
from sweeps.training.options import PACKAGES, CommonOptions

CHECKOUT_VARIABLE = "OPEN_INSTRUCT_DIR"  # the environment variable that names the checkout
environment_variables = (CHECKOUT_VARIABLE,)  # Jobs need it of the submitting shell.
FileStamp = tuple[int, int] | None  # a key for caches, see `_file_stamp`
TRAINED = "TRAINED"  # the file that finetune.py leaves beside a finished model
# What finetune.py imports beyond what every run does.
MODULES = ("deepspeed", "peft", "nltk", "langdetect", "immutabledict", "rich", "antlr4", "requests")


class OpenInstructOptions(CommonOptions):
    """The `train:` keys of backend open-instruct: finetune.py's and the patches', and no others."""

    clip_grad_norm: float = option(
        -1.0, "Norm to which larger gradients are scaled down; 0 or less sets no limit."
    )
    fused_optimizer: bool = option(True, "Whether torch's fused AdamW is used.")
    model_revision: str | None = option(
        None, "Branch, tag or commit of the model on the hub; null takes its main branch."
    )
    chat_template_name: str = option("tulu", "Name of one of open-instruct's chat templates.")
    preprocessing_num_workers: Positive | None = option(
        None, "Processes that tokenize the data; null uses one."
    )
    timeout: Positive = option(
        1800, "Seconds that the other ranks wait for the first one to tokenize."
    )
    use_flash_attn: bool = option(True, "Whether attention is flash-attn's, which it then needs.")
    attn_implementation: str | None = option(
        None, "Attention by transformers' name, such as sdpa; null lets use_flash_attn decide."
    )
    use_slow_tokenizer: bool = option(True, "Whether the tokenizer is the slow one, in Python.")
    use_lora: bool = option(False, "Whether low-rank adapters are trained instead of all weights.")
    lora_rank: int = option(64, "Rank of the adapters.")
    lora_alpha: float = option(16, "Scale of the adapters, which is divided by their rank.")
    lora_dropout: float = option(0.1, "Probability with which an adapter's inputs are dropped.")
    loss_impl: Literal["auto", "fused"] = option(
        "fused",
        "Where the loss is computed: `fused` is smoothce for every β, also 0; `auto`, which is "
        "finetune.py's own default, leaves its loss alone without smoothing.",
    )
    filter_eps: float | Literal["auto"] | None = option(
        None,
        "Threshold of smoothce's filter, which on a GPU computes only a random choice of the "
        "gradient's small parts, for speed, and scales these up, so that the gradient is right on "
        "average; `auto` chooses it by the vocabulary's size, null keeps the gradient exact.",
    )


Train = OpenInstructOptions  # what every backend calls its options


def packages(train_options: OpenInstructOptions, world: World) -> list[str]:
    """Modules that a run imports beyond those that every run does."""
    needed = ["smoothed_open_instruct", *PACKAGES, *MODULES]
    if train_options.attn_implementation is None:
        uses_flash_attn = train_options.use_flash_attn
    else:
        uses_flash_attn = train_options.attn_implementation == "flash_attention_2"
    if uses_flash_attn:
        needed.append("flash_attn")
    return needed


def missing(train_options: OpenInstructOptions, world: World) -> list[str]:
    """What else would keep a run from starting, a sentence each."""
    return [
        *checkout_problems(),
        *data_problems(train_options),
        *sharding_problems(world),
        *clipping_problems(train_options, world),
    ]


def checkout_problems() -> list[str]:
    """What keeps the checkout from training: it is not named, absent or not patched."""
    if CHECKOUT_VARIABLE not in os.environ:
        return [f"{CHECKOUT_VARIABLE} is not set: reproduce.md makes a patched checkout"]
    try:
        # Imported here, because it imports torch, for which no other command should wait.
        from smoothed_open_instruct import patches_folder
    except ImportError as error:
        return [f"backend open-instruct: smoothed_open_instruct cannot be imported: {error}"]
    checkout = Path(os.environ[CHECKOUT_VARIABLE]).absolute()
    finetune = checkout / "open_instruct" / "finetune.py"
    message = _patch_problem(patches_folder() / "apply.sh", checkout, _file_stamp(finetune))
    return [] if message is None else [f"{CHECKOUT_VARIABLE}: {message}"]


@functools.cache
def _patch_problem(apply: Path, checkout: Path, stamp: FileStamp) -> str | None:
    """Why apply.sh says that a checkout, with this finetune.py, is not patched; None if it is.

    The answer is remembered, as a launch asks for it with each run.
    """
    check = subprocess.run(
        ["bash", apply, checkout, "--check"], capture_output=True, text=True, check=False
    )
    if check.returncode == 0:
        return None
    return (check.stderr or check.stdout).strip().removeprefix("error: ")


def _file_stamp(file: Path) -> FileStamp:
    """When a file was written last, and its size; None if it is not there.

    A cached function takes it as an argument beside the file, and does not read it: it is a part of
    the cache's key, so that the function looks again once the file has changed.
    """
    with contextlib.suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_size
    return None


def data_problems(train_options: OpenInstructOptions) -> list[str]:
    """What finetune.py cannot read of the training data, as far as its first row tells."""
    file = Path(train_options.train_file)
    if file.suffix not in (".json", ".jsonl"):
        return [f"train.train_file: {file}: finetune.py reads .json or .jsonl"]
    place = _place_without_messages(file, _file_stamp(file))
    if place is not None:
        return [f"train.train_file: {place}: finetune.py reads rows with `messages` only"]
    return []


@functools.cache
def _place_without_messages(file: Path, stamp: FileStamp) -> str | None:
    """Where the first row of a file with this stamp stands, if it has no `messages`.

    If the file has no rows, this is the file's own name. The answer is remembered, as a launch asks
    for it with each run, and a list is read whole.
    """
    for place, row in rows(file):
        has_messages = isinstance(row, dict) and "messages" in row
        return None if has_messages else place
    return str(file)


def sharding_problems(world: World) -> list[str]:
    """A way of sharding that finetune.py does not know; empty where there is none."""
    if world.fsdp is None:
        return []
    return [
        "world.fsdp: backend open-instruct shards by DeepSpeed alone: set world.deepspeed instead, "
        "or take backend trainer"
    ]


def clipping_problems(train_options: OpenInstructOptions, world: World) -> list[str]:
    """Gradient clipping that would not be what the sweep file says; empty when it is."""
    deepspeed = world.read("deepspeed")
    if deepspeed is None:
        return []
    problems = []
    setting = f"gradient_clipping in {world.deepspeed}"
    limit = deepspeed.get("gradient_clipping")
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        problems.append(
            f"{setting}: found {limit!r}, expected a number, 0 for none: auto would be 1"
        )
    if train_options.clip_grad_norm > 0:
        problems.append(
            f"train.clip_grad_norm: DeepSpeed ignores it; leave it out and set {setting}"
        )
    return problems


def train(run: Run) -> None:
    """Run finetune.py in the run's processes, all of them on this machine.

    `smoothed_open_instruct.monitor`, which the patches add to finetune.py, writes metrics.jsonl.

    Raises SystemExit with finetune.py's exit code if it fails, or with 128 + the number of the
    signal that ended it. Raises SystemExit(75) where it ends well without a finished model: it has
    then saved, because the stop file appeared or a signal came.
    """
    world = run.config().world
    checkout = Path(os.environ[CHECKOUT_VARIABLE]).absolute()
    arguments_file = run.path.absolute() / "finetune.yaml"
    write_text(arguments_file, yaml.safe_dump(finetune_arguments(run), sort_keys=False))
    # The file may have changes of the user's own, so that the log says which one has run.
    digest = sha256(checkout / "open_instruct" / "finetune.py")
    print(f"checkout: {checkout}, finetune.py {digest}", flush=True)
    if world.single_process:
        command = [sys.executable, "-m", "open_instruct.finetune", str(arguments_file)]
    else:
        command = starting_ranks.torchrun_command(
            world, "open_instruct.finetune", str(arguments_file)
        )
    with stop_file_on_signals(run.stop_file):
        finished = subprocess.run(
            command,
            env=finetune_environment(run, checkout),
            check=False,
            preexec_fn=starting_ranks.leave_signals_to_parent,
        )
    keep_last_rows(run)
    if finished.returncode < 0:  # by a signal, which a shell reports as 128 + its number
        raise SystemExit(128 - finished.returncode)
    if finished.returncode > 0:
        raise SystemExit(finished.returncode)
    if not (run.checkpoints / TRAINED).is_file():
        raise SystemExit(Outcome.STOPPED.value)
    # finetune.py's output_dir, which at the end holds the model instead of checkpoints.
    replace_folder(run.checkpoints, run.model)


@contextlib.contextmanager
def stop_file_on_signals(stop_file: Path) -> Iterator[None]:
    """Within it TERM and Ctrl-C make the stop file, which is all that finetune.py listens to.

    Afterwards a file that was made so is deleted, because it would stop the next attempt too.
    """
    was_made = False

    def make_stop_file(number: int, frame: FrameType | None) -> None:
        nonlocal was_made
        if not stop_file.exists():
            was_made = True
            touch(stop_file)
        name = signal.Signals(number).name
        # No print: the signal may have come in the middle of one.
        os.write(1, f"{name}: finetune.py saves after its present update and leaves\n".encode())

    previous = {
        number: signal.signal(number, make_stop_file) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if was_made:
            stop_file.unlink(missing_ok=True)


def finetune_arguments(run: Run) -> dict[str, Any]:
    """The argument file of finetune.py: the run's options, and what this backend decides."""
    train_options: OpenInstructOptions = run.config().train_options
    arguments: dict[str, Any] = train_options.model_dump(exclude_none=True)
    if "checkpointing_steps" in arguments:
        arguments["checkpointing_steps"] = str(arguments["checkpointing_steps"])
    arguments["output_dir"] = str(run.checkpoints.absolute())
    arguments["stop_file"] = str(run.stop_file.absolute())
    arguments["log_statistics"] = True
    arguments["push_to_hub"] = False
    arguments["try_launch_beaker_eval_jobs"] = False
    return arguments


def finetune_environment(run: Run, checkout: Path) -> dict[str, str]:
    """This process's environment, and what `accelerate launch` would tell finetune.py by it."""
    world = run.config().world
    environment = dict(os.environ)
    paths = [str(checkout)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["STATISTICS_FILE"] = str(run.metrics.absolute())
    environment["ACCELERATE_MIXED_PRECISION"] = world.mixed_precision
    if world.deepspeed:
        environment["ACCELERATE_USE_DEEPSPEED"] = "true"
        environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = os.path.abspath(world.deepspeed)
    return environment


def keep_last_rows(run: Run) -> None:
    """Keep one row a step in metrics.jsonl: the last one, where an attempt repeated the step."""
    last = {row["step"]: row for row in read_rows(run.metrics)}
    write_rows(run.metrics, (last[step] for step in sorted(last)))
