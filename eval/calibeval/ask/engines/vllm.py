"""Engine on vLLM: whole prompts, prefix cache on, exact token ids' log-probabilities.

Needs vLLM 0.30 or later, whose `head_dtype` keeps logits near 20 from being 0.125 apart.
"""

import atexit
import os
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Any

from calibeval.ask.engines import Job, Tokens, shortened
from calibeval.ask.request import Precision
from calibeval.io import InputError

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

JOBS_AT_ONCE = 512  # vLLM gives nothing back before all that it was asked at once
MOST_LOGPROBS = 32  # at one place, where vLLM would refuse more than 20; there are 26 letters
JOIN_SECONDS = 5


class VllmEngine:
    """Hands vLLM whole prompts in an order that keeps shared prefixes cached.

    `max_model_length` is the most tokens of a prompt with the one that vLLM samples behind it:
    memory is kept for so many. `gpu_memory_utilization` is vLLM's share of the GPU, None its own
    default.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_length: int,
        dtype: Precision = "auto",
        revision: str | None = None,
        gpu_memory_utilization: float | None = None,
    ):
        try:
            import torch
            import transformers
            import vllm
        except ImportError as error:
            raise InputError(f"--engine vllm: {error}; it needs vLLM 0.30 or later") from error
        self.params_class = vllm.SamplingParams
        self.versions = {
            package.__name__: package.__version__ for package in (torch, transformers, vllm)
        }
        self.on_gpu = torch.cuda.is_available()
        settings: dict[str, Any] = {
            "model": model,
            "revision": revision,
            "tokenizer_revision": revision,
            "dtype": "float32" if dtype == "auto" and not self.on_gpu else dtype,
            "max_model_len": max_model_length,
            "enable_prefix_caching": True,
            "enforce_eager": True,  # little is decoded: graphs and compilation would only delay
            "max_logprobs": MOST_LOGPROBS,
            "seed": 0,
            "hf_overrides": {"head_dtype": "float32"},
        }
        if gpu_memory_utilization is not None:
            settings["gpu_memory_utilization"] = gpu_memory_utilization
        threads_before = set(threading.enumerate())
        try:
            self.llm = vllm.LLM(**settings)
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{model}: vLLM cannot run it: {shortened(error)}") from error
        self.threads = set(threading.enumerate()) - threads_before
        atexit.register(self.close)  # before multiprocessing waits for vLLM's process

    def describe(self) -> dict[str, Any]:
        """Settings that the scores depend on."""
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
            thread.join(timeout=JOIN_SECONDS)

    def score(
        self, groups: list[list[Job]], skip: Container[int] = ()
    ) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job not to `skip`."""
        jobs = [job for group in groups for job in group if job.index not in skip]
        for start in range(0, len(jobs), JOBS_AT_ONCE):
            yield from self._score(jobs[start : start + JOBS_AT_ONCE])

    def _score(self, jobs: list[Job]) -> Iterator[tuple[int, list[float]]]:
        prompts: list[Tokens] = []
        sampling_params = []
        for job in jobs:
            if _has_choices_of_one_token(job):
                # One prompt, and the log-probability of all tokens that may follow it.
                tokens = sorted({token for (token,) in job.branches})
                prompts.append(job.context)
                sampling_params.append(self._sampling_params(tokens))
            else:
                # A prompt for each choice, up to its last token, which may follow it. It is read
                # whole: vLLM takes nothing from its cache whose log-probabilities are asked for.
                for branch in job.branches:
                    prompts.append(job.context + branch[:-1])
                    # 0 asks for the prompt's own tokens, and for no others beside them.
                    sampling_params.append(self._sampling_params(branch[-1:], prompt_logprobs=0))
        outputs = iter(
            self.llm.generate(
                [{"prompt_token_ids": list(tokens)} for tokens in prompts],
                sampling_params,
                use_tqdm=False,
            )
        )
        for job in jobs:
            if _has_choices_of_one_token(job):
                next_token = next(outputs).outputs[0].logprobs[0]
                yield job.index, [next_token[token].logprob for (token,) in job.branches]
            else:
                yield job.index, [_branch_logprob(next(outputs), b) for b in job.branches]

    def _sampling_params(self, next_tokens: Sequence[int], **options: Any) -> Any:
        """vLLM's parameters for the log-probabilities of some tokens that may follow a prompt.

        The one token that vLLM must sample is not used.
        """
        return self.params_class(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            logprob_token_ids=list(next_tokens),
            logprobs=len(next_tokens),
            **options,
        )


def _has_choices_of_one_token(job: Job) -> bool:
    return job.nodes == ((),)


def _branch_logprob(output: Any, branch: Tokens) -> float:
    """log P of a branch, of which the prompt holds all but the last token."""
    *first, last = branch
    # Not `[-len(first):]`, which would be the whole prompt where a branch has one token.
    places = output.prompt_logprobs[len(output.prompt_logprobs) - len(first) :]
    logprobs = [place[token].logprob for token, place in zip(first, places, strict=True)]
    next_token = output.outputs[0].logprobs[0]
    return sum(logprobs) + next_token[last].logprob
