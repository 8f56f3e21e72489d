"""Supervisor: starts workers, replaces those that die or hang, and passes new connections to the least busy worker.

The supervisor accepts connections itself. So if a worker dies, only the connections that it served end, and the other
workers get the new connections. While no worker lives, new connections wait in the listener's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any, NamedTuple

from router.fleet import AwakeClock
from router.sharing.admission_server import AdmissionServer
from router.sharing.channels import MessageChannel, open_channel, send_connection
from router.sharing.hub import Hub
from router.sharing.shared_state import SharedState
from router.sharing.silence import Silence

if TYPE_CHECKING:
    from router.access import Admission
    from router.settings import RouterSettings

__all__ = ["LEAVING", "Supervisor", "WorkerTask", "start_forkserver"]

_log = logging.getLogger("router.sharing.supervisor")

# QUIET: a worker that sends no message for this time gets no new connections. HUNG: a worker that could have sent a
# message for this time, and did not, is killed; see ``silence.py``.
QUIET_SECONDS = 2.0
HUNG_SECONDS = 15.0
# If a worker dies sooner than this after its start, the pause before the next start doubles, up to LAST_PAUSE_SECONDS.
EARLY_DEATH_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 5.0
# Stopping workers that are still running this time after the grace time are killed.
STOP_SECONDS = 5.0
CHECK_SECONDS = 0.5
# Maximum number of connections accepted in one turn of the event loop.
MAX_ACCEPTED_AT_ONCE = 64
# If a connection cannot be accepted because no file descriptor is left, none is accepted for this time.
ACCEPT_PAUSE_SECONDS = 0.5


LEAVING = "stopping: /ready returns 503; requests are accepted for %g s more, so that load balancers notice it first"


class WorkerTask(NamedTuple):
    """The data that the supervisor gives a new worker."""

    settings: RouterSettings
    name: str
    is_first: bool
    is_replacement: bool
    num_replaced: int
    """Number of workers that have replaced a dead worker, including this worker if it is a replacement."""
    channel: socket.socket
    """The worker's end of the channel to the supervisor."""
    connections: socket.socket
    """The socket over which the worker receives clients' connections."""


def start_forkserver(module: str) -> None:
    """Start the process from which workers are forked, without waiting for it. It imports ``module`` in advance."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    # The new process inherits that these signals are blocked, and workers unblock them. Ctrl-C reaches it, too, and
    # would end it while it imports. This process gets a signal that arrives now as soon as the other one has started.
    resource_tracker.ensure_running()  # otherwise the fork server's start would start it, which unblocks the signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class Supervisor:
    """Runs the workers of one router."""

    def __init__(
        self,
        settings: RouterSettings,
        listener: socket.socket,
        run_worker: Callable[[WorkerTask], None],
        graces: Mapping[signal.Signals, float],
        admission: Admission,
    ) -> None:
        """
        Args:
            settings: the router's settings.
            listener: a socket that is bound and listening.
            run_worker: the main function of a worker. It sends the message ``ready`` or ``refuse``, and then
                repeatedly ``count``, its number of connections.
            graces: for each signal that ends the router, the seconds that running requests get.
            admission: the router's limits.
        """
        self._settings = settings
        self._listener = listener
        self._run_worker = run_worker
        self._graces = graces
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._prefix = secrets.token_hex(4)
        self._workers: dict[str, _Worker] = {}
        self._waiting: socket.socket | None = None
        self._clock = AwakeClock()
        self._hub = Hub(self._prefix)
        if admission.is_limited:
            self._hub.admission = AdmissionServer(admission, self._hub.send_limits)
        self._pause = FIRST_PAUSE_SECONDS
        self._num_started = 0
        self._was_ready = asyncio.Event()
        self._is_stopping = False
        self._stop: asyncio.TimerHandle | None = None  # set when the router has to end after a delay
        self._kills_at = 0.0
        self._refusal = ""
        self._starts: set[asyncio.Task[None]] = set()
        self._sharing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Supervisor {list(self._workers.values())}>"

    async def run_until_signal(self, on_ready: Callable[[], None]) -> str:
        """Serve until a signal arrives, and return when all workers have ended.

        Args:
            on_ready: called when all workers have started.

        Raises:
            SettingsError: the address of the shared state is invalid.

        Returns:
            A sentence that says why the workers cannot start; ``""`` after a normal end.
        """
        loop = asyncio.get_running_loop()
        ticking = asyncio.ensure_future(self._clock.keep_ticking())
        shared_state, sharing = None, None
        if self._settings.shared_state:
            on_message = functools.partial(self._hub.on_message, "")
            self._hub.routers = shared_state = SharedState(
                self._settings.shared_state, self._prefix, on_message, self._hub.list_records, self._clock.now
            )
            sharing = asyncio.ensure_future(shared_state.keep_connection())
        for each in self._graces:
            loop.add_signal_handler(each, self._on_signal, each)
        self._listener.setblocking(False)
        for place in range(self._settings.num_workers):
            await self._start_worker(place, is_replacement=False)
        ready = asyncio.ensure_future(self._announce_ready(on_ready, shared_state))
        while self._workers or self._starts:
            await asyncio.sleep(CHECK_SECONDS if not self._is_stopping else 0.02)
            self._check_workers()
        ready.cancel()
        if sharing is not None and shared_state is not None:
            await shared_state.disconnect(sharing)
        ticking.cancel()
        return self._refusal

    async def _announce_ready(self, on_ready: Callable[[], None], shared_state: SharedState | None) -> None:
        await self._was_ready.wait()
        if shared_state is not None:  # load the instances that the other routers know before the first client's request
            await shared_state.wait_for_records()
            await self._share_prefixes(shared_state)
        on_ready()
        asyncio.get_running_loop().add_reader(self._listener, self._accept_connections)

    async def _share_prefixes(self, routers: SharedState) -> None:
        """Send the workers the prefixes that the other routers know."""
        if prefixes := await routers.fetch_prefixes():
            await self._hub.share_prefixes(prefixes)

    async def _start_worker(self, place: int, *, is_replacement: bool) -> None:
        self._num_started += 1
        num_replaced = max(0, self._num_started - self._settings.num_workers)
        # A name is never used again: messages about a dead worker must not apply to the next one.
        name = f"{self._prefix}-{place}-{self._num_started}"
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            channel, their_channel = socket.socketpair()
            connections, their_connections = socket.socketpair(type=socket.SOCK_DGRAM)
            for mine, other in ((channel, their_channel), (connections, their_connections)):
                ours.callback(mine.close)
                theirs.callback(other.close)
                mine.setblocking(False)
            task = WorkerTask(
                self._settings, name, place == 0, is_replacement, num_replaced, their_channel, their_connections
            )
            process = self._context.Process(target=self._run_worker, args=(task,), daemon=True)
            process.start()
            ours.pop_all()  # ``_Worker.close`` closes them
        worker = self._workers[name] = _Worker(name, place, process, connections, self._clock)
        worker.channel = await open_channel(
            channel, lambda message: self._on_message(worker, message), lambda: self._on_lost(worker)
        )
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_death, worker)
        self._hub.add_worker(name, worker.channel)
        if self._is_stopping:  # the other workers were notified while this one started
            worker.channel.send_message("stop", max(0.0, self._kills_at - STOP_SECONDS - self._clock.now()))
        elif self._stop is not None:
            self._hub.send_to_workers("leave")

    def _on_message(self, worker: _Worker, message: list[Any]) -> None:
        match message:
            case ["ready"]:
                worker.is_ready = True
                worker.silence.note_message()
                if self._was_ready.is_set() and len(self._workers) == 1 and self._hub.routers is not None:
                    self._sharing = asyncio.ensure_future(self._share_prefixes(self._hub.routers))  # no worker has them
                elif all(each.is_ready for each in self._workers.values()):
                    self._was_ready.set()
            case ["count", int(connections), int(taken)]:
                worker.silence.note_message()
                worker.num_connections, worker.num_taken = connections, taken
            case ["log", level, logger, text]:
                logging.getLogger(logger).log(level, "%s", text)
            case ["refuse", sentence]:
                self._on_refusal(worker, sentence)
            case _:
                self._hub.on_message(worker.name, message)

    def _on_refusal(self, worker: _Worker, sentence: str) -> None:
        """Handle a worker that cannot start. During the first start, the router ends."""
        if self._was_ready.is_set():
            _log.error("worker %s cannot start: %s", worker.name, sentence)
        elif not self._refusal:
            self._refusal = sentence
            self._stop_workers(0.0)

    def _on_lost(self, worker: _Worker) -> None:
        """Stop passing connections to a worker that has closed its channel.

        ``_on_death`` handles the end of the worker's process.
        """
        worker.is_ready = False

    def _on_death(self, worker: _Worker) -> None:
        """Handle the end of a worker's process, and start another worker."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.process.sentinel)
        worker.process.join()
        worker.close()
        del self._workers[worker.name]
        self._hub.forget_worker(worker.name)
        if self._is_stopping:
            return
        code = worker.process.exitcode or 0
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        _log.error("worker %s %s; another worker replaces it", worker.name, ending)
        died_early = time.monotonic() - worker.started_at < EARLY_DEATH_SECONDS
        self._pause = min(LAST_PAUSE_SECONDS, 2 * self._pause) if died_early else FIRST_PAUSE_SECONDS
        start = asyncio.ensure_future(self._replace_worker(worker.place))
        self._starts.add(start)
        start.add_done_callback(self._starts.discard)

    async def _replace_worker(self, place: int) -> None:
        while True:
            await asyncio.sleep(self._pause)
            if self._is_stopping:
                return
            try:
                await self._start_worker(place, is_replacement=True)
            except (OSError, EOFError) as exc:  # no memory or file descriptor is left, or the fork server has died
                _log.error("a worker cannot be started; the next attempt is in %g s: %s", LAST_PAUSE_SECONDS, exc)
                self._pause = LAST_PAUSE_SECONDS
            else:
                return

    def _check_workers(self) -> None:
        """Kill workers that hang, and workers that should stop but have not ended in time."""
        now = self._clock.now()
        for worker in self._workers.values():
            if self._is_stopping:
                if now > self._kills_at:
                    worker.process.kill()
            elif now - worker.silence.began_at > QUIET_SECONDS:
                self._handle_silence(worker, now - worker.silence.began_at)

    def _handle_silence(self, worker: _Worker, seconds: float) -> None:
        """Kill a worker that hangs. If it only waits for a CPU, log a warning."""
        counted = worker.silence.measure()
        if counted > HUNG_SECONDS:
            _log.error("worker %s has not responded for %.0f s and is killed", worker.name, counted)
            worker.process.kill()
        elif seconds > HUNG_SECONDS and not worker.silence.is_reported:
            worker.silence.is_reported = True
            message = "worker %s has not responded for %.0f s; it waited for a CPU or a disk for %.0f s of this time"
            _log.warning(message, worker.name, seconds, seconds - counted)

    def _on_signal(self, sent: signal.Signals) -> None:
        delay, grace = self._settings.shutdown_delay_secs, self._graces[sent]
        if self._is_stopping or self._stop is not None:
            self._stop_workers(0.0)
        elif delay and sent is signal.SIGTERM:
            _log.info(LEAVING, delay)
            self._hub.send_to_workers("leave")
            self._stop = asyncio.get_running_loop().call_later(delay, self._stop_workers, grace)
        else:
            self._stop_workers(grace)

    def _stop_workers(self, grace: float) -> None:
        """Accept no new connections, and let the workers finish their requests within ``grace`` seconds."""
        if self._stop is not None:
            self._stop.cancel()
        if not self._is_stopping:
            self._is_stopping = True
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            if self._waiting is not None:
                self._waiting.close()
        self._kills_at = self._clock.now() + grace + STOP_SECONDS
        self._hub.send_to_workers("stop", grace)

    def _accept_connections(self) -> None:
        """Pass waiting connections to workers. While there is no worker, connections wait in the listener's queue."""
        for _ in range(MAX_ACCEPTED_AT_ONCE):
            workers = self._list_by_load()
            if not workers:
                self._pause_accepting(FIRST_PAUSE_SECONDS)
                return
            try:
                connection = self._waiting or self._listener.accept()[0]
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as exc:
                _log.error("the router cannot accept another connection: %s", exc.strerror)
                self._pause_accepting(ACCEPT_PAUSE_SECONDS)
                return
            taker = next((each for each in workers if send_connection(each.connections, connection)), None)
            if taker is None:  # all workers have just died, or their sockets are full: try again later
                self._waiting = connection
                self._pause_accepting(FIRST_PAUSE_SECONDS)
                return
            taker.num_given += 1
            connection.close()
            self._waiting = None

    def _pause_accepting(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(seconds, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if not self._is_stopping:
            asyncio.get_running_loop().add_reader(self._listener, self._accept_connections)
            self._accept_connections()

    def _list_by_load(self) -> list[_Worker]:
        """Return the workers that may get a connection, sorted by their number of connections, silent workers last."""
        quiet_before = self._clock.now() - QUIET_SECONDS
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        return sorted(ready, key=lambda worker: (worker.silence.began_at < quiet_before, worker.load))


class _Worker:
    """The supervisor's data about one worker."""

    channel: MessageChannel

    def __init__(
        self, name: str, place: int, process: ForkServerProcess, connections: socket.socket, clock: AwakeClock
    ) -> None:
        self.name = name
        self.place = place
        self.process = process
        self.connections = connections
        self.started_at = time.monotonic()
        assert process.pid is not None  # because the process was started
        self.silence = Silence(process.pid, clock.now)
        self.is_ready = False
        self.num_connections = self.num_taken = self.num_given = 0

    def __repr__(self) -> str:
        return f"<worker {self.name} {self.load} connections>"

    @property
    def load(self) -> int:
        """Number of the worker's connections: the number in its last report, plus those passed to it since then."""
        return self.num_connections + self.num_given - self.num_taken

    def close(self) -> None:
        """Close the supervisor's ends of the worker's sockets."""
        self.channel.close()
        self.connections.close()
