"""Arguments and words that the commands on feeds share."""

import argparse
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltasync.format.manifest import Manifest
from deltasync.store.opening import open_store
from deltasync.store.protocol import Store


def add_url(parser: argparse.ArgumentParser) -> None:
    """`URL`."""
    parser.add_argument("url", metavar="URL", help="the feed: a folder, or s3://…, gs://…, az://…, hf://buckets/…")


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version N`."""
    parser.add_argument("--version", type=whole_number, metavar="N", help="the version (default: the newest)")


def add_base(parser: argparse.ArgumentParser) -> None:
    """`--base DIR`."""
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="local copy of the checkpoint that the feed began with"
    )


@contextmanager
def feed(url: str) -> Iterator[Store]:
    """The store at a URL, closed at the end."""
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def whole_number(text: str) -> int:
    """A count on the command line."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return value


def time_text(unix_s: int) -> str:
    """A moment in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return str(unix_s)


def ranges_text(versions: Iterable[int]) -> str:
    """Ascending versions in few words: 0-3, 7."""
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][1] == version - 1:
            spans[-1] = spans[-1][0], version
        else:
            spans.append((version, version))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as the commands print it: the fields of docs/format.md, and the sum of its payloads."""
    return {**manifest.to_json(), "payload_bytes": manifest.nbytes}
