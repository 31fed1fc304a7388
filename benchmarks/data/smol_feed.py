"""A feed of real training steps of SmolLM2-135M, one version each, made once and kept.

Every step is a policy gradient through the whole model (`benchmarks.publish_real`). A step takes some seconds, so the
feed is written to `build/`, and the record beside it says by which plan it was made.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.publish_real import LEARNING_RATE, publish_steps, real_steps
from benchmarks.report import say
from deltasync.store.local import LocalStore

DEFAULT_OUT = Path(__file__).resolve().parents[2] / "build"


@dataclass(frozen=True, slots=True)
class FeedPlan:
    """How many versions follow the first one, and the training behind them."""

    versions: int
    layers: int | None = None  # of the model; None for all
    learning_rate: float = LEARNING_RATE
    samples: int = 2  # completions of a step, of 8 tokens each: few, because hundreds of steps are taken


@dataclass(frozen=True, slots=True)
class RealFeed:
    """Where the feed is, and the SHA-256 of the trainer's weights at each version."""

    path: Path
    hashes: tuple[str, ...]


def real_feed(plan: FeedPlan, *, out: Path = DEFAULT_OUT) -> RealFeed:
    """The feed of a plan; it is made unless it is there."""
    layers = "" if plan.layers is None else f"-{plan.layers}-layers"
    folder = out / f"smollm2-135m-{plan.versions}-versions{layers}"
    record = folder / "plan.json"
    if record.exists():
        found = json.loads(record.read_text())
        if found["plan"] == asdict(plan):
            return RealFeed(folder / "feed", tuple(found["hashes"]))
    if folder.exists():
        shutil.rmtree(folder)
    say(f"training {plan.versions + 1} steps into {folder.name}")
    steps = real_steps(plan.versions + 1, layers=plan.layers, learning_rate=plan.learning_rate, samples=plan.samples)
    hashes, _ = publish_steps([LocalStore(folder / "feed")], steps)
    record.write_text(json.dumps({"plan": asdict(plan), "hashes": hashes}))
    return RealFeed(folder / "feed", tuple(hashes))
