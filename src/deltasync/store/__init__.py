"""Object stores that hold feeds, opened from a path or a URL."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deltasync.arguments import described
from deltasync.errors import InvalidInputError
from deltasync.store.account import KINDS
from deltasync.store.local import LocalStore
from deltasync.store.memory import memory_store
from deltasync.store.protocol import Store

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
_KNOWN = ("file", "memory", "hf", *KINDS)
_OTHERS = {"gcs": "gs", "google": "gs", "aws": "s3", "wasb": "az", "wasbs": "az", "huggingface": "hf"}
"""What others call the same stores."""
_ALMOST = re.compile(r"\s*([A-Za-z][A-Za-z0-9+-]*)(:/*|/{2,})(?=[^:/\s])", re.ASCII)
"""The start of what looks like a URL, and is not one: `s3:/bucket`, `s3//bucket`, `s3:bucket`."""
_FORMS = (
    "a path",
    "file:///path",
    "memory://name",
    "s3://bucket/prefix",
    "gs://bucket/prefix",
    "az://container/prefix",
    "hf://buckets/namespace/name/prefix",
)


Feed = str | os.PathLike[str] | Store
"""A feed, as every call takes it: a URL, a path, or a store that the caller has opened."""


@contextmanager
def opened(feed: Feed) -> Iterator[Store]:
    """The store of a feed, closed at the end of the block; a store that the caller has opened stays open."""
    if not isinstance(feed, str | os.PathLike):
        if not hasattr(feed, "get_range"):
            raise InvalidInputError(f"the feed must be a URL, a path or a store, not {described(feed)}")
        yield feed
        return
    store = open_store(feed)
    try:
        yield store
    finally:
        store.close()


def open_store(url: str | os.PathLike[str]) -> Store:
    """The store at a path or URL. This reads the configuration of the account, and sends no request.

    Credentials are never part of the URL: they come from the environment (docs/stores.md). A store is a context manager
    that closes itself.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text) if isinstance(url, str) else None
    if scheme is None:
        if text.strip() == "":
            raise InvalidInputError("the store has no name", hint=f"use {', '.join(_FORMS)}")
        _require_no_url(text, is_path=not isinstance(url, str))
        try:
            return LocalStore(Path(text).expanduser() if isinstance(url, str) else url)
        except RuntimeError:
            # No such user, or HOME is not set and the system does not know this user, as in some containers.
            message = f"{text!r}: there is no such home"
            raise InvalidInputError(message, hint="set HOME, or give the whole path") from None
    url = text
    name = scheme[1].lower()
    if name == "file":
        return LocalStore(file_path(url))
    if name == "memory":
        return memory_store(url[scheme.end() :])
    if name in KINDS:
        # Imported here, like the client of the Hub below: a feed in a folder needs no client of a cloud.
        from deltasync.store.remote import open_remote

        return open_remote(url)
    if name == "hf":
        from deltasync.store.hub import open_bucket

        return open_bucket(url)
    meant = _meant(name)
    question = "" if meant is None else f"did you mean {_shown(meant, url[scheme.end() :])}? Or "
    raise InvalidInputError(f"{name}:// is not a kind of store", hint=f"{question}use {', '.join(_FORMS)}")


def _require_no_url(text: str, *, is_path: bool) -> None:
    """InvalidInputError for a path that was meant as a URL: a feed would grow unnoticed in a local folder."""
    start = _ALMOST.match(text)
    # Other folders may well have two slashes behind them.
    meant = None if start is None else _meant(start[1].lower(), is_exact=not start[2].startswith(":/"))
    if start is None or meant is None:
        return
    shown = _shown(meant, text[start.end() :])
    # A `pathlib.Path` has lost one of the two slashes.
    hint = f"did you mean the string {shown!r}?" if is_path else f"did you mean {shown}?"
    raise InvalidInputError(
        f"{_shown(start[0], text[start.end() :], separator='')!r} is not the URL of a store",
        hint=f"{hint} If it is a folder, write ./{start[0].strip()}…",
    )


def _meant(name: str, *, is_exact: bool = False) -> str | None:
    """The kind of store that a name is, or resembles."""
    if name in _KNOWN:
        return name
    close = get_close_matches(name, _KNOWN, n=1, cutoff=0.5) if len(name) > 1 and not is_exact else []
    return _OTHERS.get(name, close[0] if close else None)


def _shown(name: str, rest: str, *, separator: str = "://") -> str:
    """A URL for a message. What may be a secret is left out."""
    root = "/" if name == "file" and separator else ""
    return f"{name}{separator}{root}{'…' if any(character in rest for character in '@?#') else rest}"


def file_path(url: str) -> Path:
    """The folder that a `file://` URL names."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidInputError(
            "the file:// URL names no absolute path", hint="use file:///absolute/path, or a plain path"
        )
    return Path(unquote(parts.path))
