"""Hostile payloads that are large, or that a careless reader would make large. Made for each test, never kept."""

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "vectors"))

from support.helpers import (  # noqa: E402
    Pieces,
    mutated,
    numbers,
)

from deltasync.format import limits  # noqa: E402
from deltasync.format.digest import (  # noqa: E402
    StateDigest,
    layout_digest,
)
from deltasync.format.layout import (  # noqa: E402
    DTYPES,
    Layout,
    TensorSpec,
)
from deltasync.format.payload import (  # noqa: E402
    Block,
    PayloadHeader,
    write_payload,
)
from deltasync.format.safetensors import header_bytes  # noqa: E402
from deltasync.kernels import rans  # noqa: E402
from deltasync.kernels.rans import varint  # noqa: E402

FULL = limits.BLOCK_ELEMENTS_MAX


@dataclass(frozen=True)
class Bomb:
    """`write` puts the payload at a path; `old`, if given, the state to apply it to. `megabytes` bounds its memory."""

    write: Callable[[Path], object]
    error: str
    rule: str
    megabytes: int
    old: Callable[[Path], object] | None = None

    @property
    def stage(self) -> str:
        return "inspect" if self.old is None else "apply"


def empty_delta(layout: Layout) -> bytes:
    return write_payload(PayloadHeader("delta", layout, StateDigest.ZERO, StateDigest.ZERO), [])


def with_index(*texts: bytes) -> bytes:
    """A payload whose index is these texts one after another, compressed."""

    def change(p: Pieces) -> None:
        deflater = zlib.compressobj(1)
        p.index_bytes = b"".join(map(deflater.compress, texts)) + deflater.flush()

    return mutated(empty_delta(Layout.of([])), change)


def index_of(values: bytes) -> Callable[[Path], object]:
    """An index whose layout is a list of these values."""
    return lambda path: path.write_bytes(with_index(b'{"blocks":[],"layout":[' + values + b"]}"))


def endless_header(path: Path) -> None:
    """A header of 99 MB, of which only the first bytes take room on the disk."""
    size = limits.SAFETENSORS_HEADER_BYTES_MAX - 1_000_000
    with path.open("wb") as file:
        file.write(size.to_bytes(8, "little") + b'{"a')
        file.truncate(8 + size)


def strided(path: Path) -> None:
    """As many runs as a payload may have, in a few bytes."""

    def change(p: Pieces) -> None:
        p.index["layout"] = [["w", "U8", [FULL]]]
        p.index["blocks"] = [
            {
                "codec": "planes/1",
                "runs": [[0, 0, 1, 2, limits.RUNS_MAX]],
                "changed": 0,
                "digest": "0" * 31 + "1",
                "sha256": "0" * 64,
            }
        ]

    path.write_bytes(mutated(empty_delta(layout_of("U8")), change))


def layout_of(dtype: str) -> Layout:
    """One tensor, as long as a block may be."""
    return Layout.of([TensorSpec("w", DTYPES[dtype], (FULL,))])


def zeros(dtype: str) -> Callable[[Path], None]:
    """A state of zeros that takes no room on the disk."""
    layout = layout_of(dtype)

    def write(path: Path) -> None:
        head = header_bytes(layout.tensors, {})
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + layout.nbytes)

    return write


def one_block(dtype: str, codec: str, data: bytes) -> Callable[[Path], object]:
    """A delta of zeros, with one block over all of them that promises another digest than it gives."""
    layout = layout_of(dtype)
    parent, digest_delta = layout_digest(layout), StateDigest(1, 1)
    block = Block(codec, np.array([[0, 0, FULL]]), FULL, digest_delta, data)
    header = PayloadHeader("delta", layout, parent, parent + digest_delta)
    return lambda path: path.write_bytes(write_payload(header, [block]))


def constant_planes(dtype: str) -> bytes:
    """Planes of one symbol, which costs nothing: the block is as short as it is for a single element."""
    one = rans.encode_symbols(np.ones(1, np.uint8), [1])
    return (b"\1" + one) * DTYPES[dtype].width


def all_changed() -> bytes:
    """Every element changed, by the same step, in a few bytes."""
    sequences = numbers([0], [1]).build()
    return b"\1" + varint(FULL) + sequences + sequences


BOMBS: dict[str, Bomb] = {
    "index-of-spaces": Bomb(
        lambda path: path.write_bytes(with_index(*[b" " * limits.INDEX_BYTES_MAX] * 6)), "corrupt", "index.size", 250
    ),
    "index-of-too-many-values": Bomb(index_of(b"0," * limits.JSON_VALUES_MAX + b"0"), "corrupt", "index.json", 250),
    "index-of-many-lists": Bomb(
        index_of(b"[]," * (limits.JSON_VALUES_MAX // 2 - 10) + b"[]"), "format", "layout.entry", 700
    ),
    "header-of-99-megabytes": Bomb(endless_header, "corrupt", "safetensors.json", 500),
    "runs-without-end": Bomb(strided, "corrupt", "payload.digest", 1000),
    "planes-of-one-byte": Bomb(
        one_block("U64", "planes/1", constant_planes("U64")), "mismatch", "block.digest", 900, zeros("U64")
    ),
    "changes-of-one-byte": Bomb(
        one_block("BF16", "exp/1", all_changed()), "mismatch", "block.digest", 700, zeros("BF16")
    ),
    "changes-of-one-byte-in-bytes": Bomb(
        one_block("U8", "exp/1", all_changed()), "mismatch", "block.digest", 700, zeros("U8")
    ),
    "long-json-names": Bomb(
        lambda path: path.write_bytes(with_index(b'{"' + b"a" * (60 << 20) + b'":1}')),
        "corrupt",
        "index.field",
        700,
    ),
}
