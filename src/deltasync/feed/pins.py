"""Pin versions: `prune` keeps a pinned version for good, and its name can be used in place of its number."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from deltasync.arguments import described
from deltasync.errors import ConflictError, CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.route import Blocked, Route
from deltasync.format import keys, limits
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Pin
from deltasync.store import Feed, opened
from deltasync.store.fencing import creating
from deltasync.store.patient import get_record

logger = logging.getLogger(__name__)


def pin(
    feed: Feed,
    version: int | str,
    *,
    name: str | None = None,
    note: str = "",
    clock: Callable[[], float] = time.time,
) -> Pin:
    """Keep a version for good: `prune` deletes nothing that it needs.

    `version` is a number, or the name of another pin. `name` can be used in place of the number from now on; by default
    it is `v` and the number. Pinning the same version under the same name again replaces the note, which is for
    people.

    NotFoundError if the version does not exist or can no longer be restored; ConflictError if the name is that of
    another version: `unpin` it first.
    """
    if not isinstance(note, str) or len(note.encode(errors="replace")) > limits.NOTE_BYTES_MAX:
        raise InvalidInputError(f"note must be a text of up to {limits.NOTE_BYTES_MAX} bytes, not {described(note)}")
    with opened(feed) as store:
        log = Log(store)
        target = log.resolve(version)
        if name is None:
            name = f"v{target.version}"
        key = keys.pin_key(name)
        _require_stored(log, target)
        wanted = Pin(name, target.version, target.digest.hex, note, int(clock()))
        is_new = False
        try:
            get_record(store, key)
        except NotFoundError:
            is_new = True
            # If another process was faster, its record stays.
            creating(store).create(key, wanted.to_bytes())
        known = log.pin(name)
        if known is None or (known.version, known.digest) != (wanted.version, wanted.digest):
            what = "gone again" if known is None else f"of version {known.version}"
            raise ConflictError(
                f"the pin {name} is {what}, not of version {wanted.version}",
                key=key,
                hint=f"choose another name, or `deltasync unpin` {name} first",
            )
        if is_new:
            try:
                _require_kept(log, wanted)
            except NotFoundError:
                store.delete(key)
                raise
        if known.note == note:
            return known
        store.put(key, wanted.to_bytes())
        return wanted


def unpin(feed: Feed, version: int | str) -> tuple[Pin, ...]:
    """Remove a pin by its name, or all pins of a version by its number, and return them.

    The next `prune` may delete the version. NotFoundError if there is no such pin. A pin that is damaged can be removed
    by its name.
    """
    with opened(feed) as store:
        log = Log(store)
        if isinstance(version, str):
            key = keys.pin_key(version)
            try:
                pin = log.pin(version)
                found = [] if pin is None else [pin]
            except (CorruptError, FormatError) as error:
                logger.warning("removing a pin that cannot be read: %s", error)
                store.delete(key)
                return ()
        else:
            found = [pin for pin in log.pins() if pin.version == version]
        if not found:
            what = f"pin {version!r}" if isinstance(version, str) else f"pin of version {version}"
            raise NotFoundError(f"{store.url} has no {what}", hint="`deltasync pins` lists them")
        for pin in found:
            store.delete(keys.pin_key(pin.name))
        return tuple(found)


def pins(feed: Feed) -> tuple[Pin, ...]:
    """All pins of a feed, by version."""
    with opened(feed) as store:
        return tuple(sorted(Log(store).pins(), key=lambda pin: (pin.version, pin.name)))


def _require_stored(log: Log, target: Manifest) -> None:
    """NotFoundError unless all objects of a plan for the version are in the store, in their full size."""
    route = Route(log, target)
    while True:
        with suppress(Blocked):
            for edge in route.plan().edges:
                with route.using(edge):
                    for ref in edge.manifest.refs:
                        key = keys.payload_key(ref.sha256)
                        if not any(item.key == key and item.nbytes == ref.nbytes for item in log.store.list(key)):
                            raise NotFoundError(f"{key} is missing or cut short", key=key)
            return


def _require_kept(log: Log, pin: Pin) -> None:
    """NotFoundError if a `prune` that has not seen this pin may delete what it needs.

    `prune` raises the floor, then reads the pins, then deletes. The pin is written before this: so a `prune` whose
    floor is not seen here sees the pin. Below the floor, another pin of the same version that is still there has been
    seen by every `prune` until now.
    """
    floor = log.floor()
    if pin.version >= floor:
        return
    others = [other for other in log.pins() if other.name != pin.name and other.version == pin.version]
    if not others:
        raise NotFoundError(
            f"version {pin.version} cannot be pinned: it was pruned, and versions from {floor} on are kept",
            version=pin.version,
            key=keys.pin_key(pin.name),
            hint=f"pin version {floor} or a later one",
        )
