"""Instance: one registered instance, its health, its circuit breaker and its load.

State diagram::

    (unknown) ──register, probe ok──► healthy ◄──probes ok, or registers again and answers a probe──┐
                                         │                                                          │
                                         └──refused a connection, or failed some probes──► unhealthy┘
                                                                                              │
    removed ◄──heartbeat stopped; or without heartbeats, after the same time unhealthy────────┘

An instance becomes unhealthy immediately if it refuses a connection. Other failures, such as a connection that is not
accepted in time, count only if they repeat, and are no sign that its process has ended.

Only healthy instances are selected that are neither paused (reported by the instance, or by operator command) nor
draining (by operator command). An instance with an open circuit breaker is selected only if there is no other. An
unhealthy instance that becomes healthy again is regarded as restarted, unless it was only unreachable: its cache is
regarded as empty, and its share of requests increases gradually.

A drain lasts until the operator ends it or, if this was requested, until another process uses the instance's address.
There are two signs of another process: a registration names a different process (``Registration.identity``), or
connections were refused, as after the end of a process, and then the address answers again.

All times are seconds of one monotonic clock, ``time.monotonic`` unless the caller injects another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec

from router.fleet.breaker import Breaker
from router.fleet.registration import Registration, Role

if TYPE_CHECKING:
    from router.http import Address
    from router.policies import InstanceLoad

__all__ = ["STATES", "FleetEvents", "Instance", "Orders"]

_log = logging.getLogger("router.fleet.instance")

STATES = ("healthy", "paused", "draining", "unhealthy")
"""The values of ``Instance.state``."""

# A restarted instance first gets this fraction of its share, and all of it after this time.
FIRST_WEIGHT = 0.1
SLOW_START_SECONDS = 10.0
# The kinds of change for ``Instance.log_change``.
_HEALTH, _MODELS, _DRAIN, _PAUSE, _WEIGHT = "health", "models", "drain", "pause", "weight"
# An instance may list any number of adapters.
MAX_MODELS_LOGGED = 10

_P = ParamSpec("_P")


class Signal(Generic[_P]):
    """One kind of event. Its callbacks are called in the order in which they subscribed."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[_P, None]] = []

    def subscribe(self, callback: Callable[_P, None]) -> None:
        """Call ``callback`` at each event from now on."""
        self._callbacks.append(callback)

    def emit(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call all subscribers."""
        for callback in self._callbacks:
            callback(*args, **kwargs)


class FleetEvents:
    """Events of the instances of one registry."""

    def __init__(self) -> None:
        self.generation = 0
        """Increases whenever the instances that may be selected or paired change."""
        self.arrivals = Signal[[Instance]]()
        """An instance was added, or replaced by another kind of instance."""
        self.changes = Signal[[]]()
        """The generation has increased."""
        self.failures = Signal[[Instance]]()
        """The probes of an instance keep failing; sent at each failed probe."""
        self.logged = Signal[[Instance]]()
        """This process has logged a change of an instance."""
        self.lost_caches = Signal[[str]]()
        """The instance with this key has restarted or is gone, and so lost its cache."""
        self.new_models = Signal[[Instance]]()
        """The models of an instance have changed."""
        self.new_orders = Signal[[]]()
        """The operator commands for an instance have changed."""
        self.troubles = Signal[[Instance]]()
        """An instance has become unhealthy."""

    def bump_generation(self) -> None:
        """Invalidate prepared selections."""
        self.generation += 1
        self.changes.emit()


class Orders(NamedTuple):
    """The operator commands in effect for an instance."""

    draining: bool = False
    until_restart: bool = False
    paused: bool = False
    share: float = 1.0


class Instance:
    """One registered instance: its registration, its health, and its load."""

    def __init__(
        self,
        registration: Registration,
        load: InstanceLoad,
        events: FleetEvents,
        now: float,
        *,
        proven: bool,
        permanent: bool = False,
        has_heartbeat: bool = False,
    ) -> None:
        """
        Args:
            proven: whether it has answered a probe and so is healthy.
            permanent: whether it is never removed, even without any sign of life.
            has_heartbeat: whether it has registered more than once.
        """
        self.key = registration.key
        """Its key, ``host_ip:port``; all its registrations have the same one."""
        self.address: Address = registration.address
        """Where it listens. Host and port never change, but TLS may."""
        self.registration = registration
        self.role: Role = registration.role
        self.head_line = _make_head_line(registration)
        """Response headers that report to the client which instance has served its request."""
        self.load = load
        self.breaker = Breaker()
        self.healthy = proven
        self.trouble = "" if proven else "it has not answered a probe yet"
        self.draining = self.paused = False
        """Whether the operator lets it take no new requests: drained permanently, or paused for now."""
        self.drains_until_restart = False
        """Whether draining ends when another process uses its address."""
        self.models: frozenset[str] | None = registration.models or None
        """Names of the models that it serves; empty if it does not list them, None if it was not queried yet."""
        self.models_asked_at = -math.inf
        self.said: dict[str, str] = {}
        """For each kind, the last change that any process of this router has logged."""
        self.share = 1.0
        """Factor set by the operator for its share of the requests."""
        self.permanent, self.has_heartbeat = permanent, has_heartbeat
        self.last_registered = self.last_healthy = now
        self._events = events
        self._proven = proven
        self._warm_at = now
        self._failed_probes = self._passed_probes = 0
        self._may_be_another = False  # process: it was unhealthy, not just unreachable
        self._has_refused = False  # a connection since it was last drained: its process may have ended

    def __repr__(self) -> str:
        load = f"requests={self.load.requests} tokens={self.load.tokens}"
        breaker = "" if self.breaker.state == "closed" else f" breaker={self.breaker.state}"
        return f"<Instance {self.role.value} {self.key} {self.state}{breaker} {load}>"

    @property
    def state(self) -> str:
        """One of ``STATES``."""
        if not self.healthy:
            return "unhealthy"
        if self.draining:
            return "draining"
        return "paused" if self.paused or self.registration.is_paused else "healthy"

    @property
    def is_available(self) -> bool:
        """Whether it may be selected."""
        return self.healthy and not self.draining and not self.paused and not self.registration.is_paused

    @property
    def orders(self) -> Orders:
        """The commands in effect for it."""
        return Orders(self.draining, self.drains_until_restart, self.paused, self.share)

    def to_record(self) -> dict[str, Any]:
        """Return, as plain values, what another process must know of it: registration, signs of life and commands."""
        return {
            "fields": dict(self.registration.fields),
            "has_heartbeat": self.has_heartbeat,
            "permanent": self.permanent,
            "models": None if self.models is None else sorted(self.models),
            "orders": self.orders._asdict(),
        }

    def weight(self, now: float) -> float:
        """Return the fraction of its share of requests that it should get: less than ``share`` shortly after a
        restart.
        """
        if now >= self._warm_at:
            return self.share
        return self.share * max(FIRST_WEIGHT, 1.0 - (self._warm_at - now) / SLOW_START_SECONDS)

    def serves(self, model: str) -> bool:
        """Return whether it serves ``model``, or may serve it because it lists no models; ``""`` is any model."""
        if not model:
            return True
        return self.models is not None and (not self.models or model in self.models)

    def set_models(self, models: frozenset[str] | None, asked_at: float, *, is_told: bool = False) -> None:
        """Note the models that it serves: its answer, or None if it gave none.

        Args:
            is_told: as in ``log_change``.
        """
        self.models_asked_at = asked_at
        models = self.registration.models or models
        if self.models != models:
            if models is not None:
                told = ", ".join(sorted(models)[:MAX_MODELS_LOGGED]) or "any model, for all it tells"
                self.log_change(_MODELS, logging.INFO, f"serves {told}", is_told=is_told)
            self.models = models
            self._events.bump_generation()
            self._events.new_models.emit(self)

    def is_silent(self, now: float, expiry: float) -> bool:
        """Return whether it is gone. A permanent instance never is.

        An instance with heartbeats is gone when these stop for ``expiry`` seconds. An instance that registered only
        once (older FastDeploy, or a person with curl) has no heartbeats, and is gone after the same time in unhealthy
        state.
        """
        last_sign = self.last_registered if self.has_heartbeat else self.last_healthy
        return not self.permanent and now - last_sign > expiry

    def log_change(self, kind: str, level: int, change: str, why: str = "", *, is_told: bool = False) -> None:
        """Log a change that every process of the router notices. Only the first process logs it.

        Args:
            kind: what has changed. Within one kind, a change is logged once until a different change follows.
            is_told: whether another process has reported the change, and logs it itself.
        """
        is_said = is_told or self.said.get(kind) == change
        self.said[kind] = change
        _log.log(
            logging.DEBUG if is_said else level,
            "%s instance %s %s%s",
            *(self.role.value, self.key, change, f": {why}" if why else ""),
        )
        if not is_said:
            self._events.logged.emit(self)

    def note_health_elsewhere(self, now: float) -> None:
        """Note that another process finds it healthy, so it is not gone, though it may be unreachable from here."""
        self.last_healthy = now

    def renew_registration(self, registration: Registration, now: float, *, proven: bool = True) -> None:
        """Note that it has registered again: a heartbeat, possibly with changed fields. Its running requests stay
        counted.

        Args:
            proven: whether it is healthy, or has answered a probe.
        """
        known, self.registration, self.role = self.registration, registration, registration.role
        self.address, self.head_line = registration.address, _make_head_line(registration)
        self.has_heartbeat = True
        self.last_registered = now
        if proven and not self.healthy:  # else it was not probed, and earlier failed probes stay counted
            self.mark_healthy(now)
        if registration.models:
            self.set_models(registration.models, self.models_asked_at)
        if registration.identity != known.identity:
            self._on_restart()
        elif proven:
            self._note_answer()
        if registration != known:
            self._events.bump_generation()
        if registration.takes_cache_salt != known.takes_cache_salt:
            self._events.arrivals.emit(self)

    def apply_orders(self, orders: Orders, *, is_told: bool = False) -> None:
        """Carry out commands that another process received, or an earlier one.

        Args:
            is_told: as in ``log_change``.
        """
        self.set_draining(orders.draining, until_restart=orders.until_restart, is_told=is_told)
        self.set_pause(orders.paused, is_told=is_told)
        self.set_share(orders.share, is_told=is_told)

    def set_draining(self, draining: bool, *, until_restart: bool = False, is_told: bool = False) -> None:
        """Start or end draining. Its running requests continue.

        Args:
            until_restart: whether draining ends automatically when another process uses its address.
            is_told: as in ``log_change``.
        """
        drains_until_restart = draining and until_restart
        has_changed = (self.draining, self.drains_until_restart) != (draining, drains_until_restart)
        self.drains_until_restart = drains_until_restart
        self._has_refused = False
        if self.draining != draining:
            change = "drains" if draining else "takes requests again"
            self.log_change(_DRAIN, logging.INFO, change, is_told=is_told)
            self.draining = draining
            self._events.bump_generation()
        if has_changed:
            self._events.new_orders.emit()

    def set_pause(self, paused: bool, *, is_told: bool = False) -> None:
        """Start or end a pause. Its running requests continue."""
        if self.paused != paused:
            change = "is paused" if paused else "is paused no more"
            self.log_change(_PAUSE, logging.INFO, change, is_told=is_told)
            self.paused = paused
            self._events.bump_generation()
            self._events.new_orders.emit()

    def set_share(self, share: float, *, is_told: bool = False) -> None:
        """Set the factor for its share of requests. With 0, it gets only requests that no other instance can take."""
        if self.share != share:
            self.log_change(_WEIGHT, logging.INFO, f"has weight {share:g}", is_told=is_told)
            self.share = share
            self._events.bump_generation()
            self._events.new_orders.emit()

    def record_success(self, now: float) -> None:
        """Note a request that got the first valid byte of its answer."""
        if self.breaker.failures and self.breaker.record_success():
            _log.info("%s instance %s answers requests again", self.role.value, self.key)
            self._warm_at = now + SLOW_START_SECONDS
            self._events.bump_generation()

    def record_failure(self, now: float, reason: str) -> None:
        """Note a failed request: no answer, a broken one, or a 5xx; not 429 or 4xx."""
        if self.breaker.record_failure(now):
            _log.warning("%s instance %s keeps failing requests: %s", self.role.value, self.key, reason)
            self._events.bump_generation()

    def begin_half_open_trial(self, now: float) -> None:
        """Send it one request although its breaker is not closed, and no other one until the trial ends."""
        self.breaker.begin_half_open_trial(now)
        self._events.bump_generation()

    def mark_healthy(self, now: float) -> None:
        """Make it selectable (again)."""
        self.last_healthy = now
        self._failed_probes = 0
        may_be_another, self._may_be_another = self._may_be_another, False
        if self.healthy:
            return
        self.healthy, self.trouble = True, ""
        self.breaker = Breaker()
        if self._proven:
            self.log_change(_HEALTH, logging.INFO, "is healthy again")
            if may_be_another:
                self._warm_at = now + SLOW_START_SECONDS
                self._events.lost_caches.emit(self.key)
        else:
            self.log_change(_HEALTH, logging.INFO, "answered its first probe")
            self._proven = True
        self._events.bump_generation()

    def mark_unhealthy(self, trouble: str, *, is_out_of_reach: bool = False) -> None:
        """Stop selecting it until probes, or a registration, show that it works. Its running requests continue.

        Args:
            is_out_of_reach: whether no connection could be made, which is no sign that its process has ended.
        """
        self._passed_probes = 0
        self._may_be_another |= not is_out_of_reach
        self.trouble = trouble
        if self.healthy:
            self.log_change(_HEALTH, logging.WARNING, "is unhealthy", trouble)
            self.healthy = False
            self._events.bump_generation()
            self._events.troubles.emit(self)

    def record_passed_probe(self, now: float, threshold: int) -> None:
        """Note a passed probe. ``threshold`` of them in a row make it healthy; one, if it never was."""
        self._failed_probes = 0
        self._note_answer()
        self._passed_probes += 1
        if self._passed_probes >= threshold or not self._proven:
            self.mark_healthy(now)

    def record_failed_probe(
        self, trouble: str, threshold: int, *, may_finish: bool = False, is_out_of_reach: bool = False
    ) -> None:
        """Note a failed probe. ``threshold`` of them in a row make it unhealthy, and its requests fail.

        Args:
            may_finish: whether it only rejects new requests, like a process that is shutting down: running requests
                continue.
            is_out_of_reach: as in ``mark_unhealthy``.
        """
        self._has_refused |= may_finish
        self._may_be_another |= not is_out_of_reach
        self._passed_probes = 0
        self._failed_probes += 1
        if self._failed_probes >= threshold:
            self.mark_unhealthy(trouble, is_out_of_reach=is_out_of_reach)
            if not may_finish:
                self._events.failures.emit(self)

    def _note_answer(self) -> None:
        """Note that it has answered a probe.

        After a refused connection that shows another process, if its ``start_id`` will not: a firewall refuses, too.
        """
        if self._has_refused:
            self._has_refused = False
            if self.drains_until_restart and not self.registration.start_id:
                self._on_restart()

    def _on_restart(self) -> None:
        """Handle that another process uses its address."""
        if self.drains_until_restart:
            self.set_draining(False)
        self._events.lost_caches.emit(self.key)


def _make_head_line(registration: Registration) -> bytes:
    name = f"x-router-{registration.role.value}"
    lines = f"{name}: {registration.key}\r\n"
    if registration.role is not Role.MIXED:  # the names that FastDeploy's Go router uses for the instances of pairs
        lines += f"{name}-url: {registration.address.url}\r\n"
    return lines.encode()
