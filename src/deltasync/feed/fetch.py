"""Fetch the payloads of manifests, check their SHA-256, and check them against what the manifest promises."""

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass

from deltasync.errors import CorruptError, FormatError
from deltasync.format import keys
from deltasync.format.companions import read_files
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.index import require_disjoint
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import BlockInfo, Payload, PayloadHeader
from deltasync.parallel import each
from deltasync.store.protocol import Data, Store

PART_BYTES = 8 << 20
RANGES = 8
"""Ranges of one object that are fetched at once."""


def get_whole(store: Store, key: str, nbytes: int) -> Data:
    """An object whose size is known, from a manifest: in ranges, each thread its own, into one buffer.

    CorruptError if the object is shorter or longer. What is in it is for the caller to check: an object that is put
    anew meanwhile can give parts of both.
    """
    if nbytes <= PART_BYTES:
        # One byte more than there should be: a longer object gives itself away.
        data = store.get_range(key, 0, nbytes + 1)
        _require_length(key, nbytes, len(data))
        return data
    buffer = bytearray(nbytes)
    view = memoryview(buffer)

    def fetch_part(offset: int) -> None:
        end = min(offset + PART_BYTES, nbytes)
        part = store.get_range(key, offset, end - offset + (1 if end == nbytes else 0))
        _require_length(key, nbytes, nbytes if len(part) == end - offset else offset + len(part))
        view[offset:end] = part

    for _ in each(fetch_part, range(0, nbytes, PART_BYTES), waiting=RANGES):
        pass
    return buffer


def _require_length(key: str, nbytes: int, found: int) -> None:
    if found != nbytes:
        has = f"more than {nbytes}" if found > nbytes else f"only {found}"
        hint = "fetch it again; then another version"
        raise CorruptError(f"{key} has {has} bytes, not {nbytes}", rule="payload.size", hint=hint, key=key)


logger = logging.getLogger(__name__)

_FETCH_THREADS = 3
"""Payloads under way at once, twice this many in memory; each is fetched in parallel ranges by itself."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a payload says of itself, without its bytes."""

    header: PayloadHeader
    block_infos: tuple[BlockInfo, ...]


def fetch(store: Store, ref: PayloadRef, *, on_refetch: Callable[[str], None] = lambda key: None) -> memoryview:
    """The bytes of a payload. Damaged ones are fetched once more: the wire may be to blame. Then CorruptError."""
    key = keys.payload_key(ref.sha256)
    for attempt in range(2):
        try:
            data = memoryview(get_whole(store, key, ref.nbytes))
        except CorruptError as error:
            raise CorruptError(error.message, rule="payload.size", key=key, hint=error.hint) from error
        if hashlib.sha256(data).hexdigest() == ref.sha256:
            return data
        if attempt == 0:
            logger.warning("%s came with another SHA-256: fetching it again", key)
            on_refetch(key)
    raise CorruptError(
        f"the bytes of {key} do not have its SHA-256",
        rule="payload.sha256",
        key=key,
        hint="the object is damaged in the store: `deltasync verify --deep` tells which versions need it",
    )


def fetch_payloads(
    store: Store,
    manifests: Iterable[Manifest],
    *,
    have: Collection[str] = (),
    on_refetch: Callable[[str], None] = lambda key: None,
) -> Generator[Payload, None, None]:
    """The payloads of several manifests in order, the next ones under way while one is used.

    All payloads of a manifest are held against it before its last one is given out; the caller shows what it made of
    the others to nobody before that. Payloads whose SHA-256 is in `have` are left out. A manifest of such a one is not
    held against the sum of its payloads: the caller proves what comes out by its digest.
    """
    wanted = ((manifest, ref) for manifest in manifests for ref in manifest.payloads if ref.sha256 not in have)

    def fetched(pair: tuple[Manifest, PayloadRef]) -> tuple[Manifest, Payload]:
        return pair[0], _payload(store, pair[1], on_refetch)

    parts: list[Part] = []
    for manifest, payload in each(fetched, wanted, waiting=_FETCH_THREADS):
        # Of a manifest with payloads left out the last one never comes here: another manifest may.
        if parts and parts[-1].header.version != manifest.version:
            parts = []
        parts.append(Part(payload.header, payload.block_infos))
        check_part(manifest, parts[-1])
        if len(parts) == len(manifest.payloads):
            check_parts(manifest, parts)
            parts = []
        yield payload


def fetch_files(store: Store, manifest: Manifest) -> dict[str, bytes]:
    """The files beside the weights, by their relative path."""
    return {} if manifest.files is None else read_files(fetch(store, manifest.files))


def check_part(manifest: Manifest, part: Part) -> None:
    """CorruptError if one payload does not belong to the manifest."""
    header = part.header
    is_change = manifest.kind in ("delta", "skip")
    if is_change != (header.kind == "delta"):
        raise _wrong(manifest, f"has a payload of kind {header.kind}", "manifest.payload_kind")
    if header.layout.sha256 != manifest.layout_sha256 or header.layout.elements != manifest.elements:
        raise _wrong(manifest, "has a payload of another layout", "manifest.layout")
    if header.version != manifest.version:
        raise _wrong(manifest, f"has a payload of version {header.version}", "manifest.payload_version")
    if is_change and header.parent_digest != manifest.parent_digest:
        told = f"starts from {manifest.parent_digest}, its payload from {header.parent_digest}"
        raise _wrong(manifest, told, "manifest.parent_digest")


def check_parts(manifest: Manifest, parts: Sequence[Part]) -> None:
    """CorruptError if all payloads together are not what the manifest promises.

    Each of several payloads says where it alone leads to, so what they add is the sum of the differences.
    """
    if not parts:
        return
    layout = parts[0].header.layout
    infos = [info for part in parts for info in part.block_infos]
    require_disjoint([info.runs for info in infos], layout)
    start = layout_digest(layout) if manifest.kind == "anchor" else manifest.parent_digest
    if start is None:
        raise _wrong(manifest, "has payloads but nothing to start from", "manifest.payloads")
    digest_delta = sum((part.header.digest - start for part in parts), StateDigest.ZERO)
    if start + digest_delta != manifest.digest:
        told = f"promises the digest {manifest.digest}, its payloads lead to {start + digest_delta}"
        raise _wrong(manifest, told, "manifest.digest")
    if manifest.kind == "anchor" and sum(info.elements for info in infos) != layout.elements:
        raise _wrong(manifest, "does not cover every element", "manifest.cover")
    changed = sum(info.changed for info in infos)
    if manifest.changed not in (None, changed):
        told = f"promises {manifest.changed} changed elements, its payloads have {changed}"
        raise _wrong(manifest, told, "manifest.changed")


def _payload(store: Store, ref: PayloadRef, on_refetch: Callable[[str], None]) -> Payload:
    key = keys.payload_key(ref.sha256)
    try:
        return Payload.parse(fetch(store, ref, on_refetch=on_refetch))
    except (CorruptError, FormatError) as error:
        if error.key is not None:
            raise
        raise type(error)(f"{key}: {error.message}", rule=error.rule, hint=error.hint, key=key) from error


def _wrong(manifest: Manifest, told: str, rule: str) -> CorruptError:
    return CorruptError(
        f"the {manifest.kind} to version {manifest.version} {told}", rule=rule, version=manifest.version
    )
