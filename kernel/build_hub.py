"""Write the package as the Hugging Face Hub's `kernels` library loads it:

    python kernel/build_hub.py FOLDER

makes FOLDER with build/torch-universal/, the build variant of kernels without compiled code: the
package in a folder of its name, and `metadata.json`. `kernels.get_local_kernel(Path(FOLDER))` loads
it, and so would `kernels.get_kernel` from a Hub repository with these files.

`kernels` imports a kernel under a name that is new with each build, so that several builds can be
loaded in one process. The package's own imports, `from smoothce.options import …`, would then find
an installed smoothce or nothing: in the copy they become relative. Left out is
`smoothce.integrations`, whose users name the modules.
"""

import argparse
import ast
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path, PurePath

PACKAGE = Path(__file__).parent / "smoothce"
LICENSE = Path(__file__).parent / "LICENSE"
LEFT_OUT = ("integrations",)
VARIANT = "torch-universal"
LEAST_KERNELS = "0.17.2"  # the version that this layout was loaded with
HUB_VERSION = 1  # of the repository: one more where calls that worked would fail


def relative_imports(source: str, module: PurePath) -> str:
    """The source of a module of the package with imports of the package made relative.

    `module` is its path below the package's folder: in triton/plan.py, `from smoothce.options`
    becomes `from ..options`. Raises ValueError for `import smoothce…`, which has no relative form.
    """
    lines = source.splitlines(keepends=True)
    dots = "." * (1 + len(module.parent.parts))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == PACKAGE.name:
                    raise ValueError(
                        f"{module}, line {node.lineno}: `import {name.name}` cannot be made "
                        f"relative; write `from {PACKAGE.name} import …`"
                    )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            root, _, rest = node.module.partition(".")
            if root == PACKAGE.name:
                line = lines[node.lineno - 1]
                absolute = f"from {node.module} import"
                relative = f"from {dots}{rest} import"
                lines[node.lineno - 1] = line.replace(absolute, relative, 1)
    return "".join(lines)


def relative_sources(package: Path = PACKAGE) -> dict[PurePath, str]:
    """The modules that the Hub's copy has, by their paths below the package's folder."""
    sources = {}
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package)
        if module.parts[0] not in LEFT_OUT:
            sources[module] = relative_imports(path.read_text(encoding="utf-8"), module)
    return sources


def metadata(sources: dict[PurePath, str]) -> dict[str, object]:
    """What `kernels` reads of a build before it imports it."""
    digest = hashlib.sha256()
    for module, source in sources.items():
        digest.update(f"{module.as_posix()}\0{source}\0".encode())
    return {
        "name": PACKAGE.name,
        # The name under which the build is imported.
        "id": f"{PACKAGE.name}_universal_{digest.hexdigest()[:12]}",
        "version": HUB_VERSION,
        "kernels-minver": LEAST_KERNELS,
        "license": "Apache-2.0",
        # Triton comes with torch, and `kernels` does not allow its name here.
        "python-depends": [],
        "backend": {"type": "cuda"},
    }


def write(folder: Path) -> None:
    """Make the folder. Raises FileExistsError where there is one already, which is left alone."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists already: delete it, or name another folder")
    sources = relative_sources()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # It gets its name when it is whole.
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        unfinished.chmod(0o755)
        variant = unfinished / "build" / VARIANT
        for module, source in sources.items():
            target = variant / PACKAGE.name / module
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source, encoding="utf-8")
        shutil.copy(LICENSE, variant / "LICENSE")
        words = json.dumps(metadata(sources), indent=2)
        (variant / "metadata.json").write_text(f"{words}\n", encoding="utf-8")
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="what to make; it must not exist yet")
    folder = parser.parse_args().folder
    try:
        write(folder)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder}/build/{VARIANT}: load it with kernels.get_local_kernel(Path({str(folder)!r}))")
    return 0


if __name__ == "__main__":
    sys.exit(main())
