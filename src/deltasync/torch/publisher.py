"""`Publisher`: publishes the weights of a torch model after every optimizer step."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from deltasync.errors import InvalidInputError
from deltasync.format.layout import TensorSpec
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Bits
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.torch.device import DeviceCapture
from deltasync.torch.tensors import (
    NamedTensors,
    TorchState,
    TorchWeights,
    dtype_of,
    element_type,
    host_bits,
    named_tensors,
)
from deltasync.trainer.anchoring import AnchorPolicy
from deltasync.trainer.events import Observer, Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions

CaptureOn = Literal["host", "device", "device_with_host_shadow"]


class TorchPublisher(ABC):
    """A context manager that closes at its end; a store given by its URL is closed with it."""

    def __init__(self, store: Store | str, *, dtype: torch.dtype | None, capture_on: CaptureOn) -> None:
        self._store = open_store(store) if isinstance(store, str) else store
        self._owns_store = isinstance(store, str)
        self._dtype = dtype
        self._on_device = (
            None if capture_on == "host" else DeviceCapture("device" if capture_on == "device" else "host")
        )

    @abstractmethod
    def _finish(self) -> None:
        """Finish what is in flight and give back the feed."""

    def close(self) -> None:
        """Finish what is in flight, anchors included, and give back the feed."""
        self._finish()
        if self._owns_store:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Publisher(TorchPublisher):
    """Publishes the weights of a torch model to a feed.

    `publish` holds the trainer up only while it copies what changed since the last version; encoding and upload run in
    the background. The feed is opened, and the shadow rebuilt from it, by the first `publish`.

    `dtype`: publish floating-point weights as this type, rounded as torch rounds (bfloat16 of fp32 master weights).
    `base`: a new feed begins with the name of a checkpoint that replicas have, instead of an upload.
    `files`: what belongs beside the weights, such as config.json, by relative path.
    `wait`: a publication waits for the one before; else one that is overtaken becomes part of the next.
    `shadow_path`: keep the shadow in a mapped file instead of memory.
    `capture_on`: where accelerators compare: "device" keeps a second copy of the weights there,
    "device_with_host_shadow" reads the shadow across for every comparison, "host" copies the weights to the host.
    """

    def __init__(
        self,
        store: Store | str,
        *,
        dtype: torch.dtype | None = None,
        base: BaseRef | None = None,
        files: Mapping[str, bytes] | None = None,
        anchors: AnchorPolicy | None = None,
        wait: bool = False,
        shadow_path: Path | None = None,
        capture_on: CaptureOn = "device",
        retry_s: float = 60.0,
        require_fencing: bool = False,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(store, dtype=dtype, capture_on=capture_on)
        self._feed = FeedPublisher(
            self._store,
            PublisherOptions(
                base=base,
                files={} if files is None else files,
                anchors=AnchorPolicy() if anchors is None else anchors,
                wait=wait,
                shadow_path=shadow_path,
                retry_s=retry_s,
                require_fencing=require_fencing,
                observer=observer,
            ),
        )

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return self._feed.head

    def publish(
        self, weights: TorchState | NamedTensors, *, step: int | None = None, anchor: bool = False
    ) -> Publication:
        """Make these weights the next version: a module, a state dict, or (name, tensor) pairs that come one by one.

        Returns once what changed is captured: the weights may change again. `anchor` asks for an anchor on top.
        InvalidInputError, naming the tensor, if the tensors are not those of the feed.
        """
        if not isinstance(weights, torch.nn.Module | Mapping):
            return self._feed.publish_each(self._bits_of(weights), step=step, anchor=anchor)
        tensors = named_tensors(weights)
        devices = {tensor.device for tensor in tensors.values()}
        source = TorchWeights(tensors, cast=self._dtype)
        on_device = self._on_device
        if devices <= {torch.device("cpu")}:
            return self._feed.publish(source, step=step, anchor=anchor)
        if torch.device("meta") in devices:
            empty = min(name for name, tensor in tensors.items() if tensor.is_meta)
            raise InvalidInputError(
                f"tensor {empty!r:.200} has no data: it is on the device meta", hint="load it first"
            )
        if on_device is None:
            return self._feed.publish(source, step=step, anchor=anchor)
        if len(devices) > 1:
            raise InvalidInputError(
                f"the weights are on {', '.join(sorted(map(str, devices)))}", hint='say capture_on="host"'
            )
        return self._feed.publish(
            source, step=step, anchor=anchor, find=lambda shadow: on_device.find(shadow, tensors, self._dtype)
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until everything that was published is committed or has failed; False on time-out."""
        return self._feed.wait(timeout_s)

    def _finish(self) -> None:
        self._feed.close()

    def _bits_of(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[TensorSpec, Bits]]:
        for name, tensor in tensors:
            cast = tensor.detach().to(dtype_of(tensor, self._dtype))
            spec = TensorSpec(name, element_type(name, cast.dtype), tuple(cast.shape))
            yield spec, host_bits(cast, spec.dtype)
