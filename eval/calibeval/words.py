"""Counts as people write them."""


def counted(number: int, noun: str) -> str:
    """1 run, 24 runs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
