"""InstancesNeeded: how many instances of each role the present traffic needs, for autoscalers.

::

    needed = (busy + behind) / target utilisation, rounded up, and at least 1

    busy     prefill: instances that compute a prompt
             decode, mixed: requests that run, or wait in the router's line, by the number that an instance runs at once
    behind   for each instance whose queue takes longer than 10 s: 1 for each further 10 s; how long it takes is known
             once the role's policy has learned the cost of a token (``pool_aware``)

Both are means over the last half minute, of the whole fleet: the loads count the requests of all workers and routers.
Nothing of it is done on a request's way: loads are looked at once a second.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from router.fleet import Role

if TYPE_CHECKING:
    from router.fleet import Instance, Registry
    from router.settings import RouterSettings

__all__ = ["InstancesNeeded"]

SAMPLE_SECONDS = 1.0
WINDOW_SAMPLES = 30
PATIENCE_SECONDS = 10.0
# Of the sums of work that come and go, rounding leaves less than this.
_NO_WORK = 0.5


class _Sample(NamedTuple):
    """A role at one moment."""

    computing: int
    """Instances that have a prompt to compute."""
    requests: int
    behind: float


class InstancesNeeded:
    """Looks at the fleet's load once a second, and says how many instances would carry it well."""

    def __init__(self, settings: RouterSettings, registry: Registry, token_seconds: Callable[[Role], float]) -> None:
        """
        Args:
            token_seconds: the learned cost of a role's token of work; 0 where it is not known.
        """
        self._utilization = settings.target_utilization
        self._requests_per_instance = settings.requests_per_instance
        self._registry = registry
        self._token_seconds = token_seconds
        self._samples: dict[Role, deque[_Sample]] = {role: deque(maxlen=WINDOW_SAMPLES) for role in registry.roles}

    async def keep_sampling(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            self.take_sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def take_sample(self) -> None:
        """Look at all instances' loads."""
        for role, samples in self._samples.items():
            instances = self._list_instances(role)
            token_seconds = self._token_seconds(role)
            samples.append(
                _Sample(
                    sum(instance.load.queued > _NO_WORK for instance in instances),
                    sum(instance.load.requests for instance in instances),
                    sum(
                        max(0.0, instance.load.queued * token_seconds / PATIENCE_SECONDS - 1.0)
                        for instance in instances
                    ),
                )
            )

    def compute(self, waiting: float = 0.0) -> dict[Role, int]:
        """The instances that each role needs.

        Args:
            waiting: requests in the router's line, which no instance has yet.
        """
        return {role: self._compute_role(role, samples, waiting) for role, samples in self._samples.items()}

    def _compute_role(self, role: Role, samples: Sequence[_Sample], waiting: float) -> int:
        if not samples:
            return 1
        if role is Role.PREFILL:
            busy = _mean([sample.computing for sample in samples])
        else:
            busy = (_mean([sample.requests for sample in samples]) + waiting) / self._find_capacity(role)
        behind = _mean([sample.behind for sample in samples])
        return max(1, math.ceil((busy + behind) / self._utilization - 1e-9))

    def _find_capacity(self, role: Role) -> float:
        """The requests that an instance of this role runs at once: as they say themselves, or as it was set."""
        told = [_read_capacity(instance) or self._requests_per_instance for instance in self._list_instances(role)]
        return _mean(told) if told else self._requests_per_instance

    def _list_instances(self, role: Role) -> list[Instance]:
        return [instance for instance in self._registry if instance.role is role]


def _read_capacity(instance: Instance) -> int:
    """``max_num_seqs`` of its registration; 0 if it does not say."""
    value = instance.registration.fields.get("max_num_seqs")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
