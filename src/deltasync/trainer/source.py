"""Where the weights of a publication come from: how they are compared with the shadow, or copied to begin one."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from deltasync.errors import InvalidInputError
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.weights import Bits, Changes, Readable, Weights
from deltasync.state import State
from deltasync.trainer.capture import (
    capture,
    capture_each,
    collect,
    copy_each,
    copy_into,
    require_same,
)
from deltasync.trainer.shards import Shards


class Source(ABC):
    """The weights of one publication. A publisher asks once for their changes, or for a copy where it has no shadow."""

    @property
    def layout(self) -> Layout | None:
        """Of all weights; None if it is not known before the tensors come, or if another process knows it."""
        return None

    def shards(self, layout: Layout) -> Shards | None:
        """The part of the weights that this process has; None if it has all of them."""
        return None

    def collect(self) -> Weights:
        """Copies of all weights, whose layout is not known before. What is asked for later is taken from them."""
        raise InvalidInputError("the feed has no version yet", hint="publish all weights first")

    @abstractmethod
    def copy_into(self, weights: Weights) -> None:
        """Copy all weights."""

    @abstractmethod
    def changes(self, shadow: State) -> list[Changes]:
        """What differs from the shadow, whose lock is held."""


class WeightsSource(Source):
    """Weights in memory, or in mapped files."""

    def __init__(self, weights: Readable) -> None:
        self._weights = weights

    @property
    def layout(self) -> Layout | None:
        return self._weights.layout

    def copy_into(self, weights: Weights) -> None:
        require_same(weights.layout, self._weights.layout)
        copy_into(weights, self._weights)

    def changes(self, shadow: State) -> list[Changes]:
        # No digest is computed of what is compared, so that runs of a shard need not be contiguous in whole tensors.
        weights = shadow.require_weights()
        return capture(Weights(weights.layout, weights.arrays), self._weights)


class StreamSource(Source):
    """Tensors that come one by one, and once, so that the model never has to exist twice."""

    def __init__(self, tensors: Iterable[tuple[TensorSpec, Bits]]) -> None:
        self._tensors = tensors
        self._collected: Weights | None = None

    def collect(self) -> Weights:
        self._collected = collect(self._tensors)
        return self._collected

    def copy_into(self, weights: Weights) -> None:
        if self._collected is None:
            copy_each(weights, self._tensors)
        elif self._collected is not weights:
            copy_into(weights, self._collected)

    def changes(self, shadow: State) -> list[Changes]:
        return capture_each(shadow.require_weights(), self._tensors)
