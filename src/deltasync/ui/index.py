"""What changed in one version, from the indexes of its payloads and the tables of its blocks: by layer and kind."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.codecs import exp
from deltasync.errors import DeltasyncError
from deltasync.feed.log import READ_THREADS, Log
from deltasync.format import keys
from deltasync.format.index import BlockInfo
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Payload
from deltasync.oneshot import layer_name
from deltasync.parallel import each
from deltasync.store.protocol import Store

PAYLOADS_MAX = 64
"""Payloads whose index is read: a version of many ranks has one for each."""

CELLS_MAX = 20_000

STEPS_BLOCKS_MAX = 128
"""Blocks whose steps are read, those with the most changes: three small reads for each."""

_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


def open_index(store: Store, ref: PayloadRef) -> Payload:
    """A payload of which only the start is read; its errors name the key."""
    key = keys.payload_key(ref.sha256)
    try:
        return Payload.open(partial(store.get_range, key), ref.nbytes)
    except DeltasyncError as error:
        raise error.at(key) from error


@dataclass(frozen=True, slots=True)
class Cell:
    """The tensors of one kind in one layer.

    The index counts changes by block. Where blocks reach over several cells, `changed` is their share by elements, and
    `is_exact` is False. `nbytes` and `steps` are shared out in the same way.
    """

    layer: str
    kind: str
    tensors: int
    elements: int
    changed: float
    nbytes: float
    is_exact: bool
    steps: tuple[float, ...]
    """Changes by 1, 2, 3 to 4, 5 to 8 … units in the last place, of the blocks whose steps are known."""

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "kind": self.kind,
            "tensors": self.tensors,
            "elements": self.elements,
            "changed": round(self.changed, 3),
            "bytes": round(self.nbytes, 3),
            "exact": self.is_exact,
            "steps": [round(number, 3) for number in self.steps],
        }


@dataclass(frozen=True, slots=True)
class VersionDetail:
    """One version: its manifest and its cells, in the order of layers. An anchor has no cells: it has no parent."""

    manifest: Manifest
    anchor_bytes: int | None
    cells: tuple[Cell, ...]
    codecs: tuple[tuple[str, int, int, int], ...]
    """Codec, blocks, changed elements, bytes."""
    unread_payloads: int
    full_bytes: int | None
    steps: tuple[float, ...]
    """Changes by the size of their step, as in a cell."""

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest": {**self.manifest.to_json(), "payload_bytes": self.manifest.nbytes},
            "anchor_bytes": self.anchor_bytes,
            "cells": [cell.to_json() for cell in self.cells],
            "codecs": [
                {"codec": codec, "blocks": blocks, "changed": changed, "bytes": nbytes}
                for codec, blocks, changed, nbytes in self.codecs
            ],
            "unread_payloads": self.unread_payloads,
            "full_bytes": self.full_bytes,
            "steps": [round(number, 3) for number in self.steps],
        }


def read_version(log: Log, version: int) -> VersionDetail:
    """The details of a version, with one or two small reads for each payload, and three for each block of steps.

    NotFoundError if it is gone.
    """
    manifest = log.read(version)
    anchor = log.anchor(version)
    refs = manifest.payloads[:PAYLOADS_MAX] if manifest.kind == "delta" else ()
    payloads = list(each(partial(open_index, log.store), refs, waiting=READ_THREADS))
    infos = [info for payload in payloads for info in payload.block_infos]
    steps = _steps([(payload, info) for payload in payloads for info in payload.block_infos])
    layout = payloads[0].header.layout if payloads else None
    by_codec: dict[str, list[BlockInfo]] = {}
    for info in infos:
        by_codec.setdefault(info.codec, []).append(info)
    return VersionDetail(
        manifest=manifest,
        anchor_bytes=None if anchor is None else anchor.nbytes,
        cells=() if layout is None else cells_of(layout, infos, steps),
        codecs=tuple(
            (codec, len(group), sum(i.changed for i in group), sum(i.nbytes for i in group))
            for codec, group in sorted(by_codec.items())
        ),
        unread_payloads=len(manifest.payloads) - len(refs),
        full_bytes=None if layout is None else layout.nbytes,
        steps=_trimmed(sum(steps.values(), np.zeros(exp.STEP_BINS))),
    )


def _steps(blocks: Sequence[tuple[Payload, BlockInfo]]) -> dict[int, NDArray[np.float64]]:
    """The changes by the size of their step, of blocks that are coded by steps: by the number of the block."""
    coded = [i for i, (_, info) in enumerate(blocks) if info.codec == exp.EXP and info.changed]
    chosen = sorted(coded, key=lambda i: -blocks[i][1].changed)[:STEPS_BLOCKS_MAX]

    def read(i: int) -> NDArray[np.float64]:
        payload, info = blocks[i]
        (begin, end), dtype = info.ranges[0], payload.header.layout.tensors[info.runs[0, 0]].dtype
        return exp.read_steps(lambda offset, length: payload.read(begin + offset, length), end - begin, dtype)

    return dict(zip(chosen, each(read, chosen, waiting=READ_THREADS), strict=True))


def _trimmed(bins: NDArray[np.float64]) -> tuple[float, ...]:
    """Without the empty bins at the end."""
    return tuple(np.trim_zeros(bins, "b").tolist())


def kind_name(tensor: str) -> str:
    """The kind of a tensor: its name after the layer. The numbers of experts are left out."""
    return _NUMBER.sub("*", "." + tensor.removeprefix(layer_name(tensor)).lstrip(".")).lstrip(".") or tensor


def cells_of(layout: Layout, infos: Iterable[BlockInfo], steps: Mapping[int, NDArray[np.float64]]) -> tuple[Cell, ...]:
    """The changes by layer and kind, in the order of layers; at most `CELLS_MAX` cells. `steps`: by number of block."""
    names = [(layer_name(spec.name), kind_name(spec.name)) for spec in layout.tensors]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    cell_of = np.array([numbers[name] for name in names], np.int64)
    tensors = np.bincount(cell_of, minlength=len(numbers))
    elements = np.zeros(len(numbers), np.float64)
    np.add.at(elements, cell_of, [spec.elements for spec in layout.tensors])
    changed, nbytes, is_shared = np.zeros(len(numbers)), np.zeros(len(numbers)), np.zeros(len(numbers), bool)
    sizes: dict[int, NDArray[np.float64]] = {}
    for number, info in enumerate(infos):
        covered = np.bincount(cell_of[info.runs[:, 0]], weights=info.runs[:, 2], minlength=len(numbers))
        share = covered / info.elements
        changed += info.changed * share
        nbytes += info.nbytes * share
        for cell in np.flatnonzero(covered).tolist() if number in steps else ():
            sizes[cell] = sizes.get(cell, np.zeros(exp.STEP_BINS)) + steps[number] * share[cell]
        if info.changed and np.count_nonzero(covered) > 1:
            is_shared |= covered > 0

    def order(name: tuple[str, str]) -> list[tuple[bool, int, str]]:
        return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name[0].split(".")]

    chosen = sorted(numbers, key=order)[:CELLS_MAX]
    return tuple(
        Cell(
            layer,
            kind,
            int(tensors[i]),
            int(elements[i]),
            float(changed[i]),
            float(nbytes[i]),
            not is_shared[i],
            _trimmed(sizes[i]) if i in sizes else (),
        )
        for layer, kind in chosen
        for i in (numbers[layer, kind],)
    )
