"""Put the files of a Space into a folder, as `hf upload` sends them.

    python examples/spaces/assemble.py server /tmp/wordle-server

A Space builds its image from its own repository, so it needs the Dockerfile, the page with the settings, and what the
Dockerfile copies.
"""

import argparse
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILES = {
    "environment": ("examples/trl_wordle", "examples/wordle"),
    "server": (
        "pyproject.toml",
        "CMakeLists.txt",
        "LICENSE",
        "native",
        "src",
        "examples/trl_wordle",
        "examples/wordle",
    ),
}
"""What each Space needs of the repository, beside its own folder here."""

_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")


def assemble(space: str, folder: Path) -> None:
    """Fill a folder that is empty or not there."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"error: {folder} is not empty")
    shutil.copytree(HERE / space, folder, dirs_exist_ok=True)
    for name in FILES[space]:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the files of a Space into a folder.")
    parser.add_argument("space", choices=sorted(FILES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    assemble(options.space, options.folder)


if __name__ == "__main__":
    main()
