"""Services: the parts of the router that serve a request."""

from __future__ import annotations

from typing import NamedTuple

from router.access import Auth, Limits
from router.fleet import HealthMonitor, StoredResponses
from router.http import ConnectionPool
from router.serving.aborts import Aborter
from router.serving.plan import Pairs
from router.serving.reading.sessions import SessionHeaders
from router.serving.selection import Selector
from router.settings import RouterSettings
from router.telemetry import Audit, RouterMetrics, Tracer

__all__ = ["Services"]


class Services(NamedTuple):
    """The parts of the router that serve a request. All requests of a process share them."""

    settings: RouterSettings
    auth: Auth
    admission: Limits
    selector: Selector
    pairs: Pairs
    stored_responses: StoredResponses
    upstream: ConnectionPool
    health: HealthMonitor
    aborter: Aborter
    metrics: RouterMetrics
    audit: Audit
    sessions: SessionHeaders
    tracer: Tracer | None
    """Creates traces; None if requests are not traced."""
    is_debugging: bool
    """Whether the log level is debug, so that each step of a request is logged."""
