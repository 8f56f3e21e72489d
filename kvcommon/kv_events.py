"""KV events: which blocks an instance stored and removed, in the format of vLLM and SGLang (msgpack over ZeroMQ).

A message has three frames: the topic, the sequence number (8 bytes, big-endian) and a batch. The sequence numbers of a
publisher begin at 0 and grow by 1. A batch is the array ``[ts, events, data_parallel_rank]``. An event is a map with
the member ``type``; before vLLM's pull request 42892 (June 2026) it was an array that begins with the type. This module
reads both and writes maps. Source: ``vllm/distributed/kv_events.py`` of vLLM 0.32.

A publisher's replay socket (ROUTER) receives a sequence number. It sends one message for each batch from that number on
that it still has, then one message with the number ``END_OF_REPLAY``. A client needs a DEALER socket, which sends and
receives an empty frame before the others; a REQ socket would deliver only the first of the messages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import msgpack

__all__ = [
    "END_OF_REPLAY",
    "AllBlocksCleared",
    "Batch",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "decode_batch",
    "decode_message",
    "decode_sequence",
    "encode_batch",
    "encode_sequence",
    "is_wildcard",
    "name_host",
]

BlockHash = int | bytes
"""Block hash in an event: vLLM sends a 64-bit number, or 32 bytes if ``VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES`` is 0."""

END_OF_REPLAY = -1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Event: successive blocks of one prefix were stored. The members have the order of the event's array form."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Hash of the block before the first one. None if the prompt begins with the first one, or if the publisher does
    not know the hash."""
    token_ids: list[int]
    """Tokens of all blocks of the event; empty if the publisher does not know them."""
    block_size: int
    """Tokens in a block."""
    lora_id: int | None = None
    medium: str | None = None
    """Where the blocks are, such as GPU, CPU or POOL, or None for the instance's own cache."""
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """For each block, the values other than tokens that its hash contains, such as ``[cache_salt]``, or None."""
    group_idx: int | None = None
    """Index of the group of layers, or None for all layers."""
    kv_cache_spec_kind: str | None = None
    """Kind of attention in the group, such as full_attention or sliding_window."""
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    """Salt of the blocks. Only SGLang sends this member; vLLM sends the salt in ``extra_keys``."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Event: blocks were removed from ``medium``, or from the instance's own cache if this is None."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Event: all blocks were removed from the publisher's own cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(NamedTuple):
    """Events of one step of an instance."""

    ts: float
    """Unix time in seconds."""
    events: list[Event]
    data_parallel_rank: int | None


# More than any step of an engine has; to read more would delay everything else for seconds.
_MAX_CONTAINERS = 1_000_000

_TYPES: Mapping[str, type[Event]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
_FIELDS = {kind: tuple(field.name for field in fields(kind)) for kind in _TYPES.values()}
# vLLM's and SGLang's decoders require these members, even if they are None.
_ALWAYS_WRITTEN = frozenset(
    ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
)

_WILDCARD = re.compile(r"tcp://(\*|0\.0\.0\.0|::|\[::\]):(?=(\d+|\*)$)", re.ASCII)


def encode_batch(ts: float, events: Sequence[Event], rank: int | None) -> bytes:
    """Encode the events of one step; ``ts`` is Unix time in seconds, ``rank`` the data-parallel rank."""
    packed: bytes = msgpack.packb([ts, [_encode_event(event) for event in events], rank])
    return packed


def decode_batch(data: bytes) -> Batch:
    """Decode a batch of events. The result omits events of unknown types, and unknown members of events.

    Raises:
        ValueError: the data is damaged or has another format; the message is one sentence.
    """
    numbers = itertools.count()
    too_many = ValueError(f"A batch of KV events has more than {_MAX_CONTAINERS} arrays and maps")

    def check_container(container: Any) -> Any:
        if next(numbers) >= _MAX_CONTAINERS:
            raise too_many
        return container

    try:
        batch = msgpack.unpackb(data, strict_map_key=False, list_hook=check_container, object_hook=check_container)
    except (ValueError, TypeError, RecursionError) as exc:
        if exc is too_many:
            raise
        raise ValueError(f"A batch of KV events is not valid msgpack: {exc or type(exc).__name__}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("A batch of KV events is not an array [ts, events, data_parallel_rank]")
    ts, rank = batch[0], batch[2] if len(batch) > 2 else None
    if type(ts) not in (float, int):
        raise ValueError(f"A batch of KV events has the time {ts!r}, which is not a number")
    if not _is_optional_int(rank):
        raise ValueError(f"A batch of KV events has the data-parallel rank {rank!r}, which is not a number")
    events = [event for entry in batch[1] if (event := _decode_event(entry)) is not None]
    return Batch(float(ts), events, rank)


def encode_sequence(sequence: int) -> bytes:
    """Encode a sequence number, or ``END_OF_REPLAY``, for the second frame of a message."""
    return sequence.to_bytes(8, "big", signed=True)


def decode_sequence(frame: bytes) -> int:
    """Decode the sequence number in the second frame of a message, or in a request for replay.

    Raises:
        ValueError: the frame is neither a sequence number nor ``END_OF_REPLAY``; the message is one sentence.
    """
    if len(frame) != 8:
        raise ValueError(f"A sequence number of KV events has {len(frame)} bytes, not 8")
    if (sequence := int.from_bytes(frame, "big", signed=True)) < END_OF_REPLAY:
        raise ValueError(f"A sequence number of KV events is {sequence}; it must be at least {END_OF_REPLAY}")
    return sequence


def decode_message(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the sequence number and the encoded batch of a message.

    A message without a topic is accepted: vLLM before pull request 42892, and older SGLang, replay messages without it.

    Raises:
        ValueError: the frames are not a message of KV events; the message is one sentence.
    """
    if len(frames) not in (2, 3):
        raise ValueError(f"A message of KV events has {len(frames)} frames, not 3")
    return decode_sequence(frames[-2]), frames[-1]


def is_wildcard(endpoint: str) -> bool:
    """Return whether a ZeroMQ endpoint means all addresses of its machine, such as ``tcp://*:5557``."""
    return _WILDCARD.match(endpoint) is not None


def name_host(endpoint: str, host: str) -> str:
    """Return the endpoint to which a subscriber on another machine connects: ``host`` replaces a wildcard."""
    return _WILDCARD.sub(f"tcp://[{host}]:" if ":" in host else f"tcp://{host}:", endpoint)


def _encode_event(event: Event) -> dict[str, Any]:
    members: dict[str, Any] = {"type": type(event).__name__}
    for name in _FIELDS[type(event)]:
        value = getattr(event, name)
        if value is not None or name in _ALWAYS_WRITTEN:
            members[name] = value
    return members


def _decode_event(entry: Any) -> Event | None:
    """Decode an event in map form or array form; return None if the event's type is unknown."""
    if isinstance(entry, dict):
        name, members = entry.get("type"), entry
    elif isinstance(entry, list) and entry:
        name, members = entry[0], {}
    else:
        raise ValueError("A KV event is neither a map with its type nor an array that begins with it")
    if not isinstance(name, str):
        raise ValueError(f"A KV event has the type {name!r}, which is not a string")
    kind = _TYPES.get(name)
    if kind is None:
        return None
    if isinstance(entry, list):
        members = dict(zip(_FIELDS[kind], entry[1:], strict=False))
    values = {member: members[member] for member in _FIELDS[kind] if member in members}
    for member, value in values.items():
        if not _CHECKS[member](value):
            raise ValueError(f"The KV event {name} has a wrong {member}: {str(value)[:80]}")
    try:
        return kind(**values)
    except TypeError:
        missing = "block_hashes" if "block_hashes" not in values else "parent_block_hash, token_ids or block_size"
        raise ValueError(f"The KV event {name} lacks {missing}") from None


def _is_hash(value: Any) -> bool:
    return type(value) in _HASH_TYPES


def _is_optional_int(value: Any) -> bool:
    return value is None or type(value) is int


def _is_optional_text(value: Any) -> bool:
    return value is None or type(value) is str


# Sets, because a batch may have thousands of tokens.
_INT_TYPES, _HASH_TYPES = frozenset({int}), frozenset({int, bytes})
_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "block_hashes": lambda value: isinstance(value, list) and _HASH_TYPES.issuperset(map(type, value)),
    "parent_block_hash": lambda value: value is None or _is_hash(value),
    "token_ids": lambda value: isinstance(value, list) and _INT_TYPES.issuperset(map(type, value)),
    "block_size": lambda value: type(value) is int and value > 0,
    "lora_id": _is_optional_int,
    "medium": _is_optional_text,
    "lora_name": _is_optional_text,
    "extra_keys": lambda value: value is None or isinstance(value, list),
    "group_idx": _is_optional_int,
    "kv_cache_spec_kind": _is_optional_text,
    "kv_cache_spec_sliding_window": _is_optional_int,
    "cache_salt": _is_optional_text,
}
