"""Adaptive temperature scaling: a temperature for each token (Xie et al. 2024, arXiv 2409.19817).

    log τ_t = w · f(h_1, …, h_t) + b,   p_t = softmax(z_t / τ_t)

`h` are the hidden states that the output layer reads and `z` the logits. f is one layer of the
model's own kind with weights of its own, or nothing (`linear`). The model stays as it is, and so
does the order of a token's logits: no letter and no greedy answer changes, and of a model that
answers by letters no accuracy.

The head is trained on response tokens. Where the model's likeliest token is right, the target is
that token, and where it is not, the uniform distribution; each group's mean loss counts with 1 − α
and α, as in the authors' code (Johnathan-Xie/adaptive-temperature-scaling).
"""

import copy
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from tqdm import tqdm

from calibeval.ask import model_digest
from calibeval.ask.chat import DATE
from calibeval.ask.engines import Job, load_tokenizer, shortened, text_config
from calibeval.ask.engines.hf import Prefix, TransformersEngine
from calibeval.ask.engines.hf_model import load_model
from calibeval.ask.engines.token_tree import PADDING, separate_choices
from calibeval.io import InputError, atomic_write, parse_json, read_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Kind = Literal["transformer", "linear"]

LEARNING_RATE = 5e-5  # with EPOCHS and BATCH_SIZE the authors'
EPOCHS = 2
BATCH_SIZE = 8
MOST_TOKENS = 512  # of a conversation
# Of models without a chat template.
PROMPT = "### Instruction:\n{question}\n\n### Response:\n"


class TemperatureHead(nn.Module):
    """Gives each token's log τ; 0 until it is trained."""

    def __init__(self, config: "PretrainedConfig", kind: Kind):
        super().__init__()
        from transformers import AutoModel

        self.kind = kind
        self.layer: nn.Module | None = None
        if kind == "transformer":
            one_layer = copy.deepcopy(text_config(config))
            one_layer.num_hidden_layers = 1
            if getattr(one_layer, "layer_types", None):
                one_layer.layer_types = ["full_attention"]
            one_layer.vocab_size = 1  # it reads hidden states in place of tokens
            one_layer.pad_token_id = None
            self.layer = AutoModel.from_config(one_layer).float()
        self.output = nn.Linear(text_config(config).hidden_size, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return log τ of hidden states (B, W, H), (B, W); a token sees none behind it."""
        hidden = hidden.float()
        if self.layer is not None:
            hidden = self.layer(inputs_embeds=hidden, use_cache=False).last_hidden_state
        return self.output(hidden)[..., 0]

    def save(self, path: Path, digest: str) -> None:
        """Write the head, and the digest of the model that it was trained on."""
        with atomic_write(path, "wb") as file:
            torch.save({"kind": self.kind, "state": self.state_dict(), "model": digest}, file)

    @classmethod
    def load(cls, path: Path, config: "PretrainedConfig", digest: str | None) -> "TemperatureHead":
        """Read what `save` wrote; `InputError` where it is of another model.

        The digest is None where nobody knows it, as of a model in memory.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            if digest not in (None, content["model"]):
                raise ValueError("it was trained on other weights")
            head = cls(config, content["kind"])
            head.load_state_dict(content["state"])
        except Exception as error:  # whatever a damaged file makes torch raise
            raise InputError(
                f"--temperature-head {path}: is no head of this model: {shortened(error)}; "
                "make one by `calibeval temperature-head`"
            ) from error
        return head


class AdaptiveEngine(TransformersEngine):
    """Scores with a head's temperatures; each choice is read whole, since the head reads all."""

    def __init__(self, model: "str | PreTrainedModel", head: Path, **options: Any):
        super().__init__(model, **options)
        digest = None
        if isinstance(model, str):
            digest = model_digest.digest(model, options.get("revision"))
        self.head = TemperatureHead.load(head, self.model.config, digest).to(self.device).eval()

    def _read_prefix(self, group: list[Job]) -> Prefix:
        return Prefix()

    def _whole_or_by_choice(self, group: list[Job], longest: int) -> list[Job]:
        return [choice for job in group for choice in _without_trees(job)]

    @contextmanager
    def _output_layer_at(self, places: Tensor) -> Iterator[None]:
        log_temperatures: list[Tensor] = []

        def read(module: nn.Module, args: tuple[Any, ...]) -> None:
            log_temperatures.append(self.head(args[0]).gather(1, places)[..., None])

        def divide(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return output / log_temperatures.pop().exp()

        output_layer = self.model.get_output_embeddings()
        first = output_layer.register_forward_pre_hook(read)  # before its input is cut to `places`
        try:
            with super()._output_layer_at(places):
                last = output_layer.register_forward_hook(divide)
                try:
                    yield
                finally:
                    last.remove()
        finally:
            first.remove()


def _without_trees(job: Job) -> list[Job]:
    return [job] if job.is_chain else separate_choices(job)


def selective_loss(
    logits: Tensor, log_temperatures: Tensor, labels: Tensor, alpha: float
) -> Tensor:
    """Return the loss of T tokens: logits (T, V), log temperatures (T,), labels (T,)."""
    is_right = logits.argmax(-1) == labels
    right_logits = logits.gather(1, labels[:, None])[:, 0]
    targets = torch.where(is_right, right_logits, logits.mean(-1))
    scale = (-log_temperatures).exp()
    losses = (logits * scale[:, None]).logsumexp(-1) - targets * scale
    loss = losses.new_zeros(())
    if is_right.any():
        loss = loss + (1 - alpha) * losses[is_right].mean()
    if not is_right.all():
        loss = loss + alpha * losses[~is_right].mean()
    return loss


def train(
    model: str,
    data: Path,
    out: Path,
    *,
    kind: Kind = "transformer",
    alpha: float = 0.5,
    seed: int = 0,
) -> TemperatureHead:
    """Train a head on the responses of a file of Alpaca's form, and write it.

    Raises:
        InputError: data or a model that cannot be used; `out` is there already.
    """
    if out.exists():
        raise InputError(f"--out {out}: is there already; delete it, or give another")
    if not 0 <= alpha <= 1:
        raise InputError(f"--alpha {alpha}: expected a number from 0 to 1")
    tokenizer = load_tokenizer(model)
    conversations = [_tokenized(row, tokenizer) for row in _rows(data)]
    loaded = load_model(model, "auto", None).eval()
    _refuse_changed_logits(model, loaded, conversations[0])
    torch.manual_seed(seed)
    head = TemperatureHead(loaded.config, kind).to(loaded.device)
    order = random.Random(seed)
    steps = EPOCHS * -(-len(conversations) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(head.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with tqdm(total=steps, unit="step", file=sys.stderr) as bar:
        for _ in range(EPOCHS):
            order.shuffle(conversations)
            for start in range(0, len(conversations), BATCH_SIZE):
                batch = conversations[start : start + BATCH_SIZE]
                loss = _loss_of_batch(loaded, head, batch, alpha)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
                bar.update()
    head.save(out, model_digest.digest(model))
    return head


Conversation = tuple[list[int], int]  # tokens, and how many are the prompt's


@torch.no_grad()
def _refuse_changed_logits(name: str, model: "PreTrainedModel", conversation: Conversation) -> None:
    """Raise `InputError` for a model whose logits are not its output layer's, as Gemma 2's.

    A temperature of the output layer's would not be one of the logits.
    """
    heard: list[Tensor] = []
    output_layer = model.get_output_embeddings()
    hook = output_layer.register_forward_hook(lambda module, args, output: heard.append(output))
    try:
        ids = torch.tensor([conversation[0]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        hook.remove()
    if not torch.allclose(logits.float(), heard[0].float(), rtol=1e-3, atol=1e-3):
        raise InputError(
            f"--model {name}: changes its logits after the output layer, by a soft cap or a scale; "
            "no head can be made for it: use `calibeval temperature`"
        )


def _loss_of_batch(
    model: "PreTrainedModel", head: TemperatureHead, batch: Sequence[Conversation], alpha: float
) -> Tensor:
    """The loss of the response tokens of some conversations."""
    width = max(len(tokens) for tokens, _ in batch)
    ids = torch.tensor([tokens + [PADDING] * (width - len(tokens)) for tokens, _ in batch])
    is_response = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (tokens, prompt_length) in enumerate(batch):
        is_response[row, prompt_length : len(tokens)] = True
    ids = ids.to(model.device)
    is_response = is_response.to(model.device)
    with torch.no_grad():
        # Padding is behind all that is read, and attention causal.
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        output_layer = model.get_output_embeddings()
        before_response = is_response[:, 1:]
        read = hidden[:, :-1][before_response].float()
        bias = None if output_layer.bias is None else output_layer.bias.float()
        logits = linear(read, output_layer.weight.float(), bias)
    log_temperatures = head(hidden)[:, :-1][before_response]
    return selective_loss(logits, log_temperatures, ids[:, 1:][before_response], alpha)


def _rows(data: Path) -> list[dict[str, str]]:
    """Alpaca's rows with a response; `InputError` where the file has none."""
    try:
        rows = parse_json(read_text(data))
        used = [row for row in rows if row["output"].strip() and row["instruction"].strip()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"--data {data}: expected a JSON list of objects with the texts instruction, input and "
            f"output ({type(error).__name__}: {error})"
        ) from error
    if not used:
        raise InputError(f"--data {data}: no row has an instruction and an output")
    return used


def _tokenized(row: dict[str, str], tokenizer: "PreTrainedTokenizerBase") -> Conversation:
    """A row's tokens, in the model's chat if it has one, and how many are the prompt's."""
    question = row["instruction"]
    if row.get("input"):
        question += f"\n\n{row['input']}"
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": question}]
        prompt = str(
            tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=True, strftime_now=DATE.strftime
            )
        )
    else:
        prompt = PROMPT.format(question=question)
    adds_start_token = not tokenizer.chat_template
    prompt_ids = tokenizer(prompt, add_special_tokens=adds_start_token)["input_ids"]
    response_ids = tokenizer(row["output"], add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        response_ids = [*response_ids, tokenizer.eos_token_id]
    # A long prompt loses its beginning, so that the response has half of the tokens.
    prompt_ids = prompt_ids[-MOST_TOKENS // 2 :]
    return [*prompt_ids, *response_ids][:MOST_TOKENS], len(prompt_ids)
