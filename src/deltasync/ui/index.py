"""What changed in one version, from the indexes of its payloads and the tables of its blocks: by layer and kind."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.codecs import exp
from deltasync.errors import DeltasyncError
from deltasync.feed.log import READ_THREADS, Log
from deltasync.format import keys
from deltasync.format.layout import Layout
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import BlockInfo, Payload
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


def version_json(log: Log, version: int) -> dict[str, Any]:
    """A version as the page shows it: its manifest, and its cells in the order of layers. An anchor has no cells.

    It takes one or two small reads for each payload, and three for each block of steps. `steps` are the changes by 1,
    2, 3 to 4, 5 to 8 … units in the last place, of blocks whose steps are known. NotFoundError if the version is gone.
    """
    manifest = log.read(version)
    anchor = log.anchor(version)
    refs = manifest.payloads[:PAYLOADS_MAX] if manifest.kind == "delta" else ()
    payloads = list(each(partial(open_index, log.store), refs, waiting=READ_THREADS))
    blocks = [(payload, info) for payload in payloads for info in payload.block_infos]
    coded = [i for i, (_, info) in enumerate(blocks) if info.codec == exp.EXP and info.changed]
    chosen = sorted(coded, key=lambda i: -blocks[i][1].changed)[:STEPS_BLOCKS_MAX]

    def read_steps(i: int) -> NDArray[np.float64]:
        payload, info = blocks[i]
        (begin, end), dtype = info.ranges[0], payload.header.layout.tensors[info.runs[0, 0]].dtype
        return exp.read_steps(lambda offset, length: payload.read(begin + offset, length), end - begin, dtype)

    steps = dict(zip(chosen, each(read_steps, chosen, waiting=READ_THREADS), strict=True))
    layout = payloads[0].header.layout if payloads else None
    infos = [info for _, info in blocks]
    by_codec: dict[str, list[BlockInfo]] = {}
    for info in infos:
        by_codec.setdefault(info.codec, []).append(info)
    return {
        "manifest": {**manifest.to_json(), "payload_bytes": manifest.nbytes},
        "anchor_bytes": None if anchor is None else anchor.nbytes,
        "cells": [] if layout is None else cells_json(layout, infos, steps),
        "codecs": [
            {
                "codec": codec,
                "blocks": len(group),
                "changed": sum(i.changed for i in group),
                "bytes": sum(i.nbytes for i in group),
            }
            for codec, group in sorted(by_codec.items())
        ],
        "unread_payloads": len(manifest.payloads) - len(refs),
        "full_bytes": None if layout is None else layout.nbytes,
        "steps": _bins_json(sum(steps.values(), np.zeros(exp.STEP_BINS))),
    }


def _bins_json(bins: NDArray[np.float64]) -> list[float]:
    """Without the empty bins at the end."""
    return [round(number, 3) for number in np.trim_zeros(bins, "b").tolist()]


def kind_name(tensor: str) -> str:
    """The kind of a tensor: its name after the layer. The numbers of experts are left out."""
    return _NUMBER.sub("*", "." + tensor.removeprefix(layer_name(tensor)).lstrip(".")).lstrip(".") or tensor


def cells_json(
    layout: Layout, infos: Iterable[BlockInfo], steps: Mapping[int, NDArray[np.float64]]
) -> list[dict[str, Any]]:
    """The changes of the tensors of each kind in each layer, in the order of layers; at most `CELLS_MAX` cells.

    The index counts changes by block. Where blocks reach over several cells, `changed` is their share by elements, and
    `exact` is False. `bytes` and `steps`, which are given by the number of the block, are shared out in the same way.
    """
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

    return [
        {
            "layer": layer,
            "kind": kind,
            "tensors": int(tensors[i]),
            "elements": int(elements[i]),
            "changed": round(float(changed[i]), 3),
            "bytes": round(float(nbytes[i]), 3),
            "exact": not is_shared[i],
            "steps": _bins_json(sizes[i]) if i in sizes else [],
        }
        for layer, kind in sorted(numbers, key=order)[:CELLS_MAX]
        for i in (numbers[layer, kind],)
    ]
