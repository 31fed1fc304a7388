"""The content store (CAS) behind the stand-in of the Hub: files as chunks, uploaded in runs that are called xorbs."""

import secrets
import struct
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import hf_xet


@dataclass(frozen=True, slots=True)
class Xorb:
    """A run of compressed chunks, as the client sent it."""

    data: bytes
    ends: tuple[int, ...]
    """Where each chunk ends in `data`."""
    lengths: tuple[int, ...]
    """What each chunk holds, uncompressed."""

    @classmethod
    def parse(cls, data: bytes) -> "Xorb":
        """Chunk headers have 8 bytes: version, compressed length (3), scheme, length (3). A footer may follow."""
        ends, lengths, position = [], [], 0
        while position < len(data) and not data.startswith(b"XETBLOB", position):
            lengths.append(int.from_bytes(data[position + 5 : position + 8], "little"))
            position += 8 + int.from_bytes(data[position + 1 : position + 4], "little")
            ends.append(position)
        return cls(data, tuple(ends), tuple(lengths))


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks `first` up to `last` of a xorb: a piece of a file."""

    xorb: str
    nbytes: int
    first: int
    last: int


def parse_shard(data: bytes) -> dict[str, tuple[Segment, ...]]:
    """The files that a shard describes: records of 48 bytes behind a header of 48, up to one whose hash is all ones."""
    files: dict[str, tuple[Segment, ...]] = {}
    position = 48
    while True:
        name, flags, count = struct.unpack_from("<32sII", data, position)
        if name == b"\xff" * 32:
            return files
        records = [struct.unpack_from("<32sIIII", data, position + 48 * (1 + i)) for i in range(count)]
        files[_hex(name)] = tuple(Segment(_hex(r[0]), r[2], r[3], r[4]) for r in records)
        verification, metadata = flags >> 31 & 1, flags >> 30 & 1
        position += 48 * (1 + count * (1 + verification) + metadata)


def _hex(raw: bytes) -> str:
    """Hashes are written as four little-endian words."""
    return "".join(raw[i : i + 8][::-1].hex() for i in range(0, 32, 8))


class ContentStore:
    """What clients uploaded, and how to build files from it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.token = secrets.token_hex(16)
        """What the Hub gives to clients for this store."""
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, tuple[Segment, ...]] = {}

    def size(self, name: str) -> int:
        return sum(segment.nbytes for segment in self.files[name])

    def plan(self, name: str, begin: int, end: int) -> dict[str, Any]:
        """How to build bytes `begin` to `end` of a file: chunks, and where they lie in which xorb."""
        terms: list[dict[str, Any]] = []
        spans: dict[str, list[tuple[int, int]]] = {}
        skipped = position = 0
        for segment in self.files[name]:
            lengths = self.xorbs[segment.xorb].lengths
            starts = list(accumulate(lengths[segment.first : segment.last], initial=position))
            wanted = [i for i in range(len(starts) - 1) if starts[i + 1] > begin and starts[i] < end]
            position = starts[-1]
            if not wanted:
                continue
            if not terms:
                skipped = begin - starts[wanted[0]]
            first, last = segment.first + wanted[0], segment.first + wanted[-1] + 1
            span = {"start": first, "end": last}
            terms.append({"hash": segment.xorb, "unpacked_length": sum(lengths[first:last]), "range": span})
            spans.setdefault(segment.xorb, []).append((first, last))
        sources = {xorb: [self._source(xorb, *span) for span in _merged(found)] for xorb, found in spans.items()}
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": sources}

    def _source(self, name: str, first: int, last: int) -> dict[str, Any]:
        ends = self.xorbs[name].ends
        place = {"start": 0 if first == 0 else ends[first - 1], "end": ends[last - 1] - 1}
        return {"range": {"start": first, "end": last}, "url": f"{self.url}/chunks/{name}", "url_range": place}

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of a file, put together by the client's own library through the routes of the stand-in."""
        if begin >= end:
            return b""
        group = self._session.new_download_stream_group(
            endpoint=self.url, token=self.token, token_expiry_unix_secs=int(time.time()) + 3600
        )
        return b"".join(group.download_stream(hf_xet.XetFileInfo(name, self.size(name)), begin, end))

    @cached_property
    def _session(self) -> hf_xet.XetSession:
        return hf_xet.XetSession()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The fewest spans that cover these: the client needs one for each term, and the same chunk in no two of them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
