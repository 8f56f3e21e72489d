"""A request's body: read once, parsed once, and extended without being serialised again.

Serialising again would change the client's text: 1.0 becomes 1, big integers lose digits, escapes change.
So the router splices its own members into the original bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import orjson

__all__ = [
    *("BadBody", "InferenceBody", "encode_member", "estimate_tokens", "hide_escapes", "parse_inference"),
    *("parse_object", "show_escapes", "splice", "whole_number"),
]

# A string or an array of numbers, as a whole; or a character that opens, closes or separates. Escapes must be hidden.
_TOKEN = re.compile(rb'"[^"]*"|\[[^"{}\[\]]*\]|[{}\[\],]')
# Stand for an escaped backslash and an escaped quote where these are hidden: bytes that UTF-8 never has.
_BACKSLASH, _QUOTE = b"\xff\xfd", b"\xff\xfe"
# Everything to a space, but the ends of lines, which keep the numbers of those that follow.
_BLANK = bytes(each if each in b"\r\n" else 0x20 for each in range(256))
_COMMA = 0x2C
# English text has about four bytes to a token; a policy compares loads, so the constant matters little.
_BYTES_PER_TOKEN = 4
# More sequences than any engine makes of one request; a client's number must not size a list here.
_MOST_CHOICES = 1024


class BadBody(ValueError):
    """The client's body cannot be served; one sentence, and the member at fault if there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InferenceBody(NamedTuple):
    """The members of a completion request that the router needs to know, beside its bytes."""

    data: bytes
    members: dict[str, Any]
    request_id: str | None
    prompt_tokens: int
    """An estimate; exact where the client sent token ids."""
    choices: int
    """How many sequences the engine makes of it."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that ``data`` is.

    Raises:
        BadBody: it is not JSON, or not an object.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        value = _parse_leniently(data, exc)
    if not isinstance(value, dict):
        raise BadBody(f"the body is a JSON {_kind(value)}; it must be an object")
    return value


def parse_inference(data: bytes) -> InferenceBody:
    """The body of a completion request.

    Raises:
        BadBody: it is not a JSON object, or its ``request_id`` is not a string.
    """
    members = parse_object(data)
    request_id = members.get("request_id")
    if request_id is not None and not (isinstance(request_id, str) and request_id.isprintable()):
        raise BadBody(f"request_id is {request_id!r}; it must be a string of printable characters", "request_id")
    token_ids = members.get("prompt_token_ids")
    prompt_tokens = len(token_ids) if isinstance(token_ids, list) else estimate_tokens(data)
    n, prompt = members.get("n"), members.get("prompt")
    choices = 1 if n is None else max(1, whole_number(n) or 1)
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        choices *= len(prompt)
    return InferenceBody(data, members, request_id or None, prompt_tokens, min(choices, _MOST_CHOICES))


def whole_number(value: Any) -> int | None:
    """The number for which engines take a member; by pydantic they read 10.0, "10" and "10.0" as 10. None if none."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def estimate_tokens(data: bytes) -> int:
    """About how many prompt tokens a body of text holds."""
    return len(data) // _BYTES_PER_TOKEN


def encode_member(name: str, value: Any) -> bytes:
    """A member of an object, as ``splice`` takes it."""
    return orjson.dumps({name: value})[1:-1]


def hide_escapes(data: bytes) -> bytes:
    """JSON with its escaped quotes and backslashes made as many other bytes: each of its strings is ``"[^"]*"`` then.

    A pattern that reads the escapes itself keeps 60 bytes of state for each: gigabytes for the longest bodies.
    """
    if b"\\" not in data:  # most have none, and each replacement would look through it
        return data
    return data.replace(b"\\\\", _BACKSLASH).replace(b'\\"', _QUOTE)


def show_escapes(data: bytes) -> bytes:
    """The bytes as they were before ``hide_escapes``."""
    if b"\xff" not in data:
        return data
    return data.replace(_QUOTE, b'\\"').replace(_BACKSLASH, b"\\\\")


def splice(body: InferenceBody, added: Mapping[str, bytes]) -> bytes:
    """The body with members set; all other members keep every byte, and their place.

    The new members stand behind them, so that a place in the body that an instance finds fault with is the same in the
    client's. Members of the same name that the client sent are blanked, so that no reader can prefer them.

    Args:
        added: by name, each as ``encode_member`` made it.
    """
    data, has_members = body.data, bool(body.members)
    if not added.keys().isdisjoint(body.members):
        data, has_members = _blank_members(data, added)
    end = data.rindex(b"}")
    return b"".join((data[:end], b"," if has_members else b"", b",".join(added.values()), data[end:]))


def _blank_members(data: bytes, names: Container[str]) -> tuple[bytes, bool]:
    """``data`` with spaces in place of the members of these names; whether others are left."""
    blanked, is_any_left = bytearray(data), False
    for key, start, end in _members(data):
        if key not in names:
            is_any_left = True
            continue
        # The comma before it goes with it; or, where nothing is left before it, the one behind it.
        first, last = (start - 1, end) if is_any_left else (start, end + (data[end] == _COMMA))
        blanked[first:last] = data[first:last].translate(_BLANK)
    return bytes(blanked), is_any_left


def _members(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of each member of the object that ``data`` is; a name may come twice."""
    depth, start = 0, 0
    key: str | None = None
    for token in _TOKEN.finditer(hide_escapes(data)):
        first = data[token.start()]
        if token.end() > token.start() + 1:
            if depth == 1 and key is None:
                key = json.loads(data[token.start() : token.end()])
        elif first in b"{[":
            depth += 1
            start = token.end() if depth == 1 else start
        elif first in b"}]" or depth == 1:
            if depth == 1:
                if key is not None:
                    yield key, start, token.start()
                key, start = None, token.end()
            depth -= first in b"}]"


def _parse_leniently(data: bytes, error: orjson.JSONDecodeError) -> Any:
    # NaN, half a surrogate pair and numbers out of range are not JSON, but engines written in Python read them.
    # ``error`` may be about one of these, and the mistake stand behind it.
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        column = exc.start - data.rfind(b"\n", 0, exc.start)
        where = f"line {line} byte {column} (byte {exc.start}) is 0x{data[exc.start]:02x}"
        raise BadBody(f"the body is not valid JSON: it is not UTF-8: {where}") from None
    except json.JSONDecodeError as exc:
        raise BadBody(f"the body is not valid JSON: {exc}") from None
    except (ValueError, RecursionError):
        raise BadBody(f"the body is not valid JSON: {error}") from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", str: "string", list: "array"}.get(type(value), "number")
