"""A feed of a few training steps: publish each, verify the feed, and restore the last version exactly.

The example runs on a CPU in seconds and downloads nothing: the model is random, and its steps are like those of AdamW.

    python examples/feed.py [URL]      # a temporary folder by default; any store will do
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import deltasync

LEARNING_RATE = 1e-6
STEPS = 5
LAYERS, HIDDEN, VOCABULARY = 8, 512, 32_000


def shapes() -> dict[str, tuple[int, ...]]:
    """A small transformer."""
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for name, shape in (
            ("self_attn.q_proj", (HIDDEN, HIDDEN)),
            ("self_attn.o_proj", (HIDDEN, HIDDEN)),
            ("mlp.up_proj", (4 * HIDDEN, HIDDEN)),
            ("mlp.down_proj", (HIDDEN, 4 * HIDDEN)),
            ("input_layernorm", (HIDDEN,)),
        ):
            result[f"model.layers.{layer}.{name}.weight"] = shape
    return result


def checkpoints(folder: Path) -> Iterator[Path]:
    """A checkpoint after each step: the bf16 rounding of master weights in fp32."""
    random = np.random.default_rng(0)
    master = {n: random.normal(1.0 if "norm" in n else 0.0, 0.03, s).astype(np.float32) for n, s in shapes().items()}
    for step in range(STEPS):
        for weights in master.values():
            weights -= LEARNING_RATE * np.clip(random.standard_normal(weights.shape, np.float32), -3, 3)
        checkpoint = folder / f"checkpoint-{step}.safetensors"
        save_file({name: weights.astype(ml_dtypes.bfloat16) for name, weights in master.items()}, checkpoint)
        yield checkpoint


def main(url: str | None, folder: Path) -> bool:
    feed = str(folder / "feed") if url is None else url
    table = Table("version", "kind", "changed", "sent", "weights / sent", "seconds", title=f"Published to {feed}")
    before = None
    for step, checkpoint in enumerate(checkpoints(folder)):
        started = time.perf_counter()
        # With `parent`, the last version need not be rebuilt from the feed. Its digest is checked.
        version = deltasync.publish(feed, checkpoint, step=step, parent=before)
        seconds = time.perf_counter() - started
        size = checkpoint.stat().st_size
        changed = "all" if version.changed is None else f"{version.changed / version.elements:.2%}"
        ratio = f"{size / version.nbytes:.1f}"
        table.add_row(
            str(version.version), version.kind, changed, f"{version.nbytes / 1e6:.2f} MB", ratio, f"{seconds:.2f}"
        )
        before = checkpoint
    console = Console()
    console.print(table)

    verification = deltasync.verify(feed, deep=True)
    restored = deltasync.restore(feed, folder / "rebuilt")
    exact = deltasync.digest(folder / "rebuilt") == deltasync.digest(checkpoint)
    console.print(
        f"verify --deep: {'clean' if verification.is_clean else 'DAMAGED'}, {len(verification.restorable)} versions"
    )
    console.print(f"version {restored.version} rebuilt exactly: {'yes' if exact else 'NO'} (digest {restored.digest})")
    return exact and verification.is_clean


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(0 if main(sys.argv[1] if len(sys.argv) > 1 else None, Path(name)) else 3)
