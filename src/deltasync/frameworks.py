"""What the doors to training frameworks share: checks of settings and of base classes, and numbers for a log."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from deltasync import InvalidInputError, Manifest


def publication_numbers(manifest: Manifest) -> dict[str, float]:
    """What a version cost, for the log of a trainer."""
    share = 1.0 if manifest.changed is None else manifest.changed / max(1, manifest.elements)
    return {
        "deltasync/version": float(manifest.version),
        "deltasync/bytes": float(manifest.nbytes),
        "deltasync/changed_share": share,
    }


def floating_type(name: str | None) -> torch.dtype | None:
    """The floating-point type of torch that a setting names; None for None."""
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InvalidInputError(f"dtype must be the name of a floating-point type of torch, not {name!r:.40}")
    return dtype


def require_methods(base: type, expected: Mapping[str, list[str]], *, framework: str, hint: str) -> None:
    """InvalidInputError, naming the difference, unless the abstract methods of a framework's base class are these."""
    found = {}
    names: Iterable[str] = getattr(base, "__abstractmethods__", ())
    for name in names:
        method = inspect.getattr_static(base, name)
        called: Any = method.fget if isinstance(method, property) else getattr(base, name)
        found[name] = list(inspect.signature(called).parameters)
    if found != expected:
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise InvalidInputError(
            f"this release of {framework} has another {base.__name__}: {', '.join(differing)} differ", hint=hint
        )
