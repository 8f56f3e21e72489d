"""``python -m engine.api_server``: one instance, with OpenAI's endpoints and FastDeploy's flags."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import orjson
import prometheus_client
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from engine import logs
from engine.apis.messages import Messages, MessagesBody
from engine.apis.response_store import ResponseStore
from engine.apis.responses import Responses
from engine.apis.responses_body import ResponsesBody
from engine.args import EngineArgs, parse_args
from engine.background import in_background
from engine.block_manager import BlockManager
from engine.completions import Completions
from engine.core import EngineCore
from engine.dialects import FastDeployDialect, PairDialect, SglangDialect, VllmDialect
from engine.disaggregation import (
    BlockMemory,
    HandoverReceiver,
    Transfer,
    TransferUnavailable,
    choose_protocol,
    list_protocols,
)
from engine.generation import Generations, list_unknown_ids
from engine.http_server import (
    CLIENT_LEFT,
    HttpMiddleware,
    InstanceProtocol,
    add_error_handlers,
    encode_request_id,
    find_request_id,
    read_body,
)
from engine.kv_codec import quantised_namespace
from engine.memory_budget import choose_num_blocks
from engine.metrics import EngineMetrics
from engine.model_runner import (
    ModelRunner,
    check_length,
    choose_device,
    choose_dtype,
    load_model_config,
    load_tokenizer,
)
from engine.protocol import (
    AbortBody,
    AbortRidBody,
    ApiError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse_body,
)
from engine.registration import host_ip_towards, read_token, router_url, send_heartbeats
from engine.request import Request as EngineRequest
from engine.scheduler import Scheduler
from engine.staging import MAX_LENT_BYTES, open_direct, stage_handovers
from engine.tracing import Tracer, open_tracer
from engine.why_miss.explainer import MissExplainer
from engine.why_miss.paths import add_kvcache_paths
from kvstore_backend import BlockPool, ConfigError, KVStoreError, PoolConfig, load_config, open_pool
from kvstore_backend.config import find_checkpoint, named_protocol, named_rdma_devices
from kvstore_backend.manifest import Manifest

__all__ = ["Instance", "create_app", "main"]

log = logging.getLogger(__name__)

# Linux takes clients' ends from 32768 to 60999; one keeps its port for 60 s after it was closed.
CLOSED_CONNECTION_SECONDS = 70.0
_GRACE_SECONDS = 3
# So long after its last heartbeat a router has forgotten an instance.
_FORGOTTEN_SECONDS = 30.0
# Stopping that takes longer is explained, and explained again after each further so long.
_QUIET_SECONDS, _PROGRESS_SECONDS = 2.0, 5.0

_BodyT = TypeVar("_BodyT", ChatBody, CompletionBody, MessagesBody, ResponsesBody)


class _ClientResponse(Protocol):
    """A response in its API's form."""

    @property
    def request(self) -> EngineRequest: ...

    @property
    def is_stream(self) -> bool: ...

    async def collect_whole(self) -> dict[str, Any]: ...

    def stream_events(self) -> AsyncIterator[bytes]: ...


class Instance:
    """Everything one process serves, built from its arguments; the model is loaded here.

    Raises:
        ConfigError: the arguments, the checkpoint or the pool's configuration cannot be used.
    """

    def __init__(self, args: EngineArgs, connector: socket.socket) -> None:
        """Take over ``connector``, the bound socket where prefill instances reach this one."""
        self.args = args
        self.start_id = secrets.token_hex(8)
        """By which the router tells this process from one that had its address before."""
        self._connector = connector
        self._registered_at = -math.inf
        self.router = router_url(args.router) if args.router else None
        self._router_token = read_token(args.router_token_file) if args.router_token_file else ""
        pool_config = load_config(args.kvcache_storage_backend) if args.kvcache_storage_backend else None
        folder = find_checkpoint(args.model)
        config = load_model_config(folder)
        check_length(folder, config, args.max_model_len)
        device = choose_device(args.device)
        runner = ModelRunner(folder, config, device, choose_dtype(args.dtype, config), args.block_size)
        num_blocks = choose_num_blocks(args, runner)
        runner.allocate_kv(num_blocks)
        runner.try_out()
        if args.retrieval:
            runner.enable_retrieval(args.retrieval, args.max_num_seqs, args.max_model_len)
            log.info("Sparse attention: %s", args.retrieval)
            if advice := args.retrieval.explain_block_size():
                log.warning("%s", advice)
        self.metrics = EngineMetrics()
        self.tracer = open_tracer(args.trace_receiver) if args.trace_receiver else None
        scheduler = Scheduler(
            BlockManager(num_blocks),
            args.block_size,
            args.max_num_seqs,
            args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            prefix_caching=args.enable_prefix_caching,
            pool=pool_config is not None,
        )
        pool = _open_pool(pool_config, runner, self.metrics) if pool_config else None
        self.core = EngineCore(runner, scheduler, self.metrics, pool=pool, save_outputs=args.enable_output_caching)
        tokenizer = load_tokenizer(folder)
        self._transfer_protocols = list(args.cache_transfer_protocol)
        memory = self._open_block_memory(runner, named_rdma_devices(pool_config))
        self.receiver = HandoverReceiver(memory)
        self.dialect = self._choose_dialect()
        host = "" if args.pd_dialect == "fastdeploy" else self._own_address()
        self.generations = Generations(
            self.core, tokenizer, args.splitwise_role, args.block_size, self.receiver, memory, host, self.tracer
        )
        self.completions = Completions(
            self.generations,
            tokenizer,
            args.served_model_name,
            args.max_model_len,
            runner.vocab_size,
            runner.repetition_penalty,
            runner.default_max_tokens,
            self.dialect,
        )
        manifest = Manifest((pool or runner).namespace.fields, runner.facts)
        self.explainer = MissExplainer(self.generations.recent, tokenizer, manifest, pool)
        store = None if args.splitwise_role == "prefill" else ResponseStore()
        self.responses = Responses(self.completions, store)
        self.messages = Messages(self.completions)
        self.summary = (
            f"{args.splitwise_role} instance on port {args.port}: {args.served_model_name}, {runner.device}, "
            f"{runner.namespace.kv_dtype}, {num_blocks} KV blocks of {args.block_size} tokens, "
            f"pool: {args.kvcache_storage_backend or 'none'}"
        )

    def _open_block_memory(self, runner: ModelRunner, rdma_devices: str) -> BlockMemory | None:
        """The blocks that direct hand-overs read and write; None where there is no hand-over, or no way to do it."""
        if self.args.splitwise_role == "mixed":
            return None
        try:
            protocol = choose_protocol(self.args.cache_transfer_protocol, named_protocol())
            self._transfer_protocols = list_protocols(self.args.cache_transfer_protocol, protocol)
            transfer = Transfer(self._own_address(), protocol, rdma_devices)
            if runner.device.type == "cpu":
                return BlockMemory(self.core, runner, transfer, open_direct(runner, transfer))
            max_lent = MAX_LENT_BYTES // runner.shape.nbytes
            return BlockMemory(self.core, runner, transfer, stage_handovers(runner, transfer), max_lent)
        except (TransferUnavailable, OSError) as exc:
            log.warning("Prompts are handed over through the pool only, not directly: %s", exc)
            return None

    def _choose_dialect(self) -> PairDialect:
        port: int = self._connector.getsockname()[1]
        if self.args.pd_dialect == "vllm":
            return VllmDialect(self._own_address(), port)
        if self.args.pd_dialect == "sglang":
            return SglangDialect(self.args.splitwise_role, port)
        return FastDeployDialect()

    def _own_address(self) -> str:
        """This machine's address as the other side of a hand-over reaches it."""
        if self.args.host not in ("0.0.0.0", "::"):
            return self.args.host
        return host_ip_towards(self.router) if self.router else "127.0.0.1"

    @contextlib.asynccontextmanager
    async def run_lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Engine, connector port and heartbeat, for as long as the server runs."""
        self.core.start()
        await self.receiver.start_listening(self._connector)
        heartbeat = None
        if self.router:
            payload = self.registration_payload()
            sending = send_heartbeats(self.router, payload, self._router_token, self.note_registration)
            heartbeat = asyncio.create_task(sending)
        log.info("Ready: %s", self.summary)
        print(f"engine.api_server: ready: {self.summary}", flush=True)
        try:
            yield
        finally:
            if heartbeat:
                heartbeat.cancel()
            await self.receiver.stop_listening()
            await asyncio.to_thread(self.core.stop)
            if self.tracer is not None:
                await asyncio.to_thread(self.tracer.close)

    def note_registration(self) -> None:
        """The router has taken this instance's registration."""
        self._registered_at = time.monotonic()

    def find_obstacle(self) -> str:
        """Why no router sends requests here, or should, in one sentence; ``""`` if one does."""
        if not self.core.is_alive:
            return "the engine has failed; its log says why"
        if self.router and time.monotonic() - self._registered_at > _FORGOTTEN_SECONDS:
            return f"it is not registered at the router {self.router}; the log says why"
        return ""

    def registration_payload(self) -> dict[str, Any]:
        """This instance as the router is to know it (FastDeploy's registration)."""
        args = self.args
        rdma_ports = args.rdma_comm_ports.split(",") if args.rdma_comm_ports else None
        return {
            "role": args.splitwise_role,
            "start_id": self.start_id,
            "max_num_seqs": args.max_num_seqs,
            "port": args.port,
            "metrics_port": args.metrics_port or args.port,
            "connector_port": self.receiver.port,
            "engine_worker_queue_port": args.engine_worker_queue_port or None,
            "rdma_ports": rdma_ports,
            "device_ids": ["0"],
            "transfer_protocol": self._transfer_protocols,
            "tp_size": args.tensor_parallel_size,
            "is_paused": False,
            "version": None,
            "connected_decodes": [],
            **self.dialect.registration,
        }


def _open_pool(config: PoolConfig, runner: ModelRunner, metrics: EngineMetrics) -> BlockPool:
    """The pool, on threads that yield to compute."""
    namespace = quantised_namespace(runner.namespace, config.kv)
    return in_background(partial(open_pool, config, namespace, metrics.registry, facts=runner.facts))


def create_app(instance: Instance) -> FastAPI:
    """The HTTP face of ``instance``."""
    # FastAPI's pages about itself load their scripts from the internet.
    app = FastAPI(
        title="fastdeploy-kvstore engine",
        lifespan=instance.run_lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )

    add_error_handlers(app)
    app.add_middleware(HttpMiddleware)
    _add_completions(app, instance)
    _add_orders(app, instance)
    _add_state(app, instance)
    add_kvcache_paths(app, instance.explainer, instance.completions)
    return app


def _add_completions(app: FastAPI, instance: Instance) -> None:
    """The paths for clients."""

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _complete(request, ChatBody, instance.completions.begin_chat, instance.tracer)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await _complete(request, CompletionBody, instance.completions.begin_completion, instance.tracer)

    @app.post("/v1/responses")
    async def respond(request: Request) -> Response:
        return await _complete(request, ResponsesBody, instance.responses.begin_response, instance.tracer)

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(response_id: str) -> Response:
        return JSONResponse(instance.responses.retrieve_response(response_id))

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str) -> Response:
        return JSONResponse(instance.responses.delete_response(response_id))

    @app.post("/v1/messages")
    async def message(request: Request) -> Response:
        return await _complete(request, MessagesBody, instance.messages.begin_message, instance.tracer)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = parse_body(TokenizeBody, await read_body(request))
        return JSONResponse(await instance.completions.tokenize_prompt(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = parse_body(DetokenizeBody, await read_body(request))
        return JSONResponse(instance.completions.detokenize_tokens(body))


def _add_orders(app: FastAPI, instance: Instance) -> None:
    """The paths for routers and operators that change something."""

    @app.post("/v1/abort_requests")
    async def abort(request: Request) -> Response:
        body = parse_body(AbortBody, await read_body(request))
        if not body.abort_all and not body.req_ids:
            message = 'the body must have "req_ids", a list of request ids, or "abort_all": true'
            raise ApiError(400, message, param="req_ids")
        generations = instance.generations
        aborted = generations.abort_all() if body.abort_all else generations.abort_requests(body.req_ids)
        not_found = [] if body.abort_all else list_unknown_ids(body.req_ids, aborted)
        return JSONResponse({"code": 0, "message": "success", "aborted": aborted, "not_found": not_found})

    if isinstance(instance.dialect, SglangDialect):

        @app.post("/abort_request")
        async def abort_rid(request: Request) -> Response:
            body = parse_body(AbortRidBody, await read_body(request))
            if body.abort_all:
                instance.generations.abort_all()
            elif body.rid:
                instance.generations.abort_requests([body.rid])
            return Response(status_code=200)

    @app.post("/clear_prefix_cache")
    @app.post("/reset_prefix_cache")  # vLLM's path
    async def clear_prefix_cache(request: Request) -> Response:
        if request.query_params.get("reset_external", "").lower() in ("1", "true"):  # vLLM's query for the pool
            message = "reset_external: an instance clears its own cache, not the pool that others share; leave it out"
            raise ApiError(400, message, param="reset_external")
        if not instance.core.is_alive:
            raise ApiError(503, "this instance's engine has ended; its log says why")
        instance.core.clear_prefix_cache()
        return JSONResponse({"status": "success"})


def _add_state(app: FastAPI, instance: Instance) -> None:
    """The paths that tell of the model and of the instance."""

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse(instance.completions.list_models())

    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> Response:
        return JSONResponse(instance.completions.describe_model(model_id))

    server = instance.dialect.describe_server()
    for path in server:

        @app.get(path)
        async def describe_server(request: Request) -> Response:
            return JSONResponse(server[request.url.path])

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if instance.core.is_alive else 503)

    @app.get("/ready")
    async def ready() -> Response:
        if obstacle := instance.find_obstacle():
            return JSONResponse({"status": "not ready", "reason": obstacle}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(instance.metrics.registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


async def _complete(
    request: Request,
    kind: type[_BodyT],
    begin: Callable[[_BodyT], Awaitable[_ClientResponse]],
    tracer: Tracer | None,
) -> Response:
    """Answer a completion request, which has its id from its body, else from ``X-Request-Id``."""
    if tracer is not None:
        tracer.enter_request(request.headers.raw)
    body = parse_body(kind, await read_body(request))
    sent_id = find_request_id(request.headers.raw)
    body.request_id = body.request_id or sent_id or None
    response = await begin(body)
    answer = await _respond_unless_left(request, response)
    answer.raw_headers.append(encode_request_id(sent_id or response.request.request_id))
    return answer


async def _respond_unless_left(request: Request, response: _ClientResponse) -> Response:
    """Stream the response, or collect it and stop early when the client leaves."""
    if response.is_stream:
        return StreamingResponse(response.stream_events(), media_type="text/event-stream")

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting = asyncio.ensure_future(response.collect_whole())
    leaving = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait({collecting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=CLIENT_LEFT)
        return Response(orjson.dumps(collecting.result()), media_type="application/json")
    finally:
        for task in (collecting, leaving):
            task.cancel()


class InstanceServer(uvicorn.Server):
    """Asked to stop, gives running responses a moment to end, then ends them with finish reason ``abort``."""

    def __init__(self, instance: Instance) -> None:
        # uvicorn cuts connections at its own time-out, with a traceback for each: it is to have nothing left to cut.
        timeout = 2 * _GRACE_SECONDS
        super().__init__(
            uvicorn.Config(
                create_app(instance),
                http=InstanceProtocol,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=timeout,
            )
        )
        self._generations = instance.generations
        self._core = instance.core

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._generations.abort_all)
        telling = asyncio.ensure_future(self._tell_progress())
        await super().shutdown(sockets)
        telling.cancel()

    async def _tell_progress(self) -> None:
        """Say why it takes long to stop, if it does."""
        await asyncio.sleep(_QUIET_SECONDS)
        while True:
            if count := self._generations.num_live:
                what = "1 request that runs" if count == 1 else f"{count} requests that run"
            elif count := len(self.server_state.connections):
                what = "1 connection to close" if count == 1 else f"{count} connections to close"
            else:
                what = self._core.holds_stop_up
            log.info("stopping: waiting for %s", what)
            print(f"engine.api_server: stopping: waiting for {what}", flush=True)
            await asyncio.sleep(_PROGRESS_SECONDS)


def _bind_socket(host: str, port: int, flag: str) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is noticed before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        _bind_patiently(bound, host, port)
    except (OSError, UnicodeError) as exc:
        bound.close()
        if not isinstance(exc, OSError) or exc.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise ConfigError(f"cannot listen on {host}:{port}: --host must be an address of this machine") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None
    return bound


def _bind_patiently(bound: socket.socket, host: str, port: int) -> None:
    """Bind, if need be after waiting for the end of a connection that has the port for its client's end."""
    give_up_at, told = time.monotonic() + CLOSED_CONNECTION_SECONDS, False
    while True:
        try:
            return bound.bind((host, port))
        except OSError as exc:
            is_held = exc.errno == errno.EADDRINUSE and not _is_served(bound.family, host, port)
            if not is_held or time.monotonic() >= give_up_at:
                raise
        if not told:
            print(f"engine.api_server: waiting for port {port}: a closed connection still has it", flush=True)
            told = True
        time.sleep(0.2)


def _is_served(family: int, host: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _start_listening(bound: socket.socket, flag: str) -> None:
    """Listen, while a refusal can still be told: several may bind one port before the first of them listens."""
    try:
        bound.listen()
    except OSError as exc:
        host, port = bound.getsockname()[:2]
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}; choose another {flag}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run an instance until SIGTERM or SIGINT; 2 when its arguments cannot be used, 130 at SIGINT before it serves."""
    with contextlib.ExitStack() as sockets:
        try:
            args = parse_args(argv)
            ports = {"--port": args.port, "--pd-comm-port": args.pd_comm_port}
            if args.metrics_port and args.metrics_port != args.port:
                ports["--metrics-port"] = args.metrics_port
            bound = {flag: sockets.enter_context(_bind_socket(args.host, port, flag)) for flag, port in ports.items()}
            logs.set_up(args.log_dir, args.splitwise_role, args.port, args.log_level)
            instance = Instance(args, bound["--pd-comm-port"])
            for flag, listener in bound.items():
                _start_listening(listener, flag)
            del bound["--pd-comm-port"]  # the instance's own
        except KeyboardInterrupt:
            return 130
        except (KVStoreError, OSError) as exc:
            print(f"engine.api_server: {exc}", file=sys.stderr)
            return 2
        server = InstanceServer(instance)
        # uvicorn handles SIGTERM while it serves and raises it again at the end; being asked to stop is no failure.
        signal.signal(signal.SIGTERM, server.handle_exit)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=list(bound.values()))
        return 0 if server.started else 1


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: a native call or client that waits for a dead master must not keep the process.
    os._exit(code)
