"""What the claims compute with models themselves, beside their sweeps.

`write_base_mean` makes the base model's mean prediction, which is a target of smoothing.
`entropy_gap` says how much less sure a model is than it should be, and `score_average` averages
weights with the base model's.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import calibeval
from calibeval.ask.request import Task
from calibeval.io import atomic_write
from calibeval.measures import scaling
from sweeps.runs.run import Run
from sweeps.training.micro_batches import Updates
from sweeps.training.model_loading import load_model
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE, make_tokenizer, tokenize_file

CHUNK = 1024  # tokens whose logits are there at a time: 0.6 GB of 151,936 each
CONVERSATIONS = 2048  # of which the mean prediction is
TOP = 1000  # tokens; the mass outside them is noise
LOWEST_TEMPERATURE = 0.3  # Between these two a temperature is sought.
HIGHEST_TEMPERATURE = 2.0
TEMPERATURE_TOKENS = 4096  # on about so many tokens
BISECTIONS = 20
ALPHAS = (0.25, 0.5, 0.75, 1.0)
BATCH_SIZE = 64  # of scoring


def write_base_mean(train_options: TrainOptions, out: Path) -> None:
    """Write the base model's mean of softmax(z), (V,), unless `out` is there.

    The mean is over the targets of the first conversations that a run with these options learns.
    """
    if out.exists():
        return
    tokenizer, data = tokenizer_and_dataset(train_options)
    model = load_for_inference(train_options, len(tokenizer))
    hidden, _ = target_states(model, data, data.train_conversations[:CONVERSATIONS])
    total = torch.zeros(model.config.vocab_size, dtype=torch.float64, device=model.device)
    for chunk in logits(model, hidden):
        total += chunk.softmax(-1).sum(0, dtype=torch.float64)
    with atomic_write(out, "wb") as file:
        np.save(file, (total / total.sum()).cpu().numpy())
    del model, hidden
    torch.cuda.empty_cache()  # other processes train now


def tokenizer_and_dataset(
    train_options: TrainOptions,
) -> tuple[PreTrainedTokenizerBase, Updates]:
    """A run's tokenizer, and its conversations, split as it trains on them."""
    tokenizer = make_tokenizer(train_options)
    return tokenizer, Updates(train_options, tokenize_file(train_options, tokenizer), ranks=1)


def load_for_inference(train_options: TrainOptions, tokenizer_size: int) -> PreTrainedModel:
    """The model that `train_options.model_name_or_path` names, for inference.

    A run's own options name the base model. The model's embedding has a row for each entry of the
    tokenizer. It is on a GPU, if there is one, in its own precision; else in fp32.
    """
    model = load_model(train_options, tokenizer_size).eval()
    if torch.cuda.is_available():
        module: nn.Module = model  # whose `to` has the right type
        module.to("cuda", model.config.dtype)
    return model


def load_tuned_model(run: Run, tokenizer_size: int) -> PreTrainedModel:
    """A run's finished model, loaded as `load_for_inference` says."""
    train_options: TrainOptions = run.config().train_options
    options_of_tuned = train_options.model_copy(update={"model_name_or_path": str(run.model)})
    return load_for_inference(options_of_tuned, tokenizer_size)


@torch.inference_mode()
def target_states(
    model: PreTrainedModel, data: Updates, conversations: np.ndarray
) -> tuple[Tensor, Tensor]:
    """The last hidden states (N, D) that predict the targets of conversations, and these (N,)."""
    hidden_states = []
    targets = []
    ordered = conversations[np.argsort(data.lengths[conversations], kind="stable")]
    size = data.train_options.per_device_train_batch_size
    for start in range(0, len(ordered), size):
        rows = data.tokens.with_format("torch").__getitems__(ordered[start : start + size].tolist())
        ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True).to(model.device)
        # Causal tokens never see the padding, which comes after them, so that no mask is needed.
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1]
        labels = pad_sequence([row["labels"] for row in rows], True, IGNORE).to(model.device)[:, 1:]
        is_target = labels != IGNORE
        hidden_states.append(hidden[is_target])
        targets.append(labels[is_target])
    return torch.cat(hidden_states), torch.cat(targets)


@torch.inference_mode()
def logits(model: PreTrainedModel, hidden: Tensor) -> Iterator[Tensor]:
    """The logits (n, V) of hidden states (N, D), in fp32, a chunk at a time.

    They are those of the head alone, and so are wrong for a model that scales or soft-caps its
    logits afterwards, as Gemma 2 does.
    """
    head: nn.Module = copy.deepcopy(model.get_output_embeddings()).float()
    for chunk in hidden.split(CHUNK):
        yield head(chunk.float())


def entropy_gap(run: Run) -> dict[str, float]:
    """Figures of a run's model, in nats a token, over targets that were held out of training.

        gap = H − NLL,   H = mean −Σ_v p_v log p_v,   NLL = mean −log p_y,   p = softmax(z)

    Above 0 the model writes more randomly than it is surprised. Entropy calibration (Braverman et
    al. 2020; Cao, Valiant & Liang, arXiv 2511.11966) takes H along texts of the model's own; here
    both are along the given ones (teacher-forced). Beside them the mass outside the likeliest 1,000
    tokens, and the temperature that makes the gap 0.
    """
    tokenizer, data = tokenizer_and_dataset(run.config().train_options)
    model = load_tuned_model(run, len(tokenizer))
    hidden, targets = target_states(model, data, data.held_out_conversations)
    sums = torch.zeros(3, dtype=torch.float64)
    for z, y in zip(logits(model, hidden), targets.split(CHUNK), strict=True):
        nll_of_tokens, entropy_of_tokens = nll_and_entropy(z, y)
        top = z.softmax(-1).topk(min(TOP, z.shape[1])).values
        figures = torch.stack([nll_of_tokens, entropy_of_tokens, 1 - top.sum(-1)])
        sums += figures.sum(1, dtype=torch.float64).cpu()
    nll, entropy, outside = (sums / len(targets)).tolist()
    stride = -(-len(targets) // TEMPERATURE_TOKENS)
    return {
        "nll": nll,
        "entropy": entropy,
        "entropy_gap": entropy - nll,
        "mass_outside_top": outside,
        "entropy_temperature": entropy_temperature(model, hidden[::stride], targets[::stride]),
        "tokens": len(targets),
    }


def nll_and_entropy(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """−log p_y and the entropy of p = softmax(z), (n,) both; z is (n, V)."""
    log_p = z.log_softmax(-1)
    nll = -log_p.gather(1, y[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return nll, entropy


def entropy_temperature(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> float:
    """τ at which the entropy of softmax(z / τ) is its NLL in the mean.

    Where there is none between the two limits, it is next to the lower one if the entropy is the
    larger of the two at both limits, and next to the upper one if the NLL is.

    H − NLL = mean (z_y − Σ_v p_v z_v) / τ changes its sign once, where NLL is least: it is Guo et
    al.'s (2017) temperature. Found by bisection.
    """
    low = LOWEST_TEMPERATURE
    high = HIGHEST_TEMPERATURE
    middle = (low + high) / 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        gap = 0.0
        for z, y in zip(logits(model, hidden), targets.split(CHUNK), strict=True):
            nll, entropy = nll_and_entropy(z / middle, y)
            gap += (entropy - nll).sum(dtype=torch.float64).item()
        if gap > 0:
            high = middle
        else:
            low = middle
    return middle


def score_average(run: Run, out: Path) -> float:
    """Score a run's model averaged with its base model on MMLU, into `out`; returns α.

        θ = (1 − α) θ_base + α θ_tuned

    (Wortsman et al. 2022), with the α of the least NLL among the choices of MMLU's val questions.
    Four values are tried, and 0, which is the base model itself, is not among them: a finer search
    might do better.
    """
    train_options: TrainOptions = run.config().train_options
    tokenizer = make_tokenizer(train_options)
    base = load_for_inference(train_options, len(tokenizer))
    tuned = load_tuned_model(run, len(tokenizer))
    val = Task(task="mmlu", data="data/mmlu", split="val")
    test = Task(task="mmlu", data="data/mmlu", split="test")

    def nll(alpha: float) -> float:
        model = averaged_model(base, tuned, alpha)
        records = calibeval.score(model, tokenizer, [val], batch_size=BATCH_SIZE, progress=False)
        return scaling.nll(records[val.key], 1.0)

    alpha = min(ALPHAS, key=nll)
    calibeval.score(
        averaged_model(base, tuned, alpha),
        tokenizer,
        [test],
        out=out,
        batch_size=BATCH_SIZE,
        progress=False,
    )
    return alpha


@torch.no_grad()
def averaged_model(base: PreTrainedModel, tuned: PreTrainedModel, alpha: float) -> PreTrainedModel:
    """A model of the weights (1 − α) θ_base + α θ_tuned."""
    averaged = copy.deepcopy(tuned)
    for weight, base_weight in zip(averaged.parameters(), base.parameters(), strict=True):
        weight.copy_(torch.lerp(base_weight.float(), weight.float(), alpha))
    return averaged
