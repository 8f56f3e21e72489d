"""A subscriber to KV events and a publisher, over real sockets, and the modules of vLLM and SGLang."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any
from unittest import mock

import pytest

from kvcommon.kv_events import (
    END_OF_REPLAY,
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    decode_member,
    decode_message,
    decode_sequence,
    encode_batch,
    encode_sequence,
)

zmq = pytest.importorskip("zmq")

__all__ = [
    *("EventPublisher", "Subscriber", "apply_events", "event_publisher", "import_sglangs", "import_vllms"),
    "read_batch",
]

_DEADLINE_MS = 20_000


class Subscriber:
    """A subscriber that receives the numbered batches of a publisher, and can request them again."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        self._dealer = self._context.socket(zmq.DEALER)
        if replay_endpoint:
            self._dealer.connect(replay_endpoint)

    def wait_for_connection(self, publish: Callable[[], None]) -> int:
        """Call ``publish`` until a batch arrives, and return its number. All later batches arrive, too."""
        for _ in range(_DEADLINE_MS // 20):
            publish()
            if self._sub.poll(20):
                return self.receive()[0]
        raise AssertionError("no batch arrived")

    def receive(self) -> tuple[int, Batch]:
        """Wait for the next batch."""
        assert self._sub.poll(_DEADLINE_MS), "no batch arrived"
        sequence, data = decode_message(self._sub.recv_multipart())
        return sequence, read_batch(data)

    def replay(self, start: int) -> list[tuple[int, Batch]]:
        """Request the batches from ``start`` on."""
        self._dealer.send_multipart([b"", encode_sequence(start)])
        batches: list[tuple[int, Batch]] = []
        while True:
            assert self._dealer.poll(_DEADLINE_MS), "the replay has no end"
            sequence, data = decode_message(self._dealer.recv_multipart()[1:])
            if sequence == END_OF_REPLAY:
                return batches
            batches.append((sequence, read_batch(data)))

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._context.destroy(linger=0)


class EventPublisher:
    """A publisher like that of an instance. It can lose and forget batches, and restart at its address."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.port = self.replay_port = 0
        self.dropped: set[int] = set()
        """Numbers of the batches that the next replay omits, as a full socket does."""
        self.start()

    def start(self) -> None:
        self.number = 0
        self.blocks: set[int | bytes] = set()
        self.sent: dict[int, bytes] = {}
        self.socket, self.replayer = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.port = self._bind(self.socket, self.port)
        self.replay_port = self._bind(self.replayer, self.replay_port)

    def stop(self) -> None:
        self.socket.close(linger=0)
        self.replayer.close(linger=0)

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "endpoint": f"tcp://127.0.0.1:{self.port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay_port}",
        }

    def publish(self, *events: Event, is_lost: bool = False) -> None:
        data = encode_batch(time.time(), events, None)
        self.sent[self.number] = data
        if not is_lost:
            self.socket.send_multipart([b"", encode_sequence(self.number), data])
        self.number += 1
        for event in events:
            if isinstance(event, BlockStored):
                self.blocks.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.blocks.difference_update(event.block_hashes)
            else:
                self.blocks.clear()

    def store(self, *hashes: int, is_lost: bool = False) -> None:
        self.publish(BlockStored(list(hashes), None, [], 64), is_lost=is_lost)

    def answer_replays(self) -> None:
        while not self.replayer.closed and self.replayer.poll(0):
            who, _, first = self.replayer.recv_multipart()
            asked = {number: data for number, data in self.sent.items() if number >= decode_sequence(first)}
            left_out = self.dropped & asked.keys()
            self.dropped -= left_out
            for number, data in asked.items():
                if number not in left_out:
                    self.replayer.send_multipart([who, b"", encode_sequence(number), data])
            self.replayer.send_multipart([who, b"", encode_sequence(END_OF_REPLAY), b""])

    @staticmethod
    def _bind(socket: Any, port: int) -> int:
        deadline = time.monotonic() + 10
        while True:
            try:
                if not port:
                    return int(socket.bind_to_random_port("tcp://127.0.0.1"))
                socket.bind(f"tcp://127.0.0.1:{port}")
                return port
            except zmq.ZMQError:  # ZeroMQ closes the earlier sockets in the background
                assert time.monotonic() < deadline
                time.sleep(0.01)


@contextlib.contextmanager
def event_publisher() -> Iterator[EventPublisher]:
    """Yield a publisher that has published nothing."""
    context = zmq.Context()
    publisher = EventPublisher(context)
    try:
        yield publisher
    finally:
        publisher.stop()
        context.destroy(linger=0)


def apply_events(events: list[Event], known: set[BlockHash]) -> None:
    """Apply events to the set of hashes that a publisher is known to have."""
    for event in events:
        if isinstance(event, AllBlocksCleared):
            known.clear()
        elif isinstance(event, BlockStored):
            known.update(event.block_hashes)
        else:
            known.difference_update(event.block_hashes)


def read_batch(data: bytes) -> Batch:
    """Decode a batch with the tokens and keys of its events, which ``decode_batch`` leaves encoded."""
    batch = decode_batch(data)
    return batch._replace(events=[_read_event(event) for event in batch.events])


def _read_event(event: Event) -> Event:
    kind = next(each for each in (BlockStored, BlockRemoved, AllBlocksCleared) if isinstance(event, each))
    members = {name: getattr(event, name) for name in event.__struct_fields__}
    for name in {"token_ids", "extra_keys"} & members.keys():
        members[name] = decode_member(members[name])
    if not members.get("extra_keys", True):
        members["extra_keys"] = None
    return kind(**members)


def import_vllms() -> Any:
    """Import vLLM's module of KV events; skip the test if vLLM is not installed."""
    return pytest.importorskip("vllm.distributed.kv_events", exc_type=ImportError)


def import_sglangs() -> Any:
    """Import SGLang's module of KV events without the rest, which needs a GPU; skip the test without SGLang."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.origin:
        pytest.skip("no SGLang is installed")
    path = Path(package.origin).parent / "srt" / "disaggregation" / "kv_events.py"
    stubs = {f"sglang{name}": ModuleType(name) for name in ("", ".srt", ".srt.utils", ".srt.runtime_context")}
    stubs["sglang.srt.runtime_context"].get_parallel = None  # type: ignore[attr-defined]
    stubs["sglang.srt.utils.network"] = ModuleType("network")
    stubs["sglang.srt.utils.network"].NetworkAddress = None  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("sglangs_kv_events", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, stubs):
        spec.loader.exec_module(module)
    return module
