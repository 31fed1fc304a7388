"""Games on their way from the environment to the trainer: JSON objects in the store, beside the feed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
from wordle.training import Played

from deltasync.store.protocol import Store

GAMES, GROUP = 32, 8
"""What is played at once; games of one group have the same answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Games that were played side by side.

    `versions`: the oldest and the newest version that made letters, turn by turn, as the replica labelled its answers.
    `head`: the newest version in the store after the last of them.
    """

    versions: tuple[tuple[int, int], ...]
    head: int
    played: Played

    @property
    def oldest(self) -> int:
        return min(first for first, _ in self.versions)

    @property
    def newest(self) -> int:
        return max(last for _, last in self.versions)

    def to_bytes(self) -> bytes:
        played = {name: getattr(self.played, name).tolist() for name in Played.__slots__}
        return json.dumps({"versions": self.versions, "head": self.head, **played}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        fields = json.loads(data)
        return cls(
            versions=tuple((first, last) for first, last in fields["versions"]),
            head=fields["head"],
            played=Played(
                texts=np.array(fields["texts"], np.int64),
                log_probs=np.array(fields["log_probs"], np.float32),
                counts=np.array(fields["counts"], np.bool_),
                rewards=np.array(fields["rewards"], np.float64),
                solved=np.array(fields["solved"], np.bool_),
            ),
        )


def put(store: Store, number: int, sample: Sample) -> None:
    """Hand a sample over."""
    store.put(f"{number:08d}.json", sample.to_bytes())


def taken(store: Store, *, after: str | None = None) -> Iterator[tuple[str, Sample]]:
    """Samples in the order that they were made, from the one behind the key `after` on, each with its key."""
    for found in store.list(after=after):
        yield found.key, Sample.from_bytes(store.get(found.key))
