"""Real deltas: consecutive states of SmolLM2-135M-Instruct under policy-gradient AdamW at low learning rates.

    python -m benchmarks.data.smol --out .bench-data

Writes, for each learning rate, a folder of bf16 states one step apart, and the float32 master weights of a
few layers before and after one step. Data that is there is kept, unless it was made by another plan; one plan
gives the same files on one machine. Reading needs NumPy only.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.data.files import read_pair
from benchmarks.data.pair import Pair

DEFAULT_OUT = Path(__file__).resolve().parents[2] / ".bench-data"
FOLDER = "smollm2-135m"

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to generate; it is stored next to the data.

    With noisy gradients the mean step of Adam falls as 1 / sqrt(t) until `warmup` is past its memory of about
    ten steps, and the density of change falls with it: a shorter warm-up gives denser deltas.
    """

    learning_rates: tuple[float, ...] = (1e-6, 3e-6)
    warmup: int = 12
    pairs: int = 2  # consecutive, per learning rate
    fp32_layers: int = 4
    prompts: int = 2  # of a step
    samples: int = 4  # of a prompt
    tokens: int = 16  # of a sample
    seed: int = 0


def generate(out: Path = DEFAULT_OUT, *, plan: Plan | None = None, log: Log = print) -> Path:
    """Generate all states under `out` unless they are there; return their folder."""
    plan = plan or Plan()
    folder = out / FOLDER
    stamp = folder / "plan.json"
    wanted = json.dumps(asdict(plan), sort_keys=True)
    if stamp.exists() and stamp.read_text() == wanted:
        log(f"{FOLDER}: already there")
        return folder
    from benchmarks.data.smol_steps import run  # torch and transformers: only to generate

    stamp.unlink(missing_ok=True)
    for stale in folder.glob("lr-*/*.safetensors"):
        stale.unlink()
    run(folder, plan, log)
    stamp.write_text(wanted)
    return folder


def state_path(folder: Path, learning_rate: float, number: int) -> Path:
    """Return the file of a bf16 state: 0 is the first, each next one a step later."""
    return folder / f"lr-{learning_rate:g}" / f"step-{number}.safetensors"


def master_path(folder: Path, learning_rate: float, number: int) -> Path:
    """Return the file of the float32 state 0 or 1."""
    return folder / f"lr-{learning_rate:g}" / f"master-{number}.safetensors"


def load_pairs(folder: Path, learning_rate: float) -> Iterator[Pair]:
    """Read, one by one, the consecutive bf16 pairs of one learning rate."""
    existing = (state_path(folder, learning_rate, number) for number in itertools.count())
    files = itertools.takewhile(Path.exists, existing)
    name = f"SmolLM2-135M bf16 lr {learning_rate:g}"
    for number, (old, new) in enumerate(itertools.pairwise(files), 1):
        yield read_pair(f"{name} step {number}", old, new)


def load_fp32_pair(folder: Path, learning_rate: float) -> Pair:
    """Read the float32 master weights of some layers, one step apart."""
    old, new = (master_path(folder, learning_rate, number) for number in range(2))
    return read_pair(f"SmolLM2-135M fp32 lr {learning_rate:g}", old, new)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    default = Plan()
    parser = argparse.ArgumentParser(prog="benchmarks.data.smol", description="Generate real deltas.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="cache folder (default: .bench-data)")
    parser.add_argument("--warmup", type=int, default=default.warmup, help="steps before the first state")
    parser.add_argument("--seed", type=int, default=default.seed)
    options = parser.parse_args(arguments)
    generate(options.out, plan=Plan(warmup=options.warmup, seed=options.seed))


if __name__ == "__main__":
    main()
