"""Direct hand-overs between real instances without a pool, also if one dies during a hand-over.

The test relays the messages at the connector port between prefill (P) and decode (D), and acts at certain messages.
``tests/engine/test_direct_handover.py`` tests all other faults of a hand-over in one process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.cluster import Instance, ask, instance
from tests.end_to_end.test_prefill_decode import conversation, text
from tests.support.ports import free_port
from tests.support.waiting import wait_until

DIRECT = 'kvstore_handed_over_total{way="direct"}'


class Connector:
    """A relay between P and D's connector port. It calls ``on`` with the type of each message before it forwards it."""

    def __init__(self, decode_port: int, on: Callable[[str], object]) -> None:
        self._decode_port = decode_port
        self._on = on
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            prefill, _ = self._server.accept()
            decode = socket.create_connection(("127.0.0.1", self._decode_port))
            self._sockets += [prefill, decode]
            threading.Thread(target=self._relay, args=(prefill, decode), daemon=True).start()
            self._relay(decode, prefill)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in source.makefile("rb"):
                self._on(json.loads(line)["type"])
                target.sendall(line)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)  # also after a reset, if the source was killed


class Pair:
    """P and D, which get requests without a router."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        self.prefill, self.decode = prefill, decode
        card = next(line for line in decode.process.output.splitlines() if "ready" in line)
        assert "decode" in card
        self._threads = ThreadPoolExecutor(4)

    def ask(self, messages: list[dict[str, str]], port: int, **fields: Any) -> tuple[Any, Any]:
        """Send a request to P and D; return the futures of both responses. P must connect to D at ``port``."""
        info = {"decode_ip": "127.0.0.1", "decode_connector_port": port}
        asked = {"request_id": str(uuid.uuid4()), "disaggregate_info": info, "max_tokens": 20, **fields}
        return tuple(self._threads.submit(ask, side.url, messages, **asked) for side in (self.prefill, self.decode))  # type: ignore[return-value]


def is_free(side: Instance) -> bool:
    """Return whether all blocks are free, according to the metrics."""
    reserved = side.metric("kvstore_reserved_blocks")
    return side.metric("fastdeploy:available_gpu_block_num") == BLOCKS and not reserved


def until_free(*sides: Instance) -> None:
    wait_until(lambda: all(map(is_free, sides)), "all blocks to be free")


BLOCKS = 256


@contextlib.contextmanager
def side(folder: Path, model: Path, role: str, connector: int) -> Iterator[Instance]:
    flags = ("--splitwise-role", role, "--cache-transfer-protocol", "tcp", "--pd-comm-port", str(connector))
    with instance(folder, model, *flags, "--num-gpu-blocks-override", str(BLOCKS)) as running:
        yield running


@contextlib.contextmanager
def relayed(port: int, on: Callable[[str], object]) -> Iterator[int]:
    connector = Connector(port, on)
    try:
        yield connector.port
    finally:
        connector.close()


def test_either_side_of_a_direct_hand_over_dies_during_the_write(tmp_path: Path, model: Path, cold: Instance) -> None:
    """One test for both, because the start of instances takes longer than the faults."""
    port = free_port()
    with contextlib.ExitStack() as running:
        prefill = running.enter_context(side(tmp_path, model, "prefill", free_port()))
        decode = running.enter_context(side(tmp_path, model, "decode", port))
        pair = Pair(prefill, decode)

        # A hand-over without faults.
        legs = pair.ask(conversation("a"), port)
        assert text(legs[1].result()) == text(ask(cold.url, conversation("a"), max_tokens=20))
        assert decode.metric(DIRECT) == 1
        until_free(prefill, decode)

        # P dies during the write, which cannot end, because D is stopped.
        has_lent = threading.Event()

        def stop_decode(kind: str) -> None:
            if kind == "reserved":
                decode.process.signal(signal.SIGSTOP)
                has_lent.set()

        def is_writing() -> bool:
            # Before D has allocated blocks, this would also be true before the request arrives at P.
            is_computed = has_lent.is_set() and not prefill.metric("fastdeploy:num_requests_running")
            return is_computed and not is_free(prefill)

        def computes_while_blocks_are_held() -> bool:
            is_computing = decode.metric("fastdeploy:num_requests_running") > 0
            return is_computing and decode.metric("kvstore_reserved_blocks") > 0

        with relayed(port, stop_decode) as between:
            # The response must take long enough to be observed.
            expected = text(ask(cold.url, conversation("e"), max_tokens=800))
            legs = pair.ask(conversation("e"), between, max_tokens=800)
            wait_until(is_writing, "prefill to write")
            prefill.process.kill()
            decode.process.signal(signal.SIGCONT)
            wait_until(computes_while_blocks_are_held, "decode to compute, and to hold blocks until late bytes are in")
            assert text(legs[1].result()) == expected
            until_free(decode)
            with pytest.raises(httpx.TransportError):
                legs[0].result()

        # D dies during the write.
        prefill = pair.prefill = running.enter_context(side(tmp_path, model, "prefill", free_port()))
        has_lent.clear()
        with relayed(port, stop_decode) as between:
            legs = pair.ask(conversation("f"), between)
            wait_until(is_writing, "prefill to write")
            decode.process.kill()
            assert legs[0].result()["status"] == 200
            until_free(prefill)
            with pytest.raises(httpx.TransportError):
                legs[1].result()
