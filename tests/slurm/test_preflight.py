"""What a launch refuses before anything is queued, and what prefetch does about it."""

import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from sweep_tools import PROJECT, command, launch, prepare

from calibeval import records
from calibeval.ask.request import Task
from calibeval.io import InputError
from calibeval.records.store import part_of
from sweeps.launch import assets, preflight, slurm
from sweeps.runs import scoring
from sweeps.runs.conversations import conversation
from sweeps.runs.grid import plan_sweep
from sweeps.runs.run import Run

OFFLINE = ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@pytest.fixture(autouse=True)
def some_sbatch(tmp_path_factory, monkeypatch) -> None:
    """Let these tests pass where there is no Slurm, too: an sbatch at the end of the PATH."""
    folder = tmp_path_factory.mktemp("some-sbatch")
    (folder / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{folder}")


def problems(path: Path, *overrides: str, executor: str = "slurm") -> str:
    """What a launch would refuse, line by line."""
    try:
        return "\n".join(preflight.problems(plan_sweep(path, list(overrides)), executor))
    except InputError as error:  # which keeps the others from being looked for
        return str(error)


def mmlu(tiny: Path, **keys) -> dict:
    """A task over the tiny world's questions."""
    return {"task": "mmlu", "data": str(tiny / "mmlu"), "shots": 1, **keys}


REFUSED = [  # overrides, keys of the profile, and what is named
    ("world.deepspeed={tmp}/odd.json", {}, "world.deepspeed={tmp}/odd.json: Expecting"),
    ("world.fsdp=no.json", {}, "world.fsdp=no.json: no.json: could"),
    ("output_root={tmp}/100%A", {}, "Slurm reads % in paths"),
    # sbatch would end with: Unmatched '.
    ('output_root="{tmp}/two\\nlines"', {}, "a path of one line is needed"),
    (
        "world.nodes=2 backend=open-instruct train.train_file={tmp}/odd.json",
        {},
        "world.nodes: 2: backend open-instruct trains on one node; type world.nodes=1",
    ),
    (
        "world.nodes=2",
        {"python": "apptainer exec image.sif python"},
        "a run on several nodes (world.nodes: 2) needs an interpreter alone",
    ),
    ("train.model_name_or_path={tmp}/cut", {}, "model_name_or_path: {tmp}/cut/model.safetensors."),
    ("", {"cache": "$WORK/hub"}, "cache: $WORK/hub: $WORK is not set here: export"),
    ("", {"secrets_file": "/no/secrets"}, "cluster.yaml: secrets_file: /no/secrets: no such file"),
    ("", {"python": "/no/python"}, "cluster.yaml: python: /no/python: no such command"),
    ("", {"python": "{tmp}/closed"}, "{tmp}/closed: cannot be run"),
    ("", {"python": "'{tmp}/bare'"}, "lacks packages that runs need: pydantic submitit yaml"),
    ("score.engine=vllm", {}, f"packages that runs need: vllm: {sys.executable} -m pip install"),
    ("score.python=/no/python", {}, "score.python: /no/python: no such program"),
    ("score.tasks.0.shots=99", {}, "but --shots 99"),
]
TAKEN = [  # whose interpreter only a job can ask
    ("", {}),
    ("", {"python": "made", "setup": ["make it"]}),
    ("", {"python": "'{tmp}/bare'", "modules": ["x"]}),
    ("score.engine=vllm", {"python": "$HOME/mine"}),
]


@pytest.fixture
def odd_files(tmp_path) -> Path:
    """A folder with an interpreter without packages, one that cannot run, and damaged files."""
    (tmp_path / "odd.json").write_text('{"zero":')
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "model.safetensors.index.json").write_text("{")
    for name, mode in (("bare", 0o755), ("closed", 0o644)):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
        (tmp_path / name).chmod(mode)
    return tmp_path


@pytest.fixture
def told(toy_file, profile, tiny, odd_files):
    """told(overrides, keys) → what a launch under a profile of these keys would refuse."""

    def tell(overrides: str, keys: dict) -> str:
        keys = {key: filled(value) for key, value in keys.items()}
        path = toy_file(score={"tasks": [mmlu(tiny)]}, cluster=profile(**keys))
        return problems(path, *filled(overrides).split(" ") if overrides else [])

    def filled(value):
        return value.replace("{tmp}", str(odd_files)) if isinstance(value, str) else value

    return tell


@pytest.mark.parametrize(("overrides", "keys", "named"), REFUSED)
def test_what_a_launch_would_refuse_is_named(told, odd_files, overrides, keys, named):
    assert named.replace("{tmp}", str(odd_files)) in told(overrides, keys)


@pytest.mark.parametrize(("overrides", "keys"), TAKEN)
def test_a_whole_sweep_passes(told, overrides, keys):
    assert told(overrides, keys) == ""


@pytest.mark.parametrize(
    ("line", "modes", "named"),
    [
        ("A=b", (0o600, 0o700), ""),
        ("A=b", (0o400, 0o1777), ""),  # as /tmp has it, where nobody can replace others' files
        *(("A=b", (mode, 0o700), "others can read it: chmod 600") for mode in (0o640, 0o604)),
        ("A=b", (0o600, 0o777), "others can replace it: chmod o-w"),
        # The job's shell ran what stood behind the space, and said so in the log.
        *(
            (line, (0o600, 0o700), "line 3: write NAME=value")
            for line in ("HF_TOKEN= hf_x", "HF_TOKEN hf_x", "A=$(cat hf_x)", "A=b # hf_x")
        ),
        ("another user", (0o600, 0o700), "is another user's"),
    ],
)
def test_a_secrets_file_is_its_users_alone_and_holds_values(
    toy_file, profile, tmp_path, line, modes, named
):
    file = tmp_path / "secrets" / "secrets.env"
    file.parent.mkdir()
    file.write_text(f"# mine\nexport GOOD='a value'\n{line}\n")
    file.chmod(modes[0])
    file.parent.chmod(modes[1])
    if line == "another user":
        if os.geteuid() != 0:
            pytest.skip("giving a file away needs root")
        os.chown(file, 12345, -1)
    printed = problems(toy_file(cluster=profile(secrets_file=str(file))))
    assert named in printed and bool(printed) == bool(named) and "hf_x" not in printed


@pytest.mark.parametrize("place", ["{file}/runs", "/proc/runs"])
def test_an_output_root_that_cannot_be_written_is_named(toy_file, profile, tmp_path, place):
    """And asking leaves nothing behind."""
    file = tmp_path / "file"
    file.touch()
    root = place.format(file=file)
    path = toy_file(cluster=profile(), output_root=root)
    before = sorted(tmp_path.iterdir())
    message = f"output_root: {root}/toy: cannot be written: "
    for executor in ("local", "slurm"):
        assert message in problems(path, executor=executor)
        assert problems(path, f"output_root={tmp_path}/new", executor=executor) == ""
    assert sorted(tmp_path.iterdir()) == before
    if place == "/proc/runs":
        assert message in launch(path, "--executor", "local", code=2)


def test_each_model_and_file_that_is_not_there_is_named_once(sweep_file, tmp_path):
    words = [
        f"train.tokenizer_name={tmp_path}",
        "train.train_file=no.jsonl",
        "train.model_name_or_path=./no/thing",
    ]
    printed = launch(sweep_file(), "--executor", "local", *words, code=2)
    file = f"train.train_file: {PROJECT}/no.jsonl: could not be read (No such file"
    model = f"train.model_name_or_path: {PROJECT}/no/thing: no such folder"
    assert printed.count(file) == 1 and printed.count(model) == 1
    assert f"train.tokenizer_name: {tmp_path}: no tok* or vocab*, or not all" in printed


@pytest.fixture
def hub_sweep(sweep_file, profile) -> Path:
    """A sweep whose model and questions are the hub's."""
    return sweep_file(
        train={"model_name_or_path": "owner/absent"},
        score={"tasks": [{"task": "mmlu", "data": "hub:cais/mmlu"}]},
        cluster=profile(),
    )


def test_questions_of_the_hub_are_fetched_as_scoring_reads_them(hub_sweep, monkeypatch):
    """The data set has no default configuration."""
    calls = []

    def load_dataset(*names, **options):
        calls.append(names)
        raise OSError("no internet")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    wanted = assets.assets(plan_sweep(hub_sweep, []))
    assert assets.fetch([asset for asset in wanted if "hub:cais/mmlu" in asset.name])
    assert calls == [("cais/mmlu", "all")]


@pytest.fixture
def hub_model(tmp_path, monkeypatch) -> Path:
    """The folder of a model in the hub's cache; its branch main has a config alone."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--owner--name"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").touch()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return folder


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        ({}, ""),
        ({"tokenizer.json": ""}, "tokenizers"),
        ({"model.safetensors": ""}, "models"),
        ({INDEX: '{"weight_map": {"w": "a.safetensors"}}'}, ""),
        ({INDEX: '{"weight_map": {"w": "a.safetensors"}}', "a.safetensors": ""}, "models"),
        # The index of a format that is not read asks for nothing.
        (
            {
                "pytorch_model.bin.index.json": '{"weight_map": {"w": "a.bin"}}',
                "model.safetensors": "",
            },
            "models",
        ),
        # What another download has left is no part of a model.
        ({"model.safetensors": "", "../../blobs/stale.incomplete": ""}, "models"),
    ],
)
def test_a_model_that_is_half_there_is_not_there(hub_model, files, kinds):
    """In the hub's cache a snapshot's files are links; those whose blob was deleted are not there.
    Without a revision the branch main must be there, for which offline jobs look."""
    snapshot = hub_model / "snapshots" / "abc"
    (hub_model / "blobs").mkdir()
    for number, (name, text) in enumerate(files.items()):
        (hub_model / "blobs" / str(number)).write_text(text)
        (snapshot / name).symlink_to(hub_model / "blobs" / str(number))
    (hub_model / "refs" / "v1").write_text("abc")
    for kind in ("models", "tokenizers"):
        for revision in (None, "v1", "abc"):
            assert assets.on_disk("owner/name", kind, revision) == (kind in kinds)
        assert not assets.on_disk("owner/name", kind, "v2")
    (hub_model / "refs" / "main").write_text("def")
    assert not any(assets.on_disk("owner/name", kind) for kind in ("models", "tokenizers"))
    (hub_model / "refs" / "main").write_text("abc")
    for number in range(len(files)):
        (hub_model / "blobs" / str(number)).unlink()
    assert not any(assets.on_disk("owner/name", kind) for kind in ("models", "tokenizers"))


class Hub(BaseHTTPRequestHandler):
    """A hub of one model, `owner/name`, whose files have their own names as their content."""

    files: tuple[str, ...] = ()

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.wfile.write(self.answer())

    def answer(self) -> bytes:
        """Send the head of an answer; returns its body."""
        address = self.path.partition("?")[0]
        file = address.rpartition("/")[2]
        if "/tree/" in address:
            entries = [
                {"type": "file", "path": name, "size": 1, "oid": name} for name in self.files
            ]
            body = json.dumps(entries).encode()
        elif address.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            body = json.dumps({"id": "owner/name", "sha": "c" * 40, "siblings": siblings}).encode()
        elif file.endswith(".index.json"):
            shard = file.removesuffix(".index.json")
            body = json.dumps({"weight_map": {"weight": f"1-{shard}"}}).encode()
        else:
            body = file.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{file}"')
        self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        return body

    def log_message(self, *_words: object) -> None:
        """Print nothing."""


@pytest.fixture
def hub(tmp_path) -> Iterator[Callable[..., dict[str, str]]]:
    """Start a hub of one model: `hub(*files)` → the variables of a shell that uses it."""
    servers = []

    def start(*files: str) -> dict[str, str]:
        handler = type("HubOfFiles", (Hub,), {"files": files})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        variables = {key: value for key, value in os.environ.items() if key not in OFFLINE}
        return variables | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}

    yield start
    for server in servers:
        server.shutdown()


SAFETENSORS = ("1-model.safetensors", "model.safetensors.index.json")
PYTORCH = ("1-pytorch_model.bin", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("weights", [(*SAFETENSORS, *PYTORCH), PYTORCH])
def test_prefetch_fetches_the_weights_that_are_read_where_a_launch_looks(
    toy_file, profile, hub, tmp_path, weights
):
    """And not where variables of the shell point, which jobs do not see."""
    variables = hub("config.json", "tokenizer.json", *weights)
    variables["HF_HUB_CACHE"] = str(tmp_path / "mine")
    path = toy_file(
        train={"model_name_or_path": "owner/name"}, cluster=profile(cache=str(tmp_path / "cache"))
    )
    fetched = command("prefetch", path, env=variables)
    assert fetched.returncode == 0, fetched.stderr
    (snapshot,) = (tmp_path / "cache").glob("**/snapshots/*")
    names = {file.name for file in snapshot.iterdir()}
    assert names == {"config.json", "tokenizer.json", *weights[:2]}
    again = command("prefetch", path, env=variables)
    assert again.stdout == "here: model owner/name\n", again.stderr
    for executor in ("local", "slurm"):
        words = ("launch", path, "--executor", executor, "--dry-run")
        assert "not fetched" not in command(*words, env=variables).stdout


def test_of_a_data_set_any_snapshot_will_do(tmp_path, monkeypatch):
    """Data sets are fetched by their commits, and the cache does not note which one is main."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "data.parquet").touch()
    assert assets.on_disk("owner/name", "datasets")


@pytest.fixture
def archived(toy_file, tiny, tmp_path) -> Path:
    """A sweep whose questions are in an archive that prefetch unpacks to out/mmlu."""
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tiny / "mmlu", "data")
    target = tmp_path / "out" / "mmlu"
    source = {"url": f"file://{tmp_path}/data.tar", "to": str(target), "strip": 1}
    return toy_file(
        grid={},
        prefetch={"archives": [source]},
        score={"tasks": [{"task": "mmlu", "data": str(target), "shots": 1}]},
    )


def fetched(path: Path, *overrides: str) -> list[str]:
    """What fails of a sweep's downloads; from a folder, which `prefetch` itself refuses."""
    return assets.fetch(assets.assets(plan_sweep(path, list(overrides))))


def test_prefetch_fetches_once_and_says_what_failed(archived, tmp_path, capsys):
    target = tmp_path / "out" / "mmlu"
    (failure,) = fetched(archived, f"prefetch.archives.0.url=file://{tmp_path}/none.tar")
    assert "No such file or directory" in failure and "none.tar" in failure
    (failure,) = fetched(archived, "prefetch.archives.0.strip=4")
    assert "strip: leaves nothing of the archive; lower it" in failure
    assert not target.exists()
    assert fetched(archived) == []
    assert (target / "test" / "moons_test.csv").exists()
    assert fetched(archived) == [] and capsys.readouterr().out.count("here: ") == 1


def test_strip_leaves_the_first_folder_out_of_every_name(archived, tiny, tmp_path):
    """As tar does: an archive may have several entries at its top."""
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(tiny / "mmlu" / "test", "tests/test")
        archive.add(tiny / "mmlu" / "dev", "others/dev")
        archive.add(tiny / "chat.jsonl", "README")
    assert fetched(archived) == []
    assert sorted(path.name for path in (tmp_path / "out" / "mmlu").iterdir()) == ["dev", "test"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("archives.0.url", "http://127.0.0.1:1/leak"),
        ("archives.0.url", "file:///etc/hostname"),
        ("archives.0.url", "https://127.0.0.1:1/leak?$HF_TOKEN"),
        ("archives.0.to", "~/.ssh/rc"),
        ("archives.0.to", "../beside"),
        ("archives.0.to", ".git/hooks"),
        ("datasets.0.to", "/etc/profile.d/x.sh"),
    ],
)
def test_a_sweep_file_names_no_foreign_address_and_no_foreign_file(
    archived, monkeypatch, key, value
):
    """It may be somebody else's: the token went to the address, and the file was written."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    raw = yaml.safe_load(archived.read_text())
    raw["prefetch"]["archives"][0]["url"] = "https://127.0.0.1:1/data.tar"
    raw["prefetch"]["datasets"] = [{"hub": "owner/name", "to": "data/x.jsonl"}]
    archived.write_text(yaml.safe_dump(raw))
    with pytest.raises(InputError) as refused:
        assets.refuse_foreign_places(plan_sweep(archived, [f"prefetch.{key}={value}"]))
    assert f"{archived}: prefetch.{key}: " in str(refused.value)
    assert "hf_secret" not in str(refused.value)
    if key == "datasets.0.to":
        refused = command("prefetch", archived, f"prefetch.{key}={value}")
        assert refused.returncode == 2 and refused.stdout == ""


def test_a_secret_is_put_into_no_path(toy_file, tmp_path, monkeypatch):
    """A run's config.yaml, which others can read, held it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = toy_file(train={"model_name_or_path": "/tmp/${HF_TOKEN}"})
    with pytest.raises(InputError, match=r"train\.model_name_or_path: .*HF_TOKEN is a secret"):
        plan_sweep(path, [])


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put shell scripts in front of Slurm's tools: `programs(squeue="", …)`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(**scripts: str) -> None:
        for name, text in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return write


def test_a_launch_on_slurm_without_sbatch_is_refused_before_anything_is_noted(
    toy_file, profile, programs, tmp_path, monkeypatch
):
    """Its runs were noted as launched, and only then was sbatch not found."""
    programs(squeue="exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path = toy_file(cluster=profile())
    refusal = "--executor slurm: no sbatch is on the PATH: load the cluster's Slurm module"
    printed = launch(path, "--executor", "slurm", code=2)
    assert refusal in printed and "type --executor local" in printed
    assert not (tmp_path / "out").exists()
    dry_run = command("launch", path, "--executor", "slurm", "--dry-run").stdout
    assert f"a launch would refuse: {refusal}" in dry_run


def test_a_launch_is_queued_whole_or_not_at_all(toy_file, profile, tiny, tmp_path, programs):
    """And sbatch's refusal comes with what there is."""
    refusal = "invalid partition specified: gpu"
    programs(
        sbatch=(
            "grep -q job-name=toy.score || { echo 71; exit; }\n"
            f"echo 'sbatch: error: {refusal}' >&2; exit 1"
        ),
        squeue="",
        sinfo="printf 'y\\nx\\n'",
        scancel=f"echo $@ > '{tmp_path}/cancelled'",
    )
    path = toy_file(
        cluster=profile(partition="gpu"),
        score={"tasks": [mmlu(tiny)]},
        world={"processes_per_node": 2},
    )
    printed = launch(path, "--executor", "slurm", code=2)
    assert f"cluster.yaml: sbatch refuses: {refusal}" in printed
    assert "partition: found gpu, there is x, y" in printed
    assert (tmp_path / "cancelled").read_text() == "71\n"
    shown = command("status", path).stdout
    assert "2 runs and 1 base model to score: 3 to do" in shown and "(and 1 more like it)" in shown
    assert shown.count("there is x, y") == 1  # once, below the table


def test_what_sbatch_may_have_taken_is_not_called_refused(
    toy_file, profile, programs, tmp_path, monkeypatch
):
    """Of an sbatch that did not answer, Slurm may have the array."""
    monkeypatch.setattr(slurm, "SBATCH_SILENCE", 0.1)
    monkeypatch.setattr(slurm, "SBATCH_PATIENCE", 0.5)
    programs(sbatch="exec sleep 60", squeue="", scancel=f"echo $@ > '{tmp_path}/cancelled'")
    plan = plan_sweep(toy_file(cluster=profile()), [])
    with pytest.raises(InputError, match="the same command then queues what is missing"):
        slurm.submit(plan)
    assert all(run.events()[-1].refusal is None for run in plan.runs)
    assert not (tmp_path / "cancelled").exists()


@pytest.fixture
def asked_once(toy_file, tiny) -> tuple[Path, Run, Task]:
    """A sweep of one run, the run, and the task that it is asked."""
    path = toy_file(grid={}, score={"tasks": [mmlu(tiny)], "base": False})
    run = prepare(path)
    return path, run, run.config().score.tasks[0]


@pytest.mark.parametrize(
    ("begun", "key", "was", "now"),
    [
        (True, "shots", "1", "2"),
        (False, "shots", "1", "2"),
        (False, "chat_template", "None", "'tokenizer'"),
    ],
)
def test_records_that_answer_another_request_are_not_overwritten(asked_once, begun, key, was, now):
    path, run, task = asked_once
    whole = scoring.records_file(run, task)
    file = part_of(whole) if begun else whole
    records.write(file, [{}], {"settings": scoring.record_settings(task, run.config().score)})
    assert scoring.unscored_tasks(run) == ([task] if begun else [])
    printed = problems(path, f"score.tasks.0.{key}={now}", executor="local")
    assert f"{whole}: was asked with {key} {was}, unlike now; give the task another" in printed


def test_records_that_are_not_as_large_as_they_were_written_are_damaged(asked_once):
    _, run, task = asked_once
    file = scoring.records_file(run, task)
    records.write(file, [{}], {"settings": scoring.record_settings(task, run.config().score)})
    file.write_text("")
    assert scoring.gap(run, task) == f"{file}: 0 bytes, scoring wrote 3: damaged since"
    records.sidecar(file).write_text("{")
    assert scoring.gap(run, task) == "not trained"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "output": "b"},
    ],
)
def test_rows_of_each_usual_form_are_the_same_conversation(row):
    turns = conversation(row, "here")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "a"),
        ("assistant", "b"),
    ]


def test_an_sbatch_that_prints_no_id_is_no_refusal(toy_file, profile, programs):
    programs(sbatch="echo Welcome to 2026", squeue="")
    printed = launch(toy_file(cluster=profile()), "--executor", "slurm", code=2)
    words = "sbatch has printed no job's id: 'Welcome to 2026'; the same command finds what it"
    assert words in printed, printed


def test_a_backend_is_not_asked_about_a_run_whose_model_lacks_files(toy_file, monkeypatch):
    """One that reads the model's config to say what is missing would end in a traceback."""

    def missing(train_options: object, world: object) -> list[str]:
        raise FileNotFoundError("config.json")

    monkeypatch.setattr("toy.backend.missing", missing)
    found = preflight.problems(
        plan_sweep(toy_file(), ["train.model_name_or_path=./nowhere"]), "local"
    )
    assert [problem for problem in found if "nowhere: no such folder" in problem]


@pytest.mark.parametrize("limits", [[1.0, -1.0], [-1.0, 1.0]], ids=str)
def test_a_backend_is_asked_about_runs_that_differ_in_numbers_alone(sweep_file, tmp_path, limits):
    deepspeed = tmp_path / "deepspeed.json"
    deepspeed.write_text('{"gradient_clipping": 1.0}')
    path = sweep_file(
        grid={"clip_grad_norm": limits},
        backend="open-instruct",
        world={"deepspeed": str(deepspeed), "processes_per_node": 2},
    )
    assert "train.clip_grad_norm: DeepSpeed ignores it" in problems(path)


def test_prefetch_says_that_what_it_fetched_is_not_whole(toy_file, hub):
    variables = hub("config.json", "tokenizer.json", "model.gguf")
    fetched = command(
        "prefetch", toy_file(train={"model_name_or_path": "owner/name"}), env=variables
    )
    assert fetched.returncode == 1
    assert "failed: model owner/name: was fetched, and is not whole" in fetched.stderr


@pytest.mark.parametrize("content", [b"\xff", b"[]"], ids=str)
def test_a_damaged_index_is_named_with_the_other_problems(toy_file, hub_model, content):
    """Of the hub's cache it is a link; without the file behind it the model is fetched anew."""
    blob = hub_model / "blobs" / "index"
    blob.parent.mkdir()
    blob.write_bytes(content)
    snapshot = hub_model / "snapshots" / "abc"
    (snapshot / "model.safetensors.index.json").symlink_to(blob)
    (snapshot / "a.safetensors").touch()
    path = toy_file(train={"model_name_or_path": "owner/name"})
    told = f"model owner/name: {blob}: is damaged: delete it"
    assert told in problems(path)
    (problem,) = assets.fetch(assets.assets(plan_sweep(path, [])))
    assert told in problem
    blob.unlink()
    assert not assets.on_disk("owner/name", "models")


def test_a_refusal_is_told_though_what_was_queued_before_cannot_be_taken_back(
    toy_file, profile, tiny, programs
):
    """The launch ended with scancel's words alone, and no run was told why."""
    programs(
        sbatch=(
            "grep -q job-name=toy.score || { echo 71; exit; }\n"
            "echo 'sbatch: error: no such account' >&2; exit 1"
        ),
        squeue="",
        scancel="echo 'scancel: error: Unable to contact slurm controller' >&2; exit 1",
    )
    score = {"tasks": [mmlu(tiny)]}
    path = toy_file(cluster=profile(), score=score, world={"processes_per_node": 2})
    printed = launch(path, "--executor", "slurm", code=2)
    assert "cluster.yaml: sbatch refuses: no such account" in printed
    assert "scancel does not answer" in printed and "(71) still is; to take it back: " in printed
    assert "not queued: sbatch refuses: no such account" in command("status", path).stdout


def test_a_profiles_interpreter_is_asked_for_what_trains(sweep_file, profile, odd_files):
    printed = problems(sweep_file(cluster=profile(python=f"{odd_files}/bare")))
    absent = "accelerate datasets pydantic submitit torch transformers trl yaml"
    assert printed.endswith(f"lacks packages that runs need: {absent}")


def test_a_run_whose_model_was_deleted_cannot_be_scored(asked_once):
    path, run, _ = asked_once
    (run.path / "DONE").touch()
    printed = launch(path, "--executor", "local", code=2)
    assert f"{run.path}: its model is gone: to score it, delete the folder" in printed


def test_runs_are_queued_though_sbatch_does_not_take_their_collect_job(toy_file, profile, programs):
    programs(
        sbatch=(
            "grep -q job-name=toy.collect || { echo 71; exit; }\n"
            "echo 'sbatch: error: (job submit limit, user)' >&2; exit 1"
        ),
        squeue="",
        sacctmgr="case $* in *assoc*) echo 'mine|2'; echo 'other|';; *) echo 'normal|'; esac",
        scancel="exit 1",
    )
    path = toy_file(cluster=profile())
    printed = launch(path, "--executor", "slurm", code=1)
    assert "submitted job 71: trains 2 runs" in printed
    assert "the tables will not be made by themselves: sbatch refuses" in printed
    assert "MaxSubmitJobs is 2 for mine, 1 are asked for: launch fewer" in printed
    assert f"Once the runs are done: python -m sweeps collect {path.parent}/out/toy" in printed
