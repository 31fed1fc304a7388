"""Real training steps, one version each, and whether every version is exactly what the trainer had at its step.

The weights are compared by SHA-256 of their raw bytes, made by torch and hashlib: not by deltasync's own digest.
"""

import hashlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from benchmarks.report import Row, say
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.feed.route import Route
from deltasync.state import State, load
from deltasync.store.protocol import Store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.publisher import PublisherOptions

LEARNING_RATE = 3e-6
TIED = "lm_head.weight"  # an alias of the embedding: a checkpoint leaves it out


def real_steps(
    count: int, *, layers: int | None = None, learning_rate: float = LEARNING_RATE, samples: int = 4
) -> Iterator[torch.nn.Module]:
    """SmolLM2-135M in float32 after each of `count` steps of a policy gradient; only its first `layers` if given."""
    from examples.smollm2.policy import PolicyTrainer, Settings
    from examples.smollm2.weights import load_model, load_tokenizer

    model = load_model(seed=0)
    if layers is not None:
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
    trainer = PolicyTrainer(model, load_tokenizer(), settings=Settings(prompts=1, samples=samples, tokens=8), seed=0)
    for _ in range(count):
        trainer.step(learning_rate)
        yield model


def publish_steps(
    stores: Sequence[Store], models: Iterable[torch.nn.Module]
) -> tuple[list[str], list[list[PublishEvent]]]:
    """Publish every step as bf16 to all stores: the hash of each step, and the events of each store."""
    events: list[list[PublishEvent]] = [[] for _ in stores]
    expected = []
    with ExitStack() as stack:
        publishers = [
            stack.enter_context(
                Publisher(store, dtype=torch.bfloat16, options=PublisherOptions(wait=True, observer=of_store.append))
            )
            for store, of_store in zip(stores, events, strict=True)
        ]
        for step, model in enumerate(models):
            for publisher in publishers:
                publisher.publish(model, step=step)
            expected.append(trained_hash(model))
            if step % 10 == 0:
                say(f"real steps: {step}")
    return expected, events


def trained_hash(model: torch.nn.Module) -> str:
    """Of the weights that a replica must have."""
    state = model.state_dict()
    cast = ((name, state[name].to(torch.bfloat16)) for name in sorted(state) if name != TIED)
    return hash_of((name, tensor.view(torch.int16).numpy()) for name, tensor in cast)


def hash_of(tensors: Iterable[tuple[str, Any]]) -> str:
    """Of names and raw bytes."""
    found = hashlib.sha256()
    for name, data in tensors:
        found.update(name.encode())
        found.update(data)
    return found.hexdigest()


def exact_versions(store: Store, expected: Sequence[str]) -> list[int]:
    """The versions that come out as the trainer had them: the anchor, then one delta after the other."""
    log, exact = Log(store), []
    weights = load(log, log.read(0))
    for version, wanted in enumerate(expected):
        manifest = log.read(version)
        if version:
            State(weights, scratch=True).follow(Route(log, manifest), plan(log, manifest, start=version - 1))
        names = (spec.name for spec in weights.layout.tensors)
        if manifest.step == version and hash_of(zip(names, weights.arrays, strict=True)) == wanted:
            exact.append(version)
    return exact


def row(label: str, store: Store, expected: Sequence[str], events: Sequence[PublishEvent]) -> Row:
    """What 50 steps took on one store."""
    deltas = [event for event in events if event.kind == "delta"]
    return {
        "store": label,
        "versions": len(expected),
        "bit-exact": len(exact_versions(store, expected)),
        "changed %": 100 * statistics.mean(event.density or 0.0 for event in deltas),
        "MB per version": statistics.mean(event.payload_bytes for event in deltas) / 1e6,
        "encode s": statistics.median(event.encode_s for event in deltas),
        "put s": statistics.median(event.put_s for event in deltas),
        "commit s": statistics.median(event.commit_s for event in deltas),
    }
