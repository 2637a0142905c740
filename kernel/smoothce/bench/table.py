"""Markdown tables of figures, for `python -m smoothce.bench` and for kernel/benchmarks."""

import platform

import torch

MISSING = "–"  # stands where something was not measured


def number(value: float | None, form: str) -> str:
    """The number in this format, or a dash."""
    return MISSING if value is None else format(value, form)


def markdown_row(cells: list[str]) -> str:
    """A line of a table. A bar would end a cell, so that a slash stands for it."""
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def markdown_table(title: str, head: list[str], rows: list[list[str]]) -> str:
    """A heading, the head and the rows, one below the other."""
    lines = [f"\n### {title}\n", markdown_row(head), "|---" * len(head) + "|"]
    lines += [markdown_row(cells) for cells in rows]
    return "\n".join(lines)


def describe_hardware(device: str) -> str:
    """The GPU's name, or the CPU's kind and how many threads torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
