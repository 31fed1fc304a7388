"""Wrong arguments are refused in the call, by an error that names the argument; nothing has been written by then."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LONG_S
from support.feeds import NEVER

import deltasync
from deltasync import BaseRef, Follower, InvalidInputError, PublisherOptions, open_store, publish, set_threads
from deltasync.store.memory import MemoryStore
from deltasync.torch import ModuleTarget, Publisher, ShardedPublisher
from deltasync.transformers import DeltasyncCallback

WEIGHTS = {"w": torch.zeros(4)}
NAN = float("nan")


def publish_with(**arguments: Any) -> None:
    store = MemoryStore()
    try:
        with Publisher(store, options=PublisherOptions(anchors=NEVER)) as publisher:
            publisher.publish(arguments.pop("weights", WEIGHTS), **arguments)
    finally:
        assert {item.key for item in store.list()} <= {"feed.json"}, "nothing was published"


def follow_with(**arguments: Any) -> None:
    Follower(MemoryStore(), arguments.pop("target", ModuleTarget(WEIGHTS)), **arguments)


def options(**arguments: Any) -> None:
    PublisherOptions(**arguments)


def publisher(**arguments: Any) -> None:
    Publisher(arguments.pop("feed", MemoryStore()), **arguments)


def callback(**arguments: Any) -> None:
    DeltasyncCallback(MemoryStore(), **arguments)


REFUSED: list[tuple[Callable[..., None], str, object, str]] = [
    (publish_with, "step", 1.0, "step must be a whole number, not 1.0"),
    (publish_with, "step", "7", "step must be a whole number, not '7'"),
    (publish_with, "step", True, "step must be a whole number, not True"),
    (publish_with, "step", np.float32(3), "step must be a whole number, not a float32"),
    (publish_with, "step", torch.tensor(3.0), "step must be a whole number, not a Tensor"),
    (publish_with, "step", torch.tensor([1, 2]), "step must be a whole number, not a Tensor"),
    (publish_with, "step", -1, "step must be at least 0, not -1"),
    (publish_with, "step", 1 << 63, "step must be from 0 to 9223372036854775807, not"),
    (publish_with, "extra", {"reward": 0.7}, "extra must map strings to strings, not 'reward' to 0.7"),
    (publish_with, "extra", "reward", "extra must map strings to strings, not be 'reward'"),
    (publish_with, "weights", torch.zeros(3), "weights must be a module, a state dict, or pairs"),
    (publish_with, "weights", None, "weights must be a module, a state dict, or pairs .* not None"),
    (publish_with, "weights", [torch.zeros(3)], "not an iterator of a Tensor"),
    (publish_with, "weights", "model.safetensors", "weights must be a module, .* not 'model.safetensors'"),
    (options, "files", {"config.json": "{}"}, r"files\['config.json'\] must be bytes, not '{}' \(encode it"),
    (options, "files", {"config.json": Path("x")}, r"files\['config.json'\] must be bytes, not a PosixPath \(read it"),
    (options, "files", {"../config.json": b""}, "'../config.json' must be a relative path"),
    (options, "files", {1: b""}, "the paths of files must be strings, not 1"),
    (options, "files", ["config.json"], "files must map relative paths to bytes, not be a list"),
    (options, "base", "Qwen/Qwen3-0.6B", r"base must be of type BaseRef, not 'Qwen/Qwen3-0.6B' \(use BaseRef\("),
    (options, "anchors", 100, "anchors must be of type AnchorPolicy, not 100"),
    (options, "shadow_path", 3, "shadow_path must be a path, not 3"),
    (options, "shadow_path", "", "shadow_path must be a path, not ''"),
    (options, "shadow_path", b"shadow", "shadow_path must be a path, not b'shadow'"),
    (options, "capture_on", "gpu", "capture_on must be 'device' or 'host', not 'gpu'"),
    (options, "capture_on", None, "capture_on must be 'device' or 'host', not None"),
    (options, "retry_s", "60", "retry_s must be a number of seconds, not '60'"),
    (options, "retry_s", -1, "retry_s must be at least 0, not -1"),
    (options, "retry_s", NAN, "retry_s must be at least 0, not nan"),
    (options, "exit_s", None, "exit_s must be a number of seconds, not None"),
    (options, "exit_s", -0.5, "exit_s must be at least 0, not -0.5"),
    (options, "observer", "print", "observer must be a function, not 'print'"),
    (
        publisher,
        "dtype",
        "bfloat16",
        r"dtype must be a floating-point type of torch .* not 'bfloat16' \(torch.bfloat16",
    ),
    (publisher, "dtype", torch.int8, "dtype must be a floating-point type of torch .* not torch.int8"),
    (publisher, "dtype", torch.complex64, "dtype must be a floating-point type of torch"),
    (publisher, "dtype", np.float32, "dtype must be a floating-point type of torch"),
    (publisher, "options", {"wait": True}, "options must be of type PublisherOptions, not a dict"),
    (publisher, "feed", None, "the feed must be a URL, a path or a store, not None"),
    (publisher, "feed", 7, "the feed must be a URL, a path or a store, not 7"),
    (publisher, "feed", "", "the store has no name"),
    (callback, "what", "lora", "what must be 'model' or 'adapter' or 'merged', not 'lora'"),
    (callback, "every_steps", 0, "every_steps must be at least 1, not 0"),
    (callback, "every_steps", 2.5, "every_steps must be a whole number, not 2.5"),
    (callback, "dtype", "bf16", "dtype must be a floating-point type"),
    (callback, "files", {"a": "b"}, r"files\['a'\] must be bytes"),
    (follow_with, "target", torch.nn.Linear(2, 2), r"target must be a Target, not a Linear \(wrap a module in"),
    (follow_with, "target", "/models/current", "target must be a Target, not '/models/current'"),
    (follow_with, "mirror", 3, "mirror must be a path, not 3"),
    (follow_with, "base", "a\0b", "base must be a path, not 'a"),
    (follow_with, "replica", 7, "replica must be of type str, not 7"),
    (follow_with, "replica", "a b", "replica"),
    (follow_with, "beat_s", "30", "beat_s must be a number of seconds, not '30'"),
    (follow_with, "scrub_s", 0, r"scrub_s must be above 0, not 0 \(None"),
    (set_threads, "count", "4", "count must be a whole number, not '4'"),
    (set_threads, "count", 2.0, "count must be a whole number, not 2.0"),
    (set_threads, "count", 0, "count must be from 1 to 1024, not 0"),
    (lambda step: publish(MemoryStore(), "nowhere", step=step), "step", -1, "step must be at least 0, not -1"),
    (lambda base: publish(MemoryStore(), "nowhere", base=base), "base", "x", "base must be of type BaseRef"),
    (lambda checkpoint: publish(MemoryStore(), checkpoint), "checkpoint", None, "checkpoint must be a path, not None"),
    (lambda out: deltasync.restore(MemoryStore(), out), "out", None, "out must be a path, not None"),
    (lambda version: deltasync.restore(MemoryStore(), "x", version=version), "version", "1", "version must be a whole"),
    (
        lambda timeout_s: ShardedPublisher(MemoryStore(), timeout_s=timeout_s),
        "timeout_s",
        0,
        "timeout_s must be above 0",
    ),
]


@pytest.mark.parametrize(
    ("call", "name", "value", "message"), REFUSED, ids=[f"{case[1]}={case[2]!r:.30}" for case in REFUSED]
)
def test_refused(call: Callable[..., None], name: str, value: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call(**{name: value})


@pytest.mark.parametrize(
    "step", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor(7, dtype=torch.int16), np.array(7)], ids=repr
)
def test_whole_numbers_of_any_kind_are_steps(step: Any) -> None:
    with Publisher(MemoryStore(), options=PublisherOptions(anchors=NEVER)) as publisher:
        publication = publisher.publish(WEIGHTS, step=step)
        assert type(publication.step) is int
        assert publication.wait(LONG_S).step == 7


def test_accepted() -> None:
    """What is a number or a path in another form."""
    assert PublisherOptions(retry_s=np.float32(2), exit_s=Decimal(3), base=BaseRef("a")).retry_s == 2  # type: ignore[arg-type]
    set_threads(np.int64(3))  # type: ignore[arg-type]
    assert deltasync.parallel.threads() == 3
    set_threads(None)


def test_paths_may_be_strings(tmp_path: Path) -> None:
    feed = str(tmp_path / "feed")
    options = PublisherOptions(anchors=NEVER, shadow_path=str(tmp_path / "shadow"), files={"a.txt": bytearray(b"a")})
    with Publisher(feed, options=options) as publisher:
        publisher.publish({"w": torch.ones(4)}, step=1).wait(LONG_S)
    target = {"w": torch.zeros(4)}
    with Follower(feed, ModuleTarget(target), mirror=str(tmp_path / "mirror")) as follower:
        follower.advance()
    assert torch.equal(target["w"], torch.ones(4))
    assert (tmp_path / "mirror").is_file()
    assert deltasync.verify(feed, deep=True, base=str(tmp_path)).is_clean
    deltasync.restore(feed, str(tmp_path / "out"))
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"a"
    with open_store(feed) as store:
        assert store.url == (tmp_path / "feed").as_uri()
