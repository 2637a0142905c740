"""Where the patch files are, which belong to this package but are no modules of it."""

from pathlib import Path


def patches_folder() -> Path:
    """The folder with the .patch files, apply.sh, UPSTREAM and requirements.txt.

    An installed package carries them in `data`; in a checkout of this project they lie beside the
    package, in `patches/`.
    """
    package = Path(__file__).resolve().parent
    installed = package / "data"
    return installed if installed.is_dir() else package.parent
