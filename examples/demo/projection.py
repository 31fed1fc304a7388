"""A projection from a measured step to larger models: how much a step sends, and how long that takes."""

from dataclasses import dataclass

MODELS = {"8B": 8e9, "70B": 70e9, "405B": 405e9}
"""Numbers of weights."""

BYTES_PER_WEIGHT = 2
LINK_BITS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Projection:
    """One model: the bytes of a full copy and of one step, and the seconds that the link needs for each."""

    model: str
    copy_bytes: float
    copy_s: float
    step_bytes: float
    step_s: float


def project(*, density: float, bits: float, link_bits_per_s: float = LINK_BITS_PER_S) -> list[Projection]:
    """Project a step in which a share of `density` of the weights changes, with `bits` for each of them.

    It assumes that larger models change as the measured one did, and counts the transfer alone.
    """
    result = []
    for model, weights in MODELS.items():
        copy_bytes, step_bytes = weights * BYTES_PER_WEIGHT, weights * density * bits / 8
        result.append(
            Projection(
                model,
                copy_bytes=copy_bytes,
                copy_s=8 * copy_bytes / link_bits_per_s,
                step_bytes=step_bytes,
                step_s=8 * step_bytes / link_bits_per_s,
            )
        )
    return result


def bytes_text(nbytes: float) -> str:
    """A size with three digits, such as `187 MB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # 999.6 kB would be shown as 1000 kB.
        if nbytes >= 0.9995 * size:
            value = nbytes / size
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """A time, such as `0.22 s`, `18 min 40 s` or `1 h 48 min`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
