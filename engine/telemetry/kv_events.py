"""Sends KV events over ZeroMQ, with vLLM's configuration. ``kvcommon/kv_events.py`` describes the format."""

from __future__ import annotations

import importlib.util
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcommon.hints import list_unknown
from kvcommon.kv_events import (
    END_OF_REPLAY,
    Event,
    decode_sequence,
    encode_batch,
    encode_sequence,
    is_wildcard,
    name_host,
)
from kvstore_backend import ConfigError

if TYPE_CHECKING:
    import zmq

__all__ = ["KvEventPublisher", "KvEventsConfig", "parse_kv_events"]

log = logging.getLogger(__name__)

_MISSING = "--kv-events-config needs pyzmq: pip install '/path/to/this/repository[kv-events]'"
_QUEUE = "inproc://batches"
_RANK = 0


# The members of the JSON and their types. They are vLLM's; "bind" is SGLang's.
_TYPES: Mapping[str, type[Any]] = {
    "enable_kv_cache_events": bool,
    "publisher": str,
    "endpoint": str,
    "replay_endpoint": str,
    "topic": str,
    "buffer_steps": int,
    "hwm": int,
    "max_queue_size": int,
    "bind": bool,
}
_WANTED: Mapping[type[Any], str] = {bool: "true or false", str: "a text", int: "a whole number of at least 1"}


@dataclass(frozen=True)
class KvEventsConfig:
    """Configuration of the publication of KV events, with vLLM's names, meanings and defaults."""

    endpoint: str = "tcp://*:5557"
    """The address at which subscribers get the events."""
    replay_endpoint: str | None = None
    """The address for requests to send earlier batches again, or None if such requests are not possible."""
    topic: str = ""
    buffer_steps: int = 10_000
    """Number of the most recent batches that are stored, to send them again on request."""
    hwm: int = 100_000
    """Maximum number of batches that wait for one slow subscriber. Further batches are lost for this subscriber."""
    max_queue_size: int = 100_000
    """Maximum number of batches that wait to be sent. Further batches are lost."""
    bind: bool | None = None
    """Whether to bind ``endpoint`` (True), or to connect to it, which a broker has bound (False).

    If it is None, the publisher connects if ``endpoint`` is a TCP address of one host, and binds otherwise.
    """

    @property
    def is_bound(self) -> bool:
        """Whether ``endpoint`` is bound here, so that subscribers connect to it."""
        if self.bind is not None:
            return self.bind
        return is_wildcard(self.endpoint) or not self.endpoint.startswith("tcp:")


def parse_kv_events(text: str) -> KvEventsConfig | None:
    """Parse the JSON of ``--kv-events-config``, which may be vLLM's or SGLang's.

    Returns:
        The configuration, or None if no events are published.

    Raises:
        ConfigError: the JSON is wrong, or pyzmq is not installed. The message is one sentence.
    """
    try:
        values = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--kv-events-config is not valid JSON: {exc}") from None
    if not isinstance(values, dict):
        raise ConfigError('--kv-events-config is not a JSON object, such as {"enable_kv_cache_events": true}')
    values = {name: value for name, value in values.items() if value is not None}
    if unknown := list_unknown(sorted(values.keys() - _TYPES.keys()), _TYPES):
        raise ConfigError(f"--kv-events-config has no members called {unknown}; valid: {', '.join(_TYPES)}")
    for name, value in values.items():
        kind = _TYPES[name]
        if type(value) is not kind or (kind is int and value < 1):
            raise ConfigError(f"--kv-events-config: {name} is {value!r}; it must be {_WANTED[kind]}")
    is_enabled, publisher = values.pop("enable_kv_cache_events", None), values.pop("publisher", "")
    if publisher not in ("", "zmq", "null"):
        raise ConfigError(f'--kv-events-config: publisher is {publisher!r}; it must be "zmq" or "null"')
    # vLLM has "enable_kv_cache_events", and "zmq" is its default publisher. SGLang has only the publisher.
    if is_enabled is False or publisher == "null" or not (is_enabled or publisher):
        return None
    if importlib.util.find_spec("zmq") is None:
        raise ConfigError(_MISSING)
    return KvEventsConfig(**values)


class KvEventPublisher:
    """Gives batches of KV events sequence numbers, sends them on its own thread, and sends batches again on request.

    The constructor opens the sockets, so that a wrong address is reported before the model is loaded.

    Raises:
        ConfigError: a socket cannot be opened at an endpoint.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        import zmq

        self._config = config
        self._sequences = itertools.count()
        self._is_full = False
        self._context = zmq.Context()
        try:
            # The queue is a pair of sockets, so that the thread can wait for batches and for requests together.
            self._queued = self._open(zmq.PULL, "", _QUEUE, 1)
            self._queue = self._context.socket(zmq.PUSH)
            self._queue.set_hwm(config.max_queue_size)
            self._queue.connect(_QUEUE)
            self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm, bind=config.is_bound)
            self._replay = None
            if config.replay_endpoint:
                # ZeroMQ drops messages above the high-water mark. Sent messages still count until half of the mark was
                # sent. So twice the number of messages of a replay is enough.
                hwm = 2 * (config.buffer_steps + 1)
                self._replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, hwm)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        opened = {"endpoint": self._pub, "replay_endpoint": self._replay}
        self._endpoints = {name: each.get_string(zmq.LAST_ENDPOINT) for name, each in opened.items() if each}
        self._thread = threading.Thread(target=self._send_batches, name="kv-events", daemon=True)

    def _open(self, kind: int, name: str, endpoint: str, hwm: int, *, bind: bool = True) -> zmq.Socket[bytes]:
        import zmq

        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set_hwm(hwm)
        opened.linger = 0
        opened.ipv6 = "::" in endpoint or "[" in endpoint
        try:
            if bind:
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except zmq.ZMQError as exc:
            raise ConfigError(f"--kv-events-config: cannot use {name} {endpoint}: {exc.strerror}") from None
        return opened

    def start(self) -> None:
        """Start the thread that sends batches."""
        where = self._endpoints if self._config.is_bound else self._config.endpoint
        log.info("KV events are published at %s", where)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the sockets. Batches that were not sent are lost."""
        self._queue.close(linger=0)
        if self._thread.is_alive():
            self._context.term()  # interrupts the thread, which then closes its sockets
            self._thread.join()
        else:
            self._context.destroy(linger=0)

    def publish(self, events: Sequence[Event]) -> None:
        """Queue the events of one step as a batch, without waiting. Always call this on the same thread.

        If the queue is full, the batch is lost. Subscribers notice that its sequence number is missing.
        """
        import zmq

        frames = encode_sequence(next(self._sequences)), encode_batch(time.time(), events, _RANK)
        try:
            self._queue.send_multipart(frames, flags=zmq.NOBLOCK)
            self._is_full = False
        except zmq.Again:
            if not self._is_full:
                log.warning(
                    "KV events are lost, because %d batches wait to be sent already; raise max_queue_size",
                    self._config.max_queue_size,
                )
            self._is_full = True

    def describe(self, host: str, block_size: int) -> Mapping[str, Any] | None:
        """Return the addresses, the topic and the block size for a subscriber.

        Args:
            host: this machine's address, as the subscriber reaches it.
            block_size: number of tokens in a block.

        Returns:
            The description, or None if this instance connects to a broker, so subscribers cannot connect to it.
        """
        if not self._config.is_bound:
            return None
        endpoints = {name: name_host(endpoint, host) for name, endpoint in self._endpoints.items()}
        return {**endpoints, "topic": self._config.topic, "block_size": block_size}

    def _send_batches(self) -> None:
        """Send queued batches, and answer requests for earlier batches, until ``stop`` ends ZeroMQ's context."""
        import zmq

        topic = self._config.topic.encode()
        sent: deque[tuple[bytes, bytes]] = deque(maxlen=self._config.buffer_steps if self._replay else 0)
        poller = zmq.Poller()
        poller.register(self._queued, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while True:
                for ready, _ in poller.poll():
                    if ready is self._replay:
                        self._replay_batches(self._replay, topic, sent)
                        continue
                    sequence, batch = self._queued.recv_multipart()
                    self._pub.send_multipart([topic, sequence, batch])
                    sent.append((sequence, batch))
        except zmq.ContextTerminated:
            pass
        except zmq.ZMQError:
            log.exception("Sending KV events failed; no more events are sent until this instance restarts")
        finally:
            for opened in filter(None, (self._queued, self._pub, self._replay)):
                opened.close(linger=0)

    def _replay_batches(self, replay: zmq.Socket[bytes], topic: bytes, sent: deque[tuple[bytes, bytes]]) -> None:
        """Answer one request for earlier batches: send all batches from the requested number on, then an end marker.

        Args:
            replay: the socket with the request.
            topic: topic of the batches.
            sent: the last batches, each with its encoded number.
        """
        request = replay.recv_multipart()
        try:
            client, empty, first = request
            start = decode_sequence(first)
        except ValueError:
            log.debug("A request for a replay of KV events is ignored, because its frames are wrong: %s", request)
            return
        for sequence, batch in sent:
            if decode_sequence(sequence) >= start:
                replay.send_multipart([client, empty, topic, sequence, batch])
        replay.send_multipart([client, empty, b"", encode_sequence(END_OF_REPLAY), b""])
