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


def comparison(name: str, rows: Sequence[dict]) -> str:
    """One problem's methods, in units of the product E Cᵀ."""
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
