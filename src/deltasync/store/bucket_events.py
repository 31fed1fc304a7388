"""The event feed of a bucket: the Hub tells which files change, over one long answer of server-sent events.

    event: changes
    data: {"cursor": "…", "changes": [{"path": "…", "op": "add"}]}

The cursor of the last event, given to the next request, gets what happened in between. The Hub's other events are
`ready` (now come new changes), `reconnect` (this answer ends) and `reset` (the cursor is too old). It sends a comment
every 30 seconds or so, to show that it is there.
"""

import json
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from typing import Any

from deltasync.errors import StoreError

_log = logging.getLogger(__name__)

SILENCE_S = 90.0
"""Without a single byte, after which the connection counts as lost."""

_PAUSE_FIRST_S = 0.5
_PAUSE_MOST_S = 60.0
_REFUSALS = (401, 403, 404, 501)
"""Not for this token, or not in this place: asking again does not help."""


def changed_paths(url: str, headers: Callable[[], Mapping[str, str]], stop: threading.Event) -> Iterator[str]:
    """Paths of files that are added or replaced, from about now on, until `stop` is set. StoreError if it is refused.

    A connection that is lost, or that the Hub ends, is made anew from where it was. `headers` are asked for each time.
    """
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    cursor: str | None = None
    pause_s = _PAUSE_FIRST_S
    while not stop.is_set():
        try:
            with closing(_events(url, headers(), cursor, stop)) as events:
                for name, told in events:
                    pause_s = _PAUSE_FIRST_S
                    cursor = None if name == "reset" else _cursor(told, cursor)
                    if name == "changes":
                        yield from _paths(told)
                    if name in ("reset", "reconnect"):
                        break
        except _CursorRefusedError:
            cursor = None
        except (HTTPError, OSError) as error:
            _log.debug("lost the events of %s: %s", url, error)
        stop.wait(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MOST_S)


class _CursorRefusedError(Exception):
    """The Hub does not know the cursor any more."""


def _events(
    url: str, headers: Mapping[str, str], cursor: str | None, stop: threading.Event
) -> Generator[tuple[str, Mapping[str, Any]], None, None]:
    """Names and contents of the events of one connection."""
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

    accept = {**headers, "Accept": "text/event-stream"}
    place = {} if cursor is None else {"cursor": cursor}
    with get_session().stream("GET", url, headers=accept, params=place, timeout=SILENCE_S) as response:
        status, kind = response.status_code, response.headers.get("Content-Type", "")
        if status == 400 and cursor is not None:
            raise _CursorRefusedError
        if status in _REFUSALS or (status == 200 and not kind.startswith("text/event-stream")):
            raise StoreError(f"there are no events at {url} ({status})", transient=False, hint="poll")
        response.raise_for_status()
        name, data = "", ""
        for line in response.iter_lines():
            if stop.is_set():
                return
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                data += value
            elif not line:
                yield name, _parsed(data)
                name, data = "", ""


def _parsed(data: str) -> Mapping[str, Any]:
    """The content of an event; empty if it is none that we know how to read."""
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _cursor(told: Mapping[str, Any], before: str | None) -> str | None:
    found = told.get("cursor")
    return found if isinstance(found, str) else before


def _paths(told: Mapping[str, Any]) -> Iterator[str]:
    changes = told.get("changes")
    for change in changes if isinstance(changes, list) else ():
        if isinstance(change, dict) and change.get("op") in ("add", "update") and isinstance(change.get("path"), str):
            yield change["path"]
