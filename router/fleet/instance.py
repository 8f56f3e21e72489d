"""Instance: one registered instance, its health, its circuit breaker and its load.

Its life::

    (unknown) ──register, probe ok──► healthy ◄──probes ok, or registers again and answers a probe──┐
                                         │                                                          │
                                         └──refused a connection, or failed some probes──► unhealthy┘
                                                                                              │
    forgotten ◄──its heartbeat stopped; or it never had one, and stays unhealthy as long──────┘

An instance is unhealthy at once where it refuses a connection. Other failures, such as a connection that nobody accepts
in time, count only together, and say nothing of its process.

Only healthy instances that are neither paused (by their own account, or the operator's order) nor draining (by the
operator's order) are chosen; those whose circuit breaker is open, only if no other can be. One that comes back from
being unhealthy is taken for restarted, unless it was only out of reach: its cache is taken for empty, and it gets its
share little by little.

A drain holds until it is taken back, or, if it was ordered so, until another process has the instance's address. That
is certain where a registration says that a process other than before sends it (``Registration.identity``), and where
connections were refused, as by a process that has ended, and then the address answers again.

All times are seconds of one monotonic clock, ``time.monotonic`` where nobody injects another.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from router.fleet.breaker import Breaker
from router.fleet.events import Signal
from router.fleet.registration import Registration, Role

if TYPE_CHECKING:
    from router.http import Address
    from router.policies import InstanceLoad

__all__ = ["STATES", "FleetEvents", "Instance"]

_log = logging.getLogger("router.fleet.instance")

STATES = ("healthy", "paused", "draining", "unhealthy")
"""The values of ``Instance.state``."""

# An instance that came back gets this part of its share at first, and all of it after this long.
FIRST_WEIGHT = 0.1
SLOW_START_SECONDS = 10.0
# What ``Instance.log_change`` is about.
_HEALTH, _MODELS, _DRAIN, _PAUSE, _WEIGHT = "health", "models", "drain", "pause", "weight"
# An instance may list adapters without end.
MAX_MODELS_LOGGED = 10


class FleetEvents:
    """What happens to the instances of one registry, for those who subscribe."""

    def __init__(self) -> None:
        self.generation = 0
        """Grows whenever other instances may be chosen, or be paired, than before."""
        self.arrivals = Signal[[Instance]]()
        """An instance was added, or another kind of instance has replaced it."""
        self.failures = Signal[[Instance]]()
        """The probes of an instance keep failing; at each failed probe."""
        self.logged = Signal[[Instance]]()
        """This process has logged a change of an instance."""
        self.lost_caches = Signal[[str]]()
        """The instance of this key has restarted or is gone, and so lost its cache."""
        self.new_models = Signal[[Instance]]()
        """An instance serves other models than before."""
        self.new_orders = Signal[[]]()
        """The operator's orders about an instance have changed."""
        self.troubles = Signal[[Instance]]()
        """An instance is not healthy any more."""

    def bump_generation(self) -> None:
        """Void the choices that were prepared."""
        self.generation += 1


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
            proven: it has answered a probe, so that it is healthy.
            permanent: it is never forgotten, however long it is silent.
            has_heartbeat: it has registered more than once.
        """
        self.key = registration.key
        """Its identity, ``host_ip:port``, which every later registration has too."""
        self.address: Address = registration.address
        """Where it listens; its host and port stay, but not whether it speaks TLS."""
        self.registration = registration
        self.role: Role = registration.role
        self.head_line = _make_head_line(registration)
        """The headers by which a client is told that this instance has served its request."""
        self.load = load
        self.breaker = Breaker()
        self.healthy = proven
        self.trouble = "" if proven else "it has not answered a probe yet"
        self.draining = self.paused = False
        """Whether the operator lets it take nothing new: for good, or for the time being."""
        self.drains_until_restart = False
        """Whether draining ends when another process has its address."""
        self.models: frozenset[str] | None = registration.models or None
        """The names of the models that it serves; none of them if it does not tell, None if it was not asked yet."""
        self.models_asked_at = -math.inf
        self.said: dict[str, str] = {}
        """Of each kind the change that this router's log said last, by whichever process."""
        self.share = 1.0
        """The part of its share of requests that the operator lets it have."""
        self.permanent, self.has_heartbeat = permanent, has_heartbeat
        self.last_registered = self.last_healthy = now
        self._events = events
        self._proven = proven
        self._warm_at = now
        self._failed_probes = self._passed_probes = 0
        self._may_be_another = False  # process, since it was last healthy: it was unhealthy, and not just out of reach
        self._has_refused = False  # since it was last drained: its process may have ended

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
        """Whether it may be chosen."""
        return self.healthy and not self.draining and not self.paused and not self.registration.is_paused

    def weight(self, now: float) -> float:
        """The part of its share of requests that it should get: less than ``share`` for a while after it came back."""
        if now >= self._warm_at:
            return self.share
        return self.share * max(FIRST_WEIGHT, 1.0 - (self._warm_at - now) / SLOW_START_SECONDS)

    def serves(self, model: str) -> bool:
        """Whether it serves ``model``, or may for all it tells; ``""`` is any model."""
        if not model:
            return True
        return self.models is not None and (not self.models or model in self.models)

    def set_models(self, models: frozenset[str] | None, asked_at: float, *, is_told: bool = False) -> None:
        """Note the models that it serves: its answer, or None if it has not given one.

        Args:
            is_told: as of ``log_change``.
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
        """Whether it is gone: a permanent one never is.

        One that has shown a heartbeat is gone when that stops for ``expiry`` seconds. One that registered only
        once (older FastDeploy, or a person with curl) has none to stop, and is gone after as long without health.
        """
        last_sign = self.last_registered if self.has_heartbeat else self.last_healthy
        return not self.permanent and now - last_sign > expiry

    def log_change(self, kind: str, level: int, change: str, why: str = "", *, is_told: bool = False) -> None:
        """Log a change that each of the router's processes comes to know: the first one says it, the others do not.

        Args:
            kind: what has changed; of one kind, the same change is said once until there is another one.
            is_told: another process has told of the change, and logs it itself.
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
        """Another process finds it healthy, so it is not gone, though it may be out of reach from here."""
        self.last_healthy = now

    def renew_registration(self, registration: Registration, now: float, *, proven: bool = True) -> None:
        """It has registered again: a heartbeat, perhaps with other fields; the requests it runs stay counted.

        Args:
            proven: it is healthy, or has answered a probe.
        """
        known, self.registration, self.role = self.registration, registration, registration.role
        self.address, self.head_line = registration.address, _make_head_line(registration)
        self.has_heartbeat = True
        self.last_registered = now
        if proven and not self.healthy:  # or else it was not probed, and failed probes before this stay counted
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

    def set_draining(self, draining: bool, *, until_restart: bool = False, is_told: bool = False) -> None:
        """Take no new requests, or take them again; the requests it runs are not touched.

        Args:
            until_restart: draining ends by itself when another process has its address.
            is_told: as of ``log_change``.
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
        """Take no new requests for the time being, or take them again; the requests it runs are not touched."""
        if self.paused != paused:
            change = "is paused" if paused else "is paused no more"
            self.log_change(_PAUSE, logging.INFO, change, is_told=is_told)
            self.paused = paused
            self._events.bump_generation()
            self._events.new_orders.emit()

    def set_share(self, share: float, *, is_told: bool = False) -> None:
        """Take this part of its share of requests; with 0, only those that no other instance can take."""
        if self.share != share:
            self.log_change(_WEIGHT, logging.INFO, f"has weight {share:g}", is_told=is_told)
            self.share = share
            self._events.bump_generation()
            self._events.new_orders.emit()

    def record_success(self, now: float) -> None:
        """Note a request to it that got the first good byte of its answer."""
        if self.breaker.failures and self.breaker.record_success():
            _log.info("%s instance %s answers requests again", self.role.value, self.key)
            self._warm_at = now + SLOW_START_SECONDS
            self._events.bump_generation()

    def record_failure(self, now: float, reason: str) -> None:
        """Note a request to it that failed: no answer, a broken one, or a 5xx; not 429 or 4xx."""
        if self.breaker.record_failure(now):
            _log.warning("%s instance %s keeps failing requests: %s", self.role.value, self.key, reason)
            self._events.bump_generation()

    def begin_half_open_trial(self, now: float) -> None:
        """Send it one request although its breaker is not closed, and no other one for the time being."""
        self.breaker.begin_half_open_trial(now)
        self._events.bump_generation()

    def mark_healthy(self, now: float) -> None:
        """Let it be chosen (again)."""
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
        """Choose it no more until probes, or a registration, show that it works. The requests it runs go on.

        Args:
            is_out_of_reach: no connection could be made, which says nothing of its process.
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
        """Note a good probe; ``threshold`` of them in a row make it healthy, the first one if it never was."""
        self._failed_probes = 0
        self._note_answer()
        self._passed_probes += 1
        if self._passed_probes >= threshold or not self._proven:
            self.mark_healthy(now)

    def record_failed_probe(
        self, trouble: str, threshold: int, *, may_finish: bool = False, is_out_of_reach: bool = False
    ) -> None:
        """Note a bad probe; ``threshold`` of them in a row make it unhealthy, and its requests are given up.

        Args:
            may_finish: it only accepts nothing new, as a process does that is ending: the requests it runs go on.
            is_out_of_reach: as of ``mark_unhealthy``.
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
        """It has answered a probe."""
        if self._has_refused:
            self._has_refused = False
            if self.drains_until_restart:
                self._on_restart()

    def _on_restart(self) -> None:
        """Another process has its address."""
        if self.drains_until_restart:
            self.set_draining(False)
        self._events.lost_caches.emit(self.key)


def _make_head_line(registration: Registration) -> bytes:
    name = f"x-router-{registration.role.value}"
    lines = f"{name}: {registration.key}\r\n"
    if registration.role is not Role.MIXED:  # FastDeploy's Go router names the instances of pairs so
        lines += f"{name}-url: {registration.address.url}\r\n"
    return lines.encode()
