"""JSON as it goes out and comes in: strict, and refused in few words."""

import json
from typing import Any


def dumps(value: Any) -> str:
    """Raises ValueError for NaN and infinity, which are no JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)


def parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ValueError("the message is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("the message is JSON, but no object")
    return found


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
