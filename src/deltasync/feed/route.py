"""The ways to a version: the cheapest plan, and others where an edge of it turns out to be damaged or missing.

A plan may start with a base: a checkpoint in a local folder, or the weights of a model on the Hub and nothing else.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import INDEX_NAME, WHOLE_NAME, open_checkpoint, weight_files
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.plan import Edge, Plan, plan
from deltasync.format import keys, limits
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights
from deltasync.store.patient import require_rereadable

logger = logging.getLogger(__name__)


class Blocked(Exception):  # noqa: N818 - not an error: the next plan goes around the edge
    """An edge of a plan cannot be used. The route avoids it from then on."""

    def __init__(self, edge: Edge, cause: DeltasyncError) -> None:
        super().__init__(str(cause))
        self.edge = edge
        self.cause = cause


class Route:
    """How to get to the version `goal` of a feed, from nothing or from a version that the caller holds.

    Take the plan of `plan`, and use each edge in a `using` block. If that raises Blocked, ask for the next plan. `base`
    is a local copy of the checkpoint that the feed started with. `rerouted` counts edges that could not be used; an
    advance of a state takes the count over.
    """

    def __init__(self, log: Log, goal: Manifest, *, base: Path | None = None) -> None:
        self.log = log
        self.goal = goal
        self.rerouted = 0
        self._base = base
        self._avoid: set[str] = set()
        self._first: DeltasyncError | None = None
        self._blocked: Blocked | None = None
        self._from_nothing: Plan | None = None
        self._starts: dict[str, tuple[Layout, Weights | None]] = {}

    def plan(self, held: int | None = None) -> Plan:
        """The cheapest plan from version `held`, without edges that could not be used.

        If none is left, the error of the first edge that could not be used is raised.
        """
        step = Edge(manifest_key(self.goal), self.goal)
        if held is None and self._from_nothing is not None:
            return self._from_nothing
        try:
            if held is not None and step.start == held and self.goal.kind == "delta" and step.key not in self._avoid:
                # The next version's delta is the plan. Nothing has to be listed for that.
                chosen = Plan((step,))
            else:
                chosen = plan(self.log, self.goal, start=held, avoid=self._avoid)
        except NotFoundError as none:
            error = none if self._first is None else self._first
            floor = self.log.floor()
            if not isinstance(error, NotFoundError) or self.goal.version >= floor:
                raise error from None
            raise NotFoundError(
                f"version {self.goal.version} was pruned: {self.log.store.url} keeps versions from {floor} on "
                f"({error.message})",
                version=self.goal.version,
                key=error.key,
                hint=f"choose version {floor} or a later one",
            ) from None
        if self._blocked is not None:
            # Not before there is another plan: without one, the error that is raised says the same.
            logger.warning("cannot use %s, trying another plan: %s", self._blocked.edge.key, self._blocked.cause)
            self._blocked = None
        if held is None:
            self._from_nothing = chosen
        return chosen

    def layout(self) -> Layout:
        """The layout that the plan from nothing starts with. Edges that cannot be used for that are avoided."""
        while True:
            try:
                return self.open(self.plan().edges[0])[0]
            except Blocked:
                continue

    @contextmanager
    def using(self, edge: Edge) -> Iterator[None]:
        """Turn damage, absence and mismatches in the block into Blocked, and avoid the edge from then on."""
        try:
            yield
        except (CorruptError, FormatError, MismatchError, NotFoundError) as error:
            self._first = error if self._first is None else self._first
            self._blocked = Blocked(edge, error)
            self._avoid.add(edge.key)
            self._from_nothing = None
            self.rerouted += 1
            raise self._blocked from error

    def open(self, edge: Edge) -> tuple[Layout, Weights | None]:
        """The layout of an edge from nothing, and the weights of the base if it names one. They are read once."""
        if edge.key not in self._starts:
            with self.using(edge):
                if edge.manifest.kind == "base":
                    weights = open_base(edge, at=self._base)
                    self._starts[edge.key] = weights.layout, weights
                else:
                    ref = edge.manifest.payloads[0]
                    key = keys.payload_key(ref.sha256)
                    read = partial(self.log.store.get_range, key)
                    try:
                        layout = Payload.open(read, ref.nbytes).header.layout
                    except (CorruptError, FormatError) as error:
                        require_rereadable(error)
                        layout = Payload.open(read, ref.nbytes).header.layout
                    if layout.sha256 != edge.manifest.layout_sha256:
                        message = f"{key} has another layout than its manifest"
                        raise CorruptError(message, rule="manifest.layout", key=key)
                    self._starts[edge.key] = layout, None
        return self._starts[edge.key]


def open_base(edge: Edge, *, at: Path | None = None) -> Weights:
    """The weights of the checkpoint that a base names, or of the copy `at` another path, checked by their digest.

    NotFoundError if the checkpoint is not available; MismatchError if it has other tensors or other bits.
    """
    manifest = edge.manifest
    if manifest.base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    checkpoint = open_checkpoint(locate_base(manifest) if at is None else at)
    if checkpoint.weights.layout.sha256 != manifest.layout_sha256:
        raise MismatchError(
            f"{checkpoint.path} has other tensors than the base of version {manifest.version}",
            version=manifest.version,
            rule="base.layout",
            hint="pass the checkpoint that the feed started with",
        )
    try:
        require_digest(edge, checkpoint.weights)
    except CorruptError as error:
        raise MismatchError(
            f"{checkpoint.path} is not the base of version {manifest.version}: {error.message}",
            version=manifest.version,
            rule="base.digest",
            hint="pass the checkpoint, at the same revision, that the feed started with",
        ) from error
    return checkpoint.weights


def require_digest(edge: Edge, weights: Weights, *, on_progress: blocks.OnProgress | None = None) -> None:
    """CorruptError unless the weights have the state digest that the manifest of the edge promises."""
    digest = blocks.digest(weights, on_progress=on_progress)
    if digest != edge.manifest.digest:
        raise CorruptError(
            f"the weights of version {edge.end} have the digest {digest}, but its manifest promises "
            f"{edge.manifest.digest}",
            rule="restore.digest",
            key=edge.key,
            version=edge.end,
        )


_HINT = "pass a local copy of it: `--base DIR`"
_ELEMENT_BYTES_MAX = 8


def locate_base(manifest: Manifest) -> Path:
    """The folder of the checkpoint that the manifest of a base names.

    From the Hub, only the safetensors files that hold the weights are downloaded, and only if the size of all of them
    fits the number of elements. NotFoundError if the checkpoint is not available, MismatchError if it does not fit.
    """
    base = manifest.base
    if base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    # Path.exists raises for a name that no file can have.
    if os.path.exists(base.checkpoint):
        return Path(base.checkpoint)
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
        from huggingface_hub.errors import DryRunError, HFValidationError
    except ImportError as error:
        hint = f"{_HINT}, or install deltasync[hf] to download it from the Hub"
        raise NotFoundError(f"the base {_name(base)} is not a local folder", hint=hint) from error
    try:
        try:
            listed = snapshot_download(base.checkpoint, revision=base.revision, dry_run=True)
        except DryRunError:
            # The Hub cannot be reached: what was downloaded before may be enough.
            patterns = ["*.safetensors", INDEX_NAME]
            return Path(
                snapshot_download(
                    base.checkpoint, revision=base.revision, local_files_only=True, allow_patterns=patterns
                )
            )
        sizes = {file.filename: file.file_size or 0 for file in listed}
        # All requests are about the same commit, even if a branch moves on.
        commit = listed[0].commit_hash if listed else base.revision
        names = [name for name in sizes if name.endswith(".safetensors") and "/" not in name]
        if WHOLE_NAME in names:
            names = [WHOLE_NAME]
        elif INDEX_NAME in sizes:
            _require_size(base, manifest, sizes, [INDEX_NAME], most=limits.SAFETENSORS_HEADER_BYTES_MAX)
            index = Path(hf_hub_download(base.checkpoint, INDEX_NAME, revision=commit))
            names = weight_files(index)
        most = _ELEMENT_BYTES_MAX * manifest.elements + len(names) * (limits.SAFETENSORS_HEADER_BYTES_MAX + 8)
        _require_size(base, manifest, sizes, names, least=manifest.elements, most=most)
        for name in names:
            folder = Path(hf_hub_download(base.checkpoint, name, revision=commit)).parent
    except (OSError, ValueError, HFValidationError) as error:
        # The client raises OSErrors for network failures, missing permissions and missing repositories alike.
        raise NotFoundError(f"the base {_name(base)} is not available: {error!s:.300}", hint=_HINT) from error
    return folder


def _require_size(
    base: BaseRef, manifest: Manifest, sizes: dict[str, int], names: list[str], *, most: int, least: int = 0
) -> None:
    """MismatchError unless the Hub has all of these files, in a size that the base can have."""
    missing = [name for name in names if name not in sizes]
    nbytes = sum(sizes.get(name, 0) for name in names)
    if missing or not names:
        problem = f"has no file {missing[0]!r:.200}" if missing else "has no safetensors files"
    elif not least <= nbytes <= most:
        problem = f"has {nbytes} bytes in {len(names)} files, which does not fit {manifest.elements} elements"
    else:
        return
    raise MismatchError(
        f"{_name(base)} cannot be the base of version {manifest.version}: it {problem}",
        version=manifest.version,
        rule="base.layout",
        hint=_HINT,
    )


def _name(base: BaseRef) -> str:
    return f"{base.checkpoint!r:.200}" + ("" if base.revision is None else f" at revision {base.revision!r:.80}")
