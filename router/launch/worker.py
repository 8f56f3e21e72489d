"""run_worker: runs one of several worker processes that serve one port."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket

import uvloop

from router.app import RouterApp
from router.launch.logs import open_log, send_log
from router.launch.server import RouterServer, prepare_process
from router.settings import SettingsError
from router.sharing import Link, WorkerTask, receive_connections

__all__ = ["run_worker"]

_log = logging.getLogger("router.launch.worker")

# A worker reports its number of connections to the supervisor: after COUNT_SECONDS if the number has changed, else
# after ALIVE_SECONDS. A worker that reports nothing for ``QUIET_SECONDS`` (``supervisor.py``) is assumed to hang.
COUNT_SECONDS = 0.25
ALIVE_SECONDS = 1.0


def run_worker(task: WorkerTask) -> None:
    """Serve the connections that the supervisor passes to this process, until the supervisor stops it."""
    # Ctrl-C reaches all processes of a terminal. Only the supervisor handles it, and then stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # see ``start_forkserver``
    open_log(task.settings)
    prepare_process()
    uvloop.run(_serve(task))


async def _serve(task: WorkerTask) -> None:
    link = Link(task.name, is_first=task.is_first, is_replacement=task.is_replacement, num_replaced=task.num_replaced)
    await link.connect(task.channel)
    if task.settings.log_output == "file":
        send_log(functools.partial(link.send_message, "log"))
    (handler,) = logging.getLogger().handlers
    if not task.is_first:  # warnings about the settings are the same in all workers, so only the first logs them
        handler.setLevel(logging.ERROR)
    try:
        router = RouterApp(task.settings, link)
        server = RouterServer(router)
    except SettingsError as exc:
        link.send_message("refuse", str(exc))
        return
    finally:
        handler.setLevel(logging.NOTSET)
    link.subscribe_to_leave(router.prepare_to_leave)
    link.subscribe_to_stop(server.stop_serving)
    taking = asyncio.ensure_future(_take_connections(task.connections, server, link))
    # uvicorn handles SIGTERM while it serves. If only this worker gets the signal, it ends and is replaced.
    try:
        await server.serve(sockets=[])
    except SettingsError as exc:
        link.send_message("refuse", str(exc))
    taking.cancel()
    link.disconnect()


async def _take_connections(channel: socket.socket, server: RouterServer, link: Link) -> None:
    """Serve the connections that arrive over ``channel``, and report their number, until the server stops."""
    loop = asyncio.get_running_loop()
    while not server.started:
        await asyncio.sleep(0.01)
    num_taken = 0
    opening: set[asyncio.Task[object]] = set()

    def take_waiting() -> None:
        nonlocal num_taken
        num_received, connections = receive_connections(channel)
        num_taken += num_received
        for connection in connections:
            connection.setblocking(False)
            work = loop.create_task(loop.connect_accepted_socket(make_protocol, connection, ssl=server.config.ssl))
            opening.add(work)
            work.add_done_callback(functools.partial(_on_opened, opening))

    make_protocol = server.make_protocol
    channel.setblocking(False)
    loop.add_reader(channel, take_waiting)
    link.send_message("ready")
    reported, reported_at = (-1, -1), 0.0
    try:
        while not server.should_exit:
            counts = (len(server.server_state.connections), num_taken)
            if counts != reported or loop.time() - reported_at >= ALIVE_SECONDS:
                reported, reported_at = counts, loop.time()
                link.send_message("count", *counts)
            await asyncio.sleep(COUNT_SECONDS)
    finally:
        loop.remove_reader(channel)


def _on_opened(opening: set[asyncio.Task[object]], work: asyncio.Task[object]) -> None:
    opening.discard(work)
    if not work.cancelled() and (failure := work.exception()) is not None:
        _log.debug("a client's connection failed at its start: %s", failure)
