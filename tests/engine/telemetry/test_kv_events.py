"""KV events over real sockets: our publisher with subscribers of other projects, and the reverse."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.telemetry.kv_events import KvEventPublisher, KvEventsConfig, parse_kv_events
from kvcommon.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event, encode_sequence
from kvstore_backend import ConfigError
from tests.support.kv_events import Subscriber, import_sglangs, import_vllms
from tests.support.waiting import wait_until

zmq = pytest.importorskip("zmq")

STORED: list[Event] = [BlockStored([2**64 - 1, 2], None, [1, 2, 3, 4], 2, medium="GPU", extra_keys=[["salt"], None])]
ANYWHERE = "tcp://127.0.0.1:*"


@pytest.fixture
def publish_at() -> Iterator[Callable[..., tuple[KvEventPublisher, dict[str, Any]]]]:
    """Start a publisher at free ports; return it with its endpoints."""
    started = []

    def start(*, runs: bool = True, **config: Any) -> tuple[KvEventPublisher, dict[str, Any]]:
        config = {"endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, "bind": True, **config}
        publisher = KvEventPublisher(KvEventsConfig(**config))
        started.append(publisher)
        if runs:
            publisher.start()
        endpoints = publisher.describe("127.0.0.1", 2)
        assert endpoints
        return publisher, dict(endpoints)

    yield start
    for publisher in started:
        publisher.stop()


def subscribe(endpoints: dict[str, Any]) -> Subscriber:
    return Subscriber(endpoints["endpoint"], endpoints["replay_endpoint"], endpoints["topic"])


def test_batches_arrive_in_order_with_successive_numbers(publish_at: Any) -> None:
    publisher, endpoints = publish_at(topic="kv-events")
    with subscribe(endpoints) as subscriber:
        last = subscriber.wait_for_connection(lambda: publisher.publish([AllBlocksCleared()]))
        before = time.time()
        for number in range(100):
            publisher.publish([BlockRemoved([number], "GPU")])
        received: list[list[BlockHash]] = []
        while len(received) < 100:
            sequence, batch = subscriber.receive()
            assert sequence == last + 1
            last = sequence
            received += [event.block_hashes for event in batch.events if isinstance(event, BlockRemoved)]
            assert batch.data_parallel_rank == 0
        assert abs(batch.ts - before) < 60
        assert received == [[number] for number in range(100)]


def test_lost_batches_are_replayed_from_a_given_number(publish_at: Any) -> None:
    publisher, endpoints = publish_at(buffer_steps=3)
    with subscribe(endpoints) as subscriber:
        for number in range(5):
            publisher.publish([BlockRemoved([number])])
        wait_until(lambda: len(subscriber.replay(4)) == 1, "the last batch to be sent")
        removed = [(sequence, batch.events) for sequence, batch in subscriber.replay(0)]
        assert removed == [(number, [BlockRemoved([number])]) for number in (2, 3, 4)]  # the batches in the buffer
        assert [sequence for sequence, _ in subscriber.replay(3)] == [3, 4]
        assert subscriber.replay(5) == []


def test_a_publisher_that_starts_again_begins_at_0(publish_at: Any) -> None:
    for _ in range(2):
        publisher, endpoints = publish_at()
        with subscribe(endpoints) as subscriber:
            publisher.publish(STORED)
            [(sequence, batch)] = wait_until(lambda: subscriber.replay(0), "the batch to be sent")
            assert (sequence, batch.events) == (0, STORED)


def test_a_full_queue_loses_whole_batches_and_their_numbers(publish_at: Any, caplog: pytest.LogCaptureFixture) -> None:
    publisher, endpoints = publish_at(runs=False, max_queue_size=4)
    with subscribe(endpoints) as subscriber:
        for number in range(10):
            publisher.publish([BlockRemoved([number])])  # the publisher does not send yet, and no call waits
        assert [record.message for record in caplog.records if "lost" in record.message] == [
            "KV events are lost, because 4 batches wait to be sent already; raise max_queue_size"
        ]
        publisher.start()

        def publish_and_replay() -> list[int]:
            publisher.publish(STORED)
            numbers = [sequence for sequence, _ in subscriber.replay(0)]
            return numbers if numbers and numbers[-1] >= 10 else []

        numbers = wait_until(publish_and_replay, "a batch after the gap")
        early = [number for number in numbers if number < 10]
        assert early == list(range(len(early)))
        assert 4 <= len(early) < 10


def test_invalid_requests_have_no_response_and_no_effect(publish_at: Any) -> None:
    publisher, endpoints = publish_at()
    publisher.publish(STORED)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, subscribe(endpoints) as subscriber:
        dealer.linger = 0
        dealer.connect(endpoints["replay_endpoint"])
        for frames in ([b"", b"7"], [b"7"], [b"", b"", encode_sequence(0)], [b"", encode_sequence(-2)]):
            dealer.send_multipart(frames)
        wait_until(lambda: subscriber.replay(0), "a response")
        assert not dealer.poll(0)


def test_vllms_example_of_a_subscriber_reads_batches_and_requests_missed_ones(publish_at: Any) -> None:
    """The steps are those of vLLM's examples/features/kv_events/kv_events_subscriber.py."""
    publisher, endpoints = publish_at(topic="kv-events")
    publisher.publish(STORED)
    with subscribe(endpoints) as subscriber:
        wait_until(lambda: subscriber.replay(0), "the batch to be sent")
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.REQ) as replay:
        sub.linger = replay.linger = 0
        sub.connect(endpoints["endpoint"])
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv-events")
        replay.connect(endpoints["replay_endpoint"])

        def publish_more() -> bool:
            publisher.publish([AllBlocksCleared()])
            return bool(sub.poll(20))

        wait_until(publish_more, "a batch", pause_s=0)
        topic, sequence, payload = sub.recv_multipart()
        assert (topic, int.from_bytes(sequence, "big") > 0) == (b"kv-events", True)
        replay.send((0).to_bytes(8, "big"))
        assert replay.poll(20_000)
        topic, sequence, replayed = replay.recv_multipart()
        assert int.from_bytes(sequence, "big") == 0
        # A REQ socket gets only one response to a request. ZeroMQ drops the others.
        assert not replay.poll(100)
    kv_events = import_vllms()
    decoder = pytest.importorskip("msgspec").msgpack.Decoder(kv_events.KVEventBatch)
    [event] = decoder.decode(replayed).events
    assert (event.block_hashes, event.token_ids, event.medium) == ([2**64 - 1, 2], [1, 2, 3, 4], "GPU")
    assert decoder.decode(payload).events == [kv_events.AllBlocksCleared()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"enable_kv_cache_events": true}', KvEventsConfig()),
        ('{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "t"}', KvEventsConfig(topic="t")),
        ('{"publisher": "zmq", "replay_endpoint": null}', KvEventsConfig()),
        ('{"enable_kv_cache_events": true, "buffer_steps": 5, "hwm": 6}', KvEventsConfig(buffer_steps=5, hwm=6)),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', None),
        ('{"enable_kv_cache_events": false, "publisher": "zmq"}', None),
        ('{"endpoint": "tcp://*:5557"}', None),
        ("{}", None),
    ],
)
def test_configurations_of_vllm_and_sglang_are_parsed(text: str, expected: KvEventsConfig | None) -> None:
    assert parse_kv_events(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tcp://*:5557", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"end_point": "tcp://*:1"}', r"no members called end_point \(did you mean endpoint\?\)"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events is 'yes'; it must be true or false"),
        ('{"endpoint": 5557}', "endpoint is 5557; it must be a text"),
        ('{"hwm": 0}', "hwm is 0; it must be a whole number of at least 1"),
        ('{"hwm": true}', "hwm is True; it must be a whole number"),
        ('{"publisher": "kafka"}', 'publisher is \'kafka\'; it must be "zmq" or "null"'),
    ],
)
def test_the_error_for_an_invalid_configuration_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_kv_events(text)


def test_the_error_for_a_missing_pyzmq_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"--kv-events-config needs pyzmq: pip install .*\[kv-events\]"):
        parse_kv_events('{"publisher": "zmq"}')


def test_a_used_port_or_an_invalid_endpoint_is_an_error_at_start(publish_at: Any) -> None:
    _, endpoints = publish_at()
    for name in ("endpoint", "replay_endpoint"):
        for endpoint, problem in ((endpoints["endpoint"], "Address already in use"), ("5557", "Invalid argument")):
            with pytest.raises(ConfigError, match=f"--kv-events-config: cannot use {name} {endpoint}: {problem}"):
                publish_at(**{name: endpoint})


def test_a_publisher_that_connects_to_a_broker_has_no_endpoint_for_others() -> None:
    publisher = KvEventPublisher(KvEventsConfig("tcp://127.0.0.1:9"))  # as in vLLM, an endpoint without a wildcard
    assert publisher.describe("127.0.0.1", 16) is None
    publisher.stop()


@pytest.mark.parametrize("import_events", [import_vllms, import_sglangs])
def test_our_subscriber_reads_publishers_of_other_engines(import_events: Callable[[], Any], tmp_path: Path) -> None:
    kv_events = import_events()
    endpoint, replay_endpoint = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    publisher = kv_events.ZmqEventPublisher(0, endpoint, replay_endpoint, topic="kv-events")
    try:
        with Subscriber(endpoint, replay_endpoint, "kv-events") as subscriber:

            def publish(*events: Any) -> None:
                publisher.publish(kv_events.KVEventBatch(ts=1.5, events=list(events)))

            last = subscriber.wait_for_connection(lambda: publish(kv_events.AllBlocksCleared()))
            required = {"lora_id": None, "lora_name": None}
            publish(
                kv_events.BlockStored(
                    block_hashes=[3], parent_block_hash=2, token_ids=[5, 6], block_size=2, medium="GPU", **required
                ),
                kv_events.BlockRemoved(block_hashes=[2], medium="GPU"),
            )
            while (received := subscriber.receive())[1].events == [AllBlocksCleared()]:
                last = received[0]
            sequence, batch = received
            stored = BlockStored([3], 2, [5, 6], 2, medium="GPU")
            assert (sequence, batch.events) == (last + 1, [stored, BlockRemoved([2], "GPU")])
            assert batch.data_parallel_rank == 0
            replayed = subscriber.replay(sequence)
            assert replayed == [(sequence, batch)]
            assert subscriber.replay(0)[0][0] == 0
    finally:
        publisher.shutdown()
