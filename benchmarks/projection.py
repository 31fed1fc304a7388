"""Gigabytes and seconds for the models that people train, projected from the steps that were measured.

    python -m benchmarks.projection

Reads the sizes that `make bench-codec` has measured (results/codec.json). A projection assumes that a larger model
changes as the measured one did, and counts the transfer alone. Uploads are those of a run with the default anchors: the
first version is one, and another is due whenever the deltas since the last one are as large as it was.
"""

import json
import re
from dataclasses import dataclass

from benchmarks.report import RESULTS, Row, print_table
from deltasync import AnchorPolicy
from examples.demo.projection import BYTES_PER_WEIGHT, bytes_text, project, seconds_text

VERSIONS = 1000
_TITLE = re.compile(r"sizes: (?P<data>(SmolLM2-135M bf16 .* step 1|synthetic bf16 1\.00%)) \(")


@dataclass(frozen=True, slots=True)
class Measured:
    """One step: the share of weights that changed, the bits for each of them, and the size of an anchor."""

    data: str
    density: float
    bits: float
    anchor_share: float
    """Of the size of a full copy."""

    @property
    def delta_factor(self) -> float:
        """How many times smaller than a full copy a delta is."""
        return 8 * BYTES_PER_WEIGHT / (self.density * self.bits)

    def upload_factor(self, versions: int) -> float:
        """The same for everything that is uploaded: the first version, deltas, and anchors on the way."""
        anchor, delta = self.anchor_share, 1 / self.delta_factor
        policy, uploaded, since = AnchorPolicy(), anchor, 0.0
        for count in range(1, versions + 1):
            uploaded += delta
            since += delta
            # The policy counts whole bytes: here, billionths of a copy.
            if policy.is_due(delta_bytes=round(1e9 * since), anchor_bytes=round(1e9 * anchor), versions=count):
                uploaded, since = uploaded + anchor, 0.0
        return (versions + 1) / uploaded


def measured_steps() -> list[Measured]:
    """The real steps, and the synthetic one with 1 % changed."""
    tables = json.loads((RESULTS / "codec.json").read_text())["tables"]
    summary = {row["data"]: row for row in tables["sizes: exp/1 compared"]}
    found = []
    for title, rows in tables.items():
        if match := _TITLE.match(title):
            row = summary[match["data"]]
            density, bits = row["changed %"] / 100, row["exp/1 bits"]
            # The file of all weights is given in bits per change.
            dense = next(each["bits per change"] for each in rows if each["codec"].startswith("planes/1"))
            found.append(Measured(row["data"], density, bits, dense * density / (8 * BYTES_PER_WEIGHT)))
    return found


def main() -> None:
    """Run from the command line."""
    steps = measured_steps()
    rows: list[Row] = []
    for step in steps:
        for each in project(density=step.density, bits=step.bits):
            rows.append(
                {
                    "step": step.data,
                    "changed": f"{step.density:.2%}",
                    "bits": step.bits,
                    "model": each.model,
                    "full copy": bytes_text(each.copy_bytes),
                    "at 1 Gbit/s": seconds_text(each.copy_s),
                    "one step": bytes_text(each.step_bytes),
                    "at 1 Gbit/s ": seconds_text(each.step_s),
                }
            )
    print_table("A projection to larger models, the transfer alone", rows)
    factors: list[Row] = [
        {
            "step": step.data,
            "full copy / delta": step.delta_factor,
            "anchor / full copy": step.anchor_share,
            f"full copies / all uploads, {VERSIONS} versions": step.upload_factor(VERSIONS),
            "the same, 100 versions": step.upload_factor(100),
        }
        for step in steps
    ]
    print_table("What anchors cost", factors)


if __name__ == "__main__":
    main()
