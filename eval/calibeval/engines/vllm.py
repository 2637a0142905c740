"""Engine on vLLM: one prompt a question, prefix cache on, exact token ids' log-probabilities.

Needs vLLM 0.20 to 0.33, the releases with `SamplingParams.logprob_token_ids`. One process drives
one GPU; `--shard I/N` spreads questions over several.
"""

import os
from collections import defaultdict
from collections.abc import Iterator

from calibeval.engines import Job, Usage, context_length, first_line, load_tokenizer
from calibeval.io import InputError

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class VllmEngine:
    """Hands vLLM whole prompts in an order that keeps shared prefixes cached."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        max_length: int | None = None,
        revision: str | None = None,
        gpu_memory: float = 0.9,
    ):
        try:
            import torch
            import transformers
            import vllm
        except ImportError as error:
            raise InputError(
                f"--engine vllm needs vLLM 0.20 to 0.33, which cannot be imported ({error}); "
                f"install it, or use --engine transformers"
            ) from error
        if not hasattr(vllm.SamplingParams(), "logprob_token_ids"):
            raise InputError(
                f"vLLM {vllm.__version__} cannot give the log-probabilities of chosen tokens; "
                f"vLLM 0.20 to 0.33 can"
            )
        self.vllm, self.usage = vllm, Usage()
        self.packages = {m.__name__: m.__version__ for m in (torch, transformers, vllm)}
        self.tokenizer = load_tokenizer(model, revision)
        config = transformers.AutoConfig.from_pretrained(model, revision=revision)
        self.max_length = max_length or context_length(config)
        self.on_gpu = torch.cuda.is_available()
        self.dtype = "float32" if dtype == "auto" and not self.on_gpu else dtype
        try:
            self.llm = vllm.LLM(
                model=model,
                revision=revision,
                tokenizer_revision=revision,
                dtype=self.dtype,
                max_model_len=self.max_length + 1,
                enable_prefix_caching=True,
                enforce_eager=True,  # nothing is decoded: graphs and compilation would only delay
                max_logprobs=32,
                seed=0,
                # bfloat16 logits near 20 are 0.125 apart. vLLM 0.20 knows the option and leaves
                # the head of a model that generates as it is; `describe` says what it took.
                hf_overrides={"head_dtype": "float32"},
                **({"gpu_memory_utilization": gpu_memory} if self.on_gpu else {}),
            )
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{model}: vLLM {vllm.__version__} cannot run it: {first_line(error)}"
            ) from error

    def describe(self) -> dict:
        """Engine settings that the figures depend on."""
        config = self.llm.llm_engine.model_config
        return {
            "engine": "vllm",
            "device": "cuda" if self.on_gpu else "cpu",
            "dtype": str(config.dtype).removeprefix("torch."),
            "head_dtype": str(config.head_dtype).removeprefix("torch."),
            "max_length": self.max_length,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the packages that compute the figures."""
        return self.packages

    def score(self, groups: list[list[Job]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each letter) for every job."""
        requests = [(job, depth) for group in groups for job in group for depth in _depths(job)]
        prompts, parameters = [], []
        for job, depth in requests:
            ids = sorted(_wanted(job, depth))
            prompts.append({"prompt_token_ids": list(job.tokens + job.spine[:depth])})
            parameters.append(
                self.vllm.SamplingParams(
                    max_tokens=1,
                    temperature=0.0,
                    logprob_token_ids=ids,
                    logprobs=len(ids),
                    detokenize=False,
                )
            )
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        found: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)
        for (job, depth), output in zip(requests, outputs, strict=True):
            length = len(output.prompt_token_ids)
            self.usage.prompt_tokens += length
            self.usage.computed_tokens += length - (output.num_cached_tokens or 0)
            given = output.outputs[0].logprobs[0]
            for token in _wanted(job, depth):
                if token not in given:
                    raise InputError(
                        f"vLLM gave no log-probability for token {token} ({job.index})"
                    )
                found[job.index][depth, token] = given[token].logprob
        for group in groups:
            for job in group:
                yield job.index, _letters(job, found[job.index])


def _depths(job: Job) -> range:
    return range(len(job.spine) + 1)


def _wanted(job: Job, depth: int) -> set[int]:
    letters = {token for d, token in job.letters if d == depth}
    return letters | set(job.spine[depth : depth + 1])


def _letters(job: Job, found: dict[tuple[int, int], float]) -> list[float]:
    lead = [0.0]
    for depth, token in enumerate(job.spine):
        lead.append(lead[-1] + found[depth, token])
    return [lead[depth] + found[depth, token] for depth, token in job.letters]
