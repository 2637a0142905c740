"""Fixtures for the tests against a real open-instruct checkout, which is cloned, never changed."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from sweeps.backends.open_instruct import PACKAGES

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
APPLY = PROJECT / "patches" / "apply.sh"
UPSTREAM = dict(
    line.split(maxsplit=1) for line in (PROJECT / "patches" / "UPSTREAM").read_text().splitlines()
)
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
    names = ("pytorch_model.bin", "model.safetensors")
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
        ours = {
            "PYTHONPATH": str(PROJECT / "kernel"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        return os.environ | ours

    def finetune(
        self,
        checkout: Path,
        output: Path,
        *arguments: object,
        ranks: int = 1,
        deepspeed: Path | None = None,
        dtype: str | None = "float32",
        torch_smoothing: float | None = None,
        kill_after_step: int | None = None,
    ) -> Run:
        """Train the tiny model; fails the test if the script does, unless it was to be killed."""
        port = str(_free_port())
        environment = self.environment | {"HF_DATASETS_CACHE": str(self.world / "cache")}
        if deepspeed:
            launch = ["accelerate.commands.launch", "--num_machines", "1", "--dynamo_backend", "no"]
            launch += ["--num_processes", str(ranks), "--main_process_port", port]
            launch += ["--use_deepspeed", "--deepspeed_config_file", str(deepspeed)]
        else:
            # `accelerate launch --cpu` starts one process, whatever --num_processes says.
            environment["ACCELERATE_USE_CPU"] = "true"
            launch = ["torch.distributed.run", "--nproc_per_node", str(ranks)]
            launch += ["--master_port", port]
        script = [str(HERE / "run_finetune.py"), str(checkout)]
        script += ["--dtype", dtype] if dtype else []
        script += ["--torch-smoothing", str(torch_smoothing)] if torch_smoothing is not None else []
        given = {
            "model_name_or_path": self.world / "model",
            "train_file": self.world / "train.jsonl",
            "output_dir": output,
            "use_flash_attn": False,
            "use_slow_tokenizer": False,
            "fused_optimizer": False,
            "max_seq_length": 64,
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            "push_to_hub": False,
            "try_launch_beaker_eval_jobs": False,
        }
        flags = [str(word) for key, value in given.items() for word in (f"--{key}", value)]
        process = subprocess.Popen(
            [self.python, "-m", *launch, *script, "--", *flags, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=self.world,
        )
        log = []
        for line in process.stdout:
            log.append(line)
            match = LOSS.search(line)
            if match and kill_after_step is not None and int(match[1]) >= kill_after_step:
                # The launcher puts its workers into sessions of their own.
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                break
        log += process.stdout.readlines()
        code = process.wait()
        run = Run(output, "".join(log), code)
        assert code == 0 or kill_after_step is not None, run.log[-6000:]
        return run


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def clone(source: Path, target: Path) -> Path:
    for command in (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", source, target],
        ["git", "-C", target, "checkout", "--quiet", "--detach", UPSTREAM["commit"]],
    ):
        subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="session")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """The libraries that open-instruct e363290 pins; upstream_venv.sh makes such a Python."""
    if "OPEN_INSTRUCT_PYTHON" not in os.environ:
        pytest.skip("OPEN_INSTRUCT_PYTHON names no Python with open-instruct's pins")
    return _stack(os.environ["OPEN_INSTRUCT_PYTHON"], tmp_path_factory)


@pytest.fixture(scope="session")
def today(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """This project's own environment, with DeepSpeed and what finetune.py imports besides."""
    for name in PACKAGES:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"finetune.py needs {name}, which is not installed here")
    return _stack(sys.executable, tmp_path_factory)


def _stack(python: str, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    world = tmp_path_factory.mktemp("world")
    subprocess.run([python, HERE / "tiny_world.py", world], check=True)
    return Stack(python, world)


@pytest.fixture(scope="session")
def numactl() -> None:
    """DeepSpeed 0.15 on CPU calls numactl under ZeRO-3."""
    if shutil.which("numactl") is None:
        pytest.skip("DeepSpeed's ZeRO-3 on CPU needs numactl")


@pytest.fixture
def deepspeed(tmp_path: Path) -> Callable[[str], Path]:
    """deepspeed("zero3") → configs/deepspeed/zero3.json, but in fp32, for comparisons."""

    def config(name: str) -> Path:
        settings = json.loads((PROJECT / "configs" / "deepspeed" / f"{name}.json").read_text())
        settings["bf16"]["enabled"] = False
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(settings))
        return path

    return config
