"""Warnings that name the line of the user's program, and not one of a library that it went through.

The libraries are those of LIBRARIES. The code of any other, such as LLaMA-Factory's, counts as the
user's program."""

import sys
import warnings

import torch

# Their frames may stand between a patched model and the program that calls or trains it. contextlib
# is where a decorator such as `torch.no_grad()` may call the function it decorates.
LIBRARIES = (
    __name__.partition(".")[0],
    "accelerate",
    "axolotl",
    "contextlib",
    "deepspeed",
    "peft",
    "torch",
    "transformers",
    "trl",
)


def warn_user(message: str) -> None:
    """Warn, at the innermost line that is in none of the LIBRARIES, or at the outermost of all."""
    stack_level = 2  # the caller of this function
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_in_a_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        stack_level += 1
    warnings.warn(message, stacklevel=stack_level)


def warn_user_once(warnings_given: set[str], message: str) -> None:
    """Warn, unless the message was given already; compiled code does not warn."""
    if message not in warnings_given and not torch.compiler.is_compiling():
        warnings_given.add(message)
        warn_user(message)


def _is_in_a_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in LIBRARIES
