"""Rules (oracles) for requests: each one ends once, in time, with the right tokens or a known and justified error.

``ALLOWED_CODES`` are the errors in the documentation. An error is justified if there was a fault during the request, or
less than ``RECOVERY_SECONDS`` before it.
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

# Time in which routers recover after a fault: three probes of 5 s with pauses of 5 s, a heartbeat, the slow start, and
# 5 s of the breaker.
RECOVERY_SECONDS = 45.0
# Time after its start in which an instance registers at all routers.
REGISTERED_SECONDS = 10.0
# Maximum time between the choice of an instance and the request's arrival there.
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
    """The times of faults, which can justify errors."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float, str, str]] = []

    def add(self, start: float, end: float, kind: str, target: str = "") -> None:
        """Add a fault. ``target`` is the instance with the fault, if it concerns a single instance."""
        self._spans.append((start, end, kind, target))

    def between(self, start: float, end: float, kinds: Iterable[str] = ()) -> bool:
        """Return whether there was a fault during this time or shortly before. ``kinds``: only these kinds count."""
        wanted = tuple(kinds)
        return any(
            begun <= end and start <= ended + RECOVERY_SECONDS and (not wanted or kind in wanted)
            for begun, ended, kind, _ in self._spans
        )

    def find_single(self, start: float, end: float, kinds: Iterable[str]) -> str:
        """Return the only instance with faults during this time or shortly before; "" if there are several.

        It is also "" if there was a fault of another kind than ``kinds``.
        """
        near = [each for each in self._spans if each[0] <= end and start <= each[1] + RECOVERY_SECONDS]
        targets = {target for *_, kind, target in near if kind in kinds}
        is_single = len(targets) == 1 and all(kind in kinds for *_, kind, _ in near)
        return targets.pop() if is_single else ""

    @property
    def last(self) -> float:
        """Time of the end of the last fault."""
        return max((end for _, end, *_ in self._spans), default=0.0)


class Requests:
    """Judges the results of clients' requests.

    Args:
        world: gets the failures.
        troubles: the times of faults.
        closings: the times in which no instance may take requests, because of orders.
        patience: maximum duration of a request in seconds, by the documented time-outs.
        survives: returns whether a request must end well although an instance fails.
    """

    CUTTING = ("router", "client_link")  # kinds of faults that may cut a response
    # Kinds of faults after which another instance serves the request, or continues its answer.
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
        self._world = world
        self._troubles = troubles
        self._closings = closings
        self._patience = patience
        self._survives = survives
        self._judged: set[int] = set()
        self._late: set[int] = set()

    def check(self, clients: Iterable[Client]) -> None:
        """Judge the requests that have ended since the last call, and find those that take too long."""
        for client in clients:
            for result in client.results.values():
                if result.outcome and result.number not in self._judged:
                    self._judged.add(result.number)
                    self._judge(result)
                elif not result.outcome:
                    self._check_patience(result)

    def _check_patience(self, result: Result) -> None:
        patience = self._patience + result.details.get("pause", 0.0)
        began = result.began
        if result.behind is not None:  # its answer comes after the other one's, which its client may read late
            if result.behind.ended is None:
                return
            began = result.behind.ended
        is_late = self._world.now - began > patience and result.number not in self._late
        if is_late and not self._troubles.between(result.began, self._world.now, self.CUTTING):
            self._late.add(result.number)
            self._world.fail("patience", f"request {result.number} has not ended after {patience:g} s")

    def _judge(self, result: Result) -> None:
        number, ended = result.number, result.ended or 0.0
        description = f"request {number} ({result.path}): {result.outcome} {result.status} {result.code} {result.why}"
        if result.outcome == "wrong":
            self._world.fail("tokens", description)
        elif result.outcome in ("cut", "refused"):
            # The router passes on a response that is no generation as it arrives. So if an instance's response is cut,
            # the client's is cut, too, and so are all later requests on its connection.
            kinds = () if result.is_cut_passed_on or result.is_behind_cut else self.CUTTING
            if not self._troubles.between(result.began, ended, kinds) and "pause" not in result.details:
                self._world.fail("cut", description)
        elif result.outcome == "error":
            self._judge_error(result, description, ended)

    def _judge_error(self, result: Result, description: str, ended: float) -> None:
        planned = result.code.startswith("answers_") or "as planned" in result.why
        if result.code not in ALLOWED_CODES and not planned and result.status < 500:
            self._world.fail("error-code", description)
        if result.status == 500 and not (planned or result.has_own_error):
            self._world.fail("error-500", description)
        if result.code in ("queue_full", "queue_timeout", "rate_limit_exceeded") and result.status in (0, 200, 429):
            return
        if result.details.get("is_aborted"):
            return
        if result.code == "aborted" or "aborted" in result.why:
            self._world.fail("aborted", f"its client did not abort it: {description}")
            return
        if (planned or result.status in (200, 502, 503)) and self._closings.between(result.began, ended):
            return
        if not self._troubles.between(result.began, ended):
            self._world.fail("unjustified", f"there was no fault from {result.began:.3f} to {ended:.3f}: {description}")
            return
        single = self._troubles.find_single(result.began, ended, self.SURVIVED)
        if single and self._survives(result, single):
            self._world.fail("survives", f"only {single} had a fault: {description}")


class Orders:
    """Checks orders of operators: an instance that is drained or paused gets no later requests.

    Args:
        world: gets the failures.
        requests: the requests by their prompts.
        is_mixed: whether all instances have the role mixed. Then an instance is chosen just before a request is sent,
            unlike a decode instance.
    """

    def __init__(self, world: World, requests: dict[tuple[int, ...], Result], *, is_mixed: bool) -> None:
        self._world = world
        self._requests = requests
        self._is_mixed = is_mixed
        self._closed: dict[str, float] = {}
        self._latest: dict[str, dict[str, Any]] = {}
        self._unanswered: list[dict[str, Any]] = []
        self._overlapping: list[dict[str, Any]] = []
        self._ends_with_process: set[str] = set()
        self._parted_until = 0.0
        self._restarted_at: dict[str, float] = {}
        self._num_seen = 0

    def part(self, seconds: float) -> None:
        """Do not check orders for ``seconds``, because meanwhile messages do not reach all processes of the routers."""
        self.forget()
        self._parted_until = max(self._parted_until, self._world.now + seconds)

    def on_sent(self, key: str, path: str, body: dict[str, Any]) -> None:
        """Forget earlier orders for an instance, because a new order for it was sent."""
        if any(earlier["instance"] == key for earlier in self._unanswered):
            self._overlapping.append(body)  # either of the two may take effect last
        self._unanswered.append(body)
        self._latest[key] = body
        self._closed.pop(key, None)

    def forget(self, key: str | None = None, *, process_only: bool = False) -> None:
        """Forget the orders for an instance, because routers may have forgotten them.

        Args:
            key: the instance; None: all instances.
            process_only: forget only orders that end with the process of the instance.
        """
        for each in [key] if key is not None else list(self._closed):
            if not process_only or each in self._ends_with_process:
                self._closed.pop(each, None)
                self._latest.pop(each, None)

    def on_restart(self, key: str) -> None:
        """Forget the orders that end with the process of an instance, because it was restarted."""
        self.forget(key, process_only=True)
        self._restarted_at[key] = self._world.now

    def check(self, client: Client) -> None:
        """Record the orders that were answered since the last call."""
        for path, body, answer, sent_at, answered_at in client.orders[self._num_seen :]:
            self._unanswered = [other for other in self._unanswered if other is not body]
            if any(other is body for other in self._overlapping):
                continue
            if sent_at < self._parted_until or path not in ("/admin/pause", "/admin/drain"):
                continue
            key = body["instance"]
            closes = path == "/admin/pause" or (path == "/admin/drain" and not body.get("undrain"))
            if answer is None or answer.status != 200 or self._latest.get(key) is not body or not closes:
                continue
            if body.get("until_restart") and sent_at < self._restarted_at.get(key, -1e9) + REGISTERED_SECONDS:
                continue
            self._closed[key] = answered_at
            self._ends_with_process.discard(key)
            if body.get("until_restart"):
                self._ends_with_process.add(key)
        self._num_seen = len(client.orders)

    def on_arrival(self, instance: Instance, generation: Generation, asked: Asked) -> None:
        """Report a failure if a request arrives at an instance that must not get it."""
        result = self._requests.get(tuple(generation.prompt))
        closed = self._closed.get(instance.key)
        if result is None or closed is None:
            return
        arrival = f"request {result.number}, sent by its client at {result.began:.3f}, came to {instance.key}"
        if result.began > closed:
            self._world.fail("drained", f"{arrival}, which takes none since {closed:.3f}")
        elif self._is_mixed and asked.sent_at / 1e9 > closed + CONNECT_SECONDS:
            self._world.fail("drained", f"{arrival} at {asked.sent_at / 1e9:.3f}; it takes none since {closed:.3f}")
