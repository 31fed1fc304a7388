"""JSON from strangers: bounded, no duplicate keys, whole numbers only, text that can be encoded again."""

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,20}", re.ASCII)


def parse_object(data: bytes, *, what: str, scope: str) -> dict[str, Any]:
    """A JSON object; CorruptError with rule `{scope}.json` or `{scope}.duplicate` on anything else."""
    value = _parse(data, what=what, scope=scope)
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", rule=f"{scope}.json")
    return value


def _parse(data: bytes, *, what: str, scope: str) -> Any:
    # Every value but the first follows one of these bytes, so that their number bounds what the parser allocates.
    if sum(data.count(c) for c in (b",", b"[", b"{")) > limits.JSON_VALUES_MAX:
        raise CorruptError(f"{what} has more than {limits.JSON_VALUES_MAX} values", rule=f"{scope}.json")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CorruptError(f"{what} has the key {twice!r:.200} twice", rule=f"{scope}.duplicate")
        return found

    def refuse(text: str) -> NoReturn:
        raise CorruptError(f"{what} has the number {text:.40}, which is not whole", rule=f"{scope}.json")

    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=pairs, parse_float=refuse, parse_constant=refuse)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        # ValueError covers bad UTF-8, bad JSON, lone surrogates, and integers of thousands of digits.
        detail = "nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise CorruptError(f"{what} is not valid JSON: {detail}", rule=f"{scope}.json") from error
    return value


def require_understood(record: dict[str, Any], known: Iterable[str], *, what: str, scope: str) -> None:
    """FormatError if `must_understand` lists a field that is not `known`; other unknown fields are ignored."""
    listed = record.get("must_understand", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CorruptError(f"{what}: must_understand is not a list of names", rule=f"{scope}.field")
    unknown = sorted(set(listed) - set(known))
    if unknown:
        raise FormatError(
            f"{what} needs a reader that understands {', '.join(unknown):.200}",
            rule=f"{scope}.must_understand",
            hint="upgrade deltasync",
        )


def is_count(value: object, *, most: int) -> bool:
    """Whether a JSON value is a whole number in 0..most (True and False are not)."""
    return type(value) is int and 0 <= value <= most


def is_sha256(value: object) -> bool:
    """Whether a JSON value is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_decimal(value: object) -> bool:
    """Whether a JSON value is a whole number as text, without sign or leading zeros."""
    return isinstance(value, str) and _DECIMAL.fullmatch(value) is not None
