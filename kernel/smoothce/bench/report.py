"""What is printed: a Markdown table that carries its command, hardware and versions; and JSON."""

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence

import torch

PACKAGES = ("torch", "triton", "liger-kernel", "cut-cross-entropy", "quack-kernels")
PACKAGES += ("torchtune", "trl", "unsloth-zoo")


def provenance(device: str) -> dict[str, str]:
    """Command, hardware and versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    hardware = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads of {os.cpu_count()}"
    )
    arguments = shlex.join(sys.argv[1:])
    return {
        "command": f"python -m smoothce.bench {arguments}".rstrip(),
        "hardware": hardware,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


COLUMNS = ("method", "fwd ms", "fwd+bwd ms", "in products", "× torch", "peak MB", "torch ÷")
COLUMNS += ("dE error", "dC error")


def markdown(results: Sequence[dict], source: dict[str, str]) -> str:
    """One table for each case, with ratios to torch and to the matrix product of the same run."""
    blocks = [f"`{source['command']}`  \n{source['hardware']}; {source['versions']}"]
    for result in results:
        rows = {row["method"]: row for row in result["rows"]}
        head = [f"**{result['case']}**", "", "| " + " | ".join(COLUMNS) + " |"]
        head.append("|---" * len(COLUMNS) + "|")
        body = ["| " + " | ".join(_cells(row, rows)) + " |" for row in rows.values()]
        blocks.append("\n".join(head + body))
    return "\n\n".join(blocks)


def _cells(row: dict, rows: dict[str, dict]) -> list[str]:
    torchs, products = rows.get("torch"), row["both"] / rows["matmul"]["forward"]
    cells = [row["method"], f"{row['forward']:.4g}", f"{row['both']:.4g}", f"{products:.2f}"]
    if "peak" not in row:  # the bare matrix product
        return cells + ["–"] * 5
    times = f"{row['both'] / torchs['both']:.2f}" if torchs else "–"
    less = f"{torchs['peak'] / row['peak']:.1f}" if torchs else "–"
    return [*cells, times, f"{row['peak']:.0f}", less, *(f"{e:.1e}" for e in row["errors"])]


def comparison(name: str, rows: Sequence[dict]) -> str:
    """A GPU's table: one problem's methods, in units of the product E Cᵀ."""
    lines = [
        f"\n### {name}\n",
        "| method | β | forward ms | fwd+bwd ms | forward / GEMM | fwd+bwd / GEMM "
        "| MB held in the forward | MB held in the backward | MB beyond inputs and gradients "
        "| dE error | dC error | dC error, no targets | pairs computed |",
        "|---" * 13 + "|",
    ]
    for r in rows:
        if "failed" in r:
            lines.append(f"| {r['method']} | {r['beta']:g} | {r['failed']} |" + " |" * 10)
            continue
        pairs = "–" if r["pairs"] is None else f"{100 * r['pairs']:.1f} %"
        errors = (r[f"error_{part}"] for part in ("hidden", "weight", "unseen"))
        errors = " | ".join("–" if error is None else f"{error:.1e}" for error in errors)
        lines.append(
            f"| {r['method']} | {r['beta']:g} | {r['forward_ms']:.2f} | {r['both_ms']:.2f} "
            f"| {r['forward_gemms']:.2f} | {r['both_gemms']:.2f} "
            f"| {r['forward_mb']:.0f} | {r['backward_mb']:.0f} | {r['extra_mb']:.0f} "
            f"| {errors} | {pairs} |"
        )
    return "\n".join(lines)
