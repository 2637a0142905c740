"""python -m smoothce.bench.lm tokenize alpaca_data.json ids.npz        (needs `tokenizers`)
python -m smoothce.bench.lm compare ids.npz --steps 300 --json out.json  losses in training
python -m smoothce.bench.lm compare ids.npz --trained 1000 --steps 200   the same, fine-tuning

A small Llama on instruction text. `tokenize` makes ids.npz, which `compare` reads, from a JSON list
of records with instruction, input and output. `compare` trains the same model from the same start
with each loss and reports how far apart they end. The start is random weights, or with `--trained`
a model trained on three quarters of the text first, fine-tuned on the rest."""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smoothce.bench.arguments import fail
from smoothce.bench.peers import dense, ours

VOCABULARY, LENGTH, BATCH, HELD_OUT = 60160, 512, 16, 32
SIZE = dict(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8)


def tokenize(text: Path, out: Path) -> None:
    """Instruction records (a JSON list) → ids under a BPE trained on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    try:
        records = json.loads(text.read_text())
        fields = ("instruction", "input", "output")
        texts = ["\n\n".join(r[k] for k in fields if r[k]) for r in records]
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{text}: expected a JSON list of instruction, input and output ({error!r})")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<eos>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    ids = [i for e in tokenizer.encode_batch(texts) for i in (*e.ids, 0)]
    np.savez_compressed(out, ids=np.array(ids, dtype=np.uint16))


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences."""
    ids = torch.from_numpy(np.load(path)["ids"].astype(np.int64))
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH).cuda()
    return rows[:-HELD_OUT], rows[-HELD_OUT:]


def build():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, tie_word_embeddings=False, **SIZE
    )
    return LlamaForCausalLM(config).cuda()


def last_hidden(model, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states (N, D) in bf16 autocast and the tokens that follow them (N,)."""
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.model(rows).last_hidden_state[:, :-1]
    return hidden.flatten(0, 1).bfloat16(), rows[:, 1:].flatten()


def fit(model, rows: Tensor, steps: int, beta: float, loss, rate: float = 6e-4) -> list[float]:
    """Train in bf16 autocast; the curve of losses."""
    optimizer = torch.optim.AdamW(
        model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    picks = torch.Generator("cuda").manual_seed(1)
    warmup = min(100, steps // 4)
    curve = []
    for step in range(steps):
        decay = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / warmup) * decay
        x = rows[torch.randint(len(rows), (BATCH,), device="cuda", generator=picks)]
        hidden, labels = last_hidden(model, x)
        value = loss(hidden, model.lm_head.weight.bfloat16(), labels, beta)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(value.detach())
    return torch.stack(curve).tolist()


LOSSES = {
    "torch": dense,
    "torch, tokens of the batch in another order": lambda e, c, y, beta: dense(
        e.flip(0), c, y.flip(0), beta
    ),
    "torch, fp32 logits": lambda e, c, y, beta: dense(e.float(), c.float(), y, beta),
    "ours, exact": ours(None),
    "ours, filtered": ours("auto"),
}


def compare(
    rows: Tensor, held_out: Tensor, steps: int, beta: float, trained: int = 0, losses=LOSSES
) -> dict:
    """Loss curves, and the mean over held-out tokens of log p of tokens that are never a target."""
    found, start, rate = {}, None, 6e-4
    if trained:
        share = len(rows) * 3 // 4
        model = build()
        fit(model, rows[:share], trained, 0.0, dense)
        start, rows, rate = model.state_dict(), rows[share:], 5e-5
    for name, loss in losses.items():
        model = build()
        if start is not None:
            model.load_state_dict(start)
        curve = fit(model, rows, steps, beta, loss, rate)
        with torch.no_grad():
            hidden, labels = (x[:8192] for x in last_hidden(model.eval(), held_out))
            z = hidden.float() @ model.lm_head.weight.bfloat16().float().T
            logp = z.log_softmax(1)
            unseen = torch.ones(VOCABULARY, dtype=torch.bool, device="cuda")
            unseen[labels] = False
            found[name] = {
                "curve": curve,
                "held_out": F.nll_loss(logp, labels).item(),
                "tail": logp[:, unseen].mean().item(),
            }
        del model, z, logp
    base = found["torch"]
    for row in found.values():
        gaps = [abs(a - b) / b for a, b in zip(row["curve"], base["curve"], strict=True)]
        row["largest_gap"], row["mean_gap"] = max(gaps), sum(gaps) / len(gaps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smoothce.bench.lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("tokenize")
    command.add_argument("source", type=Path)
    command.add_argument("out", type=Path)
    command = commands.add_parser("compare")
    command.add_argument("source", type=Path)
    command.add_argument("--steps", type=int, default=300)
    command.add_argument("--label-smoothing", type=float, default=0.1)
    command.add_argument("--trained", type=int, default=0, help="steps before: fine-tuning")
    command.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.source.is_file():
        fail(f"{args.source}: no such file")
    written = args.json if args.command == "compare" else args.out
    if written and not written.absolute().parent.is_dir():
        fail(f"{written}: no such folder")  # now, not when all is trained
    if args.command == "tokenize":
        return tokenize(args.source, args.out)
    if not torch.cuda.is_available():
        fail("training needs a CUDA GPU")
    found = compare(*load(args.source), args.steps, args.label_smoothing, args.trained)
    print(
        "| loss | last | largest gap to torch | mean gap | held-out NLL | mean log p, no targets |"
    )
    print("|---|---|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | {row['curve'][-1]:.4f} | {row['largest_gap']:.1e} | {row['mean_gap']:.1e} "
            f"| {row['held_out']:.4f} | {row['tail']:.4f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
