"""Stores that tell of new objects by themselves: a capability that few have, and that nothing may depend on."""

import threading
from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Watchable(Protocol):
    """A store with news. They may come late, twice or not at all: whoever needs to know asks the store itself."""

    def watch(self, stop: threading.Event) -> Iterator[str]:
        """Keys of objects as they are put, from about now on; waits for them, and survives lost connections.

        Ends some time after `stop` is set. StoreError if the store has no news, or none for this account.
        """
        ...
