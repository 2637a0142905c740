"""The benchmark command runs, and its table says where its figures come from."""

import json
import subprocess
import sys

import pytest


def bench(*arguments):
    command = [sys.executable, "-m", "smoothce.bench", "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_table_and_json(tmp_path):
    path = tmp_path / "bench.json"
    options = ("--tokens", "16", "--label-smoothing", "0.1", "--repeats", "1", "--json", str(path))
    result = bench(*options)
    assert result.returncode == 0, result.stderr
    assert "python -m smoothce.bench --device cpu --tokens 16" in result.stdout
    written = json.loads(path.read_text())
    assert "torch" in written["versions"]
    rows = {row["method"]: row for row in written["results"][0]["rows"]}
    for name in ("torch", "chunked"):
        assert rows[name]["both"] > 0
        assert rows[name]["peak"] > 32000 * 512 * 4 / 2**20  # the weight's gradient at the least
        assert max(rows[name]["errors"]) < 1e-4
        assert f"| {name} |" in result.stdout


def test_unknown_method_lists_the_known():
    result = bench("--methods", "magic")
    assert result.returncode == 2 and "chunked" in result.stderr
