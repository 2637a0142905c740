"""The loss inside Hugging Face causal language models.

A patched model in training mode, given labels, runs its own decoder and then calls its head with
hidden states and labels; the head's forward returns the loss. Going through `head.__call__`, once
for each forward, is what lets DeepSpeed's ZeRO-3 and FSDP2 gather the classifier for the head's
forward and backward and free it in between. Reading `head.weight` from outside the head would not.

The mean over the tokens of a whole update is the trainer's work: transformers counts the labels of
all micro-batches and ranks and hands the count over as `num_items_in_batch`, by which `HeadForward`
divides the sum; TRL divides the sum itself; a loop of one's own has `smoothce.token_mean_factor`.
Where no count comes, the loss is a mean of each micro-batch, as it is upstream.

To read: `patching` is what users call; `forwards` and `head_forward` are what a patched model and
its head run; `logit_map` and `proof` decide whether a model can be patched at all, `hooks` which
hooks may stay on its head; `settings` is
the keywords, `anatomy` finds a model's parts, `outputs` builds what a forward returns; `trainer`
and `callback` are for Hugging Face's Trainers, and `families` makes kernel/FAMILIES.md.
"""

from smoothce.hf_patch.patching import patch_model, unpatch_model
from smoothce.hf_patch.trainer import patch_trainer

__all__ = ["patch_model", "patch_trainer", "unpatch_model"]
