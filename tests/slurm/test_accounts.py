"""A Slurm that enforces accounts: preflight against a real slurmdbd."""

import shutil
import subprocess

import pytest
import yaml
from real import CLUSTER, MARKS, command, empty, runs_of, wait_for

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmdbd", "mariadbd"))),
        reason="needs: apt-get install slurmdbd mariadb-server",
    ),
]


@pytest.fixture
def accounts(tmp_path_factory, monkeypatch):
    """A private Slurm on which this user has the account def-ann."""
    folder = tmp_path_factory.mktemp("accounts")
    subprocess.run([CLUSTER, "start", folder, "1", "def-ann"], check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    yield folder
    subprocess.run([CLUSTER, "stop", folder], check=True)


def test_only_ones_own_account_passes_and_slurm_agrees(accounts, profile, sweep_file, tmp_path):
    path = sweep_file(grid={}, train={"max_train_steps": 2}, cluster=profile)
    with open(profile) as file:
        keys = yaml.safe_load(file)

    def with_keys(**more) -> str:
        with open(profile, "w") as file:
            yaml.safe_dump(keys | more, file)
        done = command("launch", path, "--executor", "slurm")
        assert (done.returncode == 0) == ("submitted: " in done.stdout)
        return done.stdout + done.stderr

    refused = f"{profile}: sbatch refuses the train and the collect job: "
    for wrong in ("def-bob", "def-yourpi"):
        said = with_keys(account=wrong)
        assert refused in said and f"account: found {wrong}, there is def-ann" in said, said
    said = with_keys(account="def-ann", partition="h100")
    assert refused in said and "partition: found h100, there is all" in said, said
    said = with_keys(account="def-ann", time="900-00:00", extra=["--constraint=no-such-node"])
    assert refused in said, said
    assert "no-such-node" in said or "feature" in said.lower(), said
    assert not (tmp_path / "out").exists() and empty()
    with_keys(account="def-ann")
    wait_for(empty)
    assert runs_of(path)[0].done
