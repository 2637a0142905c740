"""What the loss saves in a plain training loop, beside transformers' own loss, on one CUDA GPU.

    python benchmarks/plain_loop.py
    python benchmarks/plain_loop.py --models qwen-1.5b --sequences 8

The same model (random weights of a real shape, in bf16, and fused AdamW's moments in bf16 too)
takes the same random tokens in every row, with gradient checkpointing. An update is --sequences
sequences of --length tokens, all of which are learned. Losses:

    smoothed      patch_model at β = 0.1, as it comes
    workspace=0   the same in the least memory: the logits are computed a second time
    transformers  the model's own loss, which does not smooth and holds all logits

Columns: tokens a second (the median over --steps updates after three that are not timed), the peak
of allocated GPU memory in GB (10⁹ bytes), and the last update's loss in nats. Losses of different
rows differ by what smoothing adds. A row is one trial; rows follow each other in one process.
"""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from training import MODELS  # benchmarks/training.py, beside this file

import smoothce

WARM_UP = 3  # updates that are not timed: kernels are compiled and chosen in them
LABEL_SMOOTHING = 0.1
# The options of `patch_model` for each row; None leaves the model's own loss.
LOSSES: dict[str, dict[str, Any] | None] = {
    "smoothed": {"label_smoothing": LABEL_SMOOTHING},
    "workspace=0": {"label_smoothing": LABEL_SMOOTHING, "workspace": 0},
    "transformers": None,
}


@dataclass(frozen=True)
class Trial:
    """What one row shows."""

    tokens_per_second: float
    peak_gigabytes: float
    loss: float  # nats, of the last update


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["qwen-1.5b", "llama-1b"], choices=MODELS)
    parser.add_argument("--sequences", type=int, default=4, help="of an update")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20, help="updates that are timed")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU, and a GPU's memory is what this measures")
    return arguments


def make_model(name: str) -> Any:
    """The model on the GPU, in training mode, with random weights and gradient checkpointing."""
    import transformers

    torch.manual_seed(0)
    architecture = getattr(transformers, f"{MODELS[name].architecture}ForCausalLM")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = architecture(MODELS[name].config())
    finally:
        torch.set_default_dtype(default)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    return model.train()


def run_trial(name: str, options: dict[str, Any] | None, arguments: argparse.Namespace) -> Trial:
    """Train on random tokens, and measure."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = make_model(name)
    if options is not None:
        smoothce.patch_model(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    size = (arguments.sequences, arguments.length)
    generator = torch.Generator("cuda").manual_seed(1)
    vocabulary = MODELS[name].shape.vocab_size
    seconds = []
    loss = torch.tensor(float("nan"))
    for _ in range(WARM_UP + arguments.steps):
        tokens = torch.randint(vocabulary, size, device="cuda", generator=generator)
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    pace = arguments.sequences * arguments.length / statistics.median(seconds[WARM_UP:])
    return Trial(pace, torch.cuda.max_memory_allocated() / 1e9, loss.item())


def main() -> int:
    """Measure every loss with every model; print the table."""
    arguments = parse()
    rows = []
    for name in arguments.models:
        for label, options in LOSSES.items():
            trial = run_trial(name, options, arguments)
            gc.collect()  # A patched head and what patches it refer to each other.
            pace = f"{trial.tokens_per_second:,.0f}"
            rows.append([name, label, pace, f"{trial.peak_gigabytes:.1f}", f"{trial.loss:.3f}"])
            print(" ".join(rows[-1]), flush=True)
    print(f"\n### {torch.cuda.get_device_name()}\n")
    print("| model | loss | tokens/s | GB | last loss |\n|---|---|---|---|---|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
