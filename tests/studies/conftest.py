"""Studies in small."""

from pathlib import Path

import pytest
import studies
import yaml


@pytest.fixture
def small(tmp_path):
    """small(study, **keys) → the exit code of a study with some of its config.yaml's keys changed,
    which writes to `out`."""

    def run(study, **keys) -> int:
        folder, file = Path(study.__file__).parent, tmp_path / "config.yaml"
        given = yaml.safe_load((folder / "config.yaml").read_text())
        file.write_text(yaml.safe_dump(given | {"output": str(tmp_path / "out")} | keys))
        return studies.command("", study.Config, study.study, folder, ["--config", str(file)])

    return run
