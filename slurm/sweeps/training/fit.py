"""One run of backend trainer, from its config to model/: data, model, loss, training, saving.

A run without torchrun, of one process and not sharded, goes on to score its model, if the sweep
scores with `score.engine: transformers` and names no other Python for it (`score.python`).
"""

import gc
from pathlib import Path

import datasets
import torch
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from smoothce import patch_trainer
from sweeps.runs import scoring
from sweeps.runs.run import Run
from sweeps.runs.schema import World
from sweeps.runs.stages import Outcome
from sweeps.training.callbacks import (
    ScheduleCallback,
    StopSignal,
    stop_handling_signals,
)
from sweeps.training.checkpoint import latest_checkpoint
from sweeps.training.micro_batches import MicroBatches, Updates
from sweeps.training.model_loading import (
    add_adapters,
    compile_layers,
    config_to_save,
    load_model,
    load_smoothing_target,
    try_packing,
)
from sweeps.training.options import TrainOptions
from sweeps.training.ranks import print_once, this_rank
from sweeps.training.saving import save_model
from sweeps.training.sft_config import first_rank_reads, sft_config
from sweeps.training.sft_trainer import SweepTrainer
from sweeps.training.tokenization import make_tokenizer, tokenize_file


def train(run: Run) -> None:
    """Fit the run; then score it, if it trains without torchrun and this Python can score it."""
    stop_signal = fit(run)
    config = run.config()
    score = config.score
    scores_here = (
        config.world.single_process
        and score is not None
        and score.engine == "transformers"
        and score.python is None
    )
    if scores_here:
        # Scoring keeps what it has when it is killed, so that it need not hear of a stop.
        stop_handling_signals()
        if stop_signal.received:  # It came after `fit` looked last, and nobody sends it again.
            raise SystemExit(Outcome.STOPPED.value)
        gc.collect()  # The trainer and its model are in reference cycles.
        torch.cuda.empty_cache()
        scoring.score_here(run)


def fit(run: Run) -> StopSignal:
    """Train the run until model/ is there, from its newest whole checkpoint on.

    Returns what notes the signals that ask this process to stop, also those that came too late for
    the training. Raises SystemExit(75) once the run is saved because someone asked it to stop, and
    InputError for what the user can put right.
    """
    stop_signal = StopSignal(run.stop_file)
    config = run.config()
    train_options: TrainOptions = config.train_options
    world = config.world
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()
    if run.stop_file.exists():
        # It is obeyed, and not deleted here. A worker deletes a stop file that was left over, and
        # only then starts this program. A file that is here all the same was made since then; or
        # the worker kept it for another process that still held the run; or this program was
        # started by hand, and the file is an old one.
        print_once(
            f"stop: {run.stop_file} exists, so the run saves after its first update and leaves; "
            "delete the file to train on"
        )

    tokenizer = make_tokenizer(train_options)
    data = Updates(train_options, tokenize_file(train_options, tokenizer), world.processes)
    trainer = make_trainer(run, train_options, world, data, tokenizer)
    trainer.add_callback(ScheduleCallback(trainer, stop_signal))

    checkpoint = newest_checkpoint_of(trainer)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    step = trainer.state.global_step
    total_updates = trainer.state.max_steps
    finished = step == total_updates
    if finished:
        save_model(trainer, tokenizer)
    else:
        print_once(f"stopped: step {step} of {total_updates} is saved")
    # A finished run that was asked to stop leaves the scoring to its next attempt. `on_any_rank`
    # waits for a call on every rank: `finished` is the same on all, so that all call it or none.
    if not finished or stop_signal.on_any_rank():
        raise SystemExit(Outcome.STOPPED.value)
    return stop_signal


def make_trainer(
    run: Run,
    train_options: TrainOptions,
    world: World,
    data: Updates,
    tokenizer: PreTrainedTokenizerBase,
) -> SweepTrainer:
    """The run's SFTTrainer with its model and loss, ready to train.

    The order matters: each step rests on those before it.
    """
    # The configuration comes before the model, because ZeRO-3 splits weights as they are loaded.
    arguments = sft_config(run, train_options, world, len(data))
    print_once(f"device: {arguments.device}, {arguments.world_size} processes")
    print_once(data.summary)
    # Weights that the base model lacks are drawn alike on all ranks.
    set_seed(train_options.seed)
    print_once(f"model: reading {train_options.model_name_or_path}")
    model = load_model(train_options, len(tokenizer), first_rank_reads=first_rank_reads(world))
    # The configuration is kept before `try_packing` writes an attention into it that only this
    # process knows.
    saved_config = config_to_save(model, train_options)
    packed = try_packing(model, train_options, half_precision=world.mixed_precision != "no")
    micro_batches = MicroBatches(data, data, this_rank(), packed)
    arguments.padding_free = packed
    arguments.gradient_accumulation_steps = micro_batches.per_update
    prepared: nn.Module = model
    if train_options.lora is not None:
        prepared = add_adapters(model, train_options.lora)
    compiled = compile_layers(model, train_options, packed, len(data))
    print_once(f"batches: {'packed' if packed else 'padded'}{', compiled' if compiled else ''}")
    smoothing_target = load_smoothing_target(train_options, data, model.config.vocab_size)
    trainer = SweepTrainer(
        run,
        train_options,
        model=prepared,
        arguments=arguments,
        tokenizer=tokenizer,
        micro_batches=micro_batches,
        saved_config=saved_config,
        data_digest=data.fingerprint + smoothing_target.digest,
    )
    patch_trainer(
        trainer,
        label_smoothing=train_options.label_smoothing,
        filter_eps=train_options.filter_eps,
        smoothing_target=smoothing_target.shares,
    )
    arguments.label_smoothing_factor = train_options.label_smoothing  # Trackers show it.
    # Dropout is drawn differently on each rank.
    set_seed(train_options.seed, device_specific=True)
    return trainer


def newest_checkpoint_of(trainer: SweepTrainer) -> Path | None:
    """The checkpoint to go on from, which the first rank looks for and tells the others."""
    of_first_rank: list[Path | None] = [None]
    if this_rank() == 0:
        of_first_rank = [latest_checkpoint(trainer.run.checkpoints, trainer.data_digest)]
    broadcast_object_list(of_first_rank)
    return of_first_rank[0]
