"""A run's options in the words of TRL's SFTConfig."""

import os
import sys
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import str_to_bool
from trl import SFTConfig

from calibeval.io import InputError
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.training.checkpoint import PART
from sweeps.training.options import TrainOptions

TRACKER_PROJECT = "sweeps"


def sft_config(
    run: Run, train_options: TrainOptions, world: World, total_updates: int
) -> SFTConfig:
    """The configuration of the SFTTrainer. Making it joins this process to the other ranks.

    It must be made before the model, because ZeRO-3 splits weights while they are loaded. How many
    micro-batches an update has, and whether they are packed, is not known then (`fit`).
    Raises InputError where another number of processes runs than the sweep file asks for, and for
    an FSDP file with a setting that means nothing.
    """
    deepspeed = world.read("deepspeed")
    clip_grad_norm = gradient_norm_limit(train_options, deepspeed)
    if deepspeed is not None:
        deepspeed = adapted_deepspeed_config(deepspeed, clip_grad_norm)
    fsdp = adapted_fsdp_config(world)
    gpu = torch.cuda.is_available()
    # SFTConfig reads the environment, as trackers do, so that it is set first.
    if deepspeed is not None and not gpu:
        start_deepspeed_without_gpu()
    prepare_trackers(run)
    # transformers warns where gradient checkpointing meets FSDP: the backward pass would gather all
    # weights a second time. That is true of FSDP1 alone, and `activation_checkpointing`, which it
    # advises, draws other dropout masks when it recomputes. So under FSDP2 it is switched on below.
    is_fsdp2 = fsdp is not None and fsdp["version"] == 2
    # By this call the process joins the other ranks.
    config = SFTConfig(
        output_dir=str(run.checkpoints / PART),
        max_steps=total_updates,
        max_length=None,  # `tokenization` has cut them.
        learning_rate=train_options.learning_rate,
        lr_scheduler_type=train_options.lr_scheduler_type,
        warmup_steps=int(total_updates * train_options.warmup_ratio),
        weight_decay=train_options.weight_decay,
        max_grad_norm=clip_grad_norm,
        gradient_checkpointing=train_options.gradient_checkpointing and not is_fsdp2,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=train_options.seed,
        bf16=world.mixed_precision == "bf16",
        fp16=world.mixed_precision == "fp16",
        deepspeed=deepspeed,
        # transformers 5 takes a bool here; its annotation still has the words of transformers 4.
        fsdp=fsdp is not None,  # type: ignore[arg-type]
        fsdp_config=fsdp,
        ddp_find_unused_parameters=False,
        # By `use_cpu` accelerate would leave out DeepSpeed and FSDP. Runs that are sharded without
        # a GPU, as in tests, go without it.
        use_cpu=not gpu and deepspeed is None and fsdp is None,
        # `start_deepspeed_without_gpu` has made a state, which is used as it is.
        accelerator_config={"use_configured_state": deepspeed is not None and not gpu},
        average_tokens_across_devices=False,  # `SweepTrainer.compute_loss` divides the loss.
        router_aux_loss_coef=0.0,  # TRL would add a mixture of experts' loss for their balance.
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
    config.gradient_checkpointing = train_options.gradient_checkpointing
    use_one_gpu(config)
    if config.world_size != world.processes:
        raise InputError(
            f"{run.config_file}: world asks for {world.processes} processes, "
            f"{config.world_size} started; launch with `python -m sweeps train`"
        )
    return config


def start_deepspeed_without_gpu() -> None:
    """Join the other ranks by gloo. accelerate starts DeepSpeed on a CPU only if it is told how."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def use_one_gpu(config: SFTConfig) -> None:
    """Let this process train on its own GPU alone, however many it sees.

    transformers would wrap the model of a single process in nn.DataParallel, over all GPUs that
    CUDA_VISIBLE_DEVICES leaves visible. That scatters rows, of which a packed batch has one.
    """
    if config.n_gpu > 1:
        print(f"note: of {config.n_gpu} visible GPUs {config.device} is used", flush=True)
        config._n_gpu = 1


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
    """A DeepSpeed config that leaves the accumulation of gradients to the Trainer."""
    adapted = dict(deepspeed)
    # DeepSpeed checks that the two batch sizes and the accumulation multiply out, and reads nothing
    # else from the sizes. By the accumulation it would divide losses, and make its step every so
    # many backward passes. The Trainer says when, so the accumulation is 1.
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
