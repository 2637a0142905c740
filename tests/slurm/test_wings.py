"""How the package hangs together: which wing may import which, and what a backend brings along."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import sweeps
from calibeval.io import InputError
from sweeps.launch import sbatch
from sweeps.runs.backend import BACKENDS, load_backend, scoring_problem
from sweeps.runs.grid import plan_sweep
from sweeps.runs.schema import Cluster
from sweeps.training import starting_ranks

PACKAGE = Path(sweeps.__file__).parent
# wing: the other wings that its modules may import. cli.py stands above all of them.
MAY_IMPORT = {
    "runs": set(),
    "training": {"runs"},
    "launch": {"runs"},
    "results": {"runs"},
}


def imported_wings(tree: ast.AST) -> Iterator[str]:
    """The wings that a module imports when it runs; `if TYPE_CHECKING:` is left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "sweeps":
                yield rest.partition(".")[0]
        yield from imported_wings(node)


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_a_wing_imports_only_what_lies_below_it(wing):
    modules = sorted((PACKAGE / wing).glob("*.py"))
    assert modules
    for module in modules:
        others = set(imported_wings(ast.parse(module.read_text()))) - {wing}
        assert others <= MAY_IMPORT[wing], f"{module.name} imports {others}"


def test_every_module_belongs_to_a_wing_or_to_the_command_line():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(MAY_IMPORT)


@pytest.mark.parametrize("name", BACKENDS)
def test_the_built_in_backends_have_what_a_backend_must_have(name):
    backend = load_backend(name)
    for member in ("Train", "packages", "missing", "train"):
        assert callable(getattr(backend, member))


def test_the_former_name_of_starting_ranks_still_works():
    from sweeps.training import torchrun

    with pytest.warns(FutureWarning, match="starting_ranks.exec_torchrun now"):
        assert torchrun.exec_torchrun is starting_ranks.exec_torchrun


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
