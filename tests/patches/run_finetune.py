"""run_finetune.py CHECKOUT [OPTIONS] -- ARGUMENTS…: finetune.py for tests and measurements.

Run by `accelerate launch` in place of finetune.py, whose arguments follow `--`. Upstream loads
weights in bf16, whose rounding hides what a test looks for: --dtype float32 or float64.
--torch-smoothing gives an unpatched checkout torch's own label smoothing, as the yardstick.
--fp32-logits takes the logits from a bf16 model in fp32, --reverse-rows turns each micro-batch
around: the same update, added up in another order. --memory FILE measures GPU memory; --no-save
leaves out the model at the end.
"""

import argparse
import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import accelerate.utils
import torch
import torch.nn.functional as F
import transformers


def main() -> None:
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout")
    parser.add_argument("--dtype", choices=["float32", "float64"])
    parser.add_argument("--torch-smoothing", type=float)
    parser.add_argument("--fp32-logits", action="store_true")
    parser.add_argument("--reverse-rows", action="store_true")
    parser.add_argument("--memory", type=Path)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args(sys.argv[1:split])
    if options.dtype:
        load = transformers.AutoModelForCausalLM.from_pretrained
        transformers.AutoModelForCausalLM.from_pretrained = lambda *args, **kwargs: load(
            *args, **kwargs | {"torch_dtype": getattr(torch, options.dtype)}
        )
    if options.torch_smoothing is not None:
        dense = F.cross_entropy
        F.cross_entropy = lambda *args, **kwargs: dense(
            *args, **kwargs | {"label_smoothing": options.torch_smoothing}
        )
    if options.fp32_logits:
        load_bf16 = transformers.AutoModelForCausalLM.from_pretrained

        def with_fp32_logits(*args: Any, **kwargs: Any) -> Any:
            model = load_bf16(*args, **kwargs)
            head = model.lm_head
            head.forward = lambda hidden: F.linear(hidden.float(), head.weight.float())
            return model

        transformers.AutoModelForCausalLM.from_pretrained = with_fp32_logits
    if options.reverse_rows:
        collate = transformers.DataCollatorForSeq2Seq.__call__
        transformers.DataCollatorForSeq2Seq.__call__ = lambda self, rows, *args: collate(
            self, rows[::-1], *args
        )
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and not torch.cuda.is_available():
        # accelerate 1.x starts DeepSpeed without CUDA only if told which backend to use.
        accelerate.utils.InitProcessGroupKwargs = functools.partial(
            accelerate.utils.InitProcessGroupKwargs, backend="gloo"
        )
    script = os.path.join(options.checkout, "open_instruct", "finetune.py")
    sys.path.insert(0, options.checkout)
    sys.argv = [script, *sys.argv[split + 1 :]]
    if options.no_save:
        import open_instruct.model_utils

        open_instruct.model_utils.save_with_accelerate = lambda *args: None
    if options.memory:
        from loss_memory import LossMemory

        memory = LossMemory()
    runpy.run_path(script, run_name="__main__")
    if options.memory and os.environ.get("RANK", "0") == "0":
        memory.write(options.memory)


if __name__ == "__main__":
    main()
