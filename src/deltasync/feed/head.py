"""The head of a feed as a follower sees it: newer versions at one small request, and a feed that was replaced."""

import logging
import time
from collections.abc import Callable

from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.feed.log import Log
from deltasync.format.manifest import Manifest

logger = logging.getLogger(__name__)

CHECK_S = 30.0
"""Seconds after which a head that no version follows is read again: the feed may have been rolled back."""


class Head:
    """The newest version of a feed that was seen: `manifest`, None before the first poll."""

    def __init__(self, log: Log, *, check_s: float = CHECK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.manifest: Manifest | None = None
        self._log = log
        self._check_s = check_s
        self._clock = clock
        self._checked_s = clock()

    def poll(self) -> Manifest:
        """The newest version; NotFoundError if the feed has none. One small request if the known one is still that.

        Now and then the known head is read again. If the feed has no such version any more, or has it with another
        digest, then it was rolled back, forked or restored: that is reported, and its newest version is the head.
        """
        known = self.manifest
        newer = None if known is None else self._log.head(after=known.version)
        if newer is not None:
            return self._see(newer)
        if known is not None and not self._is_replaced(known):
            return known
        head = self._log.require_head()
        if known is not None:
            logger.warning(
                "version %d with the digest %s is no longer in the feed, which was rolled back or replaced: "
                "following version %d with the digest %s",
                known.version,
                known.digest,
                head.version,
                head.digest,
            )
        return self._see(head)

    def _is_replaced(self, known: Manifest) -> bool:
        if self._clock() - self._checked_s < self._check_s:
            return False
        self._checked_s = self._clock()
        try:
            return self._log.read(known.version).digest != known.digest
        except NotFoundError:
            return True
        except (CorruptError, FormatError) as error:
            # It is damaged, which does not make it another version.
            logger.warning("the newest version cannot be read again: %s", error)
            return False

    def _see(self, manifest: Manifest) -> Manifest:
        self.manifest, self._checked_s = manifest, self._clock()
        return manifest
