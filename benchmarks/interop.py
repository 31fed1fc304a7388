"""A delta in the layout of slime, imported into a feed: bytes and seconds of both.

    python -m benchmarks.interop [--small]

The data are synthetic bf16 weights in the shape of Qwen3-0.6B, moved by one AdamW-like step. Folder and feed are on the
disk of the temporary folder.
"""

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.data.synthetic import QWEN3_0_6B, SMALL, bf16_pair
from benchmarks.report import Row, print_table, say, write_results
from benchmarks.states import states_of
from deltasync.checkpoint import new_checkpoint
from deltasync.feed.log import Log
from deltasync.format.weights import Weights
from deltasync.interop import Exporter, Importer
from deltasync.interop.folder import folder_name, tensor_deltas, write_files
from deltasync.store import open_store
from deltasync.trainer.capture import capture

DENSITIES = (0.002, 0.01)


def measure(density: float, *, is_small: bool) -> Row:
    """Write a folder, import it, and export the feed again."""
    states = states_of(bf16_pair(density, shape=SMALL if is_small else QWEN3_0_6B))
    old, new = states.old, states.new

    def fill(empty: Weights) -> None:
        for source, array in zip(old.arrays, empty.arrays, strict=True):
            array[:] = source

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        with new_checkpoint(old.layout, {}, place / "base") as weights:
            fill(weights)
        folder = place / "run" / folder_name(1)
        folder.mkdir(parents=True)
        written_bytes = write_files(
            folder,
            tensor_deltas(new, capture(new, old)),
            version=1,
            base_version=0,
            encoding="xor",
            checksum_format="xxh3-128",
        )
        with Importer(place / "run", place / "feed", base=place / "base") as importer:
            for _ in range(2):
                began_s = time.perf_counter()
                publication = importer.advance()
                if publication is None:
                    raise AssertionError("there is nothing to import")
                manifest = publication.wait()
                import_s = time.perf_counter() - began_s
        with Exporter(place / "feed", place / "exported") as exporter:
            exporter.advance()
            began_s = time.perf_counter()
            exporter.advance()
            export_s = time.perf_counter() - began_s
        head = Log(open_store(place / "feed")).require_head()
        if head.digest != manifest.digest or not manifest.changed:
            raise AssertionError("the feed does not have what was imported")
    return {
        "changed": f"{manifest.changed / manifest.elements:.2%}",
        "folder, MB": written_bytes / 1e6,
        "feed, MB": manifest.nbytes / 1e6,
        "ratio": written_bytes / manifest.nbytes,
        "folder, bits each": 8 * written_bytes / manifest.changed,
        "feed, bits each": 8 * manifest.nbytes / manifest.changed,
        "import, s": import_s,
        "export, s": export_s,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="80 million weights instead of 600")
    is_small = parser.parse_args().small
    rows: list[Row] = []
    for density in DENSITIES:
        say(f"{density:.1%} changed")
        rows.append(measure(density, is_small=is_small))
    print_table("A delta of slime's layout, imported into a feed", rows)
    write_results("interop", {"folders": rows})


if __name__ == "__main__":
    main()
