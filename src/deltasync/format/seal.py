"""A seal on small JSON objects: canonical bytes and their own SHA-256, so that no altered byte passes unseen.

It finds damage, not malice: whoever can write an object can seal it.
"""

import hashlib
from typing import Any

from deltasync.errors import CorruptError
from deltasync.format.layout import canonical_json

SEAL = "sha256"


def sealed(fields: dict[str, Any]) -> bytes:
    """The canonical JSON of the fields and of the SHA-256 of the canonical JSON without it."""
    return canonical_json({**fields, SEAL: _hash(fields)})


def require_sealed(data: bytes, fields: dict[str, Any], *, what: str, scope: str) -> None:
    """CorruptError unless `data`, which parses to `fields`, is byte for byte what `sealed` wrote."""
    told = {name: value for name, value in fields.items() if name != SEAL}
    if fields.get(SEAL) != _hash(told) or canonical_json(fields) != data:
        raise CorruptError(f"{what} was altered since it was written", rule=f"{scope}.sha256")


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(fields)).hexdigest()
