"""Commands on pins: pin, unpin, pins."""

import argparse

from deltasync.cli.output import Column, Output
from deltasync.cli.units import count_text, time_text
from deltasync.feed.pins import pin as keep
from deltasync.feed.pins import pins as read
from deltasync.feed.pins import unpin as release
from deltasync.format.sealed import Pin

_COLUMNS = (
    Column("name", is_name=True),
    Column("version"),
    Column("pinned (UTC)", rank=1),
    Column("note", is_name=True),
    Column("digest", rank=2),
)


def pin(args: argparse.Namespace, out: Output) -> None:
    """Keep a version for good, under a name."""
    kept = keep(args.url, args.version, name=args.name, note=args.note)
    if out.is_json:
        out.json(kept.to_json())
    else:
        out.line(f"version {kept.version} is pinned as {kept.name}: `prune` keeps it")


def unpin(args: argparse.Namespace, out: Output) -> None:
    """Remove a pin, or all pins of a version."""
    removed = release(args.url, args.version)
    if out.is_json:
        out.json({"removed": [pin.to_json() for pin in removed]})
        return
    for pin in removed:
        out.line(f"version {pin.version} is no longer pinned as {pin.name}")


def pins(args: argparse.Namespace, out: Output) -> None:
    """List the pins of a feed."""
    found = read(args.url)
    if out.is_json:
        out.json({"pins": [pin.to_json() for pin in found]})
        return
    out.table(count_text(len(found), "pin"), _COLUMNS, [_row(pin) for pin in found])


def _row(pin: Pin) -> tuple[object, ...]:
    return pin.name, pin.version, time_text(pin.created_unix_s), pin.note or None, pin.digest[:12]
