"""What is computed with models themselves: the base model's mean prediction, which is a target,
what smoothing costs in entropy, and weights averaged with the base model's."""

import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import calibeval
from calibeval import scaling
from calibeval.io import atomic_write
from calibeval.request import Task
from sweeps.runs.run import Run
from sweeps.training.global_batches import GlobalBatchDataset
from sweeps.training.model_loading import load_model
from sweeps.training.options import TrainOptions
from sweeps.training.tokenization import IGNORE, make_tokenizer, tokenize_file

CHUNK = 1024  # tokens whose logits are there at a time: 0.6 GB of 151,936 each
CONVERSATIONS = 2048  # of which the mean prediction is
TOP = 1000  # tokens; the mass outside them is noise
TEMPERATURES, TOKENS = (0.3, 2.0), 4096  # between which, and on how many tokens, one is sought
ALPHAS = (0.25, 0.5, 0.75, 1.0)


def base_mean(keys: TrainOptions) -> None:
    """Write the model's mean of softmax(z), (V,), over the targets of the first conversations that
    it is to learn as `keys.smoothing_target`, unless that is there."""
    if (out := Path(keys.smoothing_target)).exists():
        return
    tokenizer, updates = read(keys)
    model = loaded(keys, len(tokenizer))
    hidden, _ = answers(model, updates, updates.train_conversations[:CONVERSATIONS])
    total = sum(z.softmax(-1).sum(0, dtype=torch.float64) for z in logits(model, hidden))
    with atomic_write(out, "wb") as file:
        np.save(file, (total / total.sum()).cpu().numpy())
    del model, hidden
    torch.cuda.empty_cache()  # other processes train now


def read(keys: TrainOptions) -> tuple[object, GlobalBatchDataset]:
    """A run's tokenizer, and its conversations as it trains on them."""
    tokenizer = make_tokenizer(keys)
    data = tokenize_file(keys, tokenizer)
    pad = tokenizer.pad_token_id
    return tokenizer, GlobalBatchDataset(keys, data, ranks=1, rank=0, pad_token_id=pad)


def loaded(keys: TrainOptions, tokens: int, folder: Path | None = None) -> PreTrainedModel:
    """A run's base model, or that in a folder, with a row for each of so many tokens; on a GPU, if
    there is one, in its own precision, else in fp32."""
    name = keys.model_name_or_path if folder is None else str(folder)
    model = load_model(keys.model_copy(update={"model_name_or_path": name}), tokens).eval()
    return model.to("cuda", model.config.dtype) if torch.cuda.is_available() else model


@torch.inference_mode()
def answers(
    model: PreTrainedModel, updates: GlobalBatchDataset, rows: np.ndarray
) -> tuple[Tensor, Tensor]:
    """The last hidden states (N, D) behind all targets of some conversations, and these (N,)."""
    found = []
    for some in updates.group(rows):
        batch = {key: value.to(model.device) for key, value in updates.collate(some).items()}
        hidden = model.model(batch["input_ids"], use_cache=False).last_hidden_state[:, :-1]
        said = (labels := batch["labels"][:, 1:]) != IGNORE
        found.append((hidden[said], labels[said]))
    hidden, labels = map(torch.cat, zip(*found, strict=True))
    return hidden, labels


@torch.inference_mode()
def logits(model: PreTrainedModel, hidden: Tensor) -> Iterator[Tensor]:
    """The logits (n, V) of hidden states (N, D), in fp32, a chunk at a time."""
    head: nn.Module = copy.deepcopy(model.get_output_embeddings()).float()
    for some in hidden.split(CHUNK):
        yield head(some.float())


def price(run: Run) -> dict[str, float]:
    """Figures of a run's model, in nats a token, over targets that were held out of training.

        EntCE = H − NLL,   H = mean −Σ_v p_v log p_v,   NLL = mean −log p_y,   p = softmax(z)

    Above 0 the model writes more randomly than it is surprised. Entropy calibration (Braverman et
    al. 2020; Cao, Valiant & Liang, arXiv 2511.11966) takes H along texts of the model's own; here
    both are along the given ones (teacher-forced). Beside them the mass outside the likeliest 1,000
    tokens, and the temperature that makes EntCE 0.
    """
    keys = run.config().train_options
    tokenizer, updates = read(keys)
    model = loaded(keys, len(tokenizer), run.model)
    hidden, labels = answers(model, updates, updates.held_out_conversations)
    sums = torch.zeros(3, dtype=torch.float64)
    for z, y in zip(logits(model, hidden), labels.split(CHUNK), strict=True):
        outside = 1 - z.softmax(-1).topk(min(TOP, z.shape[1])).values.sum(-1)
        sums += torch.stack([*surprise(z, y), outside]).sum(1, dtype=torch.float64).cpu()
    nll, entropy, outside = (sums / len(labels)).tolist()
    some = slice(None, None, -(-len(labels) // TOKENS))
    found = {"nll": nll, "entropy": entropy, "entce": entropy - nll, "outside": outside}
    found["temperature"] = temperature(model, hidden[some], labels[some])
    return found | {"tokens": len(labels)}


def surprise(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """−log p_y and the entropy of p = softmax(z), (n,) both; z is (n, V)."""
    log_p = z.log_softmax(-1)
    return -log_p.gather(1, y[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def temperature(model: PreTrainedModel, hidden: Tensor, labels: Tensor) -> float:
    """τ at which the entropy of softmax(z / τ) is its NLL in the mean, or the end nearest to it.

    H − NLL = mean (z_y − Σ_v p_v z_v) / τ changes its sign once, where NLL is least: it is Guo et
    al.'s (2017) temperature.
    """
    low, high = TEMPERATURES
    for _ in range(20):
        tau, gap = (low + high) / 2, 0.0
        for z, y in zip(logits(model, hidden), labels.split(CHUNK), strict=True):
            nll, entropy = surprise(z / tau, y)
            gap += (entropy - nll).sum(dtype=torch.float64).item()
        low, high = (low, tau) if gap > 0 else (tau, high)
    return tau


def averaged(run: Run, out: Path) -> float:
    """Score a run's model averaged with its base model on MMLU, into `out`; returns α.

        θ = (1 − α) θ_base + α θ_tuned

    (Wortsman et al. 2022), with the α of the least NLL among the choices of MMLU's val questions.
    """
    keys, how = run.config().train_options, {"batch_size": 64, "progress": False}
    tokenizer = make_tokenizer(keys)
    base, tuned = (loaded(keys, len(tokenizer), folder) for folder in (None, run.model))
    val, test = (Task(task="mmlu", data="data/mmlu", split=split) for split in ("val", "test"))

    def nll(alpha: float) -> float:
        found = calibeval.score(mixed(base, tuned, alpha), tokenizer, [val], **how)
        return scaling.nll(found[val.key], 1.0)

    alpha = min(ALPHAS, key=nll)
    calibeval.score(mixed(base, tuned, alpha), tokenizer, [test], out=out, **how)
    return alpha


@torch.no_grad()
def mixed(base: PreTrainedModel, tuned: PreTrainedModel, alpha: float) -> PreTrainedModel:
    """A model of the weights (1 − α) θ_base + α θ_tuned."""
    made = copy.deepcopy(tuned)
    for ours, theirs in zip(made.parameters(), base.parameters(), strict=True):
        ours.copy_(torch.lerp(theirs.float(), ours.float(), alpha))
    return made
