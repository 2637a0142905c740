"""A run's options in the words of transformers' TrainingArguments."""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import str_to_bool
from transformers import TrainingArguments

from calibeval.io import InputError
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training.checkpoint import PART
from sweeps.training.options import TrainOptions

TRACKER_PROJECT = "sweeps"


@dataclass(frozen=True)
class Sharding:
    """How a run is sharded over its ranks: the files that `world` names, adapted.

    FSDP and ZeRO-3 split weights, gradients and the optimizer's state; ZeRO-2 splits the latter two
    alone. Without either file every rank has all of them.
    """

    deepspeed: dict[str, Any] | None
    fsdp: dict[str, Any] | None

    @property
    def is_fsdp2(self) -> bool:
        """Whether the run is sharded by FSDP2, which shards each weight and not flat groups."""
        return self.fsdp is not None and self.fsdp["version"] == 2


def training_arguments(
    run: Run, train_options: TrainOptions, world: World, total_updates: int
) -> TrainingArguments:
    """The arguments of the Trainer. Making them joins this process to the other ranks.

    They must be made before the model, because ZeRO-3 splits weights while they are loaded.
    Raises InputError where another number of processes runs than the sweep file asks for, and for
    an FSDP file with a setting that means nothing.
    """
    deepspeed = world.read("deepspeed")
    clip_grad_norm = gradient_norm_limit(train_options, deepspeed)
    if deepspeed is not None:
        deepspeed = adapted_deepspeed_config(deepspeed, clip_grad_norm)
    sharding = Sharding(deepspeed, adapted_fsdp_config(world))

    # TrainingArguments and trackers read the environment, so that it is set first.
    if deepspeed is not None and not torch.cuda.is_available():
        start_deepspeed_without_gpu()
    prepare_trackers(run)
    # By this call the process joins the other ranks.
    arguments = make_arguments(run, train_options, world, sharding, clip_grad_norm, total_updates)
    # Under FSDP2 `make_arguments` has left it off, to be spared a warning that is untrue there.
    arguments.gradient_checkpointing = train_options.gradient_checkpointing
    use_one_gpu(arguments)
    if arguments.world_size != world.processes:
        raise InputError(
            f"{run.config_file}: world asks for {world.processes} processes, "
            f"{arguments.world_size} started; launch with `python -m sweeps train`"
        )
    return arguments


def make_arguments(
    run: Run,
    train_options: TrainOptions,
    world: World,
    sharding: Sharding,
    clip_grad_norm: float,
    total_updates: int,
) -> TrainingArguments:
    """The options of a run by transformers' names, before `training_arguments` completes them."""
    gpu = torch.cuda.is_available()
    is_sharded = sharding.deepspeed is not None or sharding.fsdp is not None
    # TrainingArguments warn where gradient checkpointing meets FSDP: the backward pass would gather
    # all weights a second time. That is true of FSDP1 alone, and `activation_checkpointing`, which
    # they advise, draws other dropout masks when it recomputes. So under FSDP2 they are made
    # without gradient checkpointing, and `training_arguments` switches it on afterwards.
    checkpointing_from_start = train_options.gradient_checkpointing and not sharding.is_fsdp2
    return TrainingArguments(
        output_dir=str(run.checkpoints / PART),
        max_steps=total_updates,
        learning_rate=train_options.learning_rate,
        lr_scheduler_type=train_options.lr_scheduler_type,
        warmup_steps=int(total_updates * train_options.warmup_ratio),
        weight_decay=train_options.weight_decay,
        max_grad_norm=clip_grad_norm,
        per_device_train_batch_size=train_options.per_device_train_batch_size,
        gradient_checkpointing=checkpointing_from_start,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=train_options.seed,
        # Trackers show it. The loss that it would switch on is never computed: `training_step` does
        # not call it, and `patch_trainer` removes it. patch_trainer refuses a factor above 0 that
        # is not its own label_smoothing.
        label_smoothing_factor=train_options.label_smoothing,
        bf16=world.mixed_precision == "bf16",
        fp16=world.mixed_precision == "fp16",
        deepspeed=sharding.deepspeed,
        # transformers 5 takes a bool here; its annotation still has the words of transformers 4.
        fsdp=sharding.fsdp is not None,  # type: ignore[arg-type]
        fsdp_config=sharding.fsdp,
        ddp_find_unused_parameters=False,
        # By `use_cpu` accelerate would leave out DeepSpeed and FSDP. Runs that are sharded without
        # a GPU, as in tests, go without it.
        use_cpu=not gpu and not is_sharded,
        # `start_deepspeed_without_gpu` has made a state, which is used as it is.
        accelerator_config={"use_configured_state": sharding.deepspeed is not None and not gpu},
        save_strategy="no",  # ScheduleCallback decides when to save.
        logging_steps=train_options.logging_steps,
        logging_nan_inf_filter=False,  # The filter would wait for the GPU in every update.
        disable_tqdm=not sys.stderr.isatty(),
        log_level="error",
        log_level_replica="error",
        report_to=train_options.report_to or "none",
        run_name=run.name,
        project=TRACKER_PROJECT,
    )


def start_deepspeed_without_gpu() -> None:
    """Join the other ranks by gloo. accelerate starts DeepSpeed on a CPU only if it is told how."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Let this process train on its own GPU alone, however many it sees.

    transformers would wrap the model of a single process in nn.DataParallel, over all GPUs that
    CUDA_VISIBLE_DEVICES leaves visible. That scatters rows, of which a packed batch has one.
    """
    if arguments.n_gpu > 1:
        print(f"note: of {arguments.n_gpu} visible GPUs {arguments.device} is used", flush=True)
        arguments._n_gpu = 1


def gradient_norm_limit(train_options: TrainOptions, deepspeed: dict[str, Any] | None) -> float:
    """The norm that gradients are clipped to, 0.0 for no clipping.

    The option wins; without it the DeepSpeed file decides, where "auto" means no clipping.
    """
    if train_options.clip_grad_norm is not None:
        return train_options.clip_grad_norm
    limit = deepspeed.get("gradient_clipping") if deepspeed is not None else None
    if limit is None or limit == "auto":
        return 0.0
    return float(limit)


def adapted_fsdp_config(world: World) -> dict[str, Any] | None:
    """The FSDP config with its version, 2 by default, and how FSDP2 loads the model; None without.

    With `cpu_ram_efficient_loading` the first rank alone reads the weights, turns them into fp32,
    and sends each rank its part. Else every rank reads all of them and turns them into fp32. Under
    FSDP2 it is on unless the file says otherwise; FSDP1 is left as the file has it. transformers
    takes each key with `fsdp_` before it too.

    Raises InputError for another version than 1 or 2, and for a `cpu_ram_efficient_loading` that is
    no word for true or false.
    """
    fsdp = world.read("fsdp")
    if fsdp is None:
        return None
    adapted = {key.removeprefix("fsdp_"): value for key, value in fsdp.items()}
    version = str(adapted.get("version", 2))
    if version not in ("1", "2"):
        raise InputError(f"{world.fsdp}: version: found {version}, expected 1 or 2")
    adapted["version"] = int(version)
    if adapted["version"] == 2:
        adapted.setdefault("cpu_ram_efficient_loading", True)
    if "cpu_ram_efficient_loading" in adapted:
        setting = adapted["cpu_ram_efficient_loading"]
        try:
            # These are the words that transformers takes.
            adapted["cpu_ram_efficient_loading"] = bool(str_to_bool(str(setting)))
        except ValueError:
            raise InputError(
                f"{world.fsdp}: cpu_ram_efficient_loading: found {setting}, expected true or false"
            ) from None
    return adapted


def first_rank_reads(world: World) -> bool:
    """Whether the first rank alone reads the model, and sends each rank its part under FSDP2."""
    adapted = adapted_fsdp_config(world)
    if adapted is None or adapted["version"] != 2:
        return False
    return adapted["cpu_ram_efficient_loading"]


def adapted_deepspeed_config(deepspeed: dict[str, Any], clip_grad_norm: float) -> dict[str, Any]:
    """A DeepSpeed config in which one batch of the Trainer is a whole update."""
    adapted = dict(deepspeed)
    # DeepSpeed checks that the two batch sizes and the accumulation multiply out, and reads nothing
    # else from the sizes. By the accumulation it would divide losses, and make its step every so
    # many backward passes. `SweepTrainer` does both itself, so the accumulation is 1.
    adapted["train_micro_batch_size_per_gpu"] = "auto"
    adapted["train_batch_size"] = "auto"
    adapted["gradient_accumulation_steps"] = 1
    adapted["gradient_clipping"] = clip_grad_norm
    return adapted


def prepare_trackers(run: Run) -> None:
    """Let trackers go on in the same page when a run resumes, unless the environment says else."""
    os.environ.setdefault("WANDB_PROJECT", TRACKER_PROJECT)
    os.environ.setdefault("WANDB_RUN_ID", run.name)
    os.environ.setdefault("WANDB_RESUME", "allow")
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run.path / "tensorboard"))
