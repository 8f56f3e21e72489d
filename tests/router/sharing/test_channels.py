"""Connections that one process passes to another over a socket. Here, both ends are in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from router.sharing import channels
from router.sharing.channels import receive_connections, send_connection

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def channel() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
    for end in (ours, theirs):
        end.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def client() -> Iterator[Pair]:
    """The client's and the router's end of a connection."""
    client, connection = socket.socketpair()
    client.settimeout(30)
    with client, connection:
        yield client, connection


def test_a_passed_connection_works_after_its_close_at_the_sender(channel: Pair, client: Pair) -> None:
    assert send_connection(channel[0], client[1])
    client[1].close()
    number, (received,) = receive_connections(channel[1])
    with received:
        received.sendall(b"yes")
    assert number == 1
    assert client[0].recv(3) == b"yes"


def test_connections_arrive_in_order_and_in_limited_numbers(channel: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_AT_ONCE", 3)
    sent = []
    for _ in range(5):
        with socket.socket() as connection:
            assert send_connection(channel[0], connection)
            sent.append(get_inode(connection))
    received = []
    for expected in (3, 2, 0):
        number, connections = receive_connections(channel[1])
        assert number == expected
        for each in connections:
            received.append(get_inode(each))
            each.close()
    assert received == sent


def get_inode(connection: socket.socket) -> int:
    """Return the inode, which all descriptors of one connection share."""
    return os.fstat(connection.fileno()).st_ino


def test_a_connection_that_is_lost_is_counted(channel: Pair, caplog: pytest.LogCaptureFixture) -> None:
    channel[0].send(b"c")  # without its descriptor, as in a process that has none free
    assert receive_connections(channel[1]) == (1, [])
    assert "a client's connection was lost" in caplog.text


def test_a_connection_from_before_the_close_of_the_channel_is_received(client: Pair) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert send_connection(ours, client[1])
        ours.close()
        number, (received,) = receive_connections(theirs)
        received.close()
    assert number == 1


def test_a_full_queue_of_connections_does_not_block_the_sender(channel: Pair, client: Pair) -> None:
    num_sent = 0
    while send_connection(channel[0], client[1]):
        num_sent += 1
    received = 0
    while found := receive_connections(channel[1])[1]:
        received += len(found)
        for each in found:
            each.close()
    assert received == num_sent > 0


def test_an_ended_process_gets_no_connection(channel: Pair, client: Pair) -> None:
    channel[1].close()
    assert not send_connection(channel[0], client[1])
