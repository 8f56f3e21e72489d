"""The components of the router that serve a request."""

from __future__ import annotations

from typing import NamedTuple

from router.access import Auth, Limits
from router.fleet import HealthMonitor, KeptResponses
from router.http import ConnectionPool
from router.serving.aborts import Aborter
from router.serving.plan import Pairs
from router.serving.selection import Selector
from router.settings import RouterSettings
from router.telemetry import Audit, RouterMetrics, Tracer

__all__ = ["Services"]


class Services(NamedTuple):
    """The components of the router that serve a request: one of each, shared by all requests."""

    settings: RouterSettings
    auth: Auth
    admission: Limits
    selector: Selector
    pairs: Pairs
    kept_responses: KeptResponses
    upstream: ConnectionPool
    health: HealthMonitor
    aborter: Aborter
    metrics: RouterMetrics
    audit: Audit
    tracer: Tracer | None
    """Tracer, if requests are traced."""
    is_debugging: bool
    """Whether the log shows each step of a request; evaluated once, at the start."""
