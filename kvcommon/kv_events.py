"""KV events: which blocks an instance stored and removed, in the format of vLLM and SGLang (msgpack over ZeroMQ).

A message has three frames: the topic, the sequence number (8 bytes, big-endian) and a batch. The sequence numbers of a
publisher begin at 0 and grow by 1. A batch is the array ``[ts, events, data_parallel_rank]``. An event is a map with
the member ``type``; before vLLM's pull request 42892 (June 2026) it was an array that begins with the type. This module
reads both and writes maps. Source: ``vllm/distributed/kv_events.py`` of vLLM 0.32.

A publisher's replay socket (ROUTER) receives a sequence number. It sends one message for each batch that it still has,
from that number on, and then one message with the number ``END_OF_REPLAY``. A client needs a DEALER socket, which sends
and receives an empty frame before the other frames; a REQ socket would deliver only the first of the messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

__all__ = [
    "END_OF_REPLAY",
    "AllBlocksCleared",
    "Batch",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "decode_batch",
    "decode_member",
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


class BlockStored(msgspec.Struct):
    """Event: successive blocks of one prefix were stored. The members have the order of the event's array form."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    """Hash of the block before the event's first block. None if the event's first block is the first of the prompt, or
    if the publisher does not know the hash."""
    token_ids: list[int] | msgspec.Raw
    """Tokens of all blocks of the event; empty if the publisher does not know them. ``decode_batch`` does not decode
    them; ``decode_member`` does."""
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    """Tokens in a block."""
    lora_id: int | None = None
    medium: str | None = None
    """Where the blocks are, such as GPU, CPU or POOL, or None for the instance's own cache."""
    lora_name: str | None = None
    extra_keys: list[Any] | msgspec.Raw | None = None
    """For each block, the values other than tokens that its hash contains, such as ``[cache_salt]``, or None.
    ``decode_batch`` does not decode them; ``decode_member`` does."""
    group_idx: int | None = None
    """Index of the group of layers, or None for all layers."""
    kv_cache_spec_kind: str | None = None
    """Kind of attention in the group, such as full_attention or sliding_window."""
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    """Salt of the blocks. Only SGLang sends this member; vLLM sends the salt in ``extra_keys``."""


class BlockRemoved(msgspec.Struct):
    """Event: blocks were removed from ``medium``, or from the instance's own cache if ``medium`` is None."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct):
    """Event: all blocks were removed from the publisher's own cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(NamedTuple):
    """Events of one step of an instance."""

    ts: float
    """Unix time in seconds."""
    events: list[Event]
    data_parallel_rank: int | None


# vLLM's and SGLang's decoders require these members, even if they are None.
_ALWAYS_WRITTEN = frozenset(
    ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
)
_NONE = msgspec.Raw(msgspec.msgpack.encode(None))


# The forms in which events are received: as maps, and as arrays. A batch may have many thousands of tokens, which most
# readers do not need. So tokens and keys are not decoded.
class _StoredMap(BlockStored, tag_field="type", tag="BlockStored"):
    token_ids: msgspec.Raw
    extra_keys: msgspec.Raw = _NONE


class _RemovedMap(BlockRemoved, tag_field="type", tag="BlockRemoved"):
    pass


class _ClearedMap(AllBlocksCleared, tag_field="type", tag="AllBlocksCleared"):
    pass


class _StoredArray(_StoredMap, array_like=True):
    pass


class _Metadata(msgspec.Struct):
    cache_salt: str | None = None


class _SaltedArray(_StoredArray):
    lora_name: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str | None):  # SGLang 0.5.18 and 0.5.19 send a salt in this place
            self.lora_name, self.cache_salt = None, msgspec.convert(self.lora_name, _Metadata).cache_salt


class _RemovedArray(_RemovedMap, array_like=True):
    pass


class _ClearedArray(_ClearedMap, array_like=True):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class _MixedBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_MAPS = msgspec.msgpack.Decoder(_MapBatch)
_ARRAYS = msgspec.msgpack.Decoder(_ArrayBatch)
_MIXED = msgspec.msgpack.Decoder(_MixedBatch)
_MAP = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_ARRAY = msgspec.msgpack.Decoder(_SaltedArray | _RemovedArray | _ClearedArray)
_TYPES = frozenset(kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared))

_WILDCARD = re.compile(r"tcp://(\*|0\.0\.0\.0|::|\[::\]):(?=(\d+|\*)$)", re.ASCII)


def encode_batch(ts: float, events: Sequence[Event], rank: int | None) -> bytes:
    """Encode the events of one step; ``ts`` is Unix time in seconds, ``rank`` the data-parallel rank."""
    return msgspec.msgpack.encode([ts, [_encode_event(event) for event in events], rank])


def decode_batch(data: bytes) -> Batch:
    """Decode a batch of events. The result omits events of unknown types, and unknown members of events.

    Raises:
        ValueError: the data is damaged or has another format; the message is one sentence.
    """
    try:
        try:
            batch: Any = _MAPS.decode(data)
        except msgspec.ValidationError:
            try:
                batch = _ARRAYS.decode(data)
            except msgspec.ValidationError:
                batch = _MIXED.decode(data)
                batch.events = list(_decode_mixed(batch.events))
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ValueError(f"A batch of KV events cannot be decoded: {exc or type(exc).__name__}") from None
    return Batch(batch.ts, batch.events, batch.data_parallel_rank)


def decode_member(member: list[Any] | msgspec.Raw | None) -> list[Any]:
    """Decode a member of an event that ``decode_batch`` has not decoded; ``[]`` if it is None.

    Raises:
        ValueError: the member is not a list; the message is one sentence.
    """
    if not isinstance(member, msgspec.Raw):
        return member or []
    try:
        return msgspec.msgpack.decode(member, type=list[Any] | None) or []
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ValueError(f"A member of a KV event cannot be decoded: {exc or type(exc).__name__}") from None


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
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None or name in _ALWAYS_WRITTEN:
            members[name] = value
    return members


def _decode_mixed(events: list[msgspec.Raw]) -> Iterator[Event]:
    """Decode events in map form or array form. Events of unknown types are omitted.

    Raises:
        msgspec.MsgspecError: an event is damaged.
    """
    for data in events:
        event = msgspec.msgpack.decode(data, type=dict[str, Any] | list[Any])
        kind = event.get("type") if isinstance(event, dict) else event[0] if event else None
        if not isinstance(kind, str) or kind in _TYPES:
            yield (_MAP if isinstance(event, dict) else _ARRAY).decode(data)
