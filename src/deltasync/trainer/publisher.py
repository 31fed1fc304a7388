"""`Publisher`: two lines in a training loop, and every optimizer step becomes a version."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from deltasync.errors import InvalidInputError
from deltasync.format.layout import TensorSpec
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Bits
from deltasync.publishing.events import Observer, Publication
from deltasync.publishing.policy import AnchorPolicy
from deltasync.publishing.publisher import FeedPublisher, PublisherOptions
from deltasync.store.protocol import Store
from deltasync.trainer.base import CaptureOn, TorchPublisher
from deltasync.trainer.names import NamedTensors, TorchState, named_tensors
from deltasync.trainer.tensors import TorchWeights, dtype_of, element_type, host_bits


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
        threads: int | None = None,
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
                threads=threads,
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
