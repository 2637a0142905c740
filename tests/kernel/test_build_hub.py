"""The copy of the package for the Hub: what is rewritten, and what is refused."""

import importlib.util
import subprocess
import sys
from pathlib import Path, PurePath

import pytest

SCRIPT = Path(__file__).parents[2] / "kernel" / "build_hub.py"


@pytest.fixture(scope="module")
def build_hub():
    spec = importlib.util.spec_from_file_location("build_hub", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("options.py", "from smoothce.checks import a", "from .checks import a"),
        ("__init__.py", "from smoothce import a, b", "from . import a, b"),
        ("triton/plan.py", "from smoothce.options import a", "from ..options import a"),
        ("triton/__init__.py", "from smoothce.triton import a", "from ..triton import a"),
        ("a.py", "def f():\n    from smoothce.b import (\n        c,\n    )", None),
        ("a.py", "from smoothces.b import c  # from smoothce.b import d", None),
        ("a.py", 'import torch\n"""from smoothce.b import c"""', None),
    ],
)
def test_imports_of_the_package_become_relative(build_hub, module, source, expected):
    if expected is None:
        expected = source.replace("    from smoothce.b", "    from .b")
    assert build_hub.relative_imports(source, PurePath(module)) == expected


def test_an_import_that_has_no_relative_form_is_refused(build_hub):
    with pytest.raises(ValueError, match=r"a/b.py, line 2: `import smoothce.c` cannot be made"):
        build_hub.relative_imports("import torch\nimport smoothce.c", PurePath("a/b.py"))


def test_a_folder_that_exists_is_left_alone(tmp_path):
    folder = tmp_path / "hub"
    command = [sys.executable, SCRIPT, folder]
    subprocess.run(command, check=True, capture_output=True)
    metadata = folder / "build" / "torch-universal" / "metadata.json"
    metadata.write_text("mine")
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr == f"error: {folder} exists already: delete it, or name another folder\n"
    assert metadata.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["hub"]
