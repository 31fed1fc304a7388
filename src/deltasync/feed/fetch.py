"""Fetch the payloads of manifests; check their SHA-256, and that they are what the manifest promises.

One of them has the files beside the weights: configuration, tokenizer, and what else a folder needs to be loaded.
"""

import hashlib
import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial

from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, outcome
from deltasync.format import keys, limits
from deltasync.format.companions import can_run_code, read_files
from deltasync.format.digest import layout_digest
from deltasync.format.index import BlockInfo, require_disjoint
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Payload, PayloadHeader
from deltasync.parallel import each
from deltasync.store.protocol import Data, Store

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
RANGES = 8
"""Ranges of one large object that are fetched at once."""

SPLIT_BYTES = 64 << 10
"""The least bytes of a range of a small object, if it is fetched in several."""

PAYLOADS_LEAST = 3
PAYLOADS_MOST = 16
"""Payloads that are fetched at once, each in parallel ranges: how many depends on their size."""

AHEAD_BYTES = 32 << 20
"""Small payloads are fetched at once up to this many bytes: so many round trips then take the time of one."""


def get_whole(
    store: Store,
    key: str,
    nbytes: int,
    *,
    ranges: int = 1,
    on_part: Callable[[memoryview], object] | None = None,
) -> Data:
    """An object whose size a manifest promises, fetched in parallel ranges into one buffer.

    CorruptError if the object is shorter or longer. Of a large object the last range is fetched first: the size is only
    a promise, and no memory is allocated before the object is known to have it. `ranges`: how many ranges of a small
    object are fetched at once. The caller checks the content: if the object is replaced in the meantime, the result can
    be a mixture.
    `on_part` is called with all bytes, in their order, while later ones are still being fetched.
    """
    on_part = (lambda part: None) if on_part is None else on_part
    if nbytes <= PART_BYTES:
        offsets = range(0, max(nbytes, 1), max(SPLIT_BYTES, -(-nbytes // ranges)))
        # Asking for one byte more detects an object that is longer.
        if len(offsets) == 1:
            found: Iterable[bytes] = [store.get_range(key, 0, nbytes + 1)]
        else:
            spans = [(at, end - at) for at, end in zip(offsets, (*offsets[1:], nbytes + 1), strict=True)]
            found = each(lambda span: store.get_range(key, *span), spans, waiting=len(spans))
        parts = []
        for part in found:
            on_part(memoryview(part))
            parts.append(part)
        _require_length(key, nbytes, sum(map(len, parts)))
        return b"".join(parts)
    offsets = range(0, nbytes, PART_BYTES)
    # Asking for one byte more detects an object that is longer.
    last = store.get_range(key, offsets[-1], nbytes - offsets[-1] + 1)
    _require_length(key, nbytes, offsets[-1] + len(last), is_exact=bool(last))
    try:
        buffer = bytearray(nbytes)
    except MemoryError as error:
        raise CorruptError(
            f"there is no memory for the {nbytes} bytes of {key}",
            rule="payload.memory",
            hint="if the payload is that large, use a machine with more memory",
            key=key,
        ) from error
    view = memoryview(buffer)
    view[offsets[-1] :] = last

    def fetch_part(offset: int) -> None:
        part = store.get_range(key, offset, PART_BYTES)
        _require_length(key, nbytes, nbytes if len(part) == PART_BYTES else offset + len(part))
        view[offset : offset + PART_BYTES] = part

    for offset, _ in zip(offsets[:-1], each(fetch_part, offsets[:-1], waiting=RANGES), strict=True):
        on_part(view[offset : offset + PART_BYTES])
    on_part(view[offsets[-1] :])
    return buffer


def _require_length(key: str, nbytes: int, length: int, *, is_exact: bool = True) -> None:
    """CorruptError unless the length is the promised one; without `is_exact` the object may be shorter still."""
    if length != nbytes:
        has = f"more than {nbytes}" if length > nbytes else f"only {length}" if is_exact else f"at most {length}"
        hint = "fetch it again, or choose another version"
        raise CorruptError(f"{key} has {has} bytes, not {nbytes}", rule="payload.size", hint=hint, key=key)


_Summary = tuple[PayloadHeader, tuple[BlockInfo, ...]]
"""The header and the index of a payload, without its bytes."""


def fetch(
    store: Store, ref: PayloadRef, *, ranges: int = 1, on_refetch: Callable[[str], None] = lambda key: None
) -> memoryview:
    """The bytes of a payload. If they are damaged, they are fetched once more before CorruptError is raised."""
    key = keys.payload_key(ref.sha256)
    for attempt in range(2):
        sha256 = hashlib.sha256()
        data = memoryview(get_whole(store, key, ref.nbytes, ranges=ranges, on_part=sha256.update))
        if sha256.hexdigest() == ref.sha256:
            if attempt > 0:
                # Only now: if it is damaged again, the error says so.
                logger.warning("%s arrived with another SHA-256, and was whole when it was fetched again", key)
            return data
        if attempt == 0:
            on_refetch(key)
    raise CorruptError(
        f"the bytes of {key} do not have its SHA-256",
        rule="payload.sha256",
        key=key,
        hint="the object is damaged in the store: `deltasync verify --deep` lists the versions that need it",
    )


def fetch_payloads(
    store: Store,
    manifests: Iterable[Manifest],
    *,
    have: Collection[str] = (),
    layout: Layout | None = None,
    on_refetch: Callable[[str], None] = lambda key: None,
    verify_blocks: bool = False,
) -> Generator[Payload, None, None]:
    """The payloads of several manifests in order; the next ones are fetched while one is used.

    The payloads of a manifest are checked as a whole before the last of them is returned: until then, the caller must
    not publish what it made of the others. Payloads whose SHA-256 is in `have` are left out, and their manifest is not
    checked as a whole: the caller checks the result by its digest. `layout` is the one that they probably have.
    `verify_blocks`: also verify each block against its SHA-256. That of the whole payload is always checked, and proves
    the bytes.
    """
    wanted = [(manifest, ref) for manifest in manifests for ref in manifest.payloads if ref.sha256 not in have]
    largest = max((ref.nbytes for _, ref in wanted), default=0)
    at_once = max(PAYLOADS_LEAST, min(PAYLOADS_MOST, AHEAD_BYTES // max(largest, 1)))
    # A connection that was idle starts slowly: over a long way, a few small payloads arrive sooner by several of them.
    ranges = max(1, PAYLOADS_MOST // max(1, len(wanted)))

    def fetched(pair: tuple[Manifest, PayloadRef]) -> tuple[Manifest, Payload]:
        manifest, ref = pair
        try:
            data = fetch(store, ref, ranges=ranges, on_refetch=on_refetch)
            return manifest, Payload.parse(data, known=layout, is_proved=not verify_blocks)
        except (CorruptError, FormatError) as error:
            if error.key is not None:
                raise
            raise error.at(keys.payload_key(ref.sha256)) from error

    summaries: list[_Summary] = []
    for manifest, payload in each(fetched, wanted, waiting=at_once):
        layout = payload.header.layout
        # A manifest with payloads left out never becomes complete: the next one starts anew.
        if summaries and summaries[-1][0].version != manifest.version:
            summaries = []
        summaries.append((payload.header, payload.block_infos))
        _check_payload(manifest, payload.header)
        if len(summaries) == len(manifest.payloads):
            _check_payloads(manifest, summaries)
            summaries = []
        yield payload


def _check_payload(manifest: Manifest, header: PayloadHeader) -> None:
    """CorruptError if one payload does not belong to the manifest."""
    is_change = manifest.kind in ("delta", "skip")
    if is_change != (header.kind == "delta"):
        raise _wrong(manifest, f"has a payload of kind {header.kind}", "manifest.payload_kind")
    if header.layout.sha256 != manifest.layout_sha256 or header.layout.elements != manifest.elements:
        raise _wrong(manifest, "has a payload of another layout", "manifest.layout")
    if header.version != manifest.version:
        raise _wrong(manifest, f"has a payload of version {header.version}", "manifest.payload_version")
    if is_change and header.parent_digest != manifest.parent_digest:
        message = f"starts from {manifest.parent_digest}, but its payload from {header.parent_digest}"
        raise _wrong(manifest, message, "manifest.parent_digest")


def _check_payloads(manifest: Manifest, summaries: Sequence[_Summary]) -> None:
    """CorruptError if all payloads together are not what the manifest promises.

    Each of several payloads has the digest that it alone leads to, so their differences from the start are added.
    """
    if not summaries:
        return
    layout = summaries[0][0].layout
    start = layout_digest(layout) if manifest.kind == "anchor" else manifest.parent_digest
    if start is None:
        raise _wrong(manifest, "has payloads but nothing to start from", "manifest.payloads")
    digest, changed, runs = start, 0, []
    for header, infos in summaries:
        digest += header.digest - start
        for info in infos:
            changed += info.changed
            runs.append(info.runs)
    require_disjoint(runs, layout)
    if digest != manifest.digest:
        message = f"promises the digest {manifest.digest}, but its payloads lead to {digest}"
        raise _wrong(manifest, message, "manifest.digest")
    if manifest.kind == "anchor" and sum(int(part[:, 2].sum()) for part in runs) != layout.elements:
        raise _wrong(manifest, "does not cover every element", "manifest.cover")
    if manifest.changed not in (None, changed):
        message = f"promises {manifest.changed} changed elements, but its payloads have {changed}"
        raise _wrong(manifest, message, "manifest.changed")


def _wrong(manifest: Manifest, message: str, rule: str) -> CorruptError:
    return CorruptError(
        f"the {manifest.kind} to version {manifest.version} {message}", rule=rule, version=manifest.version
    )


_DAMAGE = (CorruptError, FormatError, NotFoundError)


def fetch_files(store: Store, manifest: Manifest, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files beside the weights, by their relative path; those that can run code only with `trust_code`."""
    ref = manifest.files
    if ref is None:
        return {}
    if ref.nbytes > limits.FILES_BYTES_MAX + limits.SAFETENSORS_HEADER_BYTES_MAX:
        raise CorruptError(
            f"the files beside the weights have {ref.nbytes} bytes, which are too many",
            rule="files.size",
            key=keys.payload_key(ref.sha256),
        )
    files = read_files(fetch(store, ref))
    code = [] if trust_code else [path for path in files if can_run_code(path)]
    if code:
        more = f" and {len(code) - 3} others" if len(code) > 3 else ""
        named = ", ".join(f"{path!r:.80}" for path in code[:3])
        logger.warning("version %d: leaving out files that can run code: %s%s", manifest.version, named, more)
    return {path: data for path, data in files.items() if path not in code}


def find_files(log: Log, target: Manifest, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files beside the weights of a version.

    If they are damaged or missing, those of the nearest version that has others are used, with a warning; the error if
    there are none.
    """
    try:
        return fetch_files(log.store, target, trust_code=trust_code)
    except _DAMAGE as error:
        damage = error
    tried = {target.files}
    nearest = sorted(log.versions(), key=lambda version: (abs(version - target.version), version))
    for manifest in each(partial(outcome, log.read), nearest, waiting=READ_THREADS):
        if isinstance(manifest, DeltasyncError) or manifest.files is None or manifest.files in tried:
            continue
        tried.add(manifest.files)
        with suppress(*_DAMAGE):
            files = fetch_files(log.store, manifest, trust_code=trust_code)
            logger.warning(
                "the files beside the weights of version %d cannot be read, those of version %d are used: %s",
                target.version,
                manifest.version,
                damage,
            )
            return files
    damage.hint = (
        "without these files (`files=False`, `--no-files`) the weights can be restored; publish again to repair"
    )
    raise damage
