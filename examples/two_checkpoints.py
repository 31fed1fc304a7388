"""Two checkpoints of one model, one training step apart: what the change costs, and that it comes back exactly.

Runs on a CPU in seconds and needs no download: the model is random, its step is what AdamW would do.
"""

import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import deltasync

LEARNING_RATE = 1e-6
LAYERS, HIDDEN, VOCABULARY = 8, 512, 32_000


def shapes() -> dict[str, tuple[int, ...]]:
    """A small transformer."""
    found: dict[str, tuple[int, ...]] = {
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
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found


def main() -> None:
    random = np.random.default_rng(0)
    old, new = {}, {}
    for name, shape in shapes().items():
        master = random.normal(1.0 if "norm" in name else 0.0, 0.03, shape).astype(np.float32)
        step = LEARNING_RATE * np.clip(random.standard_normal(shape), -3, 3).astype(np.float32)
        old[name], new[name] = master.astype(ml_dtypes.bfloat16), (master + step).astype(ml_dtypes.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        before, after, rebuilt = (Path(folder) / f"{name}.safetensors" for name in ("before", "after", "rebuilt"))
        save_file(old, before)
        save_file(new, after)

        started = time.perf_counter()
        delta = deltasync.diff(before, after)
        made_s = time.perf_counter() - started
        started = time.perf_counter()
        deltasync.apply(before, delta, out=rebuilt)
        applied_s = time.perf_counter() - started

        exact = deltasync.state_digest(rebuilt) == deltasync.state_digest(after)
        seen = deltasync.inspect(delta)
        table = Table(title="One optimizer step", show_header=False)
        table.add_row("weights", f"{seen.layout.elements:,} x bf16, {after.stat().st_size / 1e6:.1f} MB")
        table.add_row("changed", f"{seen.changed:,} ({seen.changed / seen.layout.elements:.2%})")
        table.add_row("delta", f"{len(delta) / 1e6:.3f} MB, {8 * len(delta) / seen.changed:.2f} bits for each change")
        table.add_row("against the file", f"{after.stat().st_size / len(delta):,.0f} times smaller")
        table.add_row("diff, apply", f"{made_s:.2f} s, {applied_s:.2f} s, files included")
        table.add_row("state digest", deltasync.state_digest(after).hex)
        table.add_row("rebuilt exactly", "yes" if exact else "NO")
        Console().print(table)
    if not exact:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
