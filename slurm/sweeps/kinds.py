"""Which kind of file a YAML file is, told by its keys, for whoever gives one in another's place."""

from sweeps.backends import REGISTRY, get_backend
from sweeps.config import Sweep
from sweeps.errors import SweepError

SWEEP, PROFILE = "a sweep", "a cluster profile"
RUN = "the config.yaml of a run"
TRAIN = "settings of one training, which a sweep has under `train`"
DEEPSPEED = "a DeepSpeed configuration, which a sweep names in `world.deepspeed`"
EXAMPLES = {SWEEP: "configs/sweeps/beta.yaml", PROFILE: "configs/cluster/generic.yaml"}


def refuse_other(raw: dict, expected: str, source: str) -> None:
    """Raise SweepError if no key of `raw` is one of `expected`, or if its keys are a run's."""
    kinds = _kinds()
    known = {kind: sum(key in keys for key in raw) for kind, keys in kinds.items()}
    best = RUN if set(raw) == kinds[RUN] else max(known, key=known.get)
    if known[expected] and best != RUN:  # one that is wrong in parts: each part is named
        return
    if known[best]:
        found = f"this looks like {best}"
    elif len(raw) < 2:  # perhaps misspelt
        return
    else:
        found = f"none of its keys ({', '.join(map(str, raw))}) is known"
    option = "; --cluster takes a profile" if best == PROFILE else ""
    raise SweepError(
        f"{source}: {found}; {expected} is expected, for example {EXAMPLES[expected]}{option}"
    )


def _kinds() -> dict[str, set[str]]:
    from sweeps.cluster import Cluster  # which itself asks here

    deepspeed = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
    deepspeed += ("gradient_accumulation_steps", "gradient_clipping", "bf16", "fp16", "optimizer")
    return {
        SWEEP: set(Sweep.model_fields),
        PROFILE: set(Cluster.model_fields),
        RUN: {"backend", "train", "world"},
        TRAIN: {key for name in REGISTRY for key in get_backend(name).Train.model_fields},
        DEEPSPEED: set(deepspeed),
    }
