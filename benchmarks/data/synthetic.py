"""Synthetic weights in the shape of Qwen3-0.6B, moved by AdamW-like updates to a wanted density of change.

Everything is seeded per tensor and chunk, so that the bits do not depend on the number of threads. The
float32 master weights exist one chunk at a time: a bf16 pair of the whole shape takes 2.4 GB and some tens
of megabytes.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.bits import ELEMENT_TYPES, UNSIGNED, Bits, round_to_bf16
from benchmarks.data.pair import Pair, make_pair

CHUNK = 1 << 21
SAMPLE = 1 << 16
TYPICAL_UPDATE = 0.25  # of Adam's m / sqrt(v), when gradients are mostly noise
LARGEST_UPDATE = 1.0

Cast = Callable[[NDArray[np.float32]], Bits]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3 model with tied embeddings."""

    layers: int = 28
    hidden: int = 1024
    intermediate: int = 3072
    heads: int = 16
    kv_heads: int = 8
    head: int = 128
    vocabulary: int = 151_936


QWEN3_0_6B = Shape()
SMALL = Shape(layers=4, vocabulary=16_384)  # 80 M elements
TINY = Shape(layers=1, vocabulary=4096)  # 20 M elements


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    sigma: float  # 0 marks a norm, whose weights lie around 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def bf16_pair(density: float, *, shape: Shape = QWEN3_0_6B, seed: int = 0, threads: int = 2) -> Pair:
    """Make a bf16 pair with about `density` of its elements changed by one step."""
    rate = find_learning_rate(density, "BF16", shape=shape, seed=seed)
    return make(f"synthetic bf16 {density:.2%}", "BF16", rate, shape=shape, seed=seed, threads=threads)


def fp8_pair(density: float, *, shape: Shape = SMALL, seed: int = 0, threads: int = 2) -> Pair:
    """Make an e4m3 pair, each tensor scaled to the range of the type, with about `density` changed."""
    rate = find_learning_rate(density, "F8_E4M3", shape=shape, seed=seed)
    return make(f"synthetic fp8 {density:.2%}", "F8_E4M3", rate, shape=shape, seed=seed, threads=threads)


def fp32_pair(learning_rate: float = 1e-6, *, shape: Shape = SMALL, seed: int = 0, threads: int = 2) -> Pair:
    """Make a pair of the float32 master weights themselves: nearly every element moves by several units."""
    name = f"synthetic fp32 lr {learning_rate:g}"
    return make(name, "F32", learning_rate, shape=shape, seed=seed, threads=threads)


def make(name: str, dtype: str, learning_rate: float, *, shape: Shape, seed: int, threads: int) -> Pair:
    """Make a pair of any supported type at a given learning rate."""
    old: dict[str, Bits] = {}
    new: dict[str, Bits] = {}
    unsigned = UNSIGNED[ELEMENT_TYPES[dtype].width]
    with ThreadPoolExecutor(threads) as pool:
        for index, tensor in enumerate(_tensors(shape)):
            cast = _caster(dtype, tensor)
            before = np.empty(tensor.size, unsigned)
            after = np.empty(tensor.size, unsigned)

            def fill(start: int, index: int = index, tensor: _Tensor = tensor) -> None:
                stop = min(start + CHUNK, tensor.size)
                master, update = _chunk(tensor, stop - start, (seed, index, start // CHUNK))
                before[start:stop] = cast(master)  # noqa: B023 - every chunk ends before the next tensor
                after[start:stop] = cast(master + np.float32(learning_rate) * update)  # noqa: B023

            list(pool.map(fill, range(0, tensor.size, CHUNK)))
            old[tensor.name] = before.reshape(tensor.shape)
            new[tensor.name] = after.reshape(tensor.shape)
    return make_pair(name, dtype, old, new)


def find_learning_rate(density: float, dtype: str, *, shape: Shape = QWEN3_0_6B, seed: int = 0) -> float:
    """Search the learning rate that changes about `density` of the elements, on a sample of every tensor."""
    sample = []
    for index, tensor in enumerate(_tensors(shape)):
        if tensor.sigma:
            master, update = _chunk(tensor, min(SAMPLE, tensor.size), (seed, index, 0))
            cast = _caster(dtype, tensor)
            sample.append((tensor.size, cast, cast(master), master, update))
    total = sum(size for size, *_ in sample)
    low, high = math.log(1e-12), math.log(1.0)
    for _ in range(24):
        middle = (low + high) / 2
        rate = np.float32(math.exp(middle))
        found = sum(
            size * float(np.mean(cast(master + rate * update) != before))
            for size, cast, before, master, update in sample
        )
        low, high = (middle, high) if found < density * total else (low, middle)
    return math.exp((low + high) / 2)


def _tensors(shape: Shape) -> list[_Tensor]:
    """List the tensors; sigma varies with the role, and grows with depth, between 0.02 and 0.05."""
    hidden, wide = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head
    tensors = [_Tensor("model.embed_tokens.weight", (shape.vocabulary, hidden), 0.03)]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        depth = 1 + 0.6 * layer / shape.layers
        tensors += [
            _Tensor(prefix + "input_layernorm.weight", (hidden,), 0.0),
            _Tensor(prefix + "mlp.down_proj.weight", (hidden, wide), 0.025 * depth),
            _Tensor(prefix + "mlp.gate_proj.weight", (wide, hidden), 0.028 * depth),
            _Tensor(prefix + "mlp.up_proj.weight", (wide, hidden), 0.024 * depth),
            _Tensor(prefix + "post_attention_layernorm.weight", (hidden,), 0.0),
            _Tensor(prefix + "self_attn.k_norm.weight", (shape.head,), 0.0),
            _Tensor(prefix + "self_attn.k_proj.weight", (keys, hidden), 0.031 * depth),
            _Tensor(prefix + "self_attn.o_proj.weight", (hidden, queries), 0.022 * depth),
            _Tensor(prefix + "self_attn.q_norm.weight", (shape.head,), 0.0),
            _Tensor(prefix + "self_attn.q_proj.weight", (queries, hidden), 0.03 * depth),
            _Tensor(prefix + "self_attn.v_proj.weight", (keys, hidden), 0.02 * depth),
        ]
    return [*tensors, _Tensor("model.norm.weight", (hidden,), 0.0)]


def _chunk(tensor: _Tensor, size: int, seed: tuple[int, int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw master weights and the direction of their update (to be scaled by the learning rate)."""
    random = np.random.Generator(np.random.SFC64(seed))
    master = random.standard_normal(size, np.float32)
    if tensor.sigma:
        master *= np.float32(tensor.sigma)
    else:
        master *= np.float32(0.1)
        master += np.float32(1.0)
    update = random.standard_normal(size, np.float32)
    update *= np.float32(TYPICAL_UPDATE)
    np.clip(update, -LARGEST_UPDATE, LARGEST_UPDATE, out=update)
    return master, update


def _caster(dtype: str, tensor: _Tensor) -> Cast:
    """Return the cast from float32 to the bits of `dtype`."""
    if dtype == "BF16":
        return round_to_bf16
    if dtype == "F32":
        return lambda values: values.view(np.uint32)
    if dtype == "F8_E4M3":
        return _fp8_caster(tensor)
    raise ValueError(f"no cast to {dtype}")


def _fp8_caster(tensor: _Tensor) -> Cast:
    """Scale so that six sigma meet the largest e4m3 value, then cast; beyond it, saturate."""
    import ml_dtypes  # only fp8 needs it

    largest = 448.0  # of e4m3
    scale = np.float32(largest / (6 * tensor.sigma if tensor.sigma else 2.0))

    def cast(values: NDArray[np.float32]) -> Bits:
        scaled = np.clip(values * scale, -largest, largest)
        bits: Bits = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return bits

    return cast
