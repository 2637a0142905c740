"""How fast TRL trains with this project's loss, with its own, and beside the sweeps' trainer.

    python benchmarks/training.py --alpaca alpaca_data.json --out FOLDER          # one CUDA GPU
    python benchmarks/training.py --alpaca alpaca_data.json --out FOLDER --models llama-8b --gpus 2

With several GPUs --sharding says by what the model is split: configs/fsdp/fsdp2.json ("fsdp2") or
configs/deepspeed/zero3.json ("zero3").

Every trainer fine-tunes the same model (random weights of a real shape), on the same conversations
with the same tokens, 64 conversations an update, AdamW over fp32 weights with bf16 computation,
gradients clipped at a norm of 1, a learning rate that falls linearly from its first update.
FOLDER/training.jsonl grows by a row a trial, with its date, card, versions and commit; a trial that
fails, or a library that is not installed, is a row with its reason. The table comes last. What an
earlier call left of a trial in FOLDER is deleted when the trial begins. Model and tokenizer stay,
unless the model's shape, the chat template or the conversations are others than before.

A trainer's name says what it has; the step is TRL's, and the smoothing comes last:

    trl             TRL's SFTTrainer as it comes: padded micro-batches of 16 (of 8 with llama-8b)
    padding-free    the conversations of an update in one pass, end to end (padding_free=True)
    packed          padding-free with smoothce.use_packed_attention
    compiled        packed, with torch.compile on each layer
    sweeps          the sweeps' trainer: packed, compiled, with smoothce's loss at β = 0.1
    …-theirs        with TRL's own smoothing, label_smoothing_factor=0.1
    …-ours          with smoothce.patch_trainer, label_smoothing=0.1
    …-ours-twice    the same, but the head's hooks run also where it defers its logits, so that
                    ZeRO-3 gathers the classifier twice a forward pass; FSDP2 copies what the head
                    answers, which then finds no loss

Not the same: TRL takes accuracy and entropy of every micro-batch, and waits for the GPU to count
its tokens; the sweeps' trainer counts them on the CPU. Conversations come in an order of each
trainer's own.

Columns: tokens/s (tokens that are no padding, median over updates after the third), milliseconds an
update (a mean update's tokens at that pace), MFU (model FLOP utilisation, about: (6 N + 6 V D t + 6
L H d · s) · tokens/s over the peak of --peak, for N weights of linear maps in the layers, V × D of
the classifier, t the share of tokens that are targets of the loss, L layers of H heads of d
dimensions, and s the mean number of tokens of a conversation, which counts long conversations'
attention too low), the peak of allocated GPU memory, seconds until the first update is done, and
the mean loss of the last quarter of updates. A row of training.jsonl also has t as `learnt`, s as
`mean_length`, and --conversations, which are those of one update, as `conversations`.

The tokenizer is a BPE trained on the data, so that tokens are about as long as usual. A file with
fewer conversations than all updates need is repeated.
"""

import argparse
import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = [str(PROJECT / folder) for folder in ("kernel", "eval", "patches", "slurm")]
TEMPLATE = PROJECT / "slurm" / "sweeps" / "training" / "chat_templates" / "alpaca.jinja"
CONVERSATIONS = 64  # of an update
IGNORED = -100  # the label of a token that no loss is taken of
WARM_UP = 3  # updates that are not timed: kernels are compiled and chosen in them
CLIP_GRADIENT_NORM = 1.0
KILL_PATIENCE = 60.0  # seconds until a process that does not die of KILL is left behind
# The packages whose versions stand in a row, where they are installed.
VERSIONS = ("torch", "triton", "transformers", "accelerate", "trl", "deepspeed")
SHARDINGS = {
    "fsdp2": PROJECT / "configs" / "fsdp" / "fsdp2.json",
    "zero3": PROJECT / "configs" / "deepspeed" / "zero3.json",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's shape, by the names of transformers' configurations."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool

    def flops_per_token(self, length: float, target_share: float) -> float:
        """FLOP of a forward and backward pass for each token of conversations this long.

        A share of the tokens, `target_share`, are targets of the loss and need the classifier.
        """
        attention = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        projections = self.hidden_size * (2 * attention + 2 * key_value)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        weights = self.num_hidden_layers * (projections + feed_forward)
        classifier = self.vocab_size * self.hidden_size
        # A token has a product with each key and one with each value, of half of the conversation
        # in the mean.
        attention_products = self.num_hidden_layers * attention * 2 * (length / 2)
        products = weights + classifier * target_share + attention_products
        # A product is a multiplication and an addition. It is made in the forward pass, and two
        # like it in the backward pass, one for the gradient of each factor.
        return 2 * 3 * products


@dataclasses.dataclass(frozen=True)
class BenchmarkModel:
    """A shape, and how it is trained."""

    architecture: str  # of transformers, without Config or ForCausalLM
    shape: Shape
    micro_batch: int = 16  # conversations of a micro-batch where batches are padded
    gradient_checkpointing: bool = False

    def config(self) -> Any:
        """The transformers configuration."""
        import transformers

        configuration = getattr(transformers, f"{self.architecture}Config")
        return configuration(**dataclasses.asdict(self.shape))


MODELS = {
    "qwen-1.5b": BenchmarkModel(
        "Qwen2",
        Shape(
            vocab_size=151936,
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            head_dim=128,
            tie_word_embeddings=True,
        ),
    ),
    "llama-1b": BenchmarkModel(
        "Llama",
        Shape(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
        ),
    ),
    "llama-8b": BenchmarkModel(
        "Llama",
        Shape(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=False,
        ),
        micro_batch=8,
        gradient_checkpointing=True,
    ),
    "tiny": BenchmarkModel(
        "Llama",
        Shape(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of the trainers that are compared."""

    step: str  # sweeps, trl, padding-free, packed or compiled
    smoothing: str = "none"  # none, theirs, ours or ours-twice

    @property
    def in_one_pass(self) -> bool:
        """Whether an update's conversations are one micro-batch, end to end."""
        return self.step not in ("trl", "sweeps")


TRAINERS = {
    "trl": Contender("trl"),
    "trl-theirs": Contender("trl", "theirs"),
    "trl-ours": Contender("trl", "ours"),
    "padding-free": Contender("padding-free"),
    "packed": Contender("packed"),
    "packed-theirs": Contender("packed", "theirs"),
    "packed-ours": Contender("packed", "ours"),
    "compiled": Contender("compiled"),
    "compiled-theirs": Contender("compiled", "theirs"),
    "compiled-ours": Contender("compiled", "ours"),
    "packed-ours-twice": Contender("packed", "ours-twice"),
    "compiled-ours-twice": Contender("compiled", "ours-twice"),
    "sweeps": Contender("sweeps", "ours"),
}
ON_ONE_GPU = [name for name, trainer in TRAINERS.items() if trainer.smoothing != "ours-twice"]
BETA = 0.1


def main() -> int:
    """Run every trial in a process of its own; print the table."""
    arguments = parse()
    if arguments.trial:
        if TRAINERS[arguments.trial].step == "sweeps":
            return train_by_sweeps(arguments)
        return train_by_trl(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = []
    for model_name in arguments.models:
        prepare(model_name, arguments)
        for trainer_name in arguments.trainers:
            row = {"model": model_name, "trainer": trainer_name, **circumstances(arguments)}
            row.update(run_trial(model_name, trainer_name, arguments))
            results.append(row)
            print(json.dumps(row), flush=True)
            with open(arguments.out / "training.jsonl", "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    print("\n".join(table(results)))
    return 0


def circumstances(arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row's figures depend on beside the model and the trainer."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = {}
    for package in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "gpus": arguments.gpus,
        "sharding": arguments.sharding if arguments.gpus > 1 else None,
        "card": card,
        "steps": arguments.steps,
        "conversations": arguments.conversations_per_update,
        "peak": arguments.peak,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
    }


def commit() -> str | None:
    """This project's commit, with "-dirty" where files have changed since; None outside git."""
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty", "--abbrev=40"]
    command.append("--exclude=*")  # It excludes all tags: `describe` would name one, not the hash.
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alpaca", type=Path, required=True, help="alpaca_data.json")
    parser.add_argument("--out", type=Path, required=True, help="models, runs and training.jsonl")
    parser.add_argument("--models", nargs="+", default=["qwen-1.5b", "llama-1b"], choices=MODELS)
    parser.add_argument("--trainers", nargs="+", default=ON_ONE_GPU, choices=TRAINERS)
    parser.add_argument("--gpus", type=int, default=1, help="above 1 the model is sharded")
    parser.add_argument("--sharding", choices=SHARDINGS, default="fsdp2", help="over several GPUs")
    parser.add_argument("--steps", type=int, default=24, help="updates of a trial")
    parser.add_argument(
        "--conversations",
        dest="conversations_per_update",
        metavar="CONVERSATIONS",
        type=int,
        default=CONVERSATIONS,
        help="of an update",
    )
    parser.add_argument("--limit", type=int, default=600, help="seconds of a trial")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of a GPU; H100 SXM's")
    parser.add_argument("--trial", choices=TRAINERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    refuse_too_few_updates(parser, arguments)
    refuse_uneven_updates(parser, arguments)
    return arguments


def refuse_too_few_updates(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where no update would be timed."""
    least = WARM_UP + 1
    if arguments.steps < least:
        parser.error(
            f"--steps {arguments.steps}: {least} or more are needed, since the first {WARM_UP} "
            "updates are not timed"
        )


def refuse_uneven_updates(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program where trainers would take updates of different sizes."""
    for model_name in arguments.models:
        conversations_per_gpu = arguments.conversations_per_update // arguments.gpus
        micro_batch = min(MODELS[model_name].micro_batch, max(1, conversations_per_gpu))
        parts = arguments.gpus * micro_batch
        if conversations_per_gpu == 0 or arguments.conversations_per_update % parts:
            parser.error(
                f"--conversations {arguments.conversations_per_update}: {arguments.gpus} GPUs with "
                f"micro-batches of {micro_batch} need a multiple of {parts} for {model_name}"
            )


def model_folder(model_name: str, arguments: argparse.Namespace) -> Path:
    return arguments.out.absolute() / "models" / model_name


def prepare(model_name: str, arguments: argparse.Namespace) -> None:
    """Write the model's random weights in bf16, and a tokenizer trained on the data.

    What an earlier call has written stays, if it was made of as many conversations of the same
    data, and of the same model and template.
    """
    folder = model_folder(model_name, arguments)
    recipe_file = folder / "made_of.json"  # written last, so that what is cut short is made anew
    recipe = {
        "sha256": hashlib.sha256(arguments.alpaca.read_bytes()).hexdigest(),
        "rows": len(training_data(arguments)),
        "architecture": MODELS[model_name].architecture,
        "shape": dataclasses.asdict(MODELS[model_name].shape),
        "template": TEMPLATE.read_text("utf-8"),
    }
    if recipe_file.exists() and json.loads(recipe_file.read_text("utf-8")) == recipe:
        return
    shutil.rmtree(folder, ignore_errors=True)
    write_model(model_name, folder)
    write_tokenizer(model_name, arguments, folder)
    recipe_file.write_text(json.dumps(recipe), "utf-8")


def write_model(model_name: str, folder: Path) -> None:
    """Write a model of random weights in bf16."""
    import torch
    import transformers

    architecture = MODELS[model_name].architecture
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model_class = getattr(transformers, f"{architecture}ForCausalLM")
        model = model_class(MODELS[model_name].config())
    torch.set_default_dtype(default)
    model.save_pretrained(folder, max_shard_size="2GB")
    del model
    torch.cuda.empty_cache()


def write_tokenizer(model_name: str, arguments: argparse.Namespace, folder: Path) -> None:
    """Write a BPE tokenizer that is trained on the data."""
    import tokenizers
    import transformers

    byte_level = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe_trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=min(60_000, MODELS[model_name].shape.vocab_size),
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    texts = []
    for row in training_data(arguments):
        texts.append(f"{row['instruction']}\n{row['input']}\n{row['output']}")
    bpe.train_from_iterator(texts, bpe_trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>"
    )
    fast.chat_template = TEMPLATE.read_text("utf-8")
    fast.save_pretrained(folder)


def training_data(arguments: argparse.Namespace) -> list[dict[str, str]]:
    """The conversations of all updates, in Alpaca's form; a file that is too short is repeated."""
    rows = json.loads(arguments.alpaca.read_text("utf-8"))
    count = arguments.conversations_per_update * arguments.steps
    return list(itertools.islice(itertools.cycle(rows), count))


def run_trial(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once in a new process, or in one for each GPU; returns a row's figures."""
    if TRAINERS[trainer_name].step != "sweeps" and not importable("trl"):
        return {"failed": "not installed: trl"}
    result = arguments.out / f"{model_name}.{trainer_name}.json"
    result.unlink(missing_ok=True)
    tokens_file(model_name, trainer_name, arguments).unlink(missing_ok=True)
    shutil.rmtree(arguments.out / "runs" / f"{model_name}.{trainer_name}", ignore_errors=True)
    cache = cache_folder(model_name, trainer_name, arguments)
    shutil.rmtree(cache, ignore_errors=True)
    log = arguments.out / f"{model_name}.{trainer_name}.log"
    command = trial_command(model_name, trainer_name, arguments)
    code = run_to_the_end(command, trial_environment(cache), log, arguments.limit)
    if code is None:
        return {"failed": f"not done after {arguments.limit} s"}
    if code or not result.exists():
        return {"failed": reason_of_failure(log)}
    figures = json.loads(result.read_text("utf-8"))
    result.unlink()
    shape = MODELS[model_name].shape
    per_token = shape.flops_per_token(figures["mean_length"], figures["learnt"])
    flops_per_second = figures["tokens_per_second"] * per_token
    figures["mfu"] = round(flops_per_second / arguments.peak / arguments.gpus, 3)
    return figures


def reason_of_failure(log: Path) -> str:
    """The line of a trial's log that says why it failed, as the sweeps find it for their runs."""
    if not importable("sweeps"):
        sys.path.extend(PACKAGES)
    from sweeps.runs.files import last_error

    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return last_error(lines)[:300]


def trial_command(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> list[str]:
    """The command of a trial, whose process this script recognizes by --trial."""
    command = [sys.executable]
    # The sweeps' trainer starts its ranks itself.
    if arguments.gpus > 1 and TRAINERS[trainer_name].step != "sweeps":
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", arguments.gpus]
    command += [__file__, "--trial", trainer_name, "--models", model_name]
    command += ["--alpaca", arguments.alpaca, "--out", arguments.out]
    command += ["--gpus", arguments.gpus, "--sharding", arguments.sharding]
    command += ["--steps", arguments.steps]
    command += ["--conversations", arguments.conversations_per_update]
    return [str(word) for word in command]


def trial_environment(cache: Path) -> dict[str, str]:
    """The environment of a trial's processes, all of which BENCHMARK_BEGAN tells from others."""
    paths = [*PACKAGES, str(PROJECT)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["HF_DATASETS_CACHE"] = str(cache)  # where the sweeps' trainer keeps tokens
    environment["BENCHMARK_BEGAN"] = str(time.time())
    return environment


def run_to_the_end(
    command: list[str], environment: dict[str, str], log: Path, limit: float
) -> int | None:
    """The command's exit code, or None where it took longer. Its processes are killed with it.

    A trainer starts others, a launcher its ranks, which would hold the GPU under the next trial.
    """
    with open(log, "w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_processes(environment["BENCHMARK_BEGAN"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_PATIENCE)


def kill_processes(began: str, patience: float = KILL_PATIENCE) -> None:
    """Kill all processes of the trial that began then, also those that are started meanwhile.

    They are told by their environment: torchrun gives each rank a session of its own, so that
    ranks are in no process group with it, and have no parent once it has ended.

    A process that hangs in the GPU's driver does not die of any signal. What is still there after
    `patience` seconds is named on stderr and left behind.
    """
    import psutil

    give_up_at = time.monotonic() + patience
    while True:
        killed = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("BENCHMARK_BEGAN") == began:
                    process.kill()
                    killed.append(process)
        if not killed:
            return
        if time.monotonic() > give_up_at:
            for process in killed:
                print(
                    f"process {process.pid} is still there {patience:.0f} s after it was killed, "
                    "and may hold the GPU under the next trials",
                    file=sys.stderr,
                )
            return
        psutil.wait_procs(killed, timeout=min(10, patience))


def importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def hand_over(trainer_name: str, arguments: argparse.Namespace, figures: dict[str, Any]) -> int:
    """Hand a trial's figures to the process that started it."""
    target = arguments.out / f"{arguments.models[0]}.{trainer_name}.json"
    target.write_text(json.dumps(figures))
    return 0


def train_by_sweeps(arguments: argparse.Namespace) -> int:
    """Train by `python -m sweeps launch`, and read the run's metrics.jsonl."""
    (model_name,) = arguments.models
    trainer_name = arguments.trial
    sweep = sweep_of(model_name, trainer_name, arguments)
    file = arguments.out / f"{model_name}.{trainer_name}.yaml"
    launched = launch(sweep, file)
    folder = Path(sweep["output_root"]) / sweep["name"]
    updates = logged_updates(folder)
    if launched.returncode or len(updates) != arguments.steps:
        # The run's own log comes last, since a row's reason is the last error that is printed.
        print(f"{len(updates)} of {arguments.steps} updates, exit code {launched.returncode}")
        print(launched.stdout + launched.stderr)
        for log in folder.glob("*/train.log"):
            print(log.read_text("utf-8", "replace"))
        return 1
    pace = statistics.median(row["tokens_per_second"] for row in updates[WARM_UP:])
    memory = max(row.get("gpu_memory_gib", 0.0) for row in updates)
    losses = [row["loss"] for row in updates]
    figures = figures_of(model_name, arguments, pace, memory, updates[0]["time"], losses)
    return hand_over(trainer_name, arguments, figures)


def sweep_of(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The sweep of one run by which a trainer's trial is done; its data are written."""
    data = arguments.out.absolute() / "alpaca.json"
    data.write_text(json.dumps(training_data(arguments)))
    return {
        "name": f"{model_name}.{trainer_name}",
        "output_root": str(arguments.out.absolute() / "runs"),
        "train": {
            "model_name_or_path": str(model_folder(model_name, arguments)),
            "train_file": str(data),
            "reduce_loss": "token_mean",
            "learning_rate": 1e-5,
            "max_train_steps": arguments.steps,
            "num_train_epochs": 1,
            "per_device_train_batch_size": arguments.conversations_per_update // arguments.gpus,
            "gradient_checkpointing": MODELS[model_name].gradient_checkpointing,
            "logging_steps": 1,
            "checkpointing_steps": None,
            "clip_grad_norm": CLIP_GRADIENT_NORM,
            "lr_scheduler_type": "linear",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "compile": True,
            "label_smoothing": BETA,
        },
        "world": world_of(arguments),
    }


def world_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sweep's `world:`: how many processes train, how they share the model, and in what."""
    import torch

    world: dict[str, Any] = {
        "processes_per_node": arguments.gpus,
        "mixed_precision": "bf16" if torch.cuda.is_available() else "no",
    }
    if arguments.gpus > 1:
        key = "fsdp" if arguments.sharding == "fsdp2" else "deepspeed"
        world[key] = str(SHARDINGS[arguments.sharding])
    return world


def launch(sweep: dict[str, Any], file: Path) -> subprocess.CompletedProcess[str]:
    """Write a sweep to a file and launch it on this machine."""
    import yaml

    file.write_text(yaml.safe_dump(sweep))
    command = ("-m", "sweeps", "launch", str(file.absolute()), "--executor", "local")
    return subprocess.run([sys.executable, *command], text=True, capture_output=True)


def logged_updates(folder: Path) -> list[dict[str, Any]]:
    """The rows of the updates that the run in a sweep's folder has logged."""
    updates = []
    for metrics in folder.glob("*/metrics.jsonl"):
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        updates += [row for row in rows if "loss" in row]
    return updates


def figures_of(
    model_name: str,
    arguments: argparse.Namespace,
    pace: float,  # tokens a second
    memory: float,  # GiB
    first_update: float,  # when it was done, in seconds since the epoch
    losses: list[float],
) -> dict[str, Any]:
    """A row's figures, of every trainer by the same rules."""
    totals = data_totals(model_name, arguments)
    return {
        "tokens_per_second": round(pace),
        "ms_per_update": round(1000 * totals.total_tokens / arguments.steps / pace),
        "gpu_memory_gib": round(memory, 2),
        "seconds_to_first_update": round(first_update - began(), 1),
        "loss": last_quarter(losses),
        "mean_length": totals.total_tokens / totals.total_conversations,
        "learnt": totals.total_targets / totals.total_tokens,
    }


def began() -> float:
    """When this trial's process was started, in seconds since the epoch."""
    return float(os.environ["BENCHMARK_BEGAN"])


def last_quarter(losses: list[float]) -> float:
    """The mean loss of the last quarter of updates."""
    count = max(1, len(losses) // 4)
    return round(statistics.mean(losses[-count:]), 4)


def tokenized(model_name: str, arguments: argparse.Namespace) -> Iterator[dict[str, list[int]]]:
    """Each conversation's tokens, and its labels: the assistant's tokens alone.

    Labels begin after as many tokens as the prompt alone has. The sweeps' trainer takes those that
    begin in the assistant's text, which can differ by a token where a token spans both.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder(model_name, arguments))
    for row in training_data(arguments):
        prompt = row["instruction"]
        if row["input"]:
            prompt += f"\n\n### Input:\n{row['input']}"
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": row["output"]},
        ]
        beginning = tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, tokenize=False
        )
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        before = len(tokenizer(beginning, add_special_tokens=False)["input_ids"])
        tokens = tokenizer(whole, add_special_tokens=False)["input_ids"]
        yield {"input_ids": tokens, "labels": [IGNORED] * before + tokens[before:]}


class DataTotals(NamedTuple):
    """What the data of all updates together is made of."""

    total_conversations: int
    total_tokens: int
    total_targets: int  # tokens that a loss is taken of


def data_totals(model_name: str, arguments: argparse.Namespace) -> DataTotals:
    """Count the data of all updates."""
    conversations = 0
    tokens = 0
    targets = 0
    for row in tokenized(model_name, arguments):
        conversations += 1
        tokens += len(row["labels"])
        targets += sum(label != IGNORED for label in row["labels"])
    return DataTotals(conversations, tokens, targets)


def train_by_trl(arguments: argparse.Namespace) -> int:
    """Train by TRL's SFTTrainer, on conversations that are tokenised already."""
    import torch
    import transformers

    (model_name,) = arguments.models
    trainer_name = arguments.trial
    folder = model_folder(model_name, arguments)
    # Before the model: ZeRO-3 splits weights while they are loaded.
    config = trl_config(model_name, trainer_name, arguments)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    clock = stopwatch()
    rows = tokens_for_trl(model_name, trainer_name, arguments)
    trainer = trl_trainer(model, config, rows, clock, model_name, trainer_name, arguments)
    trainer.train()
    if not trainer.is_world_process_zero():
        return 0
    pace = median_pace(clock.marks)
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    figures = figures_of(model_name, arguments, pace, memory, clock.first, losses)
    return hand_over(trainer_name, arguments, figures)


def trl_trainer(
    model: Any,
    config: Any,
    rows: Any,
    clock: Any,
    model_name: str,
    trainer_name: str,
    arguments: argparse.Namespace,
) -> Any:
    """TRL's SFTTrainer with all that the trainer's name says."""
    import transformers
    from trl import SFTTrainer

    from smoothce import patch_trainer, use_packed_attention

    contender = TRAINERS[trainer_name]
    trainer = SFTTrainer(
        model,
        args=config,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(
            model_folder(model_name, arguments)
        ),
        callbacks=[clock],
    )
    if contender.step in ("packed", "compiled"):
        use_packed_attention(model)
    if contender.step == "compiled":
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    if contender.smoothing.startswith("ours"):
        patch_trainer(trainer, label_smoothing=BETA)
    if contender.smoothing == "ours-twice":
        run_hooks_twice()
    return trainer


def run_hooks_twice() -> None:
    """Let a patched head run its hooks also where it defers its logits."""
    from smoothce.hf_patch.head import SmoothedHead

    defer = SmoothedHead.__call__
    forward = SmoothedHead.forward

    def call(head: Any, hidden: Any, *, request: Any = None) -> Any:
        if head.deferral is not None and request is None:
            return super(SmoothedHead, head).__call__(hidden)
        return defer(head, hidden, request=request)

    def forward_or_defer(head: Any, hidden: Any, *, request: Any = None) -> Any:
        if head.deferral is not None and request is None:
            return defer(head, hidden)
        return forward(head, hidden, request=request)

    SmoothedHead.__call__ = call  # type: ignore[method-assign]
    SmoothedHead.forward = forward_or_defer  # type: ignore[method-assign]


def median_pace(marks: list[tuple[float, int]]) -> float:
    """Tokens a second, the median over the updates after the warm-up.

    `marks` has, for each update, the time in seconds and the number of tokens when it was done.
    """
    paces = []
    timed = marks[WARM_UP - 1 :]  # from the end of the last update of the warm-up on
    for (earlier, before), (later, after) in itertools.pairwise(timed):
        paces.append((after - before) / (later - earlier))
    return statistics.median(paces)


def trl_config(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> Any:
    """The trainer's arguments."""
    import torch
    from trl import SFTConfig

    on_gpu = torch.cuda.is_available()
    sharding: dict[str, Any] = {}
    if arguments.gpus > 1:
        settings = json.loads(SHARDINGS[arguments.sharding].read_text())
        if arguments.sharding == "fsdp2":
            sharding = {"fsdp": True, "fsdp_config": settings}
        else:
            sharding = {"deepspeed": settings}
    conversations_per_gpu = arguments.conversations_per_update // arguments.gpus
    contender = TRAINERS[trainer_name]
    micro_batch = conversations_per_gpu
    if not contender.in_one_pass:
        micro_batch = min(MODELS[model_name].micro_batch, conversations_per_gpu)
    return SFTConfig(
        str(arguments.out / "runs" / f"{model_name}.{trainer_name}"),
        max_steps=arguments.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=conversations_per_gpu // micro_batch,
        learning_rate=1e-5,
        max_grad_norm=CLIP_GRADIENT_NORM,
        lr_scheduler_type="linear",
        warmup_steps=0,
        weight_decay=0.0,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=MODELS[model_name].gradient_checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding",
        padding_free=contender.in_one_pass,
        label_smoothing_factor=BETA if contender.smoothing == "theirs" else 0.0,
        **sharding,
    )


def tokens_file(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> Path:
    """What the first rank writes for the others. `run_trial` deletes one that is there before."""
    return arguments.out / f"{model_name}.{trainer_name}.tokens.jsonl"


def cache_folder(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> Path:
    """Where a trial keeps tokens as `datasets` has them. `run_trial` deletes it before."""
    return arguments.out.absolute() / "cache" / f"{model_name}.{trainer_name}"


def tokens_for_trl(model_name: str, trainer_name: str, arguments: argparse.Namespace) -> Any:
    """The tokens as a dataset. The first rank makes them, and the others wait for its file."""
    from datasets import Dataset

    file = tokens_file(model_name, trainer_name, arguments)
    if trl_rank() == 0:
        part = file.with_suffix(".part")
        part.write_text("".join(f"{json.dumps(row)}\n" for row in tokenized(model_name, arguments)))
        part.rename(file)
    while not file.exists():
        time.sleep(0.1)
    cache = cache_folder(model_name, trainer_name, arguments) / f"rank{trl_rank()}"
    return Dataset.from_json(str(file), cache_dir=str(cache))


def trl_rank() -> int:
    """This process's number among those that torchrun started."""
    return int(os.environ.get("RANK", "0"))


def stopwatch() -> Any:
    """A callback that notes when each update was done, and how many tokens were seen by then."""
    import torch
    import transformers

    class Stopwatch(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[tuple[float, int]] = []
            self.first = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if not self.marks:
                self.first = time.time()
            self.marks.append((time.monotonic(), int(state.num_input_tokens_seen)))

    return Stopwatch()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown."""
    lines = [
        "| model | GPUs | trainer | tokens/s | ms an update | MFU | memory | first update | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gpus = f"{row['gpus']}, {row['sharding']}" if row["sharding"] else str(row["gpus"])
        cells = [row["model"], gpus, row["trainer"]]
        if "failed" in row:
            cells += [row["failed"], "", "", "", "", ""]
        else:
            cells += [
                f"{row['tokens_per_second']:,}",
                f"{row['ms_per_update']:,}",
                f"{row['mfu']:.1%}",
                f"{row['gpu_memory_gib']:.1f} GiB",
                f"{row['seconds_to_first_update']:.0f} s",
                f"{row['loss']:.3f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
