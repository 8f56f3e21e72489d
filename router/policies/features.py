"""request_features: a prompt as a chain of chunk hashes. Prompts with the same beginning have the same first hashes.

No tokenizer is needed: the chunks are cut from the text that a chat template would render, or from the token ids if the
client sent these. The order of the parts is the order in which they are rendered, and the whole conversation is
included: the next turn of a conversation, which appends messages, shares all whole chunks with the previous turn.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import orjson
import xxhash

from router.policies.base import RequestFeatures

__all__ = ["TOKENS_PER_CHUNK", "chunk_hashes", "find_session", "request_features", "session_key"]

TOKENS_PER_CHUNK = 128
"""Tokens per chunk: exact for token ids, approximate for text."""

# The part of a prompt after a million tokens is ignored: hashing it would block the router.
MAX_CHUNKS = 8192

# Both kinds of chunk have the same size: 128 tokens with about four bytes of text each, or four bytes per token id.
_BYTES_PER_TOKEN = 4
_CHUNK_BYTES = _BYTES_PER_TOKEN * TOKENS_PER_CHUNK
_MAX_BYTES = MAX_CHUNKS * _CHUNK_BYTES
_MAX_TOKENS = MAX_CHUNKS * TOKENS_PER_CHUNK
# Each part of a prompt counts as at least this size, which limits the number of parts.
_PART_BYTES = 200
_MAX_DEPTH = 20
# If one of these differs, equal text has different KV.
_SALTS = ("model", "cache_salt", "lora_path", "lora_request")
# Members that chat templates render before the messages.
_RENDERED_FIRST = ("chat_template", "tools", "documents", "system", "instructions")


def request_features(
    members: Mapping[str, Any], prompt_tokens: int, session: str = "", num_bytes: int = 0
) -> RequestFeatures:
    """Return the features of the request with this body, and with this ``session`` in its headers; hash nothing yet.

    Args:
        prompt_tokens: estimate for the text only.
        num_bytes: size of the body: images and other media belong to a prefix, too.
    """
    size = max(prompt_tokens, num_bytes // _BYTES_PER_TOKEN)
    return RequestFeatures(
        prompt_tokens,
        partial(chunk_hashes, members, size) if size >= TOKENS_PER_CHUNK else None,
        tokens_per_chunk=TOKENS_PER_CHUNK,
        key=session or session_key(members),
        model=members.get("model", ""),
    )


def find_session(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the session named in a request's headers (in ASGI's format); ``""`` if there is none."""
    for name, value in headers:
        if name == b"x-session-id" and value:
            return value.decode("latin-1")
    return ""


def session_key(members: Mapping[str, Any]) -> str:
    """Return the session or user named in a request's body: ``session_id``, else that of ``extra_body``, else
    ``user``.
    """
    key, extra = members.get("session_id"), members.get("extra_body")
    if not (isinstance(key, str) and key) and isinstance(extra, dict):  # FastDeploy's Go router reads it there, too
        key = extra.get("session_id")
    if not (isinstance(key, str) and key):
        key = members.get("user")
    return key if isinstance(key, str) else ""


def chunk_hashes(members: Mapping[str, Any], prompt_tokens: int = 0) -> list[int]:
    """Return the chained 64-bit hashes of the prompt's whole chunks, at most ``MAX_CHUNKS``; empty without a prompt.

    Each hash is ``xxh3_64(chunk, seed=previous hash)``. The first seed is computed from the model and the other members
    for which equal text has different KV.

    Args:
        prompt_tokens: an estimate. Only the beginning of a prompt that is too long is used.
    """
    if prompt_tokens > _MAX_TOKENS:
        members = _clip_members(members)
    digest = xxhash.xxh3_64_intdigest
    data = _encode_prompt(members)[:_MAX_BYTES]
    seed = digest(_encode_json([members.get(name) for name in _SALTS]))
    hashes = []
    for start in range(0, len(data) - _CHUNK_BYTES + 1, _CHUNK_BYTES):
        seed = digest(data[start : start + _CHUNK_BYTES], seed)
        hashes.append(seed)
    return hashes


def _encode_prompt(members: Mapping[str, Any]) -> bytes:
    token_ids = members.get("prompt_token_ids")
    if token_ids:
        return _encode_sequence(token_ids)
    messages = members.get("messages") or members.get("input")  # chat and Anthropic's messages; responses
    if messages:
        first = [members[name] for name in _RENDERED_FIRST if name in members]
        return (_encode_json(first) if first else b"") + _encode_sequence(messages)
    return _encode_sequence(members.get("prompt"))


def _encode_sequence(prompt: Any) -> bytes:
    """Encode a prompt so that equal beginnings give equal bytes: no closing bracket or quote ends the encoding."""
    if isinstance(prompt, str):
        return prompt[:_MAX_BYTES].encode(errors="surrogatepass")
    if not isinstance(prompt, list):
        return b""
    if prompt and isinstance(prompt[0], int):
        try:
            return array("I", prompt if len(prompt) <= _MAX_TOKENS else prompt[:_MAX_TOKENS]).tobytes()
        except (TypeError, OverflowError):  # numbers that are not token ids
            return _encode_json(prompt)[:-1]
    return _encode_json(prompt)[:-1]


def _clip_members(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``members`` without most of the text after the first ``_MAX_BYTES`` of the prompt."""
    clipped, room = dict(members), _MAX_BYTES
    for name in (*_RENDERED_FIRST, "messages", "input"):
        if name in members:
            clipped[name], room = _clip_value(members[name], room)
    return clipped


def _clip_value(value: Any, room: int, depth: int = 0) -> tuple[Any, int]:
    """Return ``value`` with as many of its first parts as fit into ``room`` bytes of JSON, and the remaining bytes."""
    if isinstance(value, str):
        return value[: max(0, room)], room - len(value) - _PART_BYTES
    if depth > _MAX_DEPTH or not value or not isinstance(value, list | dict):
        return value, room - _PART_BYTES
    kept: list[Any] = []
    for part in value.values() if isinstance(value, dict) else value:
        if room <= 0:
            break
        clipped, room = _clip_value(part, room, depth + 1)
        kept.append(clipped)
    return (dict(zip(value, kept, strict=False)) if isinstance(value, dict) else kept), room


def _encode_json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, an integer of more than 64 bits, or nested more than 254 deep
        return _encode_odd_json(value)


def _encode_odd_json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b""
