"""The runner: open-instruct's finetune.py with the smoothed loss, and no file changed.

    python -m smoothed_open_instruct CHECKOUT ARGUMENTS…
    accelerate launch … -m smoothed_open_instruct CHECKOUT ARGUMENTS…

ARGUMENTS are finetune.py's, with `--label_smoothing`, `--loss_impl`, `--filter_eps` and the
`--reduce_loss` of the patches. A wrong value of these ends the process with exit status 2 before
anything is loaded. So does a finetune.py whose loss cannot be changed from outside; but where its
call of `accelerator.prepare` alone shows that, the model is loaded by then.
"""

import dataclasses
import runpy
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from smoothed_open_instruct.arguments import (
    UPSTREAM_REDUCTIONS,
    check_arguments,
    refuse,
    replaces_loss,
)
from smoothed_open_instruct.stack import adapt_todays_libraries
from smoothed_open_instruct.training_loss import TrainingLoss

# The places of finetune.py that the hooks rest on. Without one of them the loss would silently stay
# what it was.
HOOKED = (
    "class FlatArguments",
    "ArgumentParserPlus(",
    "accelerate import Accelerator",
    "accelerator.prepare(",
    "accelerator.accumulate(",
    "outputs.loss",
)


# The line of patches/0001-arguments.patch that every patched finetune.py has.
PATCHED_MARK = "import smoothed_open_instruct as ours\n"


@dataclasses.dataclass
class RunState:
    """What the script of this process has parsed, and what its model's loss was made of.

    Once `prepare` has made the loss, `args.reduce_loss` is "mean": the script's branch for that is
    the one that takes `outputs.loss` as it is. What was asked for is then in `loss_args` alone.
    """

    args: Any = None  # the script's own, which it goes on reading
    attaches_loss: bool = False
    loss_args: Namespace | None = None  # a copy from before that change; None: no loss was made


RUN = RunState()


def main(words: list[str]) -> None:
    """Hook what the script of the checkout `words[0]` imports; then run it with the other words."""
    if not words or words[0].startswith("-"):
        refuse(f"which checkout?\n{__doc__}")
    checkout = Path(words[0]).absolute()
    script = script_of(checkout)
    sys.path.insert(0, str(checkout))
    sys.argv = [str(script), *words[1:]]
    import accelerate
    from open_instruct import utils

    adapt_todays_libraries()
    utils.ArgumentParserPlus = parser_with_flags(utils.ArgumentParserPlus)
    accelerate.Accelerator = with_loss(accelerate.Accelerator)  # type: ignore[misc]
    runpy.run_path(str(script), run_name="__main__")


def script_of(checkout: Path) -> Path:
    """The checkout's finetune.py; ends the process where its loss cannot be changed from here."""
    script = checkout / "open_instruct" / "finetune.py"
    if not script.is_file():
        refuse(f"{checkout} has no open_instruct/finetune.py, so it is no open-instruct checkout")
    text = script.read_text(encoding="utf-8")
    if PATCHED_MARK in text:
        undo = f"patches/apply.sh {checkout} --reverse"
        refuse(
            f"{checkout} is patched: run its finetune.py itself, or undo the patches with {undo}"
        )
    absent = [place for place in HOOKED if place not in text]
    if absent:
        lacking = ", ".join(f"no `{place}`" for place in absent)
        refuse(f"{script} has {lacking}: its loss cannot be changed from outside")
    return script


def parser_with_flags(parser_class: Any) -> Any:
    """The checkout's parser class, whose argument classes get this project's flags."""

    def make_parser(argument_classes: Any) -> Any:
        if not isinstance(argument_classes, tuple):
            argument_classes = (argument_classes,)
        return parser_class([with_flags(argument_class) for argument_class in argument_classes])

    return make_parser


def with_flags(base: Any) -> Any:
    """The script's argument class with this project's flags; another class as it is."""
    if base.__name__ != "FlatArguments":
        return base
    upstream_reductions: tuple[str, ...] = UPSTREAM_REDUCTIONS
    if "reduce_loss" not in base.__dataclass_fields__:  # as at later commits
        upstream_reductions = ("mean",)

    @dataclasses.dataclass
    class FlatArguments(base):
        reduce_loss: str = "mean"
        label_smoothing: float = 0.0
        loss_impl: str = "auto"
        filter_eps: str | None = None

        def __post_init__(self) -> None:
            check_arguments(self, upstream_reductions)
            reduction = self.reduce_loss
            # The script's own check takes "mean" at every commit.
            self.reduce_loss = "mean"
            try:
                super().__post_init__()
            except ValueError as error:
                refuse(error)
            # Where there is a YAML file, ArgumentParserPlus makes a second object of this one's
            # values, which must be what was asked for.
            self.reduce_loss = reduction
            RUN.args = self
            RUN.attaches_loss = replaces_loss(self, upstream_reductions)
            if RUN.attaches_loss and getattr(self, "sequence_parallel_size", 1) > 1:
                refuse("this loss cannot be combined with sequence_parallel_size above 1")

    return FlatArguments


def with_loss(base: Any) -> Any:
    """accelerate's class, whose `prepare` gives the model the loss that was asked for."""

    class Accelerator(base):
        def prepare(self, *objects: Any) -> Any:
            if not RUN.attaches_loss:
                return super().prepare(*objects)
            if len(objects) != 4:
                refuse(
                    f"finetune.py prepares {len(objects)} objects, and not model, optimizer, "
                    "loader and scheduler: its loss cannot be changed from outside"
                )
            model, optimizer, loader, scheduler = objects
            RUN.loss_args = Namespace(**vars(RUN.args))
            # From here on the script reads this, and takes `outputs.loss` as it is (`RunState`).
            RUN.args.reduce_loss = "mean"
            loss = TrainingLoss(RUN.loss_args, self)
            loss.attach(model)
            model, optimizer, loader, scheduler = super().prepare(
                model, optimizer, loader, scheduler
            )
            return model, optimizer, Batches(loader, loss, model), scheduler

        def init_trackers(
            self, project_name: str, config: dict | None = None, **options: Any
        ) -> None:
            """Start the trackers, which show the reduction that was asked for."""
            if config is not None and RUN.loss_args is not None:
                config = {**config, "reduce_loss": RUN.loss_args.reduce_loss}
            super().init_trackers(project_name, config, **options)

        def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
            if not isinstance(loader, Batches):
                return super().skip_first_batches(loader, num_batches)
            rest = super().skip_first_batches(loader.loader, num_batches)
            return dataclasses.replace(loader, loader=rest)

    return Accelerator


@dataclasses.dataclass
class Batches:
    """A data loader with what `TrainingLoss.batches` adds to its micro-batches."""

    loader: Any
    loss: TrainingLoss
    model: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loss.batches(self.loader, self.model))

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        # An object that is being copied has no loader yet, and would look for it here without end.
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


if __name__ == "__main__":
    main(sys.argv[1:])
