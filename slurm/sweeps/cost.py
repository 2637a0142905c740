"""What a sweep will take, said before anything starts: GPU hours, disk, gated models."""

import re
from pathlib import Path
from statistics import median

from sweeps.plan import Cell, Plan
from sweeps.prefetch import hub_snapshot, on_hub
from sweeps.run import read_rows

PEAK = 989e12  # bf16 FLOPs a second of an H100 or H200
UTILISATION = 0.34  # of Llama 3 8B's shape on 4 H200s: patches/README.md
BYTES = 4  # of a data file, a token
STATE = 14  # bytes a parameter of a checkpoint: fp32 weights and AdamW's two, 16-bit weights
GATED = ("meta-llama/", "google/gemma", "mistralai/")


def cost(plan: Plan) -> list[str]:
    """Sentences, each saying what in it is measured and what estimated."""
    todo = [cell for cell in plan.cells if not cell.run.done]
    names = sorted({cell.config.train["model_name_or_path"] for cell in plan.cells})
    lines = []
    speeds = measured(plan)
    hours = [gpu_hours(plan, cell, speeds) for cell in todo]
    if None in hours:
        lines.append("GPU hours: not known before the models and their data are here")
    elif todo:
        told = sum(setting(cell) in speeds for cell in todo)
        lines.append(
            f"about {sum(hours):,.0f} GPU hours of training, {max(hours):,.0f} the longest run: of "
            f"{told} runs by tokens/s measured here, of {len(todo) - told} estimated, with 6 × "
            f"parameters × tokens at {UTILISATION:.0%} of an H100 and {BYTES} bytes a token"
        )
    sizes = {name: parameters(name) for name in names}
    if all(sizes.values()):
        largest = max(sizes.values()) * STATE * plan.sweep.train.get("keep_last_n_checkpoints", 3)
        models = sum(2 * sizes[cell.config.train["model_name_or_path"]] for cell in plan.cells)
        kept = "deleted once scored" if plan.sweep.keep == "scores" else f"{gigabytes(models)} kept"
        lines.append(
            f"estimated disk: models {kept}, base models {gigabytes(2 * sum(sizes.values()))}, "
            f"checkpoints of a run at work up to {gigabytes(largest)}"
        )
    if gated := [name for name in names if on_hub(name) and name.startswith(GATED)]:
        pages = " ".join(f"https://huggingface.co/{name}" for name in gated)
        lines.append(f"gated models, whose licence you accept first: {pages}; export HF_TOKEN=…")
    return lines


def setting(cell: Cell) -> tuple[str, str]:
    """What decides a run's speed: its model and its data."""
    return cell.config.train["model_name_or_path"], cell.config.train.get("train_file") or ""


def measured(plan: Plan) -> dict[tuple, float]:
    """Tokens/s of each setting of which a run has trained here."""
    found: dict[tuple, list] = {}
    for cell in plan.cells:
        for row in read_rows(cell.run.metrics):
            if "tokens_per_second" in row:
                found.setdefault(setting(cell), []).append(row["tokens_per_second"])
    return {key: median(speeds) for key, speeds in found.items()}


def gpu_hours(plan: Plan, cell: Cell, speeds: dict[tuple, float]) -> float | None:
    """Of one run's training; None where its model or data is of unknown size."""
    (name, data), train, world = setting(cell), cell.config.train, plan.sweep.world
    stated = {one.to: one.gigabytes for one in plan.sweep.prefetch.datasets}
    size = Path(data).stat().st_size if Path(data).is_file() else 1e9 * (stated.get(data) or 0)
    if not size or not (count := parameters(name)):
        return None
    tokens = size / BYTES * (train.get("num_train_epochs") or 1)
    if speed := speeds.get((name, data)):
        return tokens / speed * world.processes_per_node / 3600
    return 6 * count * tokens / (UTILISATION * PEAK) / 3600


def parameters(name: str) -> float | None:
    """Of a model's files, or else what its name says, such as 7B; None where it says nothing."""
    folder = hub_snapshot(name) if on_hub(name) else Path(name)
    if folder and (config := folder / "config.json").is_file():
        width = 4 if '"float32"' in config.read_text("utf-8") else 2
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / width
    said = re.search(r"(\d+(?:\.\d+)?)b\b", name, re.IGNORECASE)
    return float(said[1]) * 1e9 if said else None


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.0f} GB"
