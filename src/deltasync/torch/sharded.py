"""`ShardedPublisher`: every rank of a sharded trainer publishes its own shard; together they commit one version."""

from collections.abc import Mapping

import torch

from deltasync import arguments
from deltasync.errors import InvalidInputError
from deltasync.format.layout import Layout
from deltasync.format.weights import Changes, Weights
from deltasync.state import State
from deltasync.store import Feed
from deltasync.torch.device import DeviceCapture, source_of
from deltasync.torch.publisher import TorchPublisher
from deltasync.torch.ranks import TorchRanks, owned
from deltasync.torch.tensors import TorchState, layout_of, named_tensors, unwrapped
from deltasync.trainer.capture import require_same
from deltasync.trainer.events import Publication
from deltasync.trainer.group import Group
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.shards import Box, Shards, ShardWeights
from deltasync.trainer.source import Source, WeightsSource


class ShardedPublisher(TorchPublisher):
    """Publishes the weights of a model that is spread over the ranks of torch.distributed, as FSDP2 does.

    Every rank creates one and calls `publish` and `close`. A rank reads, compares, encodes and puts only its own
    elements: the model is never gathered. Rank 0 opens the feed and commits. Where several ranks have the same
    elements, the first of them publishes; tensors that are not DTensors are published by rank 0, so that under
    DistributedDataParallel a `Publisher` on rank 0 does the same with less communication.

    An error of one rank is raised on all of them. After any but a StoreError, and when a rank is lost, the publisher
    has stopped: what was not committed is invisible, and a new publisher continues from the head of the feed, with any
    number of ranks. `timeout_s` is how long rank 0 waits for the slowest rank; the others wait twice as long for it.
    Encoding and putting a shard (of all weights, for the first version) must take less time than that.

    `options.shadow_path` is a folder; each rank keeps a file there. A publication always waits for the one before. The
    observer receives the events of whole versions, on every rank that has one.
    """

    def __init__(
        self,
        feed: Feed,
        *,
        dtype: torch.dtype | None = None,
        timeout_s: float = 600.0,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        if isinstance(options, PublisherOptions) and options.skips:
            raise InvalidInputError(
                "a sharded publisher writes no skips: no rank has all weights",
                hint="leave out skips, and run `deltasync compact --follow` beside it",
            )
        super().__init__(feed, dtype=dtype, options=options)
        self._timeout_s = arguments.seconds("timeout_s", timeout_s, is_zero_allowed=False)
        self._group: Group | None = None
        self._is_closed = False

    def publish(
        self,
        weights: TorchState,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """Make these weights the next version: a module or a state dict. All ranks call this, with the same step.

        Returns once the publication before is complete and what changed is captured: the weights may change again.
        `anchor`, on rank 0, requests an anchor in addition. `extra`, on rank 0, is metadata that the manifest carries.
        """
        self._require_here()
        if self._is_closed:
            raise InvalidInputError("this publisher is closed", hint="open a new one")
        if self._feed is None or self._group is None:
            self._group = TorchRanks.open(timeout_s=self._timeout_s)
            self._feed = self._connect(self._group)
        feed, group = self._feed, self._group
        if feed.needs_files and group.rank == 0:
            with group.report_errors():
                feed.files, feed.default_files = self._files(weights)
        source = _ShardSource(weights, group.rank, self._dtype, self._on_device)
        return feed.publish(source, step=step, anchor=anchor, extra=extra)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed and the groups of ranks."""
        self._is_closed = True
        super().close()


class _ShardSource(Source):
    """The elements of a model that this rank publishes."""

    def __init__(
        self, weights: TorchState, rank: int, dtype: torch.dtype | None, on_device: DeviceCapture | None
    ) -> None:
        self._weights = weights
        self._rank = rank
        self._dtype = dtype
        self._on_device = on_device

    @property
    def layout(self) -> Layout | None:
        # Rank 0 chooses which of several tied names counts: a rank whose shards are empty cannot do so.
        return layout_of(named_tensors(self._weights), cast=self._dtype) if self._rank == 0 else None

    def shards(self, layout: Layout) -> Shards:
        return Shards(layout, self._boxes(layout)[0])

    def copy_into(self, weights: Weights) -> None:
        self._local(weights).copy_into(weights)

    def changes(self, shadow: State) -> list[Changes]:
        return self._local(shadow.require_weights()).changes(shadow)

    def _local(self, weights: Weights) -> WeightsSource:
        """The local elements, which must be in the boxes that the shadow has."""
        if not isinstance(weights, ShardWeights):
            raise TypeError("the shadow of a rank has shards")
        boxes, tensors = self._boxes(weights.shards.layout)
        weights.shards.require(boxes)
        return source_of(tensors, self._dtype, self._on_device)

    def _boxes(self, layout: Layout) -> tuple[list[Box], dict[str, torch.Tensor]]:
        """The box and the elements of each tensor of the layout that this rank publishes."""
        weights, rank = self._weights, self._rank
        if rank == 0:
            tensors = named_tensors(weights)
        else:
            state = unwrapped(weights).state_dict() if isinstance(weights, torch.nn.Module) else weights
            tensors = {spec.name: state[spec.name].detach() for spec in layout.tensors if spec.name in state}
        require_same(layout, layout_of(tensors, cast=self._dtype))
        shards = {spec.name: owned(spec.name, tensors[spec.name], rank) for spec in layout.tensors}
        return [box for box, _ in shards.values()], {name: local for name, (_, local) in shards.items()}
