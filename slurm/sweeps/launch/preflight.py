"""Everything that would stop a sweep later, found and named before anything is queued."""

import contextlib
import errno
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from calibeval.ask.tasks import HUB, load
from calibeval.io import InputError, read_text
from sweeps.launch import assets, local
from sweeps.launch.hub_cache import use_cache
from sweeps.runs import scoring
from sweeps.runs.backend import load_backend, trains_on_several_nodes
from sweeps.runs.conversations import conversations
from sweeps.runs.files import found_path
from sweeps.runs.grid import LAUNCHED_FILE, PATH_KEYS, SweepPlan, launch_folder
from sweeps.runs.processes import cli_command, run_or_empty
from sweeps.runs.run import Run
from sweeps.runs.schema import Cluster, load_cluster, one_line
from sweeps.runs.yaml_io import expand

PACKAGES_OF_JOBS = ("pydantic", "submitit", "yaml")  # as sweeps.sh asks for them
# A line of a secrets file, which jobs take as it stands: what a shell would replace is refused.
SECRET_LINE = re.compile(r"""(export )?[A-Za-z_]\w*=('[^']*'|"[^"$`\\]*"|[^\s"'$`\\]*)""", re.ASCII)
READ_CONVERSATIONS = 100_000  # of a training file, of which the format is checked


def problems(plan: SweepPlan, executor: str, runs_programs: bool = True) -> list[str]:
    """What would stop a launch by `executor`, local or slurm: one sentence for each problem.

    Without `runs_programs`, in a dry run, the profile's interpreter is not asked for its packages,
    nor is the cache looked into that another user's profile names, nor models and data that another
    user's folder names. Raises InputError for a problem that keeps the others from being looked
    for.
    """
    foreign_cache = not runs_programs and _has_foreign_cache(plan)
    if executor == "slurm":
        cluster = load_cluster(plan.sweep.cluster)
        if not foreign_cache:
            use_cache(cluster)
    else:
        cluster = Cluster()
        if not foreign_cache:
            _use_cache_of_profile(plan)
    found = []
    if foreign_cache:
        found.append(
            f"{plan.sweep.cluster}: cache: is not looked into, since another user's profile names "
            f"it: type --cluster {shlex.quote(str(plan.sweep.cluster))}"
        )
    foreign_file = None if runs_programs else _foreign_file(plan)
    if foreign_file is None:
        found += _inputs(plan)
    else:
        found.append(
            f"{foreign_file}: is another user's: the models and data that it names are not looked "
            "into: type the sweep's file"
        )
    found += [
        *_records(plan),
        *_interpreters(plan, cluster, runs_programs),
        *_secrets_file(plan, cluster),
    ]
    if executor == "local":
        nodes = plan.sweep.world.nodes
        if nodes > 1:
            found.append(
                f"world.nodes: {nodes}: this is one machine: launch on Slurm, or type "
                "world.nodes=1 and raise world.processes_per_node"
            )
        try:
            local.gpus_of_workers(plan.sweep)
        except InputError as error:  # there are too few GPUs
            found.append(str(error))
    else:
        if shutil.which("sbatch") is None:  # which a launch would miss after it has noted its runs
            found.append(
                "--executor slurm: no sbatch is on the PATH: load the cluster's Slurm module, or, "
                "to train on this machine, type --executor local"
            )
        found.extend(_cluster_of_shell(plan, cluster))
        found.extend(_several_nodes(plan, cluster))
        found.extend(_unreadable_path(plan))
    found.extend(_launched_elsewhere(plan))
    found.extend(_unwritable(plan))
    return list(dict.fromkeys(found))


def _foreign_file(plan: SweepPlan) -> Path | None:
    """The file of another user's that a sweep is read from, where its folder alone was typed.

    It may name any file that only this user can read, of which an error would show a line.
    """
    if not os.path.isdir(plan.typed[0]):
        return None
    files = [plan.folder / LAUNCHED_FILE]
    if plan.is_one_run:
        files += [run.config_file for run in plan.baselines_and_runs]
    for file in files:
        if file.stat().st_uid != os.geteuid():
            return file
    return None


def _has_foreign_cache(plan: SweepPlan) -> bool:
    """Whether only a sweep's folder names a profile of somebody else's that has a `cache`.

    Libraries of the hub read and write there, and a folder may be anybody's.
    """
    source, *overrides = plan.typed
    is_typed = any(word.startswith("cluster=") for word in overrides)
    if plan.sweep.cluster is None or is_typed or not os.path.isdir(source):
        return False
    profile = found_path(plan.sweep.cluster)
    if not profile.exists() or profile.stat().st_uid == os.geteuid():
        return False
    return load_cluster(plan.sweep.cluster).cache is not None


def _use_cache_of_profile(plan: SweepPlan) -> None:
    """Without Slurm: look for hub files where `prefetch` of this sweep puts them.

    Nothing else of the profile matters here. If it is not there, or only the cluster can name its
    cache, `prefetch` cannot have used it either, and the shell's own cache is looked into. A
    profile that has a wrong key is refused all the same.
    """
    if plan.sweep.cluster is None or not found_path(plan.sweep.cluster).exists():
        return
    cluster = load_cluster(plan.sweep.cluster)
    with contextlib.suppress(InputError):  # a variable in `cache` is not set here
        use_cache(cluster)


def _interpreters(plan: SweepPlan, cluster: Cluster, runs_programs: bool) -> Iterator[str]:
    """Interpreters that cannot be run here, and packages that they lack for the runs."""
    if cluster.python == "auto":
        absent = sorted(name for name in _packages(plan) if find_spec(name) is None)
        if absent:
            install = f"{sys.executable} -m pip install …"
            yield f"packages that runs need: {' '.join(absent)}: {install}"
    else:
        yield from _profiles_interpreter(plan, cluster, runs_programs)
    scoring_python = plan.sweep.score.python if plan.sweep.score is not None else None
    # A command of several words is a container's, in which other paths may exist.
    if scoring_python and " " not in cluster.python:
        problem = _program_problem(os.path.abspath(scoring_python), "no such program")
        if problem is not None:
            yield f"score.python: {scoring_python}: {problem}"


def _profiles_interpreter(plan: SweepPlan, cluster: Cluster, runs_programs: bool) -> Iterator[str]:
    """Problems of the profile's `python`, as far as they can be seen before a job runs it."""
    words = cluster.python.split(" ")
    with contextlib.suppress(ValueError):  # quotes that nobody closes
        words = shlex.split(cluster.python)
    # What a variable, a module or a set-up line will make of it, only the job can tell.
    if not words or "$" in words[0] or cluster.modules or cluster.setup:
        return
    problem = _program_problem(words[0], "no such command")
    if problem is not None:
        yield f"{plan.sweep.cluster}: python: {words[0]}: {problem}"
    elif len(words) == 1 and runs_programs:
        # More words are a container's, which may not run on a login node.
        absent = _absent_packages(words[0], sorted({*PACKAGES_OF_JOBS, *_packages(plan)}))
        if absent:
            lack = f"lacks packages that runs need: {' '.join(absent)}"
            yield f"{plan.sweep.cluster}: python: {cluster.python}: {lack}"


def _program_problem(program: str, absent: str) -> str | None:
    """Why a program cannot be run here, `absent` if it is not there; None if it can be."""
    if shutil.which(program):
        return None
    if os.path.exists(program):
        return f"cannot be run: {os.strerror(errno.EACCES)}"
    return absent


def _absent_packages(python: str, names: list[str]) -> list[str]:
    """Those of the modules that another interpreter does not find; none if it does not answer."""
    code = (
        "import importlib.util, sys; "
        "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
    )
    return run_or_empty(python, "-c", code, *names).split()


def _packages(plan: SweepPlan) -> set[str]:
    """The packages that the runs need, beyond those of every job."""
    backend = load_backend(plan.sweep.backend)
    score = plan.sweep.score
    names: set[str] = set()
    if score is not None and score.python is None and score.engine == "vllm":
        names.add("vllm")
    for run in plan.runs:
        names.update(backend.packages(run.config().train_options, plan.sweep.world))
    return names


def _secrets_file(plan: SweepPlan, cluster: Cluster) -> Iterator[str]:
    """What is wrong with a file of tokens: it is not there, not its user's alone, or not read."""
    if not cluster.secrets_file:
        return
    key = f"{plan.sweep.cluster}: secrets_file: {cluster.secrets_file}"
    file = Path(expand("secrets_file", cluster.secrets_file))
    if not file.is_file():
        yield f"{key}: no such file"
        return
    if file.stat().st_uid != os.getuid():
        yield f"{key}: is another user's, who could give your jobs any variable: copy it"
    elif file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        yield f"{key}: others can read it: chmod 600 {shlex.quote(str(file))}"
    else:
        yield from _wrong_line(key, file)
    folder = file.parent
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        yield f"{key}: others can replace it: chmod o-w {shlex.quote(str(folder))}"


def _wrong_line(key: str, file: Path) -> Iterator[str]:
    """The first line of a file of tokens that is no NAME=value; what it holds is not repeated."""
    for number, line in enumerate(read_text(file).splitlines(), start=1):
        if line and not line.startswith("#") and not SECRET_LINE.fullmatch(line):
            yield (
                f"{key}, line {number}: write NAME=value, without spaces, or NAME='a value'; "
                "nothing in it is run"
            )
            return


def _cluster_of_shell(plan: SweepPlan, cluster: Cluster) -> Iterator[str]:
    """A cluster that the shell names for Slurm's tools, and the profile does not."""
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        value = os.environ.get(name)
        if value and value != cluster.clusters:
            profile = plan.sweep.cluster or "a --cluster profile"
            yield (
                f"{name}: {value}: jobs go where the profile says: write `clusters: {value}` into "
                f"{profile}, or type: unset {name}"
            )


def _several_nodes(plan: SweepPlan, cluster: Cluster) -> Iterator[str]:
    """What keeps the runs from training on several nodes, where they are to."""
    nodes = plan.sweep.world.nodes
    if nodes == 1:
        return
    backend = plan.sweep.backend
    if not trains_on_several_nodes(backend):
        yield f"world.nodes: {nodes}: backend {backend} trains on one node; type world.nodes=1"
    if " " in cluster.python:
        yield (
            f"{plan.sweep.cluster}: python: {cluster.python}: a run on several nodes "
            f"(world.nodes: {nodes}) needs an interpreter alone, which each node has at this path"
        )


def _unreadable_path(plan: SweepPlan) -> Iterator[str]:
    """A folder whose path sbatch would not read as it stands."""
    folder = str(plan.folder.absolute())
    if "%" in folder:
        yield f"output_root: {folder}: Slurm reads % in paths; another folder"
    if not one_line(folder):
        yield f"output_root: {folder!r}: a path of one line is needed"


def _launched_elsewhere(plan: SweepPlan) -> Iterator[str]:
    """Relative paths that meant other files when the folder was launched from another place."""
    place, _ = launch_folder(plan.folder)
    if place is None or place == Path.cwd() or os.path.isdir(plan.typed[0]):
        return
    paths = [run.config().train.get(key) for run in plan.runs for key in PATH_KEYS]
    if plan.sweep.score is not None:
        paths += [task.data for task in plan.sweep.score.tasks]
    for path in dict.fromkeys(paths):
        if not path or os.path.isabs(path):
            continue
        if os.path.exists(path) or (place / path).exists():
            yield (
                f"{path}: {plan.folder.absolute()} was launched from {place}, where its relative "
                f"paths begin: cd {shlex.quote(str(place))}, or give this sweep another name"
            )


def _unwritable(plan: SweepPlan) -> Iterator[str]:
    """A folder that cannot be made or written, found by making and deleting another one there."""
    folder = plan.folder.absolute()
    existing = folder
    while not os.path.exists(existing):
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".sweeps-"):
            pass
    except OSError as error:
        yield f"output_root: {folder}: cannot be written: {existing}: {error.strerror}"


def _inputs(plan: SweepPlan) -> list[str]:
    """What runs read and what is not here or not readable, as far as it can be told now.

    There are three steps, and each needs what the one before has found to be in order. First what
    is not fetched: the other steps read it. Then the files of `world:`, without which no backend
    can say what a run needs. Last what models, data and questions lack, and what the backend says.
    """
    unfetched = list(_unfetched(plan))
    if unfetched:
        command = f"where there is internet: {cli_command('prefetch', *plan.typed)}"
        return [*unfetched, *_who_makes(plan), command]
    unreadable = list(_files_of_world(plan))
    if unreadable:
        return unreadable
    unreadable, from_backend = _needs_of_training(plan)
    unreadable += _questions(plan)
    if unreadable:
        unreadable += _who_makes(plan)
    return [*unreadable, *from_backend]


def _unfetched(plan: SweepPlan) -> Iterator[str]:
    """What is not fetched, or is damaged and must be fetched anew."""
    for asset in assets.assets(plan):
        try:
            if not asset.is_here():
                yield f"not fetched: {asset.name}"
        except InputError as error:
            yield f"{asset.name}: {error}"


def _who_makes(plan: SweepPlan) -> list[str]:
    """The line that names the command which makes the sweep's files, if there is one."""
    if not plan.sweep.prefetch.made_by:
        return []
    return [f"models and data of this sweep are made by: {plan.sweep.prefetch.made_by}"]


def _needs_of_training(plan: SweepPlan) -> tuple[list[str], list[str]]:
    """Models and files that cannot be read; and what the backend says of runs whose files can."""
    backend = load_backend(plan.sweep.backend)
    unreadable: list[str] = []
    from_backend: list[str] = []
    for runs in _runs_by_files(plan):
        problems_of_files = list(_models(plan.typed_train_keys(runs[0])))
        try:
            _read_train_file(runs[0])
        except InputError as error:
            problems_of_files.append(f"train.train_file: {error}")
        unreadable += problems_of_files
        if problems_of_files:  # a backend may read the files to say what is missing
            continue
        for run in runs:
            from_backend += backend.missing(run.config().train_options, plan.sweep.world)
    return unreadable, from_backend


def _files_of_world(plan: SweepPlan) -> Iterator[str]:
    """The first of the files of `world:` that cannot be read."""
    for key in ("deepspeed", "fsdp"):
        try:
            plan.sweep.world.read(key)
        except ValueError as error:
            yield f"world.{key}={getattr(plan.sweep.world, key)}: {error}"
            return


def _runs_by_files(plan: SweepPlan) -> list[list[Run]]:
    """The runs to train, in groups that read the same files, so that each is looked at once.

    Any option that is a text may be a path. So runs that are alike in all of these are one group,
    whatever their numbers: those that differ in the seed alone, for example.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in plan.runs:
        if not run.trained:
            options = run.config().train.items()
            texts = tuple((key, value) for key, value in options if isinstance(value, str))
            groups.setdefault(texts, []).append(run)
    return list(groups.values())


def _models(train_keys: dict[str, Any]) -> Iterator[str]:
    """What folders of a model and its tokenizer lack; hub models are prefetch's business."""
    for kind_key, kind in assets.KIND_OF_KEY.items():
        # Without a tokenizer of its own, its files are looked for in the model's folder.
        key = kind_key if train_keys.get(kind_key) else "model_name_or_path"
        name = train_keys.get(key)
        if name is None or assets.on_hub(name):  # a command may name no model
            continue
        folder = Path(name)
        try:
            if assets.whole(folder, kind):
                continue
        except InputError as error:
            yield f"train.{key}: {error}"
            continue
        if folder.is_dir():
            patterns = " or ".join(assets.FILES[kind])
            lack = f"no {patterns}, or not all that its index names"
        else:
            lack = "no such folder"
        yield f"train.{key}: {folder.absolute()}: {lack}"


def _read_train_file(run: Run) -> None:
    """Read the run's conversations; raises InputError where they are none."""
    file = run.config().train.get("train_file")
    if file:
        conversations(Path(file).absolute(), READ_CONVERSATIONS)


def _questions(plan: SweepPlan) -> Iterator[str]:
    """Tasks whose data cannot be read, which would show only after the training."""
    if plan.sweep.score is None:
        return
    for task in plan.sweep.score.tasks:
        if task.data.startswith(HUB):
            continue
        try:
            load(task)
        except InputError as error:
            yield f"score: {task.key}: {error}"


def _records(plan: SweepPlan) -> Iterator[str]:
    """Records that answer another request than this launch's, or cannot be made any more."""
    for run in plan.baselines_and_runs:
        tasks = scoring.unscored_tasks(run)
        for task in tasks:
            conflict = scoring.conflict(run, task)
            if conflict is not None:
                yield conflict
        is_baseline = run.config().is_baseline
        if tasks and run.done and not is_baseline and not run.model.is_dir():
            yield f"{run.path}: its model is gone: to score it, delete the folder"
