"""Selection: which instance, or which pair, serves a request.

Who may be chosen changes seldom, requests come often: the choice that a request has is prepared when something
changed (``_Choice``), and a request only applies the policies to it. It is narrowed for a single request where that
excludes instances, or while one that came back is given its share little by little.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from router.fleet import EngineKind, Instance, Registration, Registry, Role, can_decode_for, may_pair, pairing_kind
from router.http import ApiError, Usage
from router.policies import POLICIES, Decision, InstanceLoad, Outcome, Policy, RequestFeatures
from router.settings import RouterSettings

__all__ = ["NoInstance", "Selection", "Selector"]


class NoInstance(Exception):
    """Nothing can serve the request; ``error`` is the answer to its client."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


class Selection(NamedTuple):
    """Who serves a request: ``answering`` gives the answer; ``prefill`` works for it, in a pair."""

    answering: Instance
    prefill: Instance | None
    decisions: tuple[Decision, ...]


class Selector:
    """Applies the policy of each role to the instances that are available."""

    def __init__(
        self,
        settings: RouterSettings,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: the clock of the times that ``registry`` is given.
            chance: gives a number from 0 to below 1.
        """
        self._registry = registry
        self._router = f"{'https://' if settings.ssl_certfile else ''}HOST:{settings.port}"
        self._clock = clock
        self._chance = chance
        names = {
            Role.MIXED: settings.policy,
            Role.PREFILL: settings.prefill_policy,
            Role.DECODE: settings.decode_policy,
        }
        self.policies: Mapping[Role, Policy] = {
            role: POLICIES[names[role]](settings.policy_options, clock) for role in registry.roles
        }
        """The policy of each role that the router's mode takes."""
        for policy in self.policies.values():
            registry.subscribe_to_lost_caches(policy.forget_instance)
        self._choice = _Choice((), registry.splitwise)
        self._generation = -1
        self._good_until = -math.inf

    def choose(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Pick an instance, or with --splitwise a pair, none of them in ``excluded``.

        Raises:
            NoInstance: none of a role is left, or no two fit each other.
        """
        now = self._clock()
        if excluded:
            choice = self._gather_choice(now, excluded)
        else:
            if self._generation != self._registry.generation or now >= self._good_until:
                self._prepare_choice(now)
            choice = self._choice
        if choice.empty:
            raise NoInstance(self._explain_none(excluded))
        if not self._registry.splitwise:
            mixed, decision = self._apply_policy(Role.MIXED, features, choice.first, now)
            return Selection(mixed, None, (decision,))
        prefill, first = self._apply_policy(Role.PREFILL, features, choice.first, now)
        decode, second = self._apply_policy(Role.DECODE, features, choice.partners[prefill.key], now)
        return Selection(decode, prefill, (first, second))

    def choose_any(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Pick one instance for a request whose answer is not generated; in a pair's mode, decode serves it.

        Raises:
            NoInstance: none is left.
        """
        now = self._clock()
        role = Role.DECODE if self._registry.splitwise else Role.MIXED  # prefill may answer with one token
        for instances in self._rank_instances(now, excluded):
            group = _Group([i for i in instances if i.role is role])
            if group.candidates:
                instance, decision = self._apply_policy(role, features, group, now)
                return Selection(instance, None, (decision,))
        raise NoInstance(self._explain_missing([role]))

    def learn(
        self,
        selection: Selection,
        features: RequestFeatures,
        usage: Usage,
        *,
        queued_before: float,
        ttft: float | None,
    ) -> None:
        """Let the policy that chose the instance which computed the prompt learn from how it went.

        Args:
            usage: the figures of that instance.
            queued_before: the work that was queued there.
            ttft: seconds to the first token, where they are known.
        """
        decision = selection.decisions[0]
        outcome = Outcome(
            decision.key, queued_before, ttft, usage.prompt_tokens, usage.cached_tokens, usage.own_cached_tokens
        )
        role = (selection.prefill or selection.answering).role
        self.policies[role].observe_outcome(features, decision, outcome)

    def _prepare_choice(self, now: float) -> None:
        self._choice = self._gather_choice(now, ())
        self._generation = self._registry.generation
        available = self._list_available(())
        if any(instance.weight(now) < 1.0 for instance in available):
            self._good_until = now
        else:
            retries = [i.breaker.retry_at for i in available if not i.breaker.admits(now)]
            self._good_until = min(retries, default=math.inf)

    def _gather_choice(self, now: float, excluded: Collection[str]) -> _Choice:
        """The choice among the instances that are preferred most, of those that leave any."""
        choice = _Choice((), self._registry.splitwise)
        for instances in self._rank_instances(now, excluded):
            choice = _Choice(instances, self._registry.splitwise)
            if not choice.empty:
                break
        return choice

    def _rank_instances(self, now: float, excluded: Collection[str]) -> Iterator[list[Instance]]:
        """The instances that may be chosen; then the same with those that had better not be, as a last resort."""
        available = self._list_available(excluded)
        admitted = [i for i in available if i.breaker.admits(now)]
        yield self._apply_weights(admitted, now)
        yield admitted
        yield available

    def _apply_weights(self, instances: Sequence[Instance], now: float) -> list[Instance]:
        """Each with the probability that is its weight; of a role that leaves none, those with any weight, or all."""
        chosen = []
        for role in self._registry.roles:
            of_role = [(instance, instance.weight(now)) for instance in instances if instance.role is role]
            drawn = [instance for instance, weight in of_role if weight >= 1.0 or self._chance() < weight]
            chosen += drawn or [i for i, weight in of_role if weight > 0.0] or [i for i, _ in of_role]
        return chosen

    def _list_available(self, excluded: Collection[str]) -> list[Instance]:
        return [i for i in self._registry if i.is_available and i.key not in excluded]

    def _apply_policy(
        self, role: Role, features: RequestFeatures, group: _Group, now: float
    ) -> tuple[Instance, Decision]:
        decision = self.policies[role].choose_instance(features, group.candidates)
        chosen = group.by_key[decision.key]
        if chosen.breaker.state != "closed":
            chosen.begin_half_open_trial(now)
        return chosen, decision

    def _explain_none(self, excluded: Collection[str]) -> ApiError:
        available = self._list_available(excluded)
        present = {instance.role for instance in available}
        missing = [role for role in self._registry.roles if role not in present]
        return self._explain_missing(missing) if missing else _explain_misfit(available)

    def _explain_missing(self, roles: Sequence[Role]) -> ApiError:
        return ApiError(503, "; ".join(self._explain_missing_role(role) for role in roles), "no_instance")

    def _explain_missing_role(self, role: Role) -> str:
        known = [i for i in self._registry if i.role is role]
        if known:
            states = "; ".join(f"{i.key} is {i.state}{': ' + i.trouble if i.trouble else ''}" for i in known)
            return f"no {role.value} instance can take the request ({states})"
        flag = "" if role is Role.MIXED else f" --splitwise-role {role.value}"
        return (
            f"no {role.value} instance is registered; start one with{flag} --router {self._router}, "
            "where HOST is this router's address"
        )


class _Group:
    """Instances that a policy chooses from."""

    __slots__ = ("by_key", "candidates")

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.candidates: list[InstanceLoad] = [instance.load for instance in instances]
        self.by_key: dict[str, Instance] = {instance.key: instance for instance in instances}


class _Choice:
    """A request's choice: ``first`` a mixed or prefill instance, then one of a prefill's ``partners``."""

    __slots__ = ("empty", "first", "partners")

    def __init__(self, instances: Sequence[Instance], splitwise: bool) -> None:
        self.partners: dict[str, _Group] = {}
        if not splitwise:
            self.first = _Group([i for i in instances if i.role is Role.MIXED])
        else:
            prefills = [i for i in instances if i.role is Role.PREFILL]
            self.partners = _group_partners(prefills, [i for i in instances if i.role is Role.DECODE])
            self.first = _Group([prefill for prefill in prefills if prefill.key in self.partners])
        self.empty = not self.first.candidates


def _group_partners(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> dict[str, _Group]:
    """The decode instances that each prefill instance may be paired with, of those that may be paired at all."""
    partners = {}
    # Prefill instances that are alike to pairing share a group: mostly, that is all of them.
    groups: dict[object, _Group] = {}
    for prefill in prefills:
        asked = prefill.registration
        kind = (pairing_kind(asked), asked.version, asked.tp_size, asked.connected_decodes)
        if kind not in groups:
            groups[kind] = _Group([decode for decode in decodes if may_pair(asked, decode.registration)])
        if groups[kind].candidates:
            partners[prefill.key] = groups[kind]
    return partners


def _explain_misfit(instances: Sequence[Instance]) -> ApiError:
    """Why none of the prefill instances may be paired with any of the decode instances."""
    prefills = [i.registration for i in instances if i.role is Role.PREFILL]
    decodes = [i.registration for i in instances if i.role is Role.DECODE]
    if not {*map(pairing_kind, prefills)} & {*map(pairing_kind, decodes)}:
        reason = (
            "prefill and decode must be of one engine, and of vLLM's of one kv_connector; registered are "
            f"prefill {_list_engines(prefills)} and decode {_list_engines(decodes)}"
        )
        return ApiError(503, reason, "no_pair")
    if not any(can_decode_for(p.tp_size, {d.tp_size for d in decodes}) for p in prefills):
        return ApiError(
            400,
            "the tp_size of prefill and decode must be equal, or that of decode 1; registered are prefill "
            f"{sorted({p.tp_size for p in prefills})} and decode {sorted({d.tp_size for d in decodes})}",
            "tp_size_mismatch",
        )
    if not {p.version for p in prefills} & {d.version for d in decodes}:
        reason = (
            "prefill and decode must be of one version; registered are "
            f"prefill {_list_versions(prefills)} and decode {_list_versions(decodes)}"
        )
    else:
        reason = (
            "prefill instances are paired with decode instances of their version and tp_size that they have "
            "connected to, and none of those can take the request"
        )
    return ApiError(503, reason, "no_pair")


def _list_engines(registrations: Sequence[Registration]) -> str:
    return ", ".join(
        sorted(
            {f"{r.engine.value}{f' ({r.kv_connector.value})' * (r.engine is EngineKind.VLLM)}" for r in registrations}
        )
    )


def _list_versions(registrations: Sequence[Registration]) -> str:
    return ", ".join(sorted({"without a version" if r.version is None else repr(r.version) for r in registrations}))
