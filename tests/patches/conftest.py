"""Fixtures for the tests against a real open-instruct checkout, which is cloned, never changed."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sweeps.training.open_instruct_backend import MODULES

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
APPLY = PROJECT / "patches" / "apply.sh"
UPSTREAM = dict(
    line.split(maxsplit=1) for line in (PROJECT / "patches" / "UPSTREAM").read_text().splitlines()
)
MAIN = "e6c3044aa6201c8bfa4573c1b03142af599e730d"
LOSS = re.compile(r"Step: (\d+), LR: \S+, Loss: ([^,]+),")
STATISTICS = re.compile(r"training statistics: (\{.*\})")


@dataclass
class Run:
    """What a run of finetune.py left: its log, and the loss of every step."""

    output: Path
    log: str
    code: int
    losses: dict[int, float] = field(init=False)
    statistics: list[dict] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = {int(step): float(loss) for step, loss in LOSS.findall(self.log)}
        self.statistics = [json.loads(row) for row in STATISTICS.findall(self.log)]

    def weights(self) -> bytes:
        """The saved weights, byte for byte."""
        return weights_file(self.output).read_bytes()

    def update(self, start: Path) -> torch.Tensor:
        """What training added to the weights of the model in `start`, as one fp64 vector."""
        before, after = (load_weights(folder) for folder in (start, self.output))
        return torch.cat([(after[key].double() - before[key]).flatten() for key in sorted(before)])


def weights_file(folder: Path) -> Path:
    names = ("pytorch_model.bin", "model.safetensors", "adapter_model.safetensors")
    return next(path for name in names if (path := folder / name).is_file())


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    path = weights_file(folder)
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


@dataclass
class Stack:
    """A Python with the libraries of one of the two supported stacks."""

    python: str
    world: Path  # what tiny_world.py made with it

    @property
    def environment(self) -> dict[str, str]:
        """This environment, offline, one thread a process, with smoothce to be found."""
        paths = (str(PROJECT / part) for part in ("kernel", "patches", "slurm", "eval"))
        ours = {
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": str(self.world / "cache"),
            "HF_HUB_CACHE": str(self.world / "hub"),
        }
        return os.environ | ours

    @property
    def given(self) -> dict[str, object]:
        """finetune.py's arguments unless a test says otherwise."""
        return {
            "model_name_or_path": str(self.world / "model"),
            "train_file": str(self.world / "train.jsonl"),
            "use_flash_attn": False,
            "use_slow_tokenizer": False,
            "fused_optimizer": False,
            "max_seq_length": 64,
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            "push_to_hub": False,
            "try_launch_beaker_eval_jobs": False,
        }

    @cached_property
    def server(self) -> subprocess.Popen:
        """run_finetune.py, which ends with its standard input."""
        return subprocess.Popen(
            [self.python, HERE / "run_finetune.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=self.world,
        )

    def finetune(
        self,
        checkout: Path,
        output: Path,
        *arguments: object,
        ranks: int = 1,
        deepspeed: Path | None = None,
        **options: object,
    ) -> Run:
        """Train the tiny model with the `options` of run_finetune.py; fails the test if the script
        does, unless `faults` were to come."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if deepspeed:
            environment["ACCELERATE_USE_DEEPSPEED"] = "true"
            environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = deepspeed
        else:
            environment["ACCELERATE_USE_CPU"] = "true"
        given = self.given | {"output_dir": output}
        flags = [word for key, value in given.items() for word in (f"--{key}", value)]
        log = output.parent / f"{output.name}.log"
        log.unlink(missing_ok=True)
        run = {
            "ranks": ranks,
            "environment": {key: str(value) for key, value in environment.items()},
            "arguments": [str(word) for word in (checkout, *flags, *arguments)],
            "options": options,
            "log": str(log),
        }
        self.server.stdin.write(json.dumps(run) + "\n")
        self.server.stdin.flush()
        code = int(self.server.stdout.readline())
        run = Run(output, log.read_text(), code)
        assert run.code == 0 or "faults" in options, run.log[-6000:]
        return run


@pytest.fixture(scope="session")
def pristine() -> Path:
    """The checkout that OPEN_INSTRUCT_DIR names; clone it, do not change it."""
    if "OPEN_INSTRUCT_DIR" not in os.environ:
        pytest.skip("OPEN_INSTRUCT_DIR names no open-instruct checkout")
    return Path(os.environ["OPEN_INSTRUCT_DIR"])


@pytest.fixture
def checkout(pristine: Path, tmp_path: Path) -> Path:
    """A fresh clone at the patches' commit, unpatched."""
    return clone(pristine, tmp_path / "open-instruct")


@pytest.fixture(scope="session")
def unpatched(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone that stays unpatched, for the whole session."""
    return clone(pristine, tmp_path_factory.mktemp("unpatched") / "open-instruct")


@pytest.fixture(scope="session")
def patched(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched clone, for the whole session."""
    folder = clone(pristine, tmp_path_factory.mktemp("patched") / "open-instruct")
    subprocess.run([APPLY, folder], check=True)
    return folder


@pytest.fixture(scope="session")
def main_checkout(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """open-instruct's main of August 2026, for the runner."""
    return clone(
        pristine, tmp_path_factory.mktemp("main") / "open-instruct", MAIN, "--", "open_instruct"
    )


def clone(source: Path, target: Path, *what: str) -> Path:
    what = what or ("--detach", UPSTREAM["commit"])
    for command in (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", source, target],
        ["git", "-C", target, "checkout", "--quiet", *what],
    ):
        subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="session")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The libraries that open-instruct e363290 pins; upstream_venv.sh makes such a Python."""
    if "OPEN_INSTRUCT_PYTHON" not in os.environ:
        pytest.skip("OPEN_INSTRUCT_PYTHON names no Python with open-instruct's pins")
    yield from _stack(os.environ["OPEN_INSTRUCT_PYTHON"], tmp_path_factory)


@pytest.fixture(scope="session")
def today(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """This project's own environment, with DeepSpeed and what finetune.py imports besides."""
    for name in MODULES:
        if find_spec(name) is None:
            pytest.skip(f"finetune.py needs {name}, which is not installed here")
    yield from _stack(sys.executable, tmp_path_factory)


class MainStack(Stack):
    """The libraries of open-instruct's main, whose finetune.py asks the hub's cache for a model."""

    @property
    def given(self) -> dict[str, object]:
        cached = self.world / "hub" / "models--tiny--llama"
        if not cached.exists():
            shutil.copytree(self.world / "model", cached / "snapshots" / "0")
            (cached / "refs").mkdir()
            (cached / "refs" / "main").write_text("0")
        own = {
            "model_name_or_path": "tiny/llama",
            "chat_template_name": "tulu",
            "dataset_local_cache_dir": self.world / "tokenised",
            "do_not_randomize_output_dir": True,
        }
        absent = ("train_file", "use_flash_attn", "use_slow_tokenizer", "logging_steps")
        return {key: value for key, value in super().given.items() if key not in absent} | own


@pytest.fixture(scope="session")
def main_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if "OPEN_INSTRUCT_MAIN_PYTHON" not in os.environ:
        pytest.skip("OPEN_INSTRUCT_MAIN_PYTHON names no Python with open-instruct's main's needs")
    yield from _stack(os.environ["OPEN_INSTRUCT_MAIN_PYTHON"], tmp_path_factory, MainStack)


def _stack(
    python: str, tmp_path_factory: pytest.TempPathFactory, kind: type[Stack] = Stack
) -> Iterator[Stack]:
    world = tmp_path_factory.mktemp("world")
    subprocess.run([python, PROJECT / "tests" / "helpers" / "tiny_world.py", world], check=True)
    stack = kind(python, world)
    yield stack
    if "server" in vars(stack):
        stack.server.communicate()


@pytest.fixture
def deepspeed(tmp_path: Path) -> Callable[[str], Path | None]:
    """deepspeed("zero3") → configs/deepspeed/zero3.json, but in fp32, for comparisons; none for
    "ddp"."""

    def config(name: str) -> Path | None:
        if name == "ddp":
            return None
        if name == "zero3" and shutil.which("numactl") is None:
            pytest.skip("DeepSpeed 0.15's ZeRO-3 on CPU needs numactl")
        settings = json.loads((PROJECT / "configs" / "deepspeed" / f"{name}.json").read_text())
        settings["bf16"]["enabled"] = False
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(settings))
        return path

    return config
