"""The layouts of other systems on the same change, in bits for each element that changed.

    python -m benchmarks.peers

The data are 20 million synthetic bf16 weights in the shape of Qwen3, moved by one AdamW-like step. Fireworks' `arc_v3`
is measured where its package is installed: `pip install fireworks-delta-compression==0.1.0`. Its size is that of the
compressed tensors, without the file around them. The other layouts are those of `baselines`.
"""

import importlib.util
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.baselines import (
    Baseline,
    decode_gaps_xor_zstd,
    decode_index_value,
    decode_xor,
    encode_gaps_xor_zstd,
    encode_index_value,
    encode_xor,
)
from benchmarks.data.pair import Pair
from benchmarks.data.synthetic import TINY, bf16_pair
from benchmarks.entropy import conditional_entropy
from benchmarks.report import Row, print_table, say, write_results
from benchmarks.states import delta_file, states_of
from deltasync import blocks

DENSITIES = (0.002, 0.01, 0.05)
FIREWORKS = "fireworks_delta_compression"

PEERS = (
    Baseline("XOR + zstd-1: slime, Miles, Stitch, ModelExpress, CoreWeave", encode_xor, decode_xor),
    Baseline("u16 gaps + XOR, zstd-1: NeMo RL", encode_gaps_xor_zstd, decode_gaps_xor_zstd),
    Baseline("int32 + bf16: verl, vLLM's sparse loader", encode_index_value, decode_index_value),
)


def sizes(pair: Pair) -> Iterator[tuple[str, float]]:
    """The bytes of one change in every layout."""
    yield "entropy, given the old exponents", conditional_entropy(pair.tensors(), pair.kind).nbytes
    states = states_of(pair)
    yield "deltasync, exp/1", len(delta_file(states, blocks.encode_delta(states.old, states.new)))
    for peer in PEERS:
        for old, new in pair.tensors():
            peer.check(old, new)
        yield peer.name, peer.pair_bytes(pair)
    if importlib.util.find_spec(FIREWORKS) is not None:
        yield "arc_v3: Fireworks", _arc_v3_bytes(pair)


def _arc_v3_bytes(pair: Pair) -> int:
    from fireworks_delta_compression import delta_compress, delta_decompress

    total = 0
    for old, new in pair.tensors():
        src, dst = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (old, new))
        found, checksum = delta_compress(src=src, dst=dst, compression_format="arc_v3")
        restored = delta_decompress(src=src, compressed_diff=found, checksum=checksum, compression_format="arc_v3")
        if not torch.equal(restored.view(torch.int16), dst.view(torch.int16)):
            raise AssertionError("arc_v3: the round trip is not exact")
        total += found.numel() * found.element_size()
    return total


def main() -> None:
    """Run from the command line."""
    bits: dict[str, dict[str, float]] = {}
    for density in DENSITIES:
        say(f"{density:.1%} changed")
        pair = bf16_pair(density, shape=TINY)
        changed = sum(int(np.count_nonzero(old != new)) for old, new in pair.tensors())
        for name, nbytes in sizes(pair):
            bits.setdefault(name, {})[f"{density:.1%} changed"] = 8 * nbytes / changed
    rows: list[Row] = [{"bits per changed element": name, **by_density} for name, by_density in bits.items()]
    print_table("The layouts of other systems", rows)
    write_results("peers", {"bits per changed element": rows})


if __name__ == "__main__":
    main()
