"""power_of_two: the less busy of two."""

from __future__ import annotations

from router.policies import InstanceLoad, RequestFeatures
from router.policies.power_of_two import PowerOfTwo


def test_power_of_two_avoids_the_busier_of_two() -> None:
    policy = PowerOfTwo()
    candidates = [InstanceLoad("idle"), InstanceLoad("busy", requests=5)]
    assert {policy.choose_instance(RequestFeatures(100), candidates).key for _ in range(50)} == {"idle"}
