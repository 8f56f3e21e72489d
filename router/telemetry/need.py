"""InstancesNeeded: the number of instances of each role that the present traffic needs, for autoscalers.

::

    needed = (busy + behind) / target utilisation, rounded up, and at least 1

    busy     prefill: number of instances that compute a prompt
             decode, mixed: running and queued requests, divided by the number that an instance runs concurrently
    behind   sum over all instances of max(0, queue / 10 s - 1), where queue is the time to compute the queued work;
             0 until the role's policy has learned how long a token takes (only ``pool_aware`` learns this)

Both values are means over the last half minute, for the whole fleet: the loads include the requests of all workers and
routers. The loads are sampled once per second, so that requests are not delayed.
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
# ``InstanceLoad.queued`` may differ from 0 by less than this because of rounding errors.
_NO_WORK = 0.5


class _Sample(NamedTuple):
    """The load of the instances of one role at one moment."""

    computing: int
    """Number of instances that have a prompt to compute."""
    requests: int
    behind: float


class InstancesNeeded:
    """Samples the load of the instances once per second, and computes how many instances the traffic needs."""

    def __init__(self, settings: RouterSettings, registry: Registry, token_seconds: Callable[[Role], float]) -> None:
        """
        Args:
            settings: the target utilisation, and the number of requests that an instance runs concurrently.
            registry: the instances.
            token_seconds: returns the seconds that an instance of a role needs for one token of work; 0 if unknown.
        """
        self._utilization = settings.target_utilization
        self._requests_per_instance = settings.requests_per_instance
        self._registry = registry
        self._token_seconds = token_seconds
        self._samples: dict[Role, deque[_Sample]] = {role: deque(maxlen=WINDOW_SAMPLES) for role in registry.roles}

    async def keep_sampling(self) -> None:
        """Call ``take_sample`` once per second, until this task is cancelled."""
        while True:
            self.take_sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    def take_sample(self) -> None:
        """Store the present load of the instances, in one sample for each role."""
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
        """Return the number of instances of each role that the traffic needs.

        Args:
            waiting: number of requests in the router's queue, which have no instance yet.
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
        """Return the mean number of requests that an instance of this role runs concurrently."""
        numbers = [_read_capacity(instance) or self._requests_per_instance for instance in self._list_instances(role)]
        return _mean(numbers) if numbers else self._requests_per_instance

    def _list_instances(self, role: Role) -> list[Instance]:
        return [instance for instance in self._registry if instance.role is role]


def _read_capacity(instance: Instance) -> int:
    """Return ``max_num_seqs`` of the instance's registration; 0 if it has none."""
    value = instance.registration.fields.get("max_num_seqs")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
