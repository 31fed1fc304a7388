"""Check an installed package: its command, its native kernels, and a round trip through a feed.

It needs no package but deltasync and what that depends on. The tests run it in environments of their own, and the
release workflow for each wheel on its platform: `python installed_package.py`.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import deltasync
from deltasync.kernels import available

COMMAND = Path(sysconfig.get_path("scripts")) / "deltasync"


def run(*arguments: str | Path, **env: str) -> str:
    """Standard output of the command, which must succeed without a warning."""
    done = subprocess.run(
        [str(word) for word in (COMMAND, *arguments)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RuntimeWarning" not in done.stderr, done.stderr
    return done.stdout


def write_checkpoint(folder: Path, bits: np.ndarray) -> None:
    """A checkpoint with one bf16 tensor."""
    header = {"w": {"dtype": "BF16", "shape": [bits.size], "data_offsets": [0, bits.nbytes]}}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())


def main() -> None:
    """AssertionError, or the error of a command, if anything is wrong."""
    package = Path(deltasync.__file__).parent
    assert package.is_relative_to(sysconfig.get_path("platlib")), f"{package} is not what was installed"
    assert importlib.util.find_spec("torch") is None, "this must run in an environment without torch"
    assert run("--version").split() == ["deltasync", importlib.metadata.version("deltasync")]
    sets = available()
    assert sets[0] != "reference", "the native kernels are missing"
    random = np.random.default_rng(0)
    # Weights as of a layer: the bf16 bits are the upper half of the float32 ones.
    old = (random.normal(0, 0.02, 100_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old + (random.random(old.size) < 0.01).astype(np.uint16)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        write_checkpoint(place / "old", old)
        write_checkpoint(place / "new", new)
        deltas = set()
        for kernels in sets:
            run("diff", place / "old", place / "new", "-o", place / kernels, DELTASYNC_KERNELS=kernels)
            deltas.add((place / kernels).read_bytes())
        assert len(deltas) == 1, f"not the same bytes from each of {sets}"
        run("publish", place / "feed", place / "old")
        run("publish", place / "feed", place / "new")
        assert json.loads(run("verify", place / "feed", "--deep", "--json"))["clean"]
        run("restore", place / "feed", "-o", place / "restored")
        read = [(place / folder / "model.safetensors").read_bytes() for folder in ("restored", "new")]
        assert read[0].endswith(new.tobytes())
        assert read[1].endswith(new.tobytes())
        assert deltasync.digest(place / "restored") == deltasync.digest(place / "new")
    changed = int((old != new).sum())
    python = sys.version.split()[0]
    print(f"deltasync {deltasync.__version__} on Python {python}: {', '.join(sets)}; {changed} changes restored")


if __name__ == "__main__":
    main()
