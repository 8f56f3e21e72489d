"""Instance: one registered instance, its health, its circuit breaker and its load.

State diagram::

    (unknown) ──register, probe ok──► healthy ◄──probes ok, or registers again and answers a probe──┐
                                         │                                                          │
                                         └──refused a connection, or failed some probes──► unhealthy┘
                                                                                              │
    removed ◄──heartbeat stopped; or without heartbeats, after the same time unhealthy────────┘

An instance becomes unhealthy immediately if it refuses a connection. Other failures, such as a connection that is not
accepted in time, make it unhealthy only if they repeat, and do not mean that its process has ended.

The router selects only instances that are healthy, not draining (by an operator command) and not paused (by an operator
command, or because the instance reports it). It selects an instance with an open circuit breaker only if no other
instance is left. An unhealthy instance that becomes healthy again is assumed to have restarted, unless the router only
failed to connect and was not refused. After a restart, its cache is assumed to be empty, and its share of the
requests increases gradually.

A drain lasts until the operator ends it. If the operator requested this, it also ends when another process uses the
instance's address. There are two signs of another process. Either a registration names a different process
(``Registration.identity``); or connections were refused, as after the end of a process, and are accepted again.

All times are seconds of one monotonic clock, ``time.monotonic`` unless the caller injects another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
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

# A restarted instance first gets FIRST_WEIGHT of its share of the requests, and all of it after SLOW_START_SECONDS.
FIRST_WEIGHT = 0.1
SLOW_START_SECONDS = 10.0
# Values of ``kind`` for ``Instance.log_change``.
_HEALTH, _MODELS, _DRAIN, _PAUSE, _WEIGHT = "health", "models", "drain", "pause", "weight"
# Number of model names in a log line. An instance may list any number of LoRA adapters.
MAX_MODELS_LOGGED = 10

_P = ParamSpec("_P")


class Signal(Generic[_P]):
    """One kind of event. Its callbacks are called in the order in which they were subscribed."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[_P, None]] = []

    def subscribe(self, callback: Callable[_P, None]) -> None:
        """Call ``callback`` at each later event."""
        self._callbacks.append(callback)

    def emit(self, *args: _P.args, **kwargs: _P.kwargs) -> None:
        """Call all callbacks with these arguments."""
        for callback in self._callbacks:
            callback(*args, **kwargs)


class FleetEvents:
    """The events of all instances in one registry."""

    def __init__(self) -> None:
        self.generation = 0
        """Number that increases when the set of instances that may be selected or paired changes."""
        self.arrivals = Signal[[Instance]]()
        """Event: an instance was added, or has changed whether it separates caches by ``cache_salt``."""
        self.changes = Signal[[]]()
        """Event: ``generation`` has increased."""
        self.failures = Signal[[Instance]]()
        """Event: the probes of an instance fail repeatedly; emitted at each further failed probe, too."""
        self.logged = Signal[[Instance]]()
        """Event: this process has logged a change of an instance. Then other processes do not log this change."""
        self.lost_caches = Signal[[str]]()
        """Event: an instance has restarted or was removed, so its cache is lost. Callbacks get the instance's key."""
        self.new_models = Signal[[Instance]]()
        """Event: the models of an instance have changed."""
        self.new_orders = Signal[[]]()
        """Event: the operator commands for an instance have changed."""
        self.troubles = Signal[[Instance]]()
        """Event: an instance has become unhealthy."""

    def bump_generation(self) -> None:
        """Increase ``generation``, so that lists of candidates from an earlier generation are not used any more."""
        self.generation += 1
        self.changes.emit()


class Orders(NamedTuple):
    """The operator commands that are in effect for an instance."""

    draining: bool = False
    until_restart: bool = False
    paused: bool = False
    share: float = 1.0


class Instance:
    """A registered instance: its registration, its health and its load."""

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
            registration: the instance's registration.
            load: the counters of the instance's requests.
            events: the events of the registry.
            now: the present time.
            proven: whether the instance has responded to a probe, and so is healthy.
            permanent: whether the instance is never removed, even if it does not respond.
            has_heartbeat: whether the instance has registered more than once.
        """
        self.key = registration.key
        """Key of the instance, ``host_ip:port``. It never changes."""
        self.address: Address = registration.address
        """Address at which the instance listens. Host and port never change, but ``tls`` may."""
        self.registration = registration
        self.role: Role = registration.role
        self.head_line = _make_head_line(registration)
        """Header lines of a response that name the instance that has served the request."""
        self.load = load
        self.breaker = Breaker()
        self.healthy = proven
        self.trouble = "" if proven else "it has not responded to a probe yet"
        self.draining = self.paused = False
        """Whether an operator command stops new requests to the instance: a drain, or a pause."""
        self.drains_until_restart = False
        """Whether the drain ends when another process uses the instance's address."""
        self.models: frozenset[str] | None = registration.models or None
        """Names of the models that the instance serves; empty if it lists none, None if it was not queried yet."""
        self.models_asked_at = -math.inf
        """Time at which the instance was last queried for its models."""
        self.logged_changes: dict[str, str] = {}
        """For each kind of change, the last change that any process of this router has logged."""
        self.cache_known: str | None = None
        """How exactly the router knows the instance's cache: ``exact``; ``degraded`` if KV events are missing; None if
        the router reads no KV events of this instance.
        """
        self.share = 1.0
        """Weight from 0 to 1 that an operator has set: a factor of the instance's share of the requests."""
        self.permanent, self.has_heartbeat = permanent, has_heartbeat
        self.last_registered = self.last_healthy = now
        self._events = events
        self._proven = proven
        self._warm_at = now
        self._failed_probes = self._passed_probes = 0
        self._may_be_another = False  # whether another process may use the address, because a probe failed there
        self._has_refused = False  # whether a connection was refused since the drain began: the process may have ended

    def __repr__(self) -> str:
        load = f"requests={self.load.requests} tokens={self.load.tokens}"
        breaker = "" if self.breaker.state == "closed" else f" breaker={self.breaker.state}"
        return f"<Instance {self.role.value} {self.key} {self.state}{breaker} {load}>"

    @property
    def kv_events(self) -> Mapping[str, str]:
        """Endpoints at which the instance publishes its KV events; empty if it publishes none."""
        return self.registration.kv_events

    @property
    def state(self) -> str:
        """The state of the instance, one of ``STATES``."""
        if not self.healthy:
            return "unhealthy"
        if self.draining:
            return "draining"
        return "paused" if self.paused or self.registration.is_paused else "healthy"

    @property
    def is_available(self) -> bool:
        """Whether the instance may be selected for requests."""
        return self.healthy and not self.draining and not self.paused and not self.registration.is_paused

    @property
    def orders(self) -> Orders:
        """The operator commands that are in effect for this instance."""
        return Orders(self.draining, self.drains_until_restart, self.paused, self.share)

    def to_record(self) -> dict[str, Any]:
        """Return the state that other processes need, as plain values, such as models and commands."""
        return {
            "fields": dict(self.registration.fields),
            "has_heartbeat": self.has_heartbeat,
            "permanent": self.permanent,
            "models": None if self.models is None else sorted(self.models),
            "orders": self.orders._asdict(),
        }

    def weight(self, now: float) -> float:
        """Return the factor (0 to 1) by which the instance's part of the requests is multiplied at the time ``now``.

        The factor is ``share``. For some time after a restart of the instance, the factor is less than ``share``.
        """
        if now >= self._warm_at:
            return self.share
        return self.share * max(FIRST_WEIGHT, 1.0 - (self._warm_at - now) / SLOW_START_SECONDS)

    def serves(self, model: str) -> bool:
        """Return whether the instance may serve ``model``: it lists the model or none. Return True for ``""``."""
        if not model:
            return True
        return self.models is not None and (not self.models or model in self.models)

    def set_models(self, models: frozenset[str] | None, asked_at: float, *, is_remote: bool = False) -> None:
        """Set the models that the instance serves.

        Args:
            models: names of the models; None if the instance could not be queried.
            asked_at: time at which the instance was queried.
            is_remote: whether another process has reported the change. That process logs it.
        """
        self.models_asked_at = asked_at
        models = self.registration.models or models
        if self.models != models:
            if models is not None:
                names = ", ".join(sorted(models)[:MAX_MODELS_LOGGED]) or "any model (it lists none)"
                self.log_change(_MODELS, logging.INFO, f"serves {names}", is_remote=is_remote)
            self.models = models
            self._events.bump_generation()
            self._events.new_models.emit(self)

    def is_silent(self, now: float, expiry: float) -> bool:
        """Return whether the instance is assumed to have ended, because it was silent for ``expiry`` seconds.

        If the instance sends heartbeats, the time since the last heartbeat counts. An instance that registered only
        once (older FastDeploy, or a person with curl) sends no heartbeats; then the time since it was last healthy
        counts. For a permanent instance, return False.
        """
        last_sign = self.last_registered if self.has_heartbeat else self.last_healthy
        return not self.permanent and now - last_sign > expiry

    def log_change(self, kind: str, level: int, change: str, why: str = "", *, is_remote: bool = False) -> None:
        """Log a change of the instance, unless another process of this router logs it.

        Args:
            kind: kind of the change. A change is logged again only after a different change of the same kind.
            level: level of the log message.
            change: what has changed.
            why: the reason; ``""`` if there is none to log.
            is_remote: whether another process has reported the change. That process logs it.
        """
        is_logged = is_remote or self.logged_changes.get(kind) == change
        self.logged_changes[kind] = change
        _log.log(
            logging.DEBUG if is_logged else level,
            "%s instance %s %s%s",
            *(self.role.value, self.key, change, f": {why}" if why else ""),
        )
        if not is_logged:
            self._events.logged.emit(self)

    def note_health_elsewhere(self, now: float) -> None:
        """Record that another process can reach the instance. So the instance stays registered here, too."""
        self.last_healthy = now

    def renew_registration(self, registration: Registration, now: float, *, proven: bool = True) -> None:
        """Update the instance after another registration (a heartbeat), whose fields may have changed.

        The load counters still include the running requests.

        Args:
            registration: the new registration.
            now: the present time.
            proven: whether the instance is healthy, or has responded to a probe.
        """
        known, self.registration, self.role = self.registration, registration, registration.role
        self.address, self.head_line = registration.address, _make_head_line(registration)
        self.has_heartbeat = True
        self.last_registered = now
        if proven and not self.healthy:  # otherwise the instance was not probed, and failed probes stay counted
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

    def apply_orders(self, orders: Orders, *, is_remote: bool = False) -> None:
        """Apply operator commands that another process received, or that a snapshot contains.

        Args:
            orders: all commands that are in effect from now on.
            is_remote: whether another process has reported the change. That process logs it.
        """
        self.set_draining(orders.draining, until_restart=orders.until_restart, is_remote=is_remote)
        self.set_pause(orders.paused, is_remote=is_remote)
        self.set_share(orders.share, is_remote=is_remote)

    def set_draining(self, draining: bool, *, until_restart: bool = False, is_remote: bool = False) -> None:
        """Start or end a drain. Running requests continue.

        Args:
            draining: whether to start or to end the drain.
            until_restart: whether the drain ends automatically when another process uses the instance's address.
            is_remote: whether another process has reported the change. That process logs it.
        """
        drains_until_restart = draining and until_restart
        has_changed = (self.draining, self.drains_until_restart) != (draining, drains_until_restart)
        self.drains_until_restart = drains_until_restart
        self._has_refused = False
        if self.draining != draining:
            change = "drains" if draining else "takes requests again"
            self.log_change(_DRAIN, logging.INFO, change, is_remote=is_remote)
            self.draining = draining
            self._events.bump_generation()
        if has_changed:
            self._events.new_orders.emit()

    def set_pause(self, paused: bool, *, is_remote: bool = False) -> None:
        """Start or end a pause. Running requests continue."""
        if self.paused != paused:
            change = "is paused" if paused else "is no longer paused"
            self.log_change(_PAUSE, logging.INFO, change, is_remote=is_remote)
            self.paused = paused
            self._events.bump_generation()
            self._events.new_orders.emit()

    def set_share(self, share: float, *, is_remote: bool = False) -> None:
        """Set the weight of the instance. With weight 0, it gets only requests that no other instance can serve."""
        if self.share != share:
            self.log_change(_WEIGHT, logging.INFO, f"has weight {share:g}", is_remote=is_remote)
            self.share = share
            self._events.bump_generation()
            self._events.new_orders.emit()

    def record_success(self, now: float) -> None:
        """Record that a request got the first valid byte of its response."""
        if self.breaker.failures and self.breaker.record_success():
            _log.info("%s instance %s responds to requests again", self.role.value, self.key)
            self._warm_at = now + SLOW_START_SECONDS
            self._events.bump_generation()

    def record_failure(self, now: float, reason: str) -> None:
        """Record a failed request: no response, an incomplete response, or status 5xx. Status 4xx is no failure."""
        if self.breaker.record_failure(now):
            _log.warning(
                "%s instance %s keeps failing requests, so it gets only single trial requests until one succeeds: %s",
                *(self.role.value, self.key, reason),
            )
            self._events.bump_generation()

    def begin_half_open_trial(self, now: float) -> None:
        """Record that one request is tried at ``now`` although the breaker is not closed; see ``Breaker``."""
        self.breaker.begin_half_open_trial(now)
        self._events.bump_generation()

    def mark_healthy(self, now: float) -> None:
        """Mark the instance as healthy, so that it can be selected."""
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
            self.log_change(_HEALTH, logging.INFO, "responded to its first probe")
            self._proven = True
        self._events.bump_generation()

    def mark_unhealthy(self, trouble: str, *, is_out_of_reach: bool = False) -> None:
        """Mark the instance as unhealthy: it is not selected until a probe succeeds. Running requests continue.

        Args:
            trouble: the reason, in one sentence.
            is_out_of_reach: whether the connection timed out or had no route. Then the process may still run.
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
        """Record a successful probe. ``threshold`` of them in a row make an unhealthy instance healthy again.

        The first successful probe of a new instance makes it healthy.
        """
        self._failed_probes = 0
        self._note_answer()
        self._passed_probes += 1
        if self._passed_probes >= threshold or not self._proven:
            self.mark_healthy(now)

    def record_failed_probe(
        self, trouble: str, threshold: int, *, may_finish: bool = False, is_out_of_reach: bool = False
    ) -> None:
        """Record a failed probe. ``threshold`` of them in a row make the instance unhealthy, and fail its requests.

        Args:
            trouble: why the probe failed, in one sentence.
            threshold: number of failed probes in a row that make the instance unhealthy.
            may_finish: whether the instance refused the connection, like a process that is shutting down. Then running
                requests continue.
            is_out_of_reach: whether the connection timed out or had no route. Then the process may still run.
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
        """Record that the instance has responded to a probe.

        If the instance refused a connection before, its process has probably restarted. But if the instance registers a
        ``start_id``, only another ``start_id`` means a restart, because a firewall can refuse connections, too.
        """
        if self._has_refused:
            self._has_refused = False
            if self.drains_until_restart and not self.registration.start_id:
                self._on_restart()

    def _on_restart(self) -> None:
        """End the drain if it ends with a restart, and report that the cache is lost: another process has started."""
        if self.drains_until_restart:
            self.set_draining(False)
        self._events.lost_caches.emit(self.key)


def _make_head_line(registration: Registration) -> bytes:
    name = f"x-router-{registration.role.value}"
    lines = f"{name}: {registration.key}\r\n"
    if registration.role is not Role.MIXED:  # header names of FastDeploy's Go router for the instances of a pair
        lines += f"{name}-url: {registration.address.url}\r\n"
    return lines.encode()
