"""Numbers, sizes, times and versions as text for people."""

import math
import time
from collections.abc import Collection, Iterable


def number_text(count: int) -> str:
    """A whole number with separators: 1,234,567."""
    return f"{count:,}"


def count_text(count: int, noun: str) -> str:
    """A count with its noun: 1 version, 2 versions."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def or_dash(value: object) -> str:
    """A value as text; `-` for None."""
    return "-" if value is None else str(value)


def size_text(nbytes: int) -> str:
    """Bytes with a decimal unit: 1234567 is 1.23 MB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def share_text(part: int, whole: int) -> str:
    """A share in percent."""
    return "-" if whole == 0 else f"{100 * part / whole:.3f} %"


def percent(part: int | None, whole: int) -> float | None:
    """A share in percent as a number; None if it is not known."""
    return None if part is None or whole == 0 else round(100 * part / whole, 6)


def ratio_text(part: int, whole: int) -> str:
    """How many times smaller the part is: `218 times smaller`."""
    if part == 0 or whole == 0:
        return "-"
    ratio = whole / part
    return f"{ratio:,.0f} times smaller" if ratio >= 100 else f"{ratio:.3g} times smaller"


def bits_text(nbytes: int, changed: int) -> str:
    """Bits per changed element."""
    return "-" if changed == 0 else f"{8 * nbytes / changed:.2f}"


def duration_text(seconds: float) -> str:
    """A duration with its unit: `4.2 ms`, `2.31 s`, `3 min 12 s`, `5 h 10 min`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    if math.isinf(seconds):
        return "-"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def time_text(unix_s: float) -> str:
    """A time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return str(unix_s)


def versions_text(versions: Collection[int]) -> str:
    """Ascending versions as ranges with their noun: `version 7`, or `versions 0-3, 7`."""
    return f"{'version' if len(versions) == 1 else 'versions'} {ranges_text(versions)}"


_RANGES_MAX = 50
"""Ranges that are printed: junk in a store can make thousands of them, in each of thousands of lines."""


def ranges_text(versions: Iterable[int]) -> str:
    """Ascending versions as ranges: `0-3, 7`. Of very many ranges, only the first ones and the last one."""
    from deltasync.format import keys  # here, so that help does not import the format

    texts = [str(first) if first == last else f"{first}-{last}" for first, last in keys.ranges(versions)]
    if len(texts) > _RANGES_MAX:
        texts = [*texts[: _RANGES_MAX - 2], f"{len(texts) - _RANGES_MAX + 1} more ranges", texts[-1]]
    return ", ".join(texts)
