"""RouterApp: the complete router, and its control plane in FastAPI."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from router.access import Admission, AdmissionClient, Auth, Limits, find_route
from router.fleet import (
    ORDERS,
    BlockIndex,
    Discovery,
    EngineKind,
    HealthMonitor,
    Instance,
    KvEventReader,
    NotHealthy,
    Registration,
    RegistrationError,
    Registry,
    Role,
    RoleRefused,
    Scraper,
    Snapshot,
    StoredResponses,
    Tasks,
    add_listed_instances,
    clear_prefix_caches,
    describe_drain,
    is_publisher,
    parse_models,
    read_fields,
    write_answer,
)
from router.http import (
    CONTROL_BYTES,
    ApiError,
    BadBody,
    ConnectionPool,
    Cors,
    Headers,
    Refused,
    UpstreamError,
    echo_request_id,
    error_reply,
    find_foreign_page,
    is_normal_path,
    json_reply,
    parse_object,
    refusal_reply,
)
from router.serving import (
    ABORT_PATH,
    Aborter,
    AbortScope,
    Pairs,
    Proxy,
    Selector,
    Services,
    SessionHeaders,
    explain_unknown_model,
    list_unknown_ids,
    read_asked_ids,
)
from router.settings import RouterSettings, SettingsError, find_trace_receiver, read_authorities
from router.sharing import FleetSync, Link, LoadSync, PrefixSync
from router.telemetry import (
    CONTENT_TYPE,
    MAX_RECORDS,
    Audit,
    FlightRecorder,
    InstancesNeeded,
    RouterMetrics,
    merge_sessions,
    open_tracer,
)

__all__ = ["RouterApp"]

_log = logging.getLogger("router.app")

MODELS_SECONDS = 5.0
# Number of instances that are queried at the same time. Queries to all instances at once would delay other requests.
MAX_ASKED_AT_ONCE = 64
# A request for the models names the routers that it has passed through, at most this number. Otherwise a router that is
# registered as its own instance, perhaps under several names, would ask itself more and more often.
MAX_HOPS = 8
_HOPS = b"x-router-hops"
_ROUTER_ID = secrets.token_hex(8)  # the workers of a router have the same id, because they are forked later
# Maximum length of a query string, which the control plane parses.
MAX_QUERY_BYTES = 8 * 1024
# When the router stops, it may still send aborts to instances for this time.
CLOSING_SECONDS = 0.5

# Number of ended requests that /admin/requests lists by default, and at most.
LISTED_REQUESTS, MAX_LISTED_REQUESTS = 50, 1000

NO_INDEX = "this router follows no KV events, so it has no index of blocks; start it with --kv-events"
NO_SHARED_STATE = "Redis (server.shared-state) cannot be reached; the router's log says why"

# Text at /docs and /redoc, in place of FastAPI's pages, which load scripts from the internet.
DOCS = "The router's paths are described at /openapi.json (OpenAPI), and for people in docs/operations.md.\n"


# Reasons why an instance may ignore the salts of --cache-salt-per-key, if its registration does not say otherwise.
_UNSALTED = {
    EngineKind.FASTDEPLOY: "FastDeploy has no cache_salt",
    EngineKind.SGLANG: "SGLang separates salts only since its pull request 23300 (2026)",
    EngineKind.VLLM: "its registration says so",
    EngineKind.OPENAI: "it is not known whether its engine uses cache_salt",
}


class RouterApp:
    """The complete router of one process, as an ASGI application."""

    def __init__(self, settings: RouterSettings, link: Link | None = None) -> None:
        """
        Args:
            settings: the settings of the router.
            link: the connection to the router's other processes; None if there are none.

        Raises:
            SettingsError: a file that the settings name cannot be used.
        """
        self.settings = settings
        self.link = link = link or Link()
        self.registry = Registry(settings.splitwise)
        if settings.cache_salt_per_key and link.is_first:
            self.registry.events.arrivals.subscribe(_warn_of_shared_cache)
        self.load_sync = LoadSync(link, self.registry)
        self.selector = Selector(settings, self.registry)
        self.prefix_sync = PrefixSync(link, self.selector.policies)
        self.kv_events = self._make_event_reader() if settings.kv_events else None
        self.block_index = None if self.kv_events is None else self._make_block_index(self.kv_events)
        if settings.register_path:
            self._add_listed(Path(settings.register_path))
        self.auth = Auth(settings)
        self.cors = Cors(settings.cors_allowed_origins) if settings.cors_allowed_origins else None
        admission = Admission(settings, self.auth.token_rates)
        self.admission: Limits = admission
        if admission.is_limited and not link.is_alone:
            self.admission = AdmissionClient(link.wait_for_entry, link.report_end)
        self.audit = Audit(settings)
        ca_file = settings.instance_ca_file
        self.upstream = ConnectionPool(read_authorities(ca_file, "manager.instance-ca-file") if ca_file else None)
        self.tasks = Tasks()
        self.health = HealthMonitor(settings, self.registry, self.upstream, self.tasks)
        self.probing: asyncio.Future[dict[str, str]] | None = None
        """The last round of probes that a request for ``/health_generate`` has started."""
        self.fleet_sync = FleetSync(link, self.registry, self.health)
        self.snapshot = self._make_snapshot()
        self.metrics = RouterMetrics(self.registry, self.admission, self.audit, link.num_replaced, settings.dialect)
        self.need = InstancesNeeded(settings, self.registry, self.selector.token_seconds)
        self.metrics.watch_need(self.need)
        self.discovery = self._make_discovery() if settings.finds_pods and link.is_first else None
        if self.discovery is not None:
            self.metrics.watch_discovery(self.discovery)
        if settings.shared_state:
            self.metrics.watch_shared_state(lambda: not link.trouble)
        receiver = find_trace_receiver()
        self.tracer = open_tracer(receiver) if receiver else None
        if self.tracer is not None:
            self.audit.subscribe_to_batches(self.tracer.on_batch)
        self.aborter = Aborter(self.upstream, self.tasks, self.metrics.count_abort)
        self.scraper = Scraper(settings, self.registry, self.upstream)
        self.proxy = Proxy(self._gather_services())
        self.registry.events.failures.subscribe(self.proxy.on_instance_failure)
        self.recorder = self._make_recorder()
        self._answer_other_processes()
        self.control = _control_plane(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request of the control plane. ``RouterProtocol`` passes data-plane requests to ``proxy``
        instead.
        """
        if scope["type"] == "http":
            if echo := echo_request_id(scope["headers"]):
                send = _add_headers(send, echo)
            if self.cors is not None and scope["path"].startswith("/v1/"):
                send = _add_headers(send, self.cors.answer_headers(scope["headers"]))
                preflight = self.cors.answer_preflight(scope["headers"]) if scope["method"] == "OPTIONS" else None
                if preflight is not None:
                    answer = Response(preflight.body, status_code=preflight.status)
                    answer.raw_headers += preflight.headers
                    await answer(scope, receive, send)
                    return
            if len(scope["query_string"]) > MAX_QUERY_BYTES:
                message = f"the query is longer than the {MAX_QUERY_BYTES} bytes that this path accepts"
                await error_reply(ApiError(414, message, "target_too_long"), scope["path"])(scope, receive, send)
                return
            # The id of a model may be the path of a folder, which begins with a slash.
            if not is_normal_path(scope["path"].replace("/v1/models//", "/v1/models/", 1)):
                message = f"the path {scope['path']!r} has an empty segment, '.' or '..', which are not allowed"
                await error_reply(ApiError(404, message, "unknown_path"), scope["path"])(scope, receive, send)
                return
            route = find_route(scope["path"])
            if route is None:
                await error_reply(_explain_unknown_path(scope["path"]), scope["path"])(scope, receive, send)
                return
            page = find_foreign_page(scope["headers"]) if scope["method"] == "POST" else ""
            is_allowed = scope["path"].startswith("/v1/") and self.cors is not None and self.cors.allows(page)
            if page and not is_allowed:
                message = f"pages of the origin {page!r} may not use {scope['path']} of this router"
                await error_reply(ApiError(403, message, "origin_not_allowed"), scope["path"])(scope, receive, send)
                return
            try:
                self.auth.check_access(route.access, scope["headers"])
            except Refused as refused:
                await refusal_reply(refused, scope["path"])(scope, receive, send)
                return
            if scope["method"] == "HEAD":  # the handlers are defined for GET, and uvicorn omits the body
                scope = {**scope, "method": "GET"}
        try:
            await self.control(scope, receive, send)
        except ClientDisconnect:
            _log.info("a client disconnected while it sent the body of %s", scope["path"])

    def _add_listed(self, path: Path) -> None:
        if self.settings.dialect == "go" and not path.exists():  # as in FastDeploy's run_with_config example
            _log.warning("manager.register-path %s does not exist, so no instances are read from it", path)
        else:
            add_listed_instances(self.registry, path, time.monotonic())

    def _make_discovery(self) -> Discovery:
        return Discovery(
            self.settings,
            self.registry,
            self.health,
            self.upstream,
            announce=self.fleet_sync.announce_instance,
            announce_orders=self.fleet_sync.announce_orders,
            announce_removal=self.fleet_sync.announce_removal,
        )

    def _make_event_reader(self) -> KvEventReader:
        topic = "kv_events"
        try:
            reader = KvEventReader(
                self.registry, self.selector.policies, lambda content: self.link.publish_event(topic, content)
            )
        except ImportError:
            raise SettingsError('scheduler.kv-events needs pyzmq; install it with pip install ".[kv-events]"') from None
        self.link.subscribe_to_topic(topic, lambda _, content: reader.on_associated(content))
        return reader

    def _make_block_index(self, reader: KvEventReader) -> BlockIndex:
        topic = "publishers"

        async def send_changes(changes: Any) -> None:
            self.link.publish_event(topic, changes)
            await self.link.ask_peers("heard")

        index = BlockIndex(self.registry, reader, self.settings.model_aliases, send_changes)
        self.link.subscribe_to_topic(topic, lambda _, changes: index.on_changes(changes))
        self.link.answer_topic(topic, lambda _: index.dump())
        return index

    async def learn_publishers(self) -> None:
        """Ask the other processes which publishers of KV events are registered; a new process calls this."""
        if self.block_index is not None:
            for publishers in await self.link.ask_peers("publishers", everywhere=True):
                self.block_index.on_changes(publishers)

    def prepare_to_leave(self) -> None:
        """Respond "not ready" to probes, and make clients close their connections, because this process will stop."""
        self.proxy.is_leaving = True

    def _make_snapshot(self) -> Snapshot | None:
        path = self.settings.snapshot_path
        if not path:
            return None
        return Snapshot(Path(path), self.registry, self.selector.policies, versions=self.fleet_sync)

    def _make_recorder(self) -> FlightRecorder | None:
        """Return the flight recorder; None if it is off.

        If its files cannot be created, raise ``SettingsError``. A worker that replaces a dead one returns None instead.
        """
        if not self.settings.flight_recorder:
            return None
        try:
            recorder = FlightRecorder(self.settings, self.registry, self.link.name, self.proxy.list_progress)
        except SettingsError as exc:
            if not self.link.is_replacement:
                raise
            _log.error("%s; this worker process runs without a flight recorder", exc)
            return None
        self.audit.subscribe_to_batches(recorder.on_batch)
        return recorder

    def find_unreadiness(self) -> str:
        """Return why requests should go to other routers, in one sentence; ``""`` if this router can serve them."""
        return "the router is stopping" if self.proxy.is_leaving else self.selector.find_obstacle()

    def _gather_services(self) -> Services:
        return Services(
            settings=self.settings,
            auth=self.auth,
            admission=self.admission,
            selector=self.selector,
            pairs=Pairs(),
            stored_responses=self._share_stored_responses(),
            upstream=self.upstream,
            health=self.health,
            aborter=self.aborter,
            metrics=self.metrics,
            audit=self.audit,
            sessions=SessionHeaders(self.settings.session_headers),
            tracer=self.tracer,
            is_debugging=_log.isEnabledFor(logging.DEBUG),
        )

    def _share_stored_responses(self) -> StoredResponses:
        """Return the index of the responses that instances store (``/v1/responses``). All processes add to it."""
        topic = "kept_responses"
        stored = StoredResponses(
            lambda *response: self.link.publish_event(topic, response),
            lambda response_id: self.link.ask_peers(topic, response_id, everywhere=True),
        )
        self.link.subscribe_to_topic(topic, stored.on_message)
        self.link.answer_topic(topic, stored.dump_response)
        return stored

    def _answer_other_processes(self) -> None:
        self.link.answer_topic("figures", lambda _: [self.link.name, self.metrics.dump()])
        self.link.answer_topic("explain", self.audit.explain_request)
        self.link.answer_topic("session", self.audit.sum_session)
        self.link.answer_topic("requests", self.audit.list_requests)
        self.link.answer_topic("abort", self._abort_for_others)

    def _abort_for_others(self, asked: Any) -> list[list[str]]:
        return [list(each) for each in self.proxy.abort_requests(AbortScope.load(asked))]


def _warn_of_shared_cache(instance: Instance) -> None:
    """Log a warning that clients of this instance may share its cache, unless the instance is known to use salts."""
    if not instance.registration.takes_cache_salt:
        _log.warning(
            "--cache-salt-per-key may have no effect at %s instance %s, so clients may share its cache: %s. If the "
            'instance separates salts, register it with "cache_salt": true',
            *(instance.role.value, instance.key, _UNSALTED[instance.registration.engine]),
        )


def _control_plane(router: RouterApp) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if router.auth.danger and router.link.is_first and not router.link.is_replacement:
            _log.warning("%s", router.auth.danger)
        work = [
            *(router.health.awake.keep_ticking(), router.health.keep_probing()),
            *(router.proxy.watch_the_clock(), router.scraper.keep_scraping()),
            *(router.fleet_sync.keep_renewing(), router.load_sync.keep_sending(), router.need.keep_sampling()),
            router.auth.keep_current(is_logged=router.link.is_first),
        ]
        if router.link.is_replacement:
            await router.prefix_sync.load_from_peers()
        elif router.snapshot:
            router.snapshot.restore(time.monotonic())
        if router.discovery is not None:
            work.append(router.discovery.keep_discovering())
        if router.snapshot and router.link.is_first:
            work.append(router.snapshot.keep_writing(router.settings.snapshot_interval_secs))
        if router.recorder is not None:
            work.append(router.recorder.keep_recording())
        if router.kv_events is not None:
            work += [router.kv_events.keep_reading(), router.learn_publishers()]
        running = [asyncio.ensure_future(each) for each in work]
        yield
        for task in running:
            task.cancel()
        if router.snapshot and router.link.is_first:
            router.snapshot.save()
        await router.tasks.close(CLOSING_SECONDS)
        router.upstream.close()
        router.audit.close()
        if router.recorder is not None:
            router.recorder.close()
        if router.tracer is not None:
            router.tracer.close()

    app = FastAPI(title="KV router", lifespan=lifespan, redirect_slashes=False, docs_url=None, redoc_url=None)
    _add_error_handlers(app)
    _add_probes(app, router)
    _add_fleet(app, router)
    _add_index(app, router)
    _add_admin(app, router)
    _add_explanations(app, router)
    _add_clients(app, router)
    return app


def _explain_unknown_path(path: str) -> ApiError:
    message = f"the router has no path {path!r}; docs/operations/security.md lists its paths"
    return ApiError(404, message, "unknown_path")


def _add_error_handlers(app: FastAPI) -> None:
    """Define error responses in OpenAI's format."""

    @app.exception_handler(HTTPException)
    async def explain_unknown_route(request: Request, exc: HTTPException) -> Response:
        path = request.url.path
        if exc.status_code == 405:
            allowed = (exc.headers or {}).get("Allow", "another method")
            answer = error_reply(ApiError(405, f"{path} accepts {allowed}, not {request.method}", "method_not_allowed"))
        else:
            answer = error_reply(_explain_unknown_path(path))
        answer.headers.update(exc.headers or {})
        return answer

    @app.exception_handler(Refused)
    async def explain_refusal(_: Request, refused: Refused) -> Response:
        return refusal_reply(refused)

    @app.exception_handler(BadBody)
    async def explain_bad_body(_: Request, exc: BadBody) -> Response:
        return error_reply(ApiError(400, str(exc), "invalid_body", exc.param))

    @app.exception_handler(Exception)
    async def explain_failure(_: Request, __: Exception) -> Response:
        return error_reply(ApiError(500, "the router failed to handle the request", "router_error"))


def _add_fleet(app: FastAPI, router: RouterApp) -> None:
    """Define the paths for instances, and the paths that list instances."""

    @app.post("/register")
    async def register_instance(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        try:
            fields = read_fields(await _read_body(request), content_type)
            is_instance = not is_publisher(fields)
            if is_instance:
                instance = await router.health.probe_and_register(Registration.from_fields(fields))
        except (BadBody, RegistrationError) as exc:
            _log.warning("a registration was refused: %s", exc)
            return _refuse_registration(router.settings, exc)
        if not is_instance:
            return await _answer_index(router, BlockIndex.register, fields, content_type)
        await router.fleet_sync.announce_instance(instance)
        is_go = router.settings.dialect == "go"
        return json_reply(200, {"code": 200, "msg": "Register success"} if is_go else {"status": "success"})

    @app.get("/registered")
    async def list_instances() -> Response:
        instances: dict[str, Any] = {role.value: [] for role in Role}
        for instance in router.registry:
            instances[instance.role.value].append(_describe_instance(instance))
        return json_reply(200, {"code": 200, "msg": "success", **instances})

    @app.get("/registered_number")
    async def count_healthy_instances() -> Response:
        numbers = {role.value: 0 for role in Role}
        for instance in router.registry:
            numbers[instance.role.value] += instance.healthy
        return json_reply(200, numbers)

    @app.get("/decode_instances")
    async def list_decode_instances(version: str | None = None) -> Response:
        # FastDeploy's prefill instances query this to connect to decode instances in advance, and cache the response.
        decodes = [i.registration for i in router.registry if i.role is Role.DECODE and i.healthy]
        wanted = [
            _format_registration(decode)
            for decode in decodes
            if version in (None, decode.version) and decode.engine is EngineKind.FASTDEPLOY
        ]
        return json_reply(200, wanted)


def _add_index(app: FastAPI, router: RouterApp) -> None:
    """Define the paths at which other schedulers ask which blocks are cached. ``_add_fleet`` defines ``/register``."""
    answers = {
        "/unregister": BlockIndex.unregister,
        "/query": BlockIndex.query,
        "/query_by_hash": BlockIndex.query_by_hash,
    }

    async def answer_scheduler(request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        fields = read_fields(await _read_body(request), content_type)
        return await _answer_index(router, answers[request.url.path], fields, content_type)

    for path in answers:
        app.post(path, name=path[1:])(answer_scheduler)


async def _answer_index(
    router: RouterApp,
    answer: Callable[[BlockIndex, dict[str, Any]], Awaitable[dict[str, Any]]],
    fields: dict[str, Any],
    content_type: str,
) -> Response:
    """Return the answer of the block index, in the encoding of the query."""
    index = router.block_index
    if index is None:
        return error_reply(ApiError(404, NO_INDEX, "no_index"))
    body, media_type = write_answer(await answer(index, fields), content_type)
    return Response(body, media_type=media_type)


def _add_probes(app: FastAPI, router: RouterApp) -> None:
    """Define the paths for probes, metrics and the description of the API."""

    @app.get("/health")
    async def answer_health_probe(request: Request) -> Response:
        if router.link.trouble:
            # Only the admin gets the reason, because it contains the address of Redis.
            is_admin = router.auth.is_admin(request.headers.raw)
            return json_reply(
                200, {"status": "ok", "shared_state": router.link.trouble if is_admin else NO_SHARED_STATE}
            )
        return Response(status_code=200)

    @app.get("/ready")
    async def answer_readiness_probe() -> Response:
        if obstacle := router.find_unreadiness():
            return json_reply(503, {"status": "not ready", "reason": obstacle})
        return json_reply(200, {"status": "ready"})

    @app.get("/health_generate")
    async def probe_instances() -> Response:
        # Concurrent requests share one round of probes, because a round opens a connection to each instance.
        if router.probing is None or router.probing.done():
            router.probing = asyncio.ensure_future(router.health.find_troubles())
        troubles = await asyncio.shield(router.probing)
        bad = {key: trouble for key, trouble in troubles.items() if trouble}
        if bad or not troubles:
            return json_reply(503, {"code": 503, "msg": "not all instances are healthy", "unhealthy": bad})
        return json_reply(200, {"code": 200, "msg": "Health check complete"})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        # The response and the other processes get the same values, so that counters never decrease.
        own = router.metrics.dump()
        try:
            others = await router.link.ask_supervisor("figures", own)
        except asyncio.TimeoutError:
            # Prometheus would take counters of this process alone for a restart, and later count the others again.
            message = "the router's other processes did not report their metrics in time"
            return error_reply(ApiError(503, message, "metrics_incomplete"))
        return Response(await router.metrics.render_text(own, *others), media_type=CONTENT_TYPE)

    @app.get("/prometheus_targets")
    async def list_targets() -> Response:
        return json_reply(200, [_describe_target(instance) for instance in router.registry])

    @app.get("/docs", include_in_schema=False)
    @app.get("/redoc", include_in_schema=False)
    async def show_where_docs_are() -> Response:
        return Response(DOCS, media_type="text/plain")


def _add_admin(app: FastAPI, router: RouterApp) -> None:
    """Define the paths of operator commands."""

    async def carry_out_order(request: Request) -> Response:
        outcome = ORDERS[request.url.path](router.registry, await _read_body(request))
        if (instance := router.registry.get(outcome["instance"])) is not None:
            await router.fleet_sync.announce_orders(instance)
        return json_reply(200, outcome)

    for path in ORDERS:
        app.post(path, name=path.rpartition("/")[2])(carry_out_order)

    @app.get("/admin/drain")
    async def show_progress(instance: str = "") -> Response:
        return json_reply(200, describe_drain(router.registry, instance))

    @app.post("/admin/clear_prefix_cache")
    async def clear_caches() -> Response:
        outcomes = await clear_prefix_caches(router.registry, router.upstream)
        for key, outcome in outcomes.items():
            if outcome == "success":
                router.fleet_sync.announce_lost_cache(key)
        is_done = all(outcome == "success" for outcome in outcomes.values())
        status = "success" if is_done else "error"
        return json_reply(200 if is_done else 502, {"status": status, "instances": outcomes})


def _add_explanations(app: FastAPI, router: RouterApp) -> None:
    """Define the paths at which operators look up ended requests."""

    @app.get("/admin/requests")
    async def list_last_requests(count: str = str(LISTED_REQUESTS)) -> Response:
        if not count.isdecimal() or not 0 < int(count) <= MAX_LISTED_REQUESTS:
            message = f"count is {count!r}; it must be a number from 1 to {MAX_LISTED_REQUESTS}"
            return error_reply(ApiError(400, message, "invalid_query", "count"))
        listed = router.audit.list_requests(int(count))
        for elsewhere in await router.link.ask_peers("requests", int(count), everywhere=True):
            listed += elsewhere
        listed.sort(key=lambda request: float(request["time"]), reverse=True)
        return json_reply(200, {"requests": listed[: int(count)]})

    @app.get("/admin/explain/{request_id:path}")
    async def explain_request(request_id: str) -> Response:
        return json_reply(200, await _find_explanation(router, request_id))


async def _find_explanation(router: RouterApp, request_id: str) -> dict[str, Any]:
    """Return the explanation of a request, from the process that has its record."""
    explanation = router.audit.explain_request(request_id)
    if explanation is None:
        explanation = next(iter(await router.link.ask_peers("explain", request_id, everywhere=True)), None)
    if explanation is None:
        message = f"no request with the id {request_id!r} is among the last {MAX_RECORDS} requests that have ended"
        raise Refused(ApiError(404, message, "unknown_request"))
    if session := explanation.get("session_id"):
        named = [explanation["client"], session]
        parts = [router.audit.sum_session(named), *await router.link.ask_peers("session", named, everywhere=True)]
        explanation["session"] = merge_sessions(parts)
    return explanation


def _add_clients(app: FastAPI, router: RouterApp) -> None:
    """Define the paths for requests of clients that the router itself answers."""

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        models = await _gather_models(router, request)
        return json_reply(200, {"object": "list", "data": list(models.values())})

    @app.get("/v1/models/{model_id:path}")
    async def show_model(request: Request, model_id: str) -> Response:
        models = await _gather_models(router, request)
        if model_id in models:
            return json_reply(200, models[model_id])
        return error_reply(explain_unknown_model(model_id, models))

    @app.post(ABORT_PATH)
    async def abort_requests(request: Request) -> Response:
        return await _pass_on_abort(router, request.headers.raw, await _read_body(request))


def _add_headers(send: Send, headers: Headers) -> Send:
    """Return a ``send`` that adds ``headers`` to the response."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *headers]
        await send(message)

    return send_with_headers


async def _gather_models(router: RouterApp, request: Request) -> dict[str, dict[str, Any]]:
    """Return the models of all instances, and their aliases, by id."""
    sent = [header for header in request.headers.raw if header[0] == b"authorization"]
    hops = ",".join(request.headers.getlist(_HOPS.decode()))
    if _ROUTER_ID in hops or hops.count(",") >= MAX_HOPS:
        message = (
            f"the request has passed through this router before, or through {MAX_HOPS} others; check that no router is "
            "registered at itself"
        )
        raise Refused(ApiError(508, message, "loop_detected"))
    sent += [(_HOPS, f"{hops},{_ROUTER_ID}".encode())]
    asked_at_once = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def list_models(instance: Instance) -> list[dict[str, Any]]:
        try:
            async with asked_at_once:
                answer = await router.upstream.fetch(
                    instance.address, "GET", "/v1/models", headers=sent, timeout=MODELS_SECONDS
                )
            return parse_models(answer.body)
        except (UpstreamError, ValueError) as exc:
            _log.warning("instance %s did not list its models: %s", instance.key, exc)
            return []

    instances = [instance for instance in router.registry if instance.healthy]
    models: dict[str, dict[str, Any]] = {}
    for listed in await asyncio.gather(*(list_models(instance) for instance in instances)):
        for model in listed:
            models.setdefault(str(model.get("id")), model)
    aliases = router.settings.model_aliases
    return models | {alias: {**models[name], "id": alias} for alias, name in aliases.items() if name in models}


async def _read_body(request: Request) -> bytes:
    """Return the body of a control-plane request. If it is too large, raise ``Refused`` without reading the rest."""
    size, pieces = int(request.headers.get("content-length", "0")), []
    if size <= CONTROL_BYTES:
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size > CONTROL_BYTES:
                break
            pieces.append(piece)
    if size > CONTROL_BYTES:
        message = f"the body is larger than the {CONTROL_BYTES} bytes that {request.url.path} accepts"
        raise Refused(ApiError(413, message, "body_too_large"))
    return b"".join(pieces)


async def _pass_on_abort(router: RouterApp, headers: Headers, body: bytes) -> Response:
    """Send an abort to every instance, and return the ids of the aborted requests.

    A client that is identified by its API key can abort only its own requests.

    Raises:
        BadBody: the body names no requests.
        Refused: the abort is for all requests, but the admin token was not sent.
    """
    members = parse_object(body)
    asked = read_asked_ids(members)
    if asked is None and router.auth.has_admin_token:
        router.auth.check_admin(headers)
    scope = AbortScope(router.auth.find_scope(headers), asked)
    found, engine_ids = await _abort_here_and_elsewhere(router, scope)
    outcome = await router.aborter.abort_everywhere(router.registry, scope.make_members(members, engine_ids))
    aborted, not_found = scope.remove_tag(outcome.aborted), outcome.not_found
    if asked is not None:
        unknown = list_unknown_ids(asked, [*outcome.aborted, *aborted])
        not_found = [each for each in unknown if not (isinstance(each, str) and each in found)]
    return json_reply(
        200,
        {
            "status": "error" if outcome.errors else "success",
            "result": {"aborted": aborted, "not_found": not_found},
            "errors": outcome.errors,
        },
    )


async def _abort_here_and_elsewhere(router: RouterApp, scope: AbortScope) -> tuple[set[str], list[str]]:
    """Run ``Proxy.abort_requests`` in all processes of all routers, and return the combined results."""
    found, engine_ids = router.proxy.abort_requests(scope)
    for found_elsewhere, known_elsewhere in await router.link.ask_peers("abort", scope.dump(), everywhere=True):
        found.update(found_elsewhere)
        engine_ids += known_elsewhere
    return found, engine_ids


def _refuse_registration(settings: RouterSettings, refused: BadBody | RegistrationError) -> Response:
    """Return the response to a registration that is not accepted, in the format of the configured FastDeploy router."""
    if settings.dialect == "python":
        return json_reply(400, {"detail": str(refused)})
    status, text = 400, "invalid InstanceInfo format"
    if isinstance(refused, NotHealthy):
        status, text = 503, f"{refused.url} service is not healthy"
    elif isinstance(refused, RoleRefused):
        takes_pairs = "splitwise mode only supports PREFILL/DECODE instances"
        text = takes_pairs if settings.splitwise else "only MIXED instances are allowed"
    elif isinstance(refused, BadBody):
        text = "Invalid InstanceInfo JSON format"
    return json_reply(status, {"code": status, "msg": f"{text}: {refused}"})


def _format_registration(registration: Registration) -> dict[str, Any]:
    """Return all fields that the instance sent; role, ports and ids have the format of FastDeploy's Python router."""
    fields = registration.fields
    return {
        **fields,
        "role": registration.role.name,
        "host_ip": registration.address.host,
        "port": str(registration.address.port),
        "metrics_port": str(registration.metrics_port),
        "connector_port": registration.connector_port or "0",
        "engine_worker_queue_port": _format_text(fields.get("engine_worker_queue_port")),
        "transfer_protocol": registration.transfer_protocol,
        "rdma_ports": registration.rdma_ports,
        "device_ids": registration.device_ids,
        "tp_size": registration.tp_size,
        "is_paused": registration.is_paused,
        "version": registration.version,
    }


def _describe_instance(instance: Instance) -> dict[str, Any]:
    """Return the entry of an instance in ``/registered``: all fields that it sent, and its state.

    The members have the names that FastDeploy's Go router uses.
    """
    registration = instance.registration
    return {
        **_format_registration(registration),
        "role": registration.role.value,
        "connector_port": registration.connector_port or "",
        "engine_worker_queue_port": _format_text(registration.fields.get("engine_worker_queue_port")) or "",
        "url": instance.address.url,
        "worker_type": registration.role.value,
        "engine": registration.engine.value,
        "bootstrap_port": registration.bootstrap_port,
        "kv_connector": registration.kv_connector.value,
        "models": None if instance.models is None else sorted(instance.models),
        "state": instance.state,
        "trouble": instance.trouble,
        "breaker": instance.breaker.state,
        "failed_requests_in_a_row": instance.breaker.failures,
        "cache_known": instance.cache_known or "learned",
        "weight": round(instance.weight(time.monotonic()), 2),
        "running_requests": instance.load.requests,
        "running_tokens": instance.load.tokens,
    }


def _describe_target(instance: Instance) -> dict[str, Any]:
    """Return an instance as a target for Prometheus (http_sd_configs). It has no confidential fields."""
    registration = instance.registration
    address = instance.address._replace(port=registration.metrics_port)
    labels = {"instance": instance.key, "role": registration.role.value, "engine": registration.engine.value}
    return {"targets": [str(address)], "labels": {"__scheme__": "https" if address.tls else "http", **labels}}


def _format_text(value: Any) -> str | None:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return None if value is None else str(value)
