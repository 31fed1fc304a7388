"""A feed for a process of torch: its newest version, the replicas that serve one, and a version as tensors."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch

from deltasync import arguments
from deltasync.errors import InvalidInputError, NotFoundError
from deltasync.feed.log import LIVE_S, Log
from deltasync.feed.route import Route
from deltasync.format.manifest import Manifest
from deltasync.parallel import Closable
from deltasync.replica import events
from deltasync.state import State
from deltasync.store import Feed, opened
from deltasync.torch.tensors import torch_dtype

_POLL_FIRST_S, _POLL_MOST_S = 0.05, 1.0


class FeedReader(Closable):
    """Reads a feed. Its copy of the weights goes from version to version and fetches only what changed.

    `wait_s`: how long `advance` waits for a version that is not committed yet.
    `device`: where tensors are put; by default the accelerator, if there is one.
    One thread at a time may read weights; `head` and `serving` may be called by any.
    """

    def __init__(self, feed: Feed, *, wait_s: float = 600.0, device: str | None = None) -> None:
        self._feed = feed
        self._wait_s = arguments.seconds("wait_s", wait_s, is_zero_allowed=False)
        self._device = device
        self._resources = ExitStack()
        self._log: Log | None = None
        self._state = State()

    def close(self) -> None:
        """Release the feed and the memory."""
        self._log, self._state = None, State()
        self._resources.close()

    def head(self) -> Manifest | None:
        """The newest version of the feed; None if it has none."""
        return self._open().head()

    def serving(self, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> dict[str, int]:
        """The versions that live replicas serve, by replica, the slowest first.

        A replica that sends no heartbeat for `live_s` is not live. One without a version is left out.
        """
        return events.serving(self._open(), live_s=live_s, clock=clock)

    def advance(self, version: int | None = None) -> Manifest:
        """Bring the weights to a version, once it is committed, or to the newest.

        NotFoundError if the version is not committed in time.
        """
        log = self._open()
        target = log.require_head() if version is None else self._committed(log, version)
        self._state.advance(Route(log, target))
        return target

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of all tensors: a caller may keep one for longer than the version is held."""
        weights = self._state.weights
        if weights is None or self._state.version is None:
            raise InvalidInputError("no version is held", hint="call advance first")
        device = self._device
        if device is None:
            device = "cpu" if not torch.accelerator.is_available() else str(torch.accelerator.current_accelerator())
        for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True):
            tensor = torch.from_numpy(bits.copy()).view(torch_dtype(spec.dtype)).reshape(spec.shape)
            yield spec.name, tensor.to(device)

    def _open(self) -> Log:
        if self._log is None:
            self._log = Log(self._resources.enter_context(opened(self._feed)))
        return self._log

    def _committed(self, log: Log, version: int) -> Manifest:
        until_s, pause_s = time.monotonic() + self._wait_s, _POLL_FIRST_S
        while True:
            try:
                return log.read(version)
            except NotFoundError as error:
                if time.monotonic() > until_s:
                    hint = "look at the log of the trainer's rank 0"
                    raise NotFoundError(
                        f"version {version} was not committed within {self._wait_s:g} s", version=version, hint=hint
                    ) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MOST_S)
