"""The error tree: one class for each thing that a handler can do about it."""

import copy
import os
from typing import Any, ClassVar, Self


def printable(text: str) -> str:
    """Text of a feed, a store or a file on one line, safe for a terminal and a log.

    Control characters, escape codes, line breaks and characters that change the direction of text are shown escaped:
    otherwise a name could move the cursor or forge a line of a log.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class DeltasyncError(Exception):
    """Base of all errors that deltasync raises on purpose.

    `kind` is stable across releases: log it, count it, match on it. `rule` names the broken rule of docs/format.md
    where there is one. `hint` says what to do. `key` is the object or the file that the error is about, `version` the
    version of the feed. Errors can be pickled, so that they cross to other processes. Messages and hints quote foreign
    text; they are made `printable` here, so that no caller has to.
    """

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        rule: str | None = None,
        version: int | None = None,
        key: str | None = None,
    ) -> None:
        super().__init__(printable(message))
        self.message = printable(message)
        self.hint = None if hint is None else printable(hint)
        self.rule = rule
        self.version = version
        self.key = key

    def at(self, place: str | os.PathLike[str], *, version: int | None = None) -> Self:
        """A copy that names the object or file where the error was found: in its message and as its `key`."""
        error = copy.copy(self)
        error.key = os.fspath(place)
        error.message = printable(f"{error.key}: {self.message}")
        error.args = (error.message,)
        error.version = self.version if version is None else version
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call the class with the message alone, which StoreError refuses.
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        text = self.message
        if self.rule is not None:
            text += f" [{self.rule}]"
        if self.hint is not None:
            text += f" ({self.hint})"
        return text


class ConflictError(DeltasyncError):
    """Another writer won. Stop."""

    kind = "conflict"


class NotFoundError(DeltasyncError):
    """The thing asked for is not there. Choose another version."""

    kind = "not_found"


class MismatchError(DeltasyncError):
    """These bits are not the parent's bits. Start again from an anchor."""

    kind = "mismatch"


class CorruptError(DeltasyncError):
    """The bytes are damaged. Fetch them again, then start again from an anchor."""

    kind = "corrupt"


class FormatError(DeltasyncError):
    """A format, codec or field that this release does not understand. Upgrade."""

    kind = "format"


class StoreError(DeltasyncError):
    """The store failed. Retry if `transient`."""

    kind = "store"

    def __init__(self, message: str, *, transient: bool, hint: str | None = None, key: str | None = None) -> None:
        super().__init__(message, hint=hint, key=key)
        self.transient = transient


class EngineError(DeltasyncError):
    """The inference engine failed at what it was asked to do. Look at its own log, then restart it."""

    kind = "engine"


class RankError(DeltasyncError):
    """A process of a sharded trainer is lost, or failed in code that is not ours. Restart the trainer."""

    kind = "rank"


class InvalidInputError(DeltasyncError, ValueError):
    """The call is wrong. Fix it."""

    kind = "invalid_input"
