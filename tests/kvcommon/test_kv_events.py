"""The format of KV events: our decoder reads the events of other engines, and their classes read ours."""

from __future__ import annotations

import re
from typing import Any

import msgpack
import pytest

from kvcommon.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    decode_member,
    decode_message,
    decode_sequence,
    encode_batch,
    encode_sequence,
    is_wildcard,
    name_host,
)
from tests.support.kv_events import import_sglangs, import_vllms, read_batch

LARGEST = 2**64 - 1
STORED = BlockStored([LARGEST, 7], 5, [1, 2, 3, 4], 2, medium="GPU", extra_keys=[["salt"], None], group_idx=1)
EVENTS: list[Event] = [STORED, BlockRemoved([7], "GPU"), AllBlocksCleared()]


def pack(*events: Any, rank: int | None = 0) -> bytes:
    packed: bytes = msgpack.packb([1.5, list(events), rank])
    return packed


def stored_map(**members: Any) -> dict[str, Any]:
    required = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
    return {"type": "BlockStored", **required, **members}


def test_a_batch_survives_encoding() -> None:
    assert read_batch(encode_batch(1.5, EVENTS, 3)) == Batch(1.5, EVENTS, 3)
    assert read_batch(encode_batch(1.5, [], None)) == Batch(1.5, [], None)


def test_hashes_may_be_numbers_or_bytes() -> None:
    events: list[Event] = [
        BlockStored([b"a" * 32], b"b" * 32, [1], 1),
        BlockStored([-(2**63)], None, [1], 1),
        BlockRemoved([b"a" * 32]),
    ]
    assert read_batch(encode_batch(0.0, events, 0)).events == events


def test_events_are_written_as_maps_with_the_members_that_other_decoders_require() -> None:
    batch = msgpack.unpackb(encode_batch(1.5, [BlockStored([1], None, [2], 1), BlockRemoved([1])], 0))
    assert batch[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [2],
            "block_size": 1,
            "lora_id": None,
            "medium": None,
            "lora_name": None,
        },
        {"type": "BlockRemoved", "block_hashes": [1], "medium": None},
    ]


def test_the_array_form_of_older_engines_is_read() -> None:
    data = pack(
        ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None],
        ["BlockStored", [3], 2, [5, 6], 2, None, "GPU", "adapter", [["salt"]], 1, "sliding_window", 128, "new member"],
        ["BlockStored", [4], None, [7, 8], 2, None, "GPU", {"cache_salt": "salt"}],
        ["BlockRemoved", [1], "GPU"],
        ["BlockRemoved", [2]],
        ["AllBlocksCleared"],
    )
    assert read_batch(data).events == [
        BlockStored([1, 2], None, [1, 2, 3, 4], 2),
        BlockStored([3], 2, [5, 6], 2, None, "GPU", "adapter", [["salt"]], 1, "sliding_window", 128, "new member"),
        BlockStored([4], None, [7, 8], 2, None, "GPU", cache_salt="salt"),
        BlockRemoved([1], "GPU"),
        BlockRemoved([2]),
        AllBlocksCleared(),
    ]


def test_unknown_types_and_members_are_ignored() -> None:
    data = pack({"type": "BlockMoved", "to": 1}, ["BlockMoved", 1], stored_map(ownership={1: 2}), rank=None)
    assert read_batch(data) == Batch(1.5, [BlockStored([1], None, [1, 2], 2)], None)
    assert read_batch(msgpack.packb([1, [], 0, "new member"])) == Batch(1.0, [], 0)
    assert read_batch(msgpack.packb([1, []])) == Batch(1.0, [], None)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (encode_batch(1.5, EVENTS, 3)[:-1], "truncated"),
        (encode_batch(1.5, EVENTS, 3) + b"\0", "trailing"),
        (b"\x91" * 5000, "Expected `array` of at least length 2"),
        (msgpack.packb({"ts": 1}), "Expected `array`"),
        (msgpack.packb([1.5]), "Expected `array` of at least length 2"),
        (msgpack.packb([1.5, {}]), "Expected `array`"),
        (msgpack.packb(["now", []]), "Expected `float`"),
        (msgpack.packb([True, []]), "Expected `float`"),
        (msgpack.packb([1.5, [], "0"]), "Expected `int | null`"),
        (pack(7), "Expected `object | array`"),
        (pack([]), "of at least length 1"),
        (pack({}), "missing required field `type`"),
        (pack(stored_map(block_hashes=["abc"])), "block_hashes"),
        (pack(stored_map(block_hashes=1)), "block_hashes"),
        (pack(stored_map(parent_block_hash="abc")), "parent_block_hash"),
        (pack(stored_map(block_size=0)), "block_size"),
        (pack(stored_map(medium=1)), "medium"),
        (pack(["BlockStored", [1], None, [2], 1, None, None, 7]), "Expected `object`"),
        (pack({"type": "BlockRemoved"}), "block_hashes"),
        (pack({"type": "BlockStored", "block_hashes": []}), "parent_block_hash"),
    ],
)
def test_a_damaged_batch_is_refused_in_one_sentence(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        decode_batch(data)


@pytest.mark.parametrize("members", [{"token_ids": 7}, {"token_ids": {}}, {"extra_keys": "salt"}])
def test_a_damaged_member_is_refused_in_one_sentence(members: dict[str, Any]) -> None:
    event = decode_batch(pack(stored_map(**members))).events[0]
    assert isinstance(event, BlockStored)
    with pytest.raises(ValueError, match="A member of a KV event cannot be decoded: Expected `array"):
        decode_member(event.token_ids if "token_ids" in members else event.extra_keys)


def test_sequence_numbers_are_eight_bytes_big_endian() -> None:
    assert encode_sequence(258) == b"\0\0\0\0\0\0\1\2"
    assert encode_sequence(END_OF_REPLAY) == b"\xff" * 8
    for sequence in (0, 258, END_OF_REPLAY):
        assert decode_sequence(encode_sequence(sequence)) == sequence
    for frame in (b"", b"\0" * 7, b"\0" * 9, encode_sequence(-2)):
        with pytest.raises(ValueError, match="sequence number"):
            decode_sequence(frame)


def test_a_message_has_three_frames_and_an_older_replay_two() -> None:
    assert decode_message([b"topic", encode_sequence(4), b"batch"]) == (4, b"batch")
    assert decode_message([encode_sequence(4), b"batch"]) == (4, b"batch")
    assert decode_message([b"", encode_sequence(END_OF_REPLAY), b""]) == (END_OF_REPLAY, b"")
    with pytest.raises(ValueError, match="4 frames"):
        decode_message([b"", b"", encode_sequence(4), b"batch"])


@pytest.mark.parametrize(
    ("endpoint", "host", "expected"),
    [
        ("tcp://*:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.1", "tcp://10.0.0.1:5557"),
        ("tcp://[::]:5557", "fd00::1", "tcp://[fd00::1]:5557"),
        (":::5557", "10.0.0.1", ":::5557"),
        ("tcp://127.0.0.1:5557", "10.0.0.1", "tcp://127.0.0.1:5557"),
        ("tcp://[fd00::2]:5557", "10.0.0.1", "tcp://[fd00::2]:5557"),
        ("ipc:///tmp/*:1", "10.0.0.1", "ipc:///tmp/*:1"),
    ],
)
def test_the_address_of_the_machine_replaces_a_wildcard(endpoint: str, host: str, expected: str) -> None:
    assert name_host(endpoint, host) == expected
    assert is_wildcard(endpoint) is (endpoint != expected)


def test_the_classes_of_vllm_and_ours_read_the_same_bytes() -> None:
    kv_events = import_vllms()
    msgspec = pytest.importorskip("msgspec")
    theirs = kv_events.KVEventBatch(
        ts=1.5,
        events=[
            kv_events.BlockStored(
                block_hashes=[LARGEST, 7],
                parent_block_hash=5,
                token_ids=[1, 2, 3, 4],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                extra_keys=[("salt",), None],
                group_idx=1,
            ),
            kv_events.BlockRemoved(block_hashes=[7], medium="GPU"),
            kv_events.AllBlocksCleared(),
        ],
        data_parallel_rank=3,
    )
    assert read_batch(msgspec.msgpack.encode(theirs)) == Batch(1.5, EVENTS, 3)
    assert msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(encode_batch(1.5, EVENTS, 3)) == theirs
    with_bytes = kv_events.KVEventBatch(ts=1.5, events=[kv_events.BlockRemoved(block_hashes=[b"a" * 32], medium=None)])
    batch = Batch(1.5, [BlockRemoved([b"a" * 32])], None)
    assert read_batch(msgspec.msgpack.encode(with_bytes)) == batch
    assert msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(encode_batch(*batch)) == with_bytes


def test_the_classes_of_sglang_and_ours_read_the_same_bytes() -> None:
    kv_events = import_sglangs()
    msgspec = pytest.importorskip("msgspec")
    theirs = kv_events.KVEventBatch(
        ts=1.5,
        events=[
            kv_events.BlockStored(
                block_hashes=[-7],
                parent_block_hash=None,
                token_ids=[1, 2],
                block_size=2,
                lora_id=None,
                medium=kv_events.StorageMedium.CPU,
                cache_salt="salt",
            ),
            kv_events.BlockRemoved(block_hashes=[-7], medium=kv_events.StorageMedium.GPU),
            kv_events.AllBlocksCleared(),
        ],
        attn_dp_rank=3,
    )
    ours: list[Event] = [
        BlockStored([-7], None, [1, 2], 2, medium="CPU_PINNED", cache_salt="salt"),
        BlockRemoved([-7], "GPU"),
        AllBlocksCleared(),
    ]
    assert read_batch(msgspec.msgpack.encode(theirs)) == Batch(1.5, ours, 3)
    assert msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(encode_batch(1.5, ours, 3)) == theirs
