"""How ranks commit together: rank 0 does it, decides on the way whether an anchor is due, and tells the others both."""

from collections.abc import Callable, Sequence

from deltasync.format.manifest import Manifest
from deltasync.log.writer import Writer
from deltasync.publishing.anchoring import Anchoring
from deltasync.publishing.making import Part
from deltasync.publishing.shadow import Shadow
from deltasync.retrying import Retry
from deltasync.trainer.distributed import Ranks


class ToldAnchoring(Anchoring):
    """Begins an anchor when `is_told`: only rank 0 asks whether one is due."""

    is_told = False

    def consider(self, manifest: Manifest) -> None:
        if self.is_told:
            self.begin(manifest)


class Committing:
    """The join of versions, for a Maker, and the look at what became of one, for a Pipeline."""

    def __init__(
        self, ranks: Ranks, writer: Writer, shadow: Shadow, anchoring: ToldAnchoring, *, retry_s: float
    ) -> None:
        self._ranks = ranks
        self._writer = writer
        self._shadow = shadow
        self._anchoring = anchoring
        self._retry_s = retry_s

    def join(self, about: str, make: Callable[[], Part], finish: Callable[[Part], Manifest]) -> Manifest:
        """Every rank makes its part, rank 0 finishes."""

        def commit(part: Part) -> tuple[Manifest, bool]:
            manifest = finish(part)
            return manifest, self._is_due(manifest)

        manifest, self._anchoring.is_told = self._ranks.join(about, make, commit)
        return manifest

    def look(self, after: int) -> Manifest | None:
        """The newest version behind one that all ranks know."""

        def find(_: Sequence[None]) -> tuple[Manifest | None, bool]:
            found = Retry(self._retry_s)(lambda: self._writer.log.head(after=after))
            return found, found is not None and found.writer == self._writer.id and self._is_due(found)

        found, self._anchoring.is_told = self._ranks.agree(f"what follows version {after}", None, find)
        return found

    def _is_due(self, manifest: Manifest) -> bool:
        with self._shadow.lock:
            return self._anchoring.is_due(manifest)
