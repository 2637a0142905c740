"""What a warm child has imported before it is forked; imports alone start no threads."""

import accelerate  # noqa: F401
import torch  # noqa: F401
import transformers
from transformers.models.llama import modeling_llama  # noqa: F401

for lazy in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer", "get_scheduler"):
    getattr(transformers, lazy)
