"""The loss inside Hugging Face language models.

A patched model runs its own forward. In training, with labels, its head answers with logits that
are deferred, and the cross-entropy that takes them is computed without them, inside a call of the
head: that is where DeepSpeed's ZeRO-3 and FSDP2 gather the classifier.

- `patching` is what users call, and what a patched model runs;
- `deferred_logits` notes what a model does to its logits;
- `head` has the settings, and computes the loss as they and the notes say;
- `trainer` and `callback` are for Hugging Face's Trainers and TRL's.
"""

from smoothce.hf_patch.patching import patch_model, unpatch_model
from smoothce.hf_patch.trainer import patch_trainer

__all__ = ["patch_model", "patch_trainer", "unpatch_model"]
