"""Engine on vLLM: whole prompts, prefix cache on, exact token ids' log-probabilities.

Needs vLLM 0.20 to 0.33, the releases with `SamplingParams.logprob_token_ids`. One process drives
one GPU; `--shard I/N` spreads questions over several.
"""

import os
from collections.abc import Iterator
from types import MethodType

from calibeval.engines import Job, Usage, first_line, load_tokenizer
from calibeval.io import InputError

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


class VllmEngine:
    """Hands vLLM whole prompts in an order that keeps shared prefixes cached.

    `longest`: tokens of the longest prompt, all that memory is kept for; None: the model's
    positions. Other options go to `vllm.LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        longest: int | None = None,
        revision: str | None = None,
        gpu_memory: float = 0.9,
        **options,
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
        self.on_gpu = torch.cuda.is_available()
        try:
            self.llm = vllm.LLM(
                model=model,
                revision=revision,
                tokenizer_revision=revision,
                dtype="float32" if dtype == "auto" and not self.on_gpu else dtype,
                max_model_len=longest + 1 if longest else None,
                enable_prefix_caching=True,
                enforce_eager=True,  # nothing is decoded: graphs and compilation would only delay
                max_logprobs=32,
                seed=0,
                hf_overrides={"head_dtype": "float32"},
                worker_extension_cls=f"{__name__}.PreciseHead",
                **({"gpu_memory_utilization": gpu_memory} if self.on_gpu else {}),
                **options,
            )
            (self.head_dtype,) = self.llm.collective_rpc("make_head_precise")
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"{model}: vLLM {vllm.__version__} cannot run it: {first_line(error)}"
            ) from error

    def describe(self) -> dict:
        """Engine settings that the figures depend on; `head_dtype` is that of logits it gave."""
        config = self.llm.llm_engine.model_config
        return {
            "engine": "vllm",
            "device": "cuda" if self.on_gpu else "cpu",
            "dtype": str(config.dtype).removeprefix("torch."),
            "head_dtype": self.head_dtype,
            "max_length": config.max_model_len - 1,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the packages that compute the figures."""
        return self.packages

    def score(self, groups: list[list[Job]]) -> Iterator[tuple[int, list[float]]]:
        """Yield (job index, log-probability of each branch) for every job."""
        jobs = [job for group in groups for job in group]
        # Letters: a prompt a node, and all tokens that may follow. Longer branches: their first
        # tokens so, which leaves the context in the cache, and the rest from a prompt a branch.
        asked = [job.nodes if job.is_chain else ((),) for job in jobs]
        steps = [(job, node) for job, nodes in zip(jobs, asked, strict=True) for node in nodes]
        outputs = self._generate(
            [job.tokens + node for job, node in steps],
            [self._next(_followers(job, node)) for job, node in steps],
        )
        first = {
            (id(job), node): {
                t: entry.logprob for t, entry in output.outputs[0].logprobs[0].items()
            }
            for (job, node), output in zip(steps, outputs, strict=True)
        }
        rest = [
            (job, branch)
            for job, nodes in zip(jobs, asked, strict=True)
            for branch in dict.fromkeys(job.branches)
            if len(nodes) < len(job.nodes) and len(branch) > 1
        ]
        along = ((id(job), branch) for job, branch in rest)
        after = dict(zip(along, self._read_along(rest), strict=True))
        for job in jobs:
            found = []
            for branch in job.branches:
                known = 1 if (id(job), branch) in after else len(branch)
                parts = [first[id(job), branch[:i]].get(branch[i]) for i in range(known)]
                parts += [after[id(job), branch]] if known < len(branch) else []
                if None in parts:
                    raise InputError(f"vLLM gave no log-probability of a choice ({job.index})")
                found.append(sum(parts))
            yield job.index, found

    def _read_along(self, rest: list[tuple[Job, tuple[int, ...]]]) -> Iterator[float]:
        """log P of each branch's tokens but the first, given the context and those before.

        vLLM computes log-probabilities of a prompt's tokens for what it does not find in the cache,
        and so reads none of it unless told to. Told to, the first of the branch's tokens that it
        must compute is the context's own last but for what blocks two branches share: these few
        are asked again without the cache.
        """
        prompts = [job.tokens + branch for job, branch in rest]
        read = [self._along(False)] * len(prompts)
        outputs = self._generate(prompts, read)
        short = [
            i
            for i, (job, _) in enumerate(rest)
            if (outputs[i].num_cached_tokens or 0) > len(job.tokens)
        ]
        again = self._generate([prompts[i] for i in short], [self._along(True)] * len(short))
        for i, output in zip(short, again, strict=True):
            outputs[i] = output
        for (job, branch), output in zip(rest, outputs, strict=True):
            given = output.prompt_logprobs[1 - len(branch) :]
            try:
                yield sum(at[t].logprob for at, t in zip(given, branch[1:], strict=True))
            except (KeyError, ValueError, TypeError):
                raise InputError(
                    f"vLLM gave no log-probability of a choice ({job.index})"
                ) from None

    def _generate(self, prompts: list[tuple[int, ...]], parameters: list) -> list:
        if not prompts:
            return []
        given = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        outputs = self.llm.generate(given, parameters, use_tqdm=False)
        for output in outputs:
            length = len(output.prompt_token_ids)
            self.usage.prompt_tokens += length
            self.usage.computed_tokens += length - (output.num_cached_tokens or 0)
        return outputs

    def _next(self, ids: list[int]):
        return self.vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprob_token_ids=ids,
            logprobs=len(ids),
            detokenize=False,
        )

    def _along(self, skip_cache: bool):
        return self.vllm.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            skip_reading_prefix_cache=skip_cache,
            detokenize=False,
        )


def _followers(job: Job, node: tuple[int, ...]) -> list[int]:
    """The tokens that branches have after a node."""
    depth = len(node)
    return sorted({b[depth] for b in job.branches if len(b) > depth and b[:depth] == node})


class PreciseHead:
    """Methods that vLLM adds to its worker, the process that holds the model.

    bfloat16 logits near 20 are 0.125 apart. vLLM 0.30 and later heed `head_dtype`; earlier releases
    keep the output layer of a model that generates in the model's precision.
    """

    def make_head_precise(self) -> str:
        """Let the output layer's product be float32; returns the type of logits that come out."""
        import torch
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        model = self.model_runner.get_model()
        if self._logits_dtype(model) != torch.float32:
            for module in model.modules():
                if isinstance(module, LogitsProcessor):
                    module._get_logits = MethodType(_precise_logits, module)
        return str(self._logits_dtype(model)).removeprefix("torch.")

    def _logits_dtype(self, model):
        import torch

        config = self.model_runner.model_config
        hidden = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=self.device)
        with torch.inference_mode():
            return model.compute_logits(hidden).dtype


def _precise_logits(self, hidden_states, lm_head, embedding_bias):
    """`LogitsProcessor._get_logits` with an output in float32, as vLLM 0.30 computes it."""
    import torch

    if not torch.is_floating_point(getattr(lm_head, "weight", torch.zeros(0, dtype=torch.int))):
        raise ValueError("its output layer is quantised, so that its logits cannot be float32")
    weight = lm_head.weight.t()
    if hidden_states.is_cuda and hidden_states.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden_states, weight, out_dtype=torch.float32)
    else:
        logits = hidden_states.float() @ weight.float()
    if embedding_bias is not None:
        logits = logits + embedding_bias.float()
    logits = self._gather_logits(logits)
    return None if logits is None else logits[..., : self.org_vocab_size]
