"""Where the files of the hub lie that were fetched: for a launch, for `prefetch` and for jobs.

The rules are those of `huggingface_hub.constants` and `datasets.config`, which read the same
variables when they are imported. They are repeated here because a launch must not wait for the
import of these packages, and because they would not see a profile's `cache` any more.
"""

import os
from pathlib import Path

from sweeps.runs.schema import Cluster
from sweeps.runs.yaml_io import expand

# Variables that override HF_HOME for some of the files.
VARIABLES_OF_PARTS = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE")


def use_cache(cluster: Cluster) -> None:
    """Look for hub files where the jobs of this profile will, and let programs look there too.

    Without a `cache` in the profile that is where this shell's variables say: `job_variables`
    hands them on to the jobs.
    """
    if cluster.cache:
        os.environ["HF_HOME"] = expand("cluster.cache", cluster.cache)
        for variable in VARIABLES_OF_PARTS:
            os.environ.pop(variable, None)


def job_variables() -> dict[str, str]:
    """The variables that let a job without a `cache` in its profile look where this shell does.

    There are none where this shell has none: a job then has those of a login, if any.
    """
    variables = {}
    if os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME"):
        variables["HF_HOME"] = str(_home())
    for name in VARIABLES_OF_PARTS:
        value = os.environ.get(name)
        if value:
            variables[name] = value
    return variables


def _home() -> Path:
    """The folder of all that Hugging Face's libraries keep."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(user_cache, "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(home)))


def hub_folder() -> Path:
    """The folder of models and data sets, each in a folder of its own."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        folder = os.environ.get(name)
        if folder:
            return Path(os.path.expandvars(os.path.expanduser(folder)))
    return _home() / "hub"
