"""How the packages hang together: which wing may import which, and what a backend brings along."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import calibeval
import sweeps
from calibeval.io import InputError
from sweeps.launch import sbatch
from sweeps.runs.backend import load_backend, scoring_problem
from sweeps.runs.grid import plan_sweep
from sweeps.runs.schema import Cluster

# package: {wing: the other wings that its modules may import}.
MAY_IMPORT = {
    sweeps: {
        "runs": set(),
        "training": {"runs"},
        "launch": {"runs"},
        "results": {"runs"},
    },
    calibeval: {
        "records": set(),
        "measures": {"records"},
        "ask": {"records", "measures"},
        "imports": {"records", "ask"},
        "report": {"records", "measures", "ask"},
    },
}
WINGS = [(package, wing) for package, wings in MAY_IMPORT.items() for wing in wings]
# The modules that belong to no wing. The first stand above all wings, the others below them.
OUTSIDE_WINGS = {
    sweeps: ({"__init__.py", "__main__.py", "cli.py"}, set()),
    calibeval: (
        {"__init__.py", "__main__.py", "callback.py", "metrics.py"},
        {"io.py", "validation.py", "yaml_text.py"},
    ),
}


def imported_wings(tree: ast.AST, package: ModuleType) -> Iterator[str]:
    """The wings, and modules beside them, that a module imports, in functions too."""
    for node in ast.iter_child_nodes(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, _, rest = name.partition(".")
            if first == package.__name__ and not rest.startswith("__version__"):
                yield rest.partition(".")[0]
        yield from imported_wings(node, package)


@pytest.mark.parametrize(("package", "wing"), WINGS)
def test_a_wing_imports_only_what_lies_below_it(package, wing):
    modules = sorted((folder_of(package) / wing).rglob("*.py"))
    assert modules
    _, below = OUTSIDE_WINGS[package]
    may_import = MAY_IMPORT[package][wing] | {name.removesuffix(".py") for name in below} | {wing}
    for module in modules:
        others = set(imported_wings(ast.parse(module.read_text()), package))
        assert others <= may_import, f"{module.name} imports {others - may_import}"


def folder_of(package: ModuleType) -> Path:
    """Where a package's modules are."""
    return Path(package.__file__).parent


@pytest.fixture
def own_backend(monkeypatch) -> ModuleType:
    """A backend of the user's own, the toy's with another name, to which members can be added."""
    module = ModuleType("own_backend")
    module.__dict__.update(vars(load_backend("toy.backend")))
    monkeypatch.setitem(sys.modules, "own_backend", module)
    return module


def test_jobs_see_the_variables_that_their_backend_names(toy_file, own_backend):
    path = toy_file(grid={})
    own_backend.environment_variables = ("MY_DATA",)
    toy = sbatch.exported(plan_sweep(path, []).sweep, Cluster())
    own = sbatch.exported(plan_sweep(path, ["backend=own_backend"]).sweep, Cluster())
    assert "OPEN_INSTRUCT_DIR" in toy and "MY_DATA" not in toy
    assert own == [*toy, "MY_DATA"]


def test_a_backend_says_that_what_it_leaves_cannot_be_scored(toy_file, own_backend):
    own_backend.scoring_problem = lambda train: f"seed {train.seed}: leaves no model"
    path = toy_file(grid={"seed": [7]})
    scored = ["backend=own_backend", "score.tasks=[{task: mmlu, data: x}]"]
    with pytest.raises(InputError, match=r"toy\.yaml: seed 7: leaves no model"):
        plan_sweep(path, scored)
    assert plan_sweep(path, ["backend=own_backend"]).runs  # nobody asks for a score
    assert scoring_problem("toy.backend", SimpleNamespace()) is None
