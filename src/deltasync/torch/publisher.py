"""`Publisher`: publishes the weights of a torch model after every optimizer step."""

import copy
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from deltasync import arguments
from deltasync.errors import InvalidInputError
from deltasync.format.companions import can_run_code
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Bits
from deltasync.parallel import ProcessBound
from deltasync.store import Feed, opened
from deltasync.torch.device import DeviceCapture, source_of
from deltasync.torch.tensors import (
    NamedTensors,
    TorchState,
    dtype_of,
    element_type,
    host_bits,
    named_tensors,
    require_dtype,
    unwrapped,
)
from deltasync.trainer.capture import Source, StreamSource
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions


class TorchPublisher(ProcessBound):
    """A context manager that is closed at its end. A store that was given by its URL or path is closed with it."""

    def __init__(self, feed: Feed, *, dtype: torch.dtype | None, options: PublisherOptions) -> None:
        super().__init__()
        if dtype is not None:
            require_dtype(dtype)
        arguments.instance("options", options, PublisherOptions)
        self._resources = ExitStack()
        self._store = self._resources.enter_context(opened(feed))
        self._feed: FeedPublisher | None = None
        self._dtype = dtype
        self._options = options
        self._on_device = DeviceCapture() if options.capture_on == "device" else None

    @property
    def head(self) -> Manifest | None:
        """The version that was committed last, by this publisher or before it."""
        return None if self._feed is None else self._feed.head

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was published is committed or has failed; False on timeout."""
        self._require_here()
        return self._feed is None or self._feed.wait(timeout_s)

    def close(self) -> None:
        """Finish what is in flight, anchors included, and release the feed. In a forked process this does nothing."""
        if self._is_here():
            self._resources.close()

    def _files(self, weights: object) -> tuple[dict[str, bytes], dict[str, bytes]]:
        """The files beside the weights: those that were asked for, and those that come with a model."""
        given = {**saved_files(self._options.processing_class), **self._options.files}
        module = unwrapped(weights) if isinstance(weights, torch.nn.Module) else None
        return given, {} if module is None or not is_pretrained(module) else model_files(module, dtype=self._dtype)


class Publisher(TorchPublisher):
    """Publishes the weights of a torch model to a feed.

    `publish` blocks the trainer only while it copies what changed since the last version; encoding and upload run in
    the background. The first `publish` opens the feed and rebuilds the shadow from it.

    `dtype`: publish floating-point weights as this type, rounded as torch rounds (bfloat16 of fp32 master weights).
    """

    def __init__(
        self,
        feed: Feed,
        *,
        dtype: torch.dtype | None = None,
        options: PublisherOptions = PublisherOptions(),
    ) -> None:
        super().__init__(feed, dtype=dtype, options=options)
        self._feed = self._publisher = FeedPublisher(self._store, self._options)
        self._resources.callback(self._publisher.close)
        self._layout: Layout | None = None
        """That of the last weights: most often the next ones have it, too."""

    def publish(
        self,
        weights: TorchState | NamedTensors,
        *,
        step: int | None = None,
        anchor: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> Publication:
        """Make these weights the next version: a module, a state dict, or (name, tensor) pairs that come one by one.

        Returns once what changed is captured: the weights may change again. `anchor` requests an anchor in addition.
        `extra` is metadata of your own, which the manifest carries.
        Of a model of transformers, the configuration and the generation configuration go beside the first version.
        InvalidInputError, naming the tensor, if the tensors are not those of the feed.
        """
        self._require_here()
        feed = self._publisher
        if feed.needs_files:
            feed.files, feed.default_files = self._files(weights)
        source: Source
        if isinstance(weights, torch.nn.Module | Mapping):
            tensors = named_tensors(weights)
            devices = {tensor.device for tensor in tensors.values()}
            if torch.device("meta") in devices:
                name = min(name for name, tensor in tensors.items() if tensor.is_meta)
                raise InvalidInputError(
                    f"tensor {name!r:.200} has no data: it is on the device meta", hint="load it first"
                )
            if self._on_device is not None and len(devices) > 1:
                raise InvalidInputError(
                    f"the weights are on {', '.join(sorted(map(str, devices)))}, not on one device",
                    hint='use PublisherOptions(capture_on="host")',
                )
            source = source_of(tensors, self._dtype, self._on_device, known=self._layout)
            self._layout = source.layout
        elif isinstance(weights, torch.Tensor | str | bytes) or not isinstance(weights, Iterable):
            raise _not_weights(arguments.described(weights))
        else:
            source = StreamSource(self._bits_of(weights))
        return feed.publish(source, step=step, anchor=anchor, extra=extra)

    def _bits_of(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[TensorSpec, Bits]]:
        for item in tensors:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor)):
                raise _not_weights(f"an iterator of {arguments.described(item)}")
            name, tensor = item
            cast = tensor.detach().to(dtype_of(tensor, self._dtype))
            spec = TensorSpec(name, element_type(name, cast.dtype), tuple(cast.shape))
            yield spec, host_bits(cast, spec.dtype)


def _not_weights(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"weights must be a module, a state dict, or pairs of a name and a tensor, not {what}",
        hint="give the model itself",
    )


def model_files(
    model: torch.nn.Module, processing_class: Any = None, *, dtype: torch.dtype | None = None
) -> dict[str, bytes]:
    """The files that `save_pretrained` writes beside the weights of a model and its tokenizer or processor.

    `dtype`: what the weights are published as, if that is not what they are.
    """
    pretrained: Any = model
    config = copy.deepcopy(pretrained.config)
    # FSDP2 changes the class of a module to one with this prefix.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = pretrained.dtype if dtype is None else dtype
    generation = saved_files(pretrained.generation_config) if pretrained.can_generate() else {}
    return {"config.json": config.to_json_string().encode(), **generation, **saved_files(processing_class)}


def is_pretrained(model: object) -> bool:
    """Whether `model_files` can be called with it: a model of transformers, whose own weights are its checkpoint."""
    is_model = isinstance(model, torch.nn.Module) and hasattr(model, "can_generate") and hasattr(model, "dtype")
    return is_model and hasattr(getattr(model, "config", None), "to_json_string") and not hasattr(model, "peft_config")


def saved_files(thing: Any) -> dict[str, bytes]:
    """What a tokenizer, processor or configuration writes when it is saved, but no code; nothing for None."""
    if thing is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and not can_run_code(path.name))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
