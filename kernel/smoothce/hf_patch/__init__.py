"""The loss inside Hugging Face causal language models.

A patched model in training mode, given labels, runs its own decoder and then calls its head with
hidden states and labels; the head's forward returns the loss. Going through `head.__call__`, once
for each forward, is what lets DeepSpeed's ZeRO-3 and FSDP2 gather the classifier for the head's
forward and backward and free it in between. Reading `head.weight` from outside the head would not.

The mean over the tokens of a whole update is the trainer's work: transformers counts the labels of
all micro-batches and ranks and hands the count over as `num_items_in_batch`, by which `HeadForward`
divides the sum; TRL divides the sum itself; a loop of one's own has `smoothce.token_mean_factor`.
Where no count comes, the loss is a mean of each micro-batch, as it is upstream.

Compiled code goes the same way, but for what needs Python. While it is compiled
(`torch.compiler.is_compiling`),

- a model that is not verified yet raises ValueError (`model_forward`), and so does a hook on the
  head that is not known yet (`head_hooks`);
- scales, caps and the loss function are compared with what was verified, and torch makes guards of
  the graph of these comparisons; values of frozen tensors are not compared
  (`verification.VerifiedLoss`);
- a wrapper around the head is not looked for (`fused_forward`), nobody notices what trains around
  the loss (`model_forward.DecoderHook`), and nothing is warned of (`user_warnings`);
- the loss is one operator of the graph (`smoothce.compile_operator`).

Upstream is transformers here: the model's forward as its class has it. The fused loss is the one
that a patched head computes without logits, by `linear_cross_entropy` or a function of the user's.

To read, in this order:

- `patching` is what users call, `settings` the keywords that it takes, and `anatomy` finds a
  model's parts;
- `model_forward` is what a patched model runs, `fused_forward` the part of it that computes the
  loss, `head_forward` what its head runs, and `outputs` what comes out;
- `verification` decides whether a model can be patched at all: `probe` runs it, `logit_map` finds
  what it does to its logits, and `head_hooks` which hooks may stay on its head;
- `user_warnings` makes every warning point at the user's own line;
- `trainer` and `callback` are for Hugging Face's Trainers, and `trl` is what is known of TRL;
- `families` makes kernel/FAMILIES.md and is used by nothing else here.
"""

from smoothce.hf_patch.patching import patch_model, unpatch_model
from smoothce.hf_patch.trainer import patch_trainer

__all__ = ["patch_model", "patch_trainer", "unpatch_model"]
