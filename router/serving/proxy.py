"""The data plane: every forwarded request, from the client's bytes to the response's.

The steps for one request: its client is checked and admitted; the body is read and parsed once; instances are selected;
an attempt is sent; its first bytes decide whether it is relayed or another attempt is made; then bytes are relayed as
they arrive. If decode preempts a request in the middle, another attempt continues it. ``ServingRequest`` implements
these steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.access import FORWARDED, find_route
from router.http import ApiError, ClientRequest, Headers, Refused
from router.serving.aborts import AbortScope
from router.serving.request import ServingRequest
from router.serving.response import RequestEnded
from router.serving.services import Services
from router.telemetry import RequestRecord

if TYPE_CHECKING:
    from router.fleet import Instance

__all__ = ["Proxy"]

# If a check for time-outs itself runs later than this, it is postponed to the next one.
LATE_SECONDS = 0.25


class Proxy:
    """Serves requests for forwarded paths from the instances: has the services for it, and the running requests."""

    def __init__(self, services: Services) -> None:
        self.max_body_bytes = services.settings.max_body_bytes
        self.is_leaving = False
        """Whether clients should close their connections, because this process stops soon."""
        self.usual_targets: Mapping[bytes, str] = {path.encode(): path for path in FORWARDED}
        """Checked targets of its requests, and their paths."""
        self._timeout = services.settings.request_timeout_secs
        # If an instance fails its probes, its streams are ended after this time of silence.
        self._silence = services.settings.health_check_interval_secs
        self._stall = services.settings.stream_stall_secs
        self._services = services
        self._live: set[ServingRequest] = set()

    def __repr__(self) -> str:
        return f"<Proxy {len(self._live)} requests>"

    @property
    def num_requests(self) -> int:
        """Number of requests that are being served or queued."""
        return len(self._live)

    def takes(self, path: str) -> bool:
        """Return whether this path is served by an instance, rather than by the router or by all instances."""
        route = find_route(path)
        return route is not None and route.is_forwarded

    def find_refusal(self, headers: Headers) -> Refused | None:
        """Return why the sender of these headers may not send a body; None if it may."""
        try:
            self._services.auth.identify_client(headers)
        except Refused as refused:
            return refused
        return None

    def serve(self, request: ClientRequest) -> None:
        """Answer one request."""
        ServingRequest(request, self._services, self._live).start()

    def on_refused(self, method: str, path: str, error: ApiError, request_id: str = "") -> None:
        """Note a request that was answered with ``error`` without being read."""
        record = RequestRecord(method, path, time.time(), request_id=request_id, status=error.status, error=error.code)
        self._services.audit.add_record(record)

    def stop(self) -> None:
        """End every request in progress with a clear error: the router is stopping."""
        self._end_older(ApiError(503, "the router is stopping", "router_stopping"), time.perf_counter())

    async def watch_the_clock(self) -> None:
        """End requests that exceed the time-out, and instances' streams that stall, until cancelled."""
        late = ApiError(504, f"the request was not answered within {self._timeout:g} s", "request_timeout")
        was_late = False
        while True:
            seconds = min(1.0, self._timeout / 4, (self._stall or self._timeout) / 4)
            due_at = time.monotonic() + seconds
            await asyncio.sleep(seconds)
            was_late = not was_late and time.monotonic() - due_at > LATE_SECONDS
            if was_late:
                continue  # this process did not run: first it has to read the data that arrived meanwhile
            self._end_older(late, time.perf_counter() - self._timeout)
            if self._stall:
                self._end_stalled_streams(time.perf_counter() - self._stall)

    def on_instance_failure(self, instance: Instance) -> None:
        """End attempts that wait for an instance that answers no probes, and retry elsewhere if allowed."""
        for serving in list(self._live):
            if serving.attempt is not None:
                serving.attempt.on_instance_failure(instance, self._silence)

    def abort_requests(self, scope: AbortScope) -> tuple[set[str], list[str]]:
        """Prevent further attempts of the requests that the abort means.

        Returns:
            Those of the given ids that mean a request here, and all ids by which engines know these requests now.
        """
        found: set[str] = set()
        engine_ids: list[str] = []
        for serving in list(self._live):
            meant, known = serving.abort(scope)
            found.update(meant)
            engine_ids += known
        return found, engine_ids

    def _end_stalled_streams(self, since: float) -> None:
        """End the streams without data from their instances since this time; the instances get an abort."""
        for serving in list(self._live):
            attempt = serving.attempt
            if attempt is not None and attempt.is_stalled(since):
                attempt.on_stall(self._stall)

    def _end_older(self, error: ApiError, started_before: float) -> None:
        for serving in [serving for serving in self._live if serving.started <= started_before]:
            serving.end_early(RequestEnded(error))
