"""The instances: which ones have registered, which are healthy, which may be paired.

registration.py   Registration: the fields that an instance sends about itself, parsed
instance.py       Instance: one registered instance, its health and its load
kept_responses.py KeptResponses: which instance stores which answer of /v1/responses
breaker.py        Breaker: excludes an instance from selection after failed live requests
registry.py       Registry: all instances by host:port
models.py         which models instances serve, and which of them a request means
pairing.py        which prefill and decode instance may work together
health.py         HealthMonitor: probes instances
discovery/        Discovery: finds instances as pods of a Kubernetes cluster
scrape.py         Scraper: fetches the load that instances report themselves
admin.py          operator commands: drain, pause, resume, set a weight, empty caches
register_file.py  instances that are listed in a file instead of registering themselves
snapshot.py       Snapshot: instances and prefixes for the next start
tasks.py          Tasks: background work that no other task awaits
awake.py          AwakeClock: seconds during which this process was able to notice events
"""

from router.fleet.admin import ORDERS, clear_prefix_caches, tell_progress
from router.fleet.awake import AwakeClock
from router.fleet.discovery import Discovery
from router.fleet.health import HealthMonitor
from router.fleet.instance import STATES, Instance, Orders
from router.fleet.kept_responses import KeptResponses
from router.fleet.models import UNLISTED, ServedModels, parse_models
from router.fleet.pairing import can_decode_for, may_pair, pairing_kind, share_model
from router.fleet.register_file import add_listed_instances
from router.fleet.registration import (
    EngineKind,
    KvConnector,
    NotHealthy,
    Registration,
    RegistrationError,
    Role,
    RoleRefused,
)
from router.fleet.registry import Registry
from router.fleet.scrape import Scraper
from router.fleet.snapshot import Snapshot
from router.fleet.tasks import Tasks, gather_spread

__all__ = [
    "ORDERS",
    "STATES",
    "UNLISTED",
    "AwakeClock",
    "Discovery",
    "EngineKind",
    "HealthMonitor",
    "Instance",
    "KeptResponses",
    "KvConnector",
    "NotHealthy",
    "Orders",
    "Registration",
    "RegistrationError",
    "Registry",
    "Role",
    "RoleRefused",
    "Scraper",
    "ServedModels",
    "Snapshot",
    "Tasks",
    "add_listed_instances",
    "can_decode_for",
    "clear_prefix_caches",
    "gather_spread",
    "may_pair",
    "pairing_kind",
    "parse_models",
    "share_model",
    "tell_progress",
]
