"""A training run to look at: a feed of a model with layers, at a steady pace, and replicas that write heartbeats."""

import math
import os
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from deltasync import blocks
from deltasync.blocks import detect
from deltasync.codecs import exp
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.format.weights import Weights
from deltasync.replica.events import Seconds
from deltasync.store.local import LocalStore

from .feeds import Feed

STEP_S = 20
WIDTH = 64
_KINDS = {
    "self_attn.q_proj.weight": (WIDTH, WIDTH),
    "self_attn.k_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.v_proj.weight": (WIDTH // 4, WIDTH),
    "self_attn.o_proj.weight": (WIDTH, WIDTH),
    "mlp.gate_proj.weight": (2 * WIDTH, WIDTH),
    "mlp.up_proj.weight": (2 * WIDTH, WIDTH),
    "mlp.down_proj.weight": (WIDTH, 2 * WIDTH),
    "input_layernorm.weight": (WIDTH,),
}


def model(layers: int) -> dict[str, np.ndarray]:
    """A small model whose tensors have the names of a large one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, WIDTH)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{kind}": shape for kind, shape in _KINDS.items()}
    shapes["model.norm.weight"] = (WIDTH,)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


class Run(Feed):
    """A run in a folder. Each tensor is a block of its own, as in a model whose tensors have millions of elements.

    Its last version so far is committed now, those before at a steady pace.
    """

    def __init__(self, folder: Path, *, versions: int, layers: int = 8) -> None:
        super().__init__(LocalStore(folder))
        self.folder = folder
        self._first_unix_s = int(time.time()) - STEP_S * (versions - 1)
        self._rng = np.random.default_rng(1)
        self.anchor(model(layers))
        for _ in range(versions - 1):
            self.step()

    def new(self, *args: Any, **fields: Any) -> Manifest:
        version = len(self.states)
        return super().new(*args, created_unix_s=self._first_unix_s + STEP_S * version, step=10 * version, **fields)

    def step(self) -> Manifest:
        """The next version: late layers and the MLP change most."""
        old, version = self.states[-1], len(self.states)
        arrays = tuple(array.copy() for array in old.arrays)
        for spec, array in zip(old.layout.tensors, arrays, strict=True):
            layer = int(spec.name.split(".")[2]) if ".layers." in spec.name else 1
            share = 0.002 * (1 + layer) * (0.35 if "attn" in spec.name else 1.0) * (1.2 + math.sin(version / 6))
            bits = array.reshape(-1)
            hit = self._rng.random(bits.size) < share
            bits[hit] += 1
        new = Weights(old.layout, arrays)
        runs = [np.array([(i, 0, spec.elements)], np.int64) for i, spec in enumerate(old.layout.tensors)]
        group = [exp.encode(old, changes) for piece in runs for changes in detect(old, new, piece)]
        ref = self.put_change(version - 1, version, group)
        changed = sum(block.changed for block in group)
        return self._commit(self.new("delta", new, blocks.digest(new), payloads=(ref,), changed=changed), new)

    def beat(
        self, replica: str, version: int, *, ago_s: float = 3, engine: str = "vllm 0.32", proved: bool = True
    ) -> None:
        """The heartbeat of a replica that serves a version."""
        served = self.log.read(version)
        seconds = Seconds(plan=0.012, fetch=0.31, decode=0.17, stage=0.09, commit=0.021, pause=0.008)
        facts = {"engine": engine, "digest": served.digest.hex, **seconds.facts()}
        if proved:
            facts |= {"proved_version": str(version), "proved_unix_s": str(int(time.time() - ago_s - 240))}
        self.write_beat(replica, version, facts, ago_s=ago_s)

    def write_beat(self, replica: str, version: int | None, facts: dict[str, str], *, ago_s: float = 3) -> None:
        """A heartbeat with any facts."""
        at_s = time.time() - ago_s
        self.log.beat(Heartbeat(replica, version, int(at_s), facts))
        os.utime(self.folder / keys.replica_key(replica), (at_s, at_s))
