"""Connections that one process hands to another over a socket between them; here both ends are of one process."""

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
    """A client's end of a connection, and the router's."""
    client, connection = socket.socketpair()
    client.settimeout(30)
    with client, connection:
        yield client, connection


def test_a_connection_works_on_the_other_side_and_here_it_may_be_closed(channel: Pair, client: Pair) -> None:
    assert send_connection(channel[0], client[1])
    client[1].close()
    number, (received,) = receive_connections(channel[1])
    with received:
        received.sendall(b"yes")
    assert number == 1
    assert client[0].recv(3) == b"yes"


def test_connections_come_in_their_order_and_only_some_at_once(channel: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_AT_ONCE", 3)
    sent = []
    for _ in range(5):
        with socket.socket() as connection:
            assert send_connection(channel[0], connection)
            sent.append(inode_of(connection))
    received = []
    for expected in (3, 2, 0):
        number, connections = receive_connections(channel[1])
        assert number == expected
        for each in connections:
            received.append(inode_of(each))
            each.close()
    assert received == sent


def inode_of(connection: socket.socket) -> int:
    """What two descriptors of one connection have in common."""
    return os.fstat(connection.fileno()).st_ino


def test_a_connection_that_is_lost_on_its_way_is_counted(channel: Pair, caplog: pytest.LogCaptureFixture) -> None:
    channel[0].send(b"c")  # as it arrives in a process that has no descriptor left
    assert receive_connections(channel[1]) == (1, [])
    assert "a client's connection was lost" in caplog.text


def test_what_came_before_the_other_end_closed_is_received(client: Pair) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert send_connection(ours, client[1])
        ours.close()
        number, (received,) = receive_connections(theirs)
        received.close()
    assert number == 1


def test_a_process_that_takes_none_at_present_is_not_waited_for(channel: Pair, client: Pair) -> None:
    num_sent = 0
    while send_connection(channel[0], client[1]):
        num_sent += 1
    received = 0
    while found := receive_connections(channel[1])[1]:
        received += len(found)
        for each in found:
            each.close()
    assert received == num_sent > 0


def test_a_process_that_is_gone_takes_none(channel: Pair, client: Pair) -> None:
    channel[1].close()
    assert not send_connection(channel[0], client[1])
