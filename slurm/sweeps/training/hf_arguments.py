"""A run's options in the words of transformers' TrainingArguments."""

import os
import sys
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import enable_fsdp_ram_efficient_loading
from transformers import TrainingArguments

from calibeval.io import InputError
from sweeps.runs.run import Run
from sweeps.runs.schema import DistributedConfig
from sweeps.training.checkpoint import PART
from sweeps.training.options import TrainOptions

TRACKER_PROJECT = "sweeps"


def training_arguments(
    run: Run, train_options: TrainOptions, distributed: DistributedConfig, total_updates: int
) -> TrainingArguments:
    """The arguments of the Trainer. Making them joins this process to the other ranks.

    They must be made before the model, because ZeRO-3 splits weights while they are loaded.
    Raises InputError where another number of processes runs than the sweep file asks for.
    """
    gpu = torch.cuda.is_available()
    fsdp = distributed.read("fsdp")
    fsdp2 = False
    first_rank_reads = False
    if fsdp is not None:
        fsdp = adapted_fsdp_config(fsdp)
        fsdp2 = fsdp["version"] == 2
        first_rank_reads = fsdp2 and is_true(fsdp["cpu_ram_efficient_loading"])
    deepspeed = distributed.read("deepspeed")
    clip_grad_norm = gradient_norm_limit(train_options, deepspeed)
    if deepspeed is not None:
        deepspeed = adapted_deepspeed_config(deepspeed, clip_grad_norm)
        if not gpu:
            # Without a GPU accelerate starts DeepSpeed only if it is told which backend to use.
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            PartialState(backend="gloo")
    prepare_trackers(run)
    # Under FSDP2 gradient checkpointing is switched on below, once the arguments are made. They
    # would warn that the backward pass gathers all weights a second time, which is true of FSDP1
    # alone, and advise `activation_checkpointing`, whose recomputation draws other dropout masks.
    checkpointing_from_start = train_options.gradient_checkpointing and not fsdp2
    arguments = TrainingArguments(
        output_dir=str(run.checkpoints / PART),
        max_steps=total_updates,
        # The options
        learning_rate=train_options.learning_rate,
        lr_scheduler_type=train_options.lr_scheduler_type,
        warmup_steps=int(total_updates * train_options.warmup_ratio),
        weight_decay=train_options.weight_decay,
        max_grad_norm=clip_grad_norm,
        per_device_train_batch_size=train_options.per_device_train_batch_size,
        gradient_checkpointing=checkpointing_from_start,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=train_options.seed,
        # Trackers show it; the loss that it would switch on is replaced in `fit.install_loss`.
        label_smoothing_factor=train_options.label_smoothing,
        # Precision and processes
        bf16=distributed.mixed_precision == "bf16",
        fp16=distributed.mixed_precision == "fp16",
        deepspeed=deepspeed,
        fsdp=fsdp is not None,  # type: ignore[arg-type]  # which is to become a bool
        fsdp_config=fsdp,
        ddp_find_unused_parameters=False,
        use_cpu=not gpu and deepspeed is None and fsdp is None,
        accelerator_config={"use_configured_state": deepspeed is not None and not gpu},
        # Saving and logging
        save_strategy="no",  # ScheduleCallback says when
        logging_steps=train_options.logging_steps,
        logging_nan_inf_filter=False,  # which would wait for the GPU in every update
        disable_tqdm=not sys.stderr.isatty(),
        log_level="error",
        log_level_replica="error",
        report_to=train_options.report_to or "none",
        run_name=run.name,
        project=TRACKER_PROJECT,
    )
    arguments.gradient_checkpointing = train_options.gradient_checkpointing
    use_one_gpu(arguments)
    if first_rank_reads:
        # The model is loaded before the Trainer, which would say so too late.
        enable_fsdp_ram_efficient_loading()
    if arguments.world_size != distributed.processes:
        raise InputError(
            f"{run.config_file}: world asks for {distributed.processes} processes, "
            f"{arguments.world_size} started; launch with `python -m sweeps train`"
        )
    return arguments


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


def adapted_fsdp_config(fsdp: dict[str, Any]) -> dict[str, Any]:
    """An FSDP config by which the first rank alone reads the model, unless it says otherwise.

    With `cpu_ram_efficient_loading` it reads and widens the weights and broadcasts them; else every
    rank reads and widens all of them. transformers takes each key with `fsdp_` before it too.
    """
    adapted = {key.removeprefix("fsdp_"): value for key, value in fsdp.items()}
    adapted["version"] = int(adapted.get("version", 2))
    if adapted["version"] == 2:
        adapted.setdefault("cpu_ram_efficient_loading", True)
    return adapted


def is_true(setting: Any) -> bool:
    """Whether a setting of an FSDP file is true, which transformers also takes as text."""
    return str(setting).lower() == "true"


def adapted_deepspeed_config(deepspeed: dict[str, Any], clip_grad_norm: float) -> dict[str, Any]:
    """A DeepSpeed config in which one batch of the Trainer is a whole update."""
    adapted = dict(deepspeed)
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
