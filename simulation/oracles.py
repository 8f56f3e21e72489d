"""What must hold of requests, whatever the world does: each ends once, in time, with the right tokens or a known error.

``ALLOWED_CODES`` are the errors that the documentation names. An error is justified by trouble: a fault that was there,
or had been there less than ``RECOVERY_SECONDS`` before the request's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simulation.actors.client import Client, Result
from simulation.actors.engines import Generation
from simulation.actors.http import Asked
from simulation.actors.instance import Instance
from simulation.world import World

__all__ = ["ALLOWED_CODES", "RECOVERY_SECONDS", "Orders", "Requests", "Troubles"]

# Three probes with 5 s each, 5 s apart, and a heartbeat; then the slow start and the breaker's 5 s.
RECOVERY_SECONDS = 45.0
# A connection to an instance that was chosen before may take so long.
CONNECT_SECONDS = 4.0

ALLOWED_CODES = frozenset(
    {
        *("no_instance", "no_pair", "prefill_failed", "decode_failed", "mixed_failed", "instance_failed"),
        *(
            "stream_stalled",
            "request_timeout",
            "preempted",
            "cannot_continue",
            "aborted",
            "queue_timeout",
            "queue_full",
        ),
        *("rate_limit_exceeded", "router_stopping", "instance_redirects", "instance_refused", "keeper_failed"),
        *("request_incomplete", "model_not_found", "router_overloaded", "not_as_pair"),
    }
)


class Troubles:
    """When something was wrong, and for how long: what may justify an error."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, str, str]] = []

    def add(self, start: float, end: float, kind: str, target: str = "") -> None:
        """Something was wrong for this time; with one instance alone, if it is the ``target``."""
        self._spans.append((start, end, kind, target))

    def between(self, start: float, end: float, kinds: Iterable[str] = ()) -> bool:
        """Whether anything, or one of these kinds, was wrong then, or shortly before."""
        wanted = tuple(kinds)
        return any(
            begun <= end and start <= ended + RECOVERY_SECONDS and (not wanted or kind in wanted)
            for begun, ended, kind, _ in self._spans
        )

    def find_single(self, start: float, end: float, kinds: Iterable[str]) -> str:
        """Return the only instance that had troubles then, or shortly before, if all were of these kinds; or ``""``."""
        near = [each for each in self._spans if each[0] <= end and start <= each[1] + RECOVERY_SECONDS]
        targets = {target for *_, kind, target in near if kind in kinds}
        is_single = len(targets) == 1 and all(kind in kinds for *_, kind, _ in near)
        return targets.pop() if is_single else ""

    @property
    def last(self) -> float:
        """When the last one ended."""
        return max((end for _, end, *_ in self._spans), default=0.0)


class Requests:
    """Judges how clients' requests end. Faults of these kinds may cut answers: ``cutting``."""

    CUTTING = ("router", "client_link")
    # After these another instance serves the request, or goes on with its answer.
    SURVIVED = ("kill", "cuts", "closes_unasked", "half_head", "engine_dies", "answers_500", "answers_503")

    def __init__(
        self,
        world: World,
        troubles: Troubles,
        closings: Troubles,
        *,
        patience: float,
        survives: Callable[[Result, str], bool],
    ) -> None:
        """
        Args:
            closings: when operators let instances take nothing, so that there may be none.
            patience: the seconds within which a request must end, by the documented time-outs.
            survives: whether a request is one of those that end well although an instance fails.
        """
        self._world = world
        self._troubles = troubles
        self._closings = closings
        self._patience = patience
        self._survives = survives
        self._judged: set[int] = set()
        self._late: set[int] = set()

    def check(self, clients: Iterable[Client]) -> None:
        """Judge the requests that have ended since the last call, and those that take too long."""
        for client in clients:
            for result in client.results.values():
                if result.outcome and result.number not in self._judged:
                    self._judged.add(result.number)
                    self._judge(result)
                elif not result.outcome:
                    self._check_patience(result)

    def _check_patience(self, result: Result) -> None:
        patience = self._patience + result.details.get("pause", 0.0)
        is_late = self._world.now - result.began > patience and result.number not in self._late
        if is_late and not self._troubles.between(result.began, self._world.now, self.CUTTING):
            self._late.add(result.number)
            self._world.fail("patience", f"request {result.number} has not ended after {patience:g} s")

    def _judge(self, result: Result) -> None:
        number, ended = result.number, result.ended or 0.0
        told = f"request {number} ({result.path}): {result.outcome} {result.status} {result.code} {result.why}"
        if result.outcome == "wrong":
            self._world.fail("tokens", told)
        elif result.outcome in ("cut", "refused"):
            if not self._troubles.between(result.began, ended, self.CUTTING) and "pause" not in result.details:
                self._world.fail("cut", told)
        elif result.outcome == "error":
            self._judge_error(result, told, ended)

    def _judge_error(self, result: Result, told: str, ended: float) -> None:
        planned = result.code.startswith("answers_") or "as planned" in result.why
        if result.code not in ALLOWED_CODES and not planned and result.status < 500:
            self._world.fail("error-code", told)
        if result.status == 500 and not planned:
            self._world.fail("error-500", told)
        if result.code in ("queue_full", "queue_timeout", "rate_limit_exceeded") and result.status in (0, 200, 429):
            return
        if result.details.get("is_aborted"):
            return
        if result.code == "aborted" or "aborted" in result.why:
            self._world.fail("aborted", f"nobody aborted it: {told}")
            return
        if result.status in (502, 503) and self._closings.between(result.began, ended):
            return
        if not self._troubles.between(result.began, ended):
            self._world.fail("unjustified", f"nothing was wrong from {result.began:.3f} to {ended:.3f}: {told}")
            return
        single = self._troubles.find_single(result.began, ended, self.SURVIVED)
        if single and self._survives(result, single):
            self._world.fail("survives", f"something was wrong with {single} alone: {told}")


class Orders:
    """What operators were promised: an instance that drains, or is paused, gets no request that comes later."""

    def __init__(self, world: World, requests: dict[tuple[int, ...], Result], *, is_mixed: bool) -> None:
        """
        Args:
            requests: by their prompts.
            is_mixed: instances are chosen just before a request is sent, unlike decode instances.
        """
        self._world = world
        self._requests = requests
        self._is_mixed = is_mixed
        self._closed: dict[str, float] = {}
        self._latest: dict[str, dict[str, Any]] = {}
        self._ends_with_process: set[str] = set()
        self._num_seen = 0

    def on_sent(self, key: str, path: str, body: dict[str, Any]) -> None:
        """An order about an instance is on its way: what was promised before may not hold."""
        self._latest[key] = body
        self._closed.pop(key, None)

    def forget(self, key: str | None = None, *, process_only: bool = False) -> None:
        """An instance is another process, or is forgotten by routers; None: all of them are."""
        for each in [key] if key is not None else list(self._closed):
            if not process_only or each in self._ends_with_process:
                self._closed.pop(each, None)
                self._latest.pop(each, None)

    def check(self, client: Client) -> None:
        """Note the orders that were answered since the last call."""
        for path, body, answer, _, answered_at in client.orders[self._num_seen :]:
            if path not in ("/admin/pause", "/admin/drain"):
                continue
            key = body["instance"]
            closes = path == "/admin/pause" or (path == "/admin/drain" and not body.get("undrain"))
            if answer is None or answer.status != 200 or self._latest.get(key) is not body or not closes:
                continue
            self._closed[key] = answered_at
            self._ends_with_process.discard(key)
            if body.get("until_restart"):
                self._ends_with_process.add(key)
        self._num_seen = len(client.orders)

    def on_arrival(self, instance: Instance, generation: Generation, asked: Asked) -> None:
        """A request has come to an instance."""
        result = self._requests.get(tuple(generation.prompt))
        closed = self._closed.get(instance.key)
        if result is None or closed is None:
            return
        what = f"request {result.number}, sent by its client at {result.began:.3f}, came to {instance.key}"
        if result.began > closed:
            self._world.fail("drained", f"{what}, which takes none since {closed:.3f}")
        elif self._is_mixed and asked.sent_at / 1e9 > closed + CONNECT_SECONDS:
            self._world.fail("drained", f"{what} at {asked.sent_at / 1e9:.3f}; it takes none since {closed:.3f}")
