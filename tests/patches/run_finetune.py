"""Runs finetune.py for tests, without the ten seconds that importing its libraries takes.

Each line of standard input is a run as JSON (ranks, environment, arguments, options, log), answered
by its exit status.
"""

import contextlib
import functools
import importlib
import json
import logging
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any

import accelerate.utils
import torch
import torch.nn.functional as F
import transformers

import smoothed_open_instruct.__main__


def main(
    checkout: str,
    *arguments: str,
    dtype: str | None = "float32",
    torch_smoothing: float | None = None,
    faults: tuple[str, ...] = (),
    runner: bool = False,
) -> None:
    """Upstream loads weights in bf16, whose rounding hides what a test looks for: `dtype`.
    `torch_smoothing` gives an unpatched checkout torch's own label smoothing, as the yardstick.
    `faults` make happen what a test will not wait for. `runner` has smoothed_open_instruct run an
    unpatched checkout."""
    if dtype:
        load = transformers.AutoModelForCausalLM.from_pretrained
        wide = {"torch_dtype": getattr(torch, dtype)}
        transformers.AutoModelForCausalLM.from_pretrained = lambda *args, dtype=None, **kwargs: (
            load(*args, **kwargs | wide)
        )
    if torch_smoothing is not None:
        dense = F.cross_entropy
        F.cross_entropy = lambda *args, **kwargs: dense(
            *args, **kwargs | {"label_smoothing": torch_smoothing}
        )
    for fault in faults:
        inject(*fault.split(":"))
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available():
        # accelerate 1.x starts DeepSpeed without CUDA only if told which backend to use.
        accelerate.utils.InitProcessGroupKwargs = functools.partial(
            accelerate.utils.InitProcessGroupKwargs, backend="gloo"
        )
    if runner:
        smoothed_open_instruct.__main__.main([checkout, *arguments])
    else:
        script = os.path.join(checkout, "open_instruct", "finetune.py")
        sys.path.insert(0, checkout)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def inject(fault: str, step: str = "") -> None:
    """step:N kills the run after that step; saved:N when checkpoint N is written, but not marked;
    saving:N while the first process still writes it, slowly; trained when the model is marked.
    skew: the first process deletes slowly, and the others are late after each checkpoint."""
    import smoothed_open_instruct as ours

    rank = int(os.environ["RANK"])
    save, mark, rmdir = accelerate.Accelerator.save_state, ours.mark_trained, os.rmdir

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def save_state(self: Any, folder: str) -> None:
        wanted = folder.endswith(f"_{step}")
        if (fault, rank, wanted) == ("saving", 0, True):
            os.makedirs(folder, exist_ok=True)
            time.sleep(3)
            die()
        save(self, folder)
        if fault == "saved" and wanted:
            self.wait_for_everyone()
            die()
        if fault == "skew" and rank > 0:
            time.sleep(0.2)

    class AtStep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f"Step: {step}," in record.getMessage():
                die()

    if fault == "step":
        logging.getLogger("__main__").addHandler(AtStep())
    elif fault == "trained":
        # The others leave the mark to the first: dying early they would end it while it writes.
        ours.mark_trained = lambda *args: (mark(*args), rank or die())
    else:
        accelerate.Accelerator.save_state = save_state
    if fault == "skew":
        os.rmdir = lambda *args, **kwargs: (time.sleep(0.5), rmdir(*args, **kwargs))


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")  # DeepSpeed prints while it is imported
    os.dup2(2, 1)
    for name in ("datasets", "deepspeed", "peft", "wandb", "smoothed_open_instruct"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        run = json.loads(line)
        ranks = {start(run, rank) for rank in range(run["ranks"])}
        status = 0
        while ranks:
            child, ended = os.wait()
            if child in ranks:
                ranks.remove(child)
                if ended and not status:
                    status = ended
                    for other in ranks:
                        os.kill(other, signal.SIGKILL)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def start(run: dict[str, Any], rank: int) -> int:
    """A process of the run, as torchrun would have started it; returns its id."""
    if child := os.fork():
        return child
    code = 1
    try:
        log = os.open(run["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(run["environment"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        main(*run["arguments"], **run["options"])
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
