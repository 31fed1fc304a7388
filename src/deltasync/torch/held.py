"""What checkpoint engines share: one version as torch tensors, `HeldVersion`; checks of settings and base classes."""

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from deltasync import arguments
from deltasync.errors import InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.format.manifest import Manifest
from deltasync.state import State
from deltasync.store import Feed, opened
from deltasync.torch.tensors import torch_dtype

_POLL_FIRST_S, _POLL_MOST_S = 0.05, 1.0


class HeldVersion:
    """A copy of the weights that moves from version to version, and fetches only what changed. One thread at a time.

    `wait_s`: how long `advance` waits for a version that is not committed yet.
    `device`: where tensors are put; by default the accelerator, if there is one.
    """

    def __init__(self, feed: Feed, *, wait_s: float, device: str | None = None) -> None:
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

    def head(self) -> int | None:
        """The newest version of the feed."""
        head = self._open().head()
        return None if head is None else head.version

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


def publication_numbers(manifest: Manifest) -> dict[str, float]:
    """What a version cost, for the log of a trainer."""
    share = 1.0 if manifest.changed is None else manifest.changed / max(1, manifest.elements)
    return {
        "deltasync/version": float(manifest.version),
        "deltasync/bytes": float(manifest.nbytes),
        "deltasync/changed_share": share,
    }


def floating_type(name: str | None) -> torch.dtype | None:
    """The floating-point type of torch that a setting names; None for None."""
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError(f"dtype must be the name of a floating-point type of torch, not {name!r:.40}")
    return dtype


def require_methods(base: type, expected: Mapping[str, list[str]], *, framework: str, hint: str) -> None:
    """InvalidInputError, naming the difference, unless the abstract methods of a framework's base class are these."""
    found = {}
    names: Iterable[str] = getattr(base, "__abstractmethods__", ())
    for name in names:
        method = inspect.getattr_static(base, name)
        called: Any = method.fget if isinstance(method, property) else getattr(base, name)
        found[name] = list(inspect.signature(called).parameters)
    if found != expected:
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise InvalidInputError(
            f"this release of {framework} has another {base.__name__}: {', '.join(differing)} differ", hint=hint
        )
