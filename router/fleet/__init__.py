"""The instances."""

from router.fleet.health import HealthMonitor
from router.fleet.pairing import PairInfo, can_decode_for, disaggregate_info, may_pair
from router.fleet.registration import Registration, RegistrationError, Role
from router.fleet.registry import Instance, Registry
from router.fleet.tasks import Tasks

__all__ = [
    "HealthMonitor",
    "Instance",
    "PairInfo",
    "Registration",
    "RegistrationError",
    "Registry",
    "Role",
    "Tasks",
    "can_decode_for",
    "disaggregate_info",
    "may_pair",
]
