"""Selection: which instance, or which pair, serves a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from router.errors import ApiError
from router.instances import Instance, Registry, Role
from router.policies import POLICIES, Decision, RequestFeatures
from router.settings import RouterSettings
from router.splitwise import can_decode_for

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

    def __init__(self, settings: RouterSettings, registry: Registry) -> None:
        self._registry = registry
        self._port = settings.port
        names = {
            Role.MIXED: settings.policy,
            Role.PREFILL: settings.prefill_policy,
            Role.DECODE: settings.decode_policy,
        }
        self._policies = {role: POLICIES[names[role]]() for role in registry.roles}

    def choose(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Pick an instance, or with --splitwise a pair, none of them in ``excluded``.

        Raises:
            NoInstance: none of a role is left, or no two fit each other.
        """
        candidates = {role: self._candidates(role, excluded) for role in self._registry.roles}
        missing = [role for role, instances in candidates.items() if not instances]
        if missing:
            raise NoInstance(self._missing(missing))
        if not self._registry.splitwise:
            mixed, decision = self._apply(Role.MIXED, features, candidates[Role.MIXED])
            return Selection(mixed, None, (decision,))
        sizes = {decode.registration.tp_size for decode in candidates[Role.DECODE]}
        prefills = [p for p in candidates[Role.PREFILL] if can_decode_for(p.registration.tp_size, sizes)]
        if not prefills:
            raise NoInstance(_unfit(candidates))
        prefill, first = self._apply(Role.PREFILL, features, prefills)
        fitting = [
            decode
            for decode in candidates[Role.DECODE]
            if can_decode_for(prefill.registration.tp_size, {decode.registration.tp_size})
        ]
        decode, second = self._apply(Role.DECODE, features, fitting)
        return Selection(decode, prefill, (first, second))

    def choose_any(self, features: RequestFeatures, excluded: Collection[str] = ()) -> Selection:
        """Pick one instance for a request that is no completion; in a pair's mode, prefill does such work.

        Raises:
            NoInstance: none is left.
        """
        for role in self._registry.roles:
            instances = self._candidates(role, excluded)
            if instances:
                instance, decision = self._apply(role, features, instances)
                return Selection(instance, None, (decision,))
        raise NoInstance(self._missing(self._registry.roles))

    def _candidates(self, role: Role, excluded: Collection[str]) -> list[Instance]:
        available = self._registry.available(role)
        return [i for i in available if i.key not in excluded] if excluded else available

    def _apply(self, role: Role, features: RequestFeatures, instances: Sequence[Instance]) -> tuple[Instance, Decision]:
        decision = self._policies[role].choose(features, [i.candidate for i in instances])
        chosen = next(i for i in instances if i.key == decision.key)
        return chosen, decision

    def _missing(self, roles: Sequence[Role]) -> ApiError:
        return ApiError(503, "; ".join(self._missing_role(role) for role in roles), "no_instance")

    def _missing_role(self, role: Role) -> str:
        known = [i for i in self._registry if i.role is role]
        if known:
            states = "; ".join(f"{i.key} is {i.state}{': ' + i.trouble if i.trouble else ''}" for i in known)
            return f"no {role.value} instance can take the request ({states})"
        flag = "" if role is Role.MIXED else f" --splitwise-role {role.value}"
        return (
            f"no {role.value} instance is registered; start one with{flag} --router HOST:{self._port}, "
            "where HOST is this router's address"
        )


def _unfit(candidates: dict[Role, list[Instance]]) -> ApiError:
    sizes = {role.value: sorted({i.registration.tp_size for i in instances}) for role, instances in candidates.items()}
    return ApiError(
        400,
        "the tp_size of prefill and decode must be equal, or that of decode 1; "
        f"registered are prefill {sizes['prefill']} and decode {sizes['decode']}",
        "tp_size_mismatch",
    )
