"""The instances: which instances are registered, which are healthy, and which can form a pair.

registration.py   Registration: the fields that an instance sends about itself
instance.py       Instance: one registered instance, its health and its load
kv_events.py      KvEventReader: reads KV events, to know which blocks each instance has cached
kv_event_feed.py  KvEventFeed: reads the events of one instance, and asks for those that were lost
block_index.py    BlockIndex: responds to queries of other schedulers about cached prefixes
stored_responses.py  StoredResponses: which instance stores which response of /v1/responses
breaker.py        Breaker: excludes an instance from selection after requests failed there
registry.py       Registry: all instances by host:port
models.py         which models the instances serve, and which model a request means
pairing.py        which prefill and decode instances may form a pair
health.py         HealthMonitor: probes instances
discovery/        Discovery: finds instances as pods of a Kubernetes cluster
scrape.py         Scraper: fetches the load that instances report
admin.py          operator commands: drain, pause, resume, set a weight, empty caches
register_file.py  instances that are listed in a file instead of registering themselves
snapshot.py       Snapshot: a file with instances and prefixes for the next start
tasks.py          Tasks: background work that no other task awaits
awake.py          AwakeClock: a clock that stops while this process does not run
"""

from router.fleet.admin import ORDERS, clear_prefix_caches, describe_drain
from router.fleet.awake import AwakeClock
from router.fleet.block_index import BlockIndex, is_publisher, read_fields, write_answer
from router.fleet.discovery import Discovery, IdentityHidden, ask_identity, ask_sglang
from router.fleet.health import HealthMonitor
from router.fleet.instance import STATES, Instance, Orders
from router.fleet.kv_events import KvEventReader
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
from router.fleet.stored_responses import StoredResponses
from router.fleet.tasks import Tasks, gather_spread

__all__ = [
    "ORDERS",
    "STATES",
    "UNLISTED",
    "AwakeClock",
    "BlockIndex",
    "Discovery",
    "EngineKind",
    "HealthMonitor",
    "IdentityHidden",
    "Instance",
    "KvConnector",
    "KvEventReader",
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
    "StoredResponses",
    "Tasks",
    "add_listed_instances",
    "ask_identity",
    "ask_sglang",
    "can_decode_for",
    "clear_prefix_caches",
    "describe_drain",
    "gather_spread",
    "is_publisher",
    "may_pair",
    "pairing_kind",
    "parse_models",
    "read_fields",
    "share_model",
    "write_answer",
]
