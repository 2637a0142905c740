"""Convert stories260K, a real pre-trained model of 260,032 parameters, to a Hugging Face folder.

    python tests/eval/stories260k.py STORIES_DIR OUT_DIR [--positions 4096]

STORIES_DIR holds stories260K.bin (llama2.c's version-0 format) and tok512.bin. The model was
trained on 512 positions; more let five-shot prompts in, at the price of sense.
"""

import argparse
import struct
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def convert(source: Path, out: Path, positions: int = 512) -> None:
    """Write config, weights and tokenizer to `out`."""
    pieces = read_pieces(source / "tok512.bin", vocabulary=512)
    tokenizer(pieces).save_pretrained(out)
    model(source / "stories260K.bin", positions).save_pretrained(out)


def read_pieces(path: Path, vocabulary: int) -> list[str]:
    """The tokenizer's pieces; each is stored as score, length, UTF-8 bytes."""
    raw, at, pieces = path.read_bytes(), 4, []
    for _ in range(vocabulary):
        (length,) = struct.unpack_from("<i", raw, at + 4)
        pieces.append(raw[at + 8 : at + 8 + length].decode("utf-8"))
        at += 8 + length
    if at != len(raw):
        raise ValueError(f"{path}: {len(raw) - at} bytes left after {vocabulary} pieces")
    return pieces


def tokenizer(pieces: list[str]) -> PreTrainedTokenizerFast:
    """A SentencePiece-style BPE: earlier pieces merge first, unknown characters become bytes."""
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [piece.replace(" ", "▁") for piece in pieces[259:]]
    ids = {name: i for i, name in enumerate(names)}
    merges = [
        (name[:cut], name[cut:])
        for name in names[259:]
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    bpe = Tokenizer(BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    bpe.add_special_tokens([AddedToken(t, special=True) for t in names[:3]])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def model(path: Path, positions: int) -> LlamaForCausalLM:
    """The Llama with its weights; query and key rows are reordered from pairs to halves."""
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocabulary, _ = struct.unpack_from("<7i", raw)
    flat, at = np.frombuffer(raw, dtype="<f4", offset=28), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        size = int(np.prod(shape))
        at += size
        return torch.from_numpy(flat[at - size : at].reshape(shape).copy())

    size = dim // heads
    parts = {
        "embed": take(vocabulary, dim),
        "norm1": take(layers, dim),
        "q": take(layers, dim, dim),
        "k": take(layers, kv_heads * size, dim),
        "v": take(layers, kv_heads * size, dim),
        "o": take(layers, dim, dim),
        "norm2": take(layers, dim),
        "gate": take(layers, hidden, dim),
        "down": take(layers, dim, hidden),
        "up": take(layers, hidden, dim),
        "norm": take(dim),
    }
    state = {
        "model.embed_tokens.weight": parts["embed"],
        "lm_head.weight": parts["embed"],
        "model.norm.weight": parts["norm"],
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        state |= {
            layer + "input_layernorm.weight": parts["norm1"][i],
            layer + "self_attn.q_proj.weight": halves(parts["q"][i], heads),
            layer + "self_attn.k_proj.weight": halves(parts["k"][i], kv_heads),
            layer + "self_attn.v_proj.weight": parts["v"][i],
            layer + "self_attn.o_proj.weight": parts["o"][i],
            layer + "post_attention_layernorm.weight": parts["norm2"][i],
            layer + "mlp.gate_proj.weight": parts["gate"][i],
            layer + "mlp.down_proj.weight": parts["down"][i],
            layer + "mlp.up_proj.weight": parts["up"][i],
        }
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama = LlamaForCausalLM(config)
    llama.load_state_dict(state)
    return llama


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (x0, y0, x1, y1, …) to (x0, x1, …, y0, y1, …)."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--positions", type=int, default=512)
    a = parser.parse_args()
    convert(a.source, a.out, a.positions)
