"""Engine on vLLM: whole prompts, prefix cache on, exact token ids' log-probabilities.

Needs vLLM 0.30 or later, whose `head_dtype` keeps logits near 20 from being 0.125 apart.
"""

import atexit
import os
import threading
from collections.abc import Container, Iterator

from calibeval.engines import Job, shortened
from calibeval.io import InputError

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

AT_ONCE = 512  # questions: vLLM gives nothing back before all that it was asked at once


class VllmEngine:
    """Hands vLLM whole prompts in an order that keeps shared prefixes cached.

    `longest`: tokens of the longest prompt, all that memory is kept for. Other options go to
    `vllm.LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        longest: int,
        dtype: str = "auto",
        revision: str | None = None,
        **options,
    ):
        try:
            import torch
            import transformers
            import vllm
        except ImportError as error:
            raise InputError(f"--engine vllm: {error}; it needs vLLM 0.30 or later") from error
        self.parameters = vllm.SamplingParams
        self.versions = {m.__name__: m.__version__ for m in (torch, transformers, vllm)}
        self.on_gpu = torch.cuda.is_available()
        before = set(threading.enumerate())
        settings = {
            "model": model,
            "revision": revision,
            "tokenizer_revision": revision,
            "dtype": "float32" if dtype == "auto" and not self.on_gpu else dtype,
            "max_model_len": longest + 1,
            "enable_prefix_caching": True,
            "enforce_eager": True,  # little is decoded: graphs and compilation would only delay
            "max_logprobs": 32,
            "seed": 0,
            "hf_overrides": {"head_dtype": "float32"},
        }
        try:
            self.llm = vllm.LLM(**settings | options)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{model}: vLLM cannot run it: {shortened(error)}") from error
        self.threads = set(threading.enumerate()) - before
        atexit.register(self.close)  # before multiprocessing waits for vLLM's process

    def describe(self) -> dict:
        """Engine settings that the figures depend on."""
        dtype = self.llm.llm_engine.model_config.dtype
        return {
            "engine": "vllm",
            "device": "cuda" if self.on_gpu else "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "head_dtype": "float32",
        }

    def close(self) -> None:
        """End the process that holds the model, and the threads that speak with it.

        They are daemons: one that is in C++ while Python ends aborts the whole process.
        """
        atexit.unregister(self.close)
        self.llm.llm_engine.engine_core.shutdown()
        for thread in self.threads:
            thread.join(timeout=5)

    def score(
        self, groups: list[list[Job]], skip: Container[int] = ()
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job not to `skip`."""
        jobs = [job for group in groups for job in group if job.index not in skip]
        for start in range(0, len(jobs), AT_ONCE):
            yield from self._score(jobs[start : start + AT_ONCE])

    def _score(self, jobs: list[Job]) -> Iterator[tuple[int, list[float]]]:
        # Choices of one token: a prompt, and all tokens that may follow it. Texts: a prompt each,
        # read whole, for vLLM takes nothing from its cache whose log-probabilities are asked.
        prompts, asked = [], []
        for job in jobs:
            if job.nodes == ((),):
                ids = sorted({token for (token,) in job.branches})
                prompts.append(job.tokens)
                asked.append({"logprob_token_ids": ids, "logprobs": len(ids)})
            else:
                prompts += [job.tokens + branch for branch in job.branches]
                asked += [{"prompt_logprobs": 0}] * len(job.branches)
        fixed = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        outputs = iter(
            self.llm.generate(
                [{"prompt_token_ids": list(tokens)} for tokens in prompts],
                [self.parameters(**fixed | what) for what in asked],
                use_tqdm=False,
            )
        )
        for job in jobs:
            if job.nodes == ((),):
                after = next(outputs).outputs[0].logprobs[0]
                yield job.index, [after[token].logprob for (token,) in job.branches]
                continue
            scores = []
            for branch in job.branches:
                read = next(outputs).prompt_logprobs[-len(branch) :]
                pairs = zip(branch, read, strict=True)
                scores.append(sum(at[token].logprob for token, at in pairs))
            yield job.index, scores
