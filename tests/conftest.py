"""Fixtures for every part."""

import os
import shutil
import subprocess
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors, and a process for each core
import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when it is first imported, which any test's imports may cause.
    os.environ.setdefault("TRITON_INTERPRET", "1")

TOPLEVEL = Path(__file__).resolve().parents[1]


def pytest_runtest_setup(item):
    """Tests marked `gpu` are skipped where torch finds no GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory):
    """shared_data("mmlu.tar.xz") → the folder it unpacks to, or the unpacked file itself.

    Real data sets are not in the repository: they are looked for in $CALIB_DATA, then in
    ../shared/data beside the checkout, and tests that need an absent one are skipped.
    """
    folder = Path(os.environ.get("CALIB_DATA") or TOPLEVEL.parent / "shared" / "data")
    unpacked: dict[str, Path] = {}

    def get(name: str) -> Path:
        packed = folder / name
        if not packed.is_file():
            pytest.skip(f"no {packed} (set CALIB_DATA to the folder that holds {name})")
        if name not in unpacked:
            out = tmp_path_factory.mktemp(name.split(".")[0])
            if name.endswith(".tar.xz"):
                shutil.unpack_archive(packed, out)
                unpacked[name] = out
            else:
                unpacked[name] = out / packed.stem
                with open(unpacked[name], "wb") as file:
                    subprocess.run(["xz", "-dc", str(packed)], stdout=file, check=True)
        return unpacked[name]

    return get
