"""Checks of arguments: each error names the argument, what it must be, and what it is."""

import operator
import os
from collections.abc import Collection
from pathlib import Path

from deltasync.errors import InvalidInputError

COUNT_MAX = (1 << 63) - 1


def whole_number(name: str, value: object, *, least: int = 0, most: int = COUNT_MAX, hint: str | None = None) -> int:
    """An int from anything that is a whole number, such as an integer of NumPy or a tensor with a single integer."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise InvalidInputError(f"{name} must be a whole number, not {described(value)}", hint=hint)
    if not least <= number <= most:
        allowed = f"at least {least}" if most == COUNT_MAX and number < least else f"from {least} to {most}"
        raise InvalidInputError(f"{name} must be {allowed}, not {number}", hint=hint)
    return number


def optional_version(value: object) -> int | None:
    """A version of a feed, or None for the one that is meant by default."""
    return None if value is None else whole_number("version", value)


def seconds(name: str, value: object, *, is_zero_allowed: bool = True, hint: str | None = None) -> float:
    """A duration, which may be infinite."""
    if isinstance(value, bool | str | bytes):
        number = None
    else:
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = None
    if number is None:
        raise InvalidInputError(f"{name} must be a number of seconds, not {described(value)}", hint=hint)
    if not (number >= 0 if is_zero_allowed else number > 0):
        allowed = "at least 0" if is_zero_allowed else "above 0"
        raise InvalidInputError(f"{name} must be {allowed}, not {number:g}", hint=hint)
    return number


def local_path(name: str, value: object) -> Path:
    """A path from a str or a path."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidInputError(f"{name} must be a path, not {described(value)}")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidInputError(f"{name} must be a path, not {text!r:.80}")
    return Path(text)


def optional_path(name: str, value: object) -> Path | None:
    """A path, or None."""
    return None if value is None else local_path(name, value)


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Refuse a value that is none of the allowed ones."""
    if value not in allowed:
        raise InvalidInputError(f"{name} must be {' or '.join(map(repr, allowed))}, not {described(value)}")


def instance(name: str, value: object, kind: type, *, hint: str | None = None) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        raise InvalidInputError(f"{name} must be of type {kind.__qualname__}, not {described(value)}", hint=hint)


def described(value: object) -> str:
    """A value for a message: short, and with its type unless that is plain to see."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return f"{value!r:.80}"
    return f"a {type(value).__qualname__}"
