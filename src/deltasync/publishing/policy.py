"""When a feed gets a new anchor: late joiners read the last one and every delta since."""

from dataclasses import dataclass

from deltasync.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorPolicy:
    """An anchor is due when the deltas since the last one have `bytes_ratio` times its size, or after `versions`."""

    bytes_ratio: float | None = 1.0
    versions: int | None = None

    def __post_init__(self) -> None:
        if (self.bytes_ratio is not None and self.bytes_ratio <= 0) or (
            self.versions is not None and self.versions < 1
        ):
            raise InvalidInputError(f"{self} is never or always due", hint="use None to leave a rule out")

    def is_due(self, *, delta_bytes: int, anchor_bytes: int, versions: int) -> bool:
        """Whether this much since the last anchor, of that size, asks for a new one."""
        by_bytes = self.bytes_ratio is not None and delta_bytes >= self.bytes_ratio * anchor_bytes
        return by_bytes or (self.versions is not None and versions >= self.versions)


NEVER = AnchorPolicy(bytes_ratio=None, versions=None)
