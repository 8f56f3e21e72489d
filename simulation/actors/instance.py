"""Instance: simulates an inference instance of any dialect, with faults of the plan.

If a router breaks a rule of a hand-over, this is reported as a failure of the world.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from simulation.actors.engines import APIS, Generation, Script, read_generation
from simulation.actors.http import Answer, Asked, ClientConnection, Reply, ServerConnection, format_request
from simulation.actors.tokens import answer_ids, prompt_ids, text_of

if TYPE_CHECKING:
    from simulation.world import Process, World

__all__ = ["MOODS", "POISON", "Instance", "Watcher"]

HEARTBEAT_SECONDS = 5.0
# Time for which prefill retains the blocks of a prompt, and for which decode waits for them.
LEASE_SECONDS = 30.0
SGLANG_NOTICES_SECONDS = 3.0
BOOTSTRAP_OFFSET = 1000
POISON = prompt_ids("poison")[0]
"""Token id of a word in a prompt. An instance that computes a prompt with this word crashes."""

MOODS = (
    *("answers_500", "answers_503", "answers_429", "answers_400", "redirects", "cuts", "closes_unasked", "hangs"),
    *("hangs_in_stream", "slow", "no_http", "preempts", "engine_dies", "unhealthy", "half_head"),
)
"""Kinds of faults that an instance can have for a while."""


class Watcher(Protocol):
    """Interface of the world for instances."""

    instances: dict[str, Instance]

    def on_arrival(self, instance: Instance, generation: Generation, asked: Asked, leg: str) -> None:
        """Record that a request has arrived at an instance."""

    def on_poison(self, instance: Instance, generation: Generation) -> None:
        """Crash the instance, because it computes a prompt with ``POISON``."""

    def on_own_error(self, generation: Generation) -> None:
        """Record that an instance answers a request with status 500."""

    def fail(self, oracle: str, message: str) -> None:
        """Report that a rule is broken."""


@dataclass
class _Life:
    """State of an instance, which a restart loses."""

    start_id: str
    draws: random.Random
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    """Requests that the engine computes or retains KV for, by their ids in the engine. Setting the event stops one."""
    unknown_aborts: set[str] = field(default_factory=set)
    """The ids of aborts that found no request, because it had ended, or because the abort had overtaken it."""
    handed: dict[str, asyncio.Event] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], float]] = field(default_factory=dict)
    connections: dict[ServerConnection, None] = field(default_factory=dict)


class Instance:
    """A simulated instance. ``start`` starts its process, also again after its end.

    Attributes:
        mood: the current kind of fault, of ``MOODS``; "": none.
        process: the current process.
        life: the state of the current process.
        down_since: virtual time of the last crash; None: the instance is running.
    """

    def __init__(
        self,
        world: World,
        watcher: Watcher,
        name: str,
        role: str,
        *,
        engine: str = "fastdeploy",
        connector: str = "nixl",
        routers: tuple[tuple[str, int], ...] = (("router", 9000),),
        preempts: bool = False,
    ) -> None:
        self.world, self.watcher = world, watcher
        self.name, self.role, self.engine, self.connector = name, role, engine, connector
        self.host, self.port = name, 8000
        self.routers = routers
        self.mood = ""
        self.token_seconds = 0.02
        self.idle_seconds = 5.0
        self.process: Process
        self.life: _Life
        self._num_lives = 0
        self.down_since: float | None = None

    def __repr__(self) -> str:
        return f"<instance {self.key} {self.role} {self.engine} {self.mood}>"

    @property
    def key(self) -> str:
        """The address by which routers name the instance."""
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Start the process. After a crash the new process has the same address and no state of the old one."""
        self._num_lives += 1
        self.mood, self.down_since = "", None
        self.process = self.world.make_process(self.name, host=self.host)
        draws = self.world.stream("instance", self.name, str(self._num_lives))
        self.life = _Life(f"{self.name}-{self._num_lives}", draws)
        self.process.start_loop(self._main)

    def crash(self, *, silently: bool) -> None:
        """Kill the process. ``silently``: the host loses power, so that other hosts get no message."""
        self.down_since = self.world.now
        self.process.crash(silently=silently)

    def registration(self) -> dict[str, Any]:
        """Return the body of its registration at routers."""
        fields: dict[str, Any] = {
            "role": self.role,
            "host_ip": self.host,
            "port": self.port,
            "metrics_port": self.port,
            "connector_port": self.port + 1,
            "rdma_ports": ["7100"],
            "device_ids": [0],
            "transfer_protocol": ["rdma"],
            "tp_size": 1,
            "is_paused": False,
            "start_id": self.life.start_id,
        }
        if self.engine != "fastdeploy":
            fields |= {"engine": self.engine, "bootstrap_port": self.port + BOOTSTRAP_OFFSET}
        return fields | ({"kv_connector": self.connector} if self.engine == "vllm" else {})

    async def _main(self) -> None:
        loop, life = asyncio.get_running_loop(), self.life
        await loop.create_server(self._make_connection, self.host, self.port)
        bootstrap = self.port + BOOTSTRAP_OFFSET
        await loop.create_server(self._make_connection, self.host, bootstrap)
        await asyncio.sleep(life.draws.random())
        while True:
            for host, port in self.routers:
                await self._register(host, port)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    def _make_connection(self) -> ServerConnection:
        return ServerConnection(self._handle, self.life.connections, self.idle_seconds)

    async def _register(self, host: str, port: int) -> None:
        body = json.dumps(self.registration()).encode()
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(_ask(host, port, format_request("POST", "/register", body)), 5.0)

    async def _handle(self, asked: Asked, reply: Reply) -> None:
        path = asked.path
        if path == "/health":
            await self._answer_probe(reply)
        elif path == "/v1/models":
            await reply.answer(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})
        elif path in ("/v1/abort_requests", "/abort_request"):
            await self._abort(asked, reply)
        elif path == "/detokenize":
            await reply.answer(200, {"prompt": text_of(asked.json()["tokens"])})
        elif path == "/query":
            await reply.answer(200, {"0": {"engine_id": self.life.start_id}})
        elif path in APIS:
            await self._generate(asked, reply)
        elif path == "/v1/embeddings":
            await self._embed(asked, reply)
        else:
            self.watcher.fail("paths", f"a client has reached {path} at {self.name}")
            await reply.answer(404, {"error": {"message": "no such path"}})

    async def _answer_probe(self, reply: Reply) -> None:
        if self.mood == "unhealthy":
            await reply.answer(500, {})
        else:
            await reply.answer(200, {})

    async def _abort(self, asked: Asked, reply: Reply) -> None:
        members = asked.json()
        ids = members.get("req_ids") or ([members["rid"]] if members.get("rid") else [])
        if members.get("abort_all"):
            ids = list(self.life.running)
        aborted = []
        for each in ids:
            stop = self.life.running.get(each)
            if stop is not None:
                stop.set()
                aborted.append(each)
            else:
                self.life.unknown_aborts.add(each)
        await reply.answer(200, {"result": {"aborted": aborted, "not_found": [x for x in ids if x not in aborted]}})

    async def _embed(self, asked: Asked, reply: Reply) -> None:
        if await self._misbehave(reply, None):
            return
        await asyncio.sleep(0.01)
        text = asked.json()["input"]
        await reply.answer(200, {"object": "list", "data": [{"index": 0, "embedding": [len(text)]}], "model": "m"})

    async def _generate(self, asked: Asked, reply: Reply) -> None:
        generation = read_generation(asked.path, asked.json(), self.engine)
        self.watcher.on_arrival(self, generation, asked, self.role)
        if not generation.is_resumed_right:
            at = f"at {self.name}, behind {generation.start} tokens"
            self.watcher.fail("resumption", f"{at}: {generation.resumed[-5:]} were never generated")
        if await self._misbehave(reply, generation):
            return
        if POISON in generation.prompt:
            self.watcher.on_poison(self, generation)
        engine_id = self._engine_id(generation, asked)
        if (before := self.life.running.get(engine_id)) is not None and not before.is_set():
            self.watcher.fail("dialect", f"{self.name} is asked for {engine_id} while it computes a request of this id")
        stop = self.life.running[engine_id] = asyncio.Event()
        connection = reply._connection
        self._stop_when_left(connection, stop)
        try:
            await self._compute(generation, asked, reply, stop)
        except ConnectionError:
            if self.engine == "fastdeploy" and not stop.is_set():
                # FastDeploy's engine computes the answer to its end, although the client has disconnected.
                await _sleep_unless(stop, self.token_seconds * max(1, generation.end - generation.start))
            raise
        finally:
            if self.life.running.get(engine_id) is stop:
                del self.life.running[engine_id]

    def _engine_id(self, generation: Generation, asked: Asked) -> str:
        members = generation.members
        prefix = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}[generation.api]
        if self.engine == "fastdeploy":
            given = str(members.get("request_id", ""))
            return (given if given.startswith(prefix) else prefix + given) + "_0"
        if self.engine == "sglang":
            rid = members.get("rid")
            return str(rid[0] if isinstance(rid, list) else rid or f"own-{self.life.draws.getrandbits(40)}")
        return f"{asked.headers.get('x-request-id', '')}-{self.life.draws.getrandbits(40)}"

    def _stop_when_left(self, connection: ServerConnection, stop: asyncio.Event) -> None:
        """Let the engine stop if the client disconnects: vLLM at once, SGLang after some seconds.

        FastDeploy stops only if the request is aborted.
        """
        if self.engine in ("vllm", "openai"):
            connection.on_lost.append(stop.set)
        elif self.engine == "sglang":
            loop = asyncio.get_running_loop()
            connection.on_lost.append(functools.partial(_call_later, loop, stop.set))

    async def _compute(self, generation: Generation, asked: Asked, reply: Reply, stop: asyncio.Event) -> None:
        draws, members = self.life.draws, generation.members
        script = Script(generation, self.engine, f"{self.name}-{draws.getrandbits(32):x}", 1_800_000_000)
        if self.role == "prefill":
            await self._prefill(generation, script, reply, stop, asked)
            return
        trouble = await self._await_hand_over(generation, stop, asked) if self.role == "decode" else ""
        if not self._has_hand_over(members):
            await _sleep_unless(stop, draws.uniform(0.01, 0.15))
        if stop.is_set():
            raise ConnectionError("aborted")
        if trouble:
            await self._report_trouble(generation, script, reply, trouble)
            return
        ids = answer_ids(generation.prompt, generation.start, generation.end)
        may_preempt = self.mood == "preempts" and self.role == "decode" and self.engine == "fastdeploy"
        finish = generation.finish
        if may_preempt and ids and generation.api in ("chat", "completions"):
            ids, finish = ids[: draws.randrange(len(ids))], "pd_reschedule"
        if not generation.is_stream:
            await _sleep_unless(stop, self.token_seconds * len(ids))
            if stop.is_set():
                await self._answer_aborted(reply)
                return
            await reply.answer(200, script.whole(ids, finish))
            return
        await self._stream(ids, finish, script, reply, stop, generation)

    async def _answer_aborted(self, reply: Reply) -> None:
        if not reply.is_peer_gone:
            await reply.answer(499 if self.engine == "fastdeploy" else 400, {"error": {"message": "request aborted"}})

    async def _stream(
        self, ids: list[int], finish: str, script: Script, reply: Reply, stop: asyncio.Event, generation: Generation
    ) -> None:
        draws = self.life.draws
        await reply.begin_stream()
        for event in script.begin():
            await reply.chunk(event)
        position, fails_at = 0, -1
        alone = draws.choice((0.3, 0.9))  # share of tokens that are alone in an event
        finishes_at_once = generation.api not in ("chat", "completions") or draws.random() < 0.5
        mood = self.mood
        if mood in ("engine_dies", "hangs_in_stream"):
            fails_at = draws.choice((0, draws.randrange(len(ids) + 1), len(ids)))
        while position < len(ids) or fails_at >= 0:
            count = 1 if draws.random() < alone else draws.randint(2, 4)
            group = ids[position : position + count]
            slow = 20.0 if self.mood == "slow" else 1.0
            await _sleep_unless(stop, slow * self.token_seconds * len(group))
            if stop.is_set():
                raise ConnectionError("aborted")
            if 0 <= fails_at <= position and mood == "hangs_in_stream":
                await _sleep_unless(stop, 3600.0)
                raise ConnectionError("hung")
            if 0 <= fails_at <= position:
                await reply.chunk(script.error("EngineCore encountered an issue. See stack trace", 500))
                await reply.chunk(b"data: [DONE]\n\n")
                await reply.end_stream()
                return
            is_last = position + count >= len(ids) and finish != "pd_reschedule"
            reason = finish if is_last and finishes_at_once else None
            await reply.chunk(script.tokens(group, is_first=position == 0, finish=reason))
            position += len(group)
        if draws.random() < 0.3:
            await _sleep_unless(stop, self.token_seconds)
            if stop.is_set():
                raise ConnectionError("aborted")
        if finish == "pd_reschedule" and draws.random() < 0.5:
            await reply.chunk(script.error("PD Error: decode preempted the request", 500) + b"data: [DONE]\n\n")
        else:
            for event in script.end(len(ids), finish):
                await reply.chunk(event)
        await reply.end_stream()

    async def _misbehave(self, reply: Reply, generation: Generation | None) -> bool:
        """Fail before the computation, or prepare a later cut, if the mood is of this kind.

        Returns:
            Whether the request has failed, so that nothing is computed.
        """
        mood, draws = self.mood, self.life.draws
        if mood.startswith("answers_"):
            await reply.answer(int(mood[-3:]), {"error": {"message": f"as planned: {mood}", "code": mood}})
        elif mood == "redirects":
            await reply.raw(b"HTTP/1.1 307 X\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n")
        elif mood == "no_http":
            await reply.raw(b"\x00\x01 this is no HTTP\r\n\r\n")
        elif mood == "half_head":
            await reply.raw(b"HTTP/1.1 200 OK\r\ncontent-ty")
            reply.cut()
        elif mood == "closes_unasked":
            reply.cut()
        elif mood == "hangs":
            await asyncio.sleep(3600.0)
        elif mood == "cuts":
            reply.cut_at = draws.randrange(1, 3000)
            return False
        else:
            return False
        return True

    # Hand-overs.

    def _has_hand_over(self, members: dict[str, Any]) -> bool:
        return any(name in members for name in ("disaggregate_info", "kv_transfer_params", "bootstrap_room"))

    async def _prefill(
        self, generation: Generation, script: Script, reply: Reply, stop: asyncio.Event, asked: Asked
    ) -> None:
        members, draws = generation.members, self.life.draws
        await _sleep_unless(stop, draws.uniform(0.02, 0.3))
        if stop.is_set():
            raise ConnectionError("aborted")
        ids = answer_ids(generation.prompt, generation.start, min(generation.end, generation.start + 1))
        params = members.get("kv_transfer_params") or {}
        if self.engine == "fastdeploy":
            if not self._hand_to_decode(members):
                await self._send_event(reply, generation, script.error("PD Error: decode cannot be reached", 500))
                return
        elif self.engine == "sglang":
            self._open(f"room-{members['bootstrap_room']}")
        elif self.connector == "mooncake":
            self._open(f"transfer-{params.get('transfer_id')}")
        response = script.whole(ids, "length")
        if self.engine == "vllm" and self.connector == "nixl" and params.get("do_remote_decode"):
            lease = f"{draws.getrandbits(64):x}"
            self.life.leases[lease] = (generation.prompt, self.world.now + LEASE_SECONDS)
            response["kv_transfer_params"] = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.life.start_id,
                "remote_block_ids": [lease],
                "remote_host": self.host,
                "remote_port": self.port,
            }
        if generation.is_stream:
            await reply.begin_stream()
            for event in (
                *script.begin(),
                script.tokens(ids, is_first=True, finish="length"),
                *script.end(len(ids), "length"),
            ):
                await reply.chunk(event)
            await reply.end_stream()
        else:
            await reply.answer(200, response)

    async def _send_event(self, reply: Reply, generation: Generation, event: bytes) -> None:
        if generation.is_stream:
            await reply.begin_stream()
            await reply.chunk(event)
            await reply.end_stream()
        else:
            await reply.answer(200, json.loads(event.partition(b"data: ")[2]))

    def _hand_to_decode(self, members: dict[str, Any]) -> bool:
        info = members["disaggregate_info"]
        decode = self.watcher.instances.get(info["decode_ip"])
        if decode is None or decode.role != "decode":
            self.watcher.fail("dialect", f"disaggregate_info names {info['decode_ip']}, which is no decode instance")
            return False
        link = self.world.network.link(self.host, decode.host)
        if not decode.process.runs or link.is_down:
            return False
        decode._open(f"request-{members['request_id']}")
        return True

    def _open(self, key: str) -> None:
        self.life.handed.setdefault(key, asyncio.Event())
        for instance in (self, *self.watcher.instances.values()):
            if instance.life.handed.get(key) is not None and instance.process.is_alive:
                gate = instance.life.handed[key]
                loop = instance.process.loops[0]
                loop.post(gate.set)

    async def _await_hand_over(self, generation: Generation, stop: asyncio.Event, asked: Asked) -> str:
        """Wait for the prompt's KV. Return why it did not arrive; "" if it arrived, or is not needed."""
        members = generation.members
        params = members.get("kv_transfer_params") or {}
        if self.engine == "fastdeploy" and "disaggregate_info" in members:
            # FastDeploy's decode waits without a time limit, until the request is aborted.
            return await self._await_gate(f"request-{members['request_id']}", stop, None)
        if self.engine == "sglang" and "bootstrap_room" in members:
            prefill = self.watcher.instances.get(members["bootstrap_host"])
            if prefill is None or prefill.role != "prefill":
                self.watcher.fail("dialect", f"{members['bootstrap_host']} is no prefill instance")
            return await self._await_gate(f"room-{members['bootstrap_room']}", stop, LEASE_SECONDS, prefill)
        if self.engine == "vllm" and self.connector == "mooncake" and params.get("do_remote_prefill"):
            prefill = self._find_life(params["remote_engine_id"])
            return await self._await_gate(f"transfer-{params['transfer_id']}", stop, LEASE_SECONDS, prefill)
        if self.engine == "vllm" and params.get("do_remote_prefill"):
            return self._take_lease(params, generation)
        return ""

    def _find_life(self, start_id: str) -> Instance | None:
        return next((each for each in self.watcher.instances.values() if each.life.start_id == start_id), None)

    async def _await_gate(
        self, key: str, stop: asyncio.Event, seconds: float | None, prefill: Instance | None = None
    ) -> str:
        gate = self.life.handed.setdefault(key, asyncio.Event())
        if prefill is not None and key in prefill.life.handed:
            gate.set()
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, stop)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            self.life.handed.pop(key, None)
        return "" if gate.is_set() or stop.is_set() else "the prompt's KV did not come"

    def _take_lease(self, params: dict[str, Any], generation: Generation) -> str:
        prefill = self._find_life(str(params.get("remote_engine_id")))
        if prefill is None or not prefill.process.is_alive:
            return "prefill has ended"
        prompt, ends_at = prefill.life.leases.pop(str((params.get("remote_block_ids") or [""])[0]), ([], 0.0))
        if self.world.now > ends_at:
            return "prefill's lease is over, or was taken"
        if prompt != generation.prompt:
            self.watcher.fail("dialect", f"decode {self.name} was given the lease of another prompt")
        return ""

    async def _report_trouble(self, generation: Generation, script: Script, reply: Reply, trouble: str) -> None:
        self.watcher.on_own_error(generation)
        if self.engine == "sglang":
            await reply.answer(500, {"error": {"message": f"Decode transfer failed: {trouble}"}})
        elif generation.is_stream:
            await reply.begin_stream()
            for event in script.begin():
                await reply.chunk(event)
            await reply.chunk(script.error("Internal server error", 500))
            await reply.chunk(b"data: [DONE]\n\n")
            await reply.end_stream()
        else:
            await reply.answer(500, {"error": {"message": "Internal server error", "code": 500}})


def _call_later(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    loop.call_later(SGLANG_NOTICES_SECONDS, callback)


async def _sleep_unless(stop: asyncio.Event, seconds: float) -> None:
    """Sleep for ``seconds``, or until ``stop`` is set."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _ask(host: str, port: int, request: bytes) -> Answer:
    transport, connection = await asyncio.get_running_loop().create_connection(ClientConnection, host, port)
    try:
        answer = connection.send(request)
        while not (answer.is_whole or connection.is_lost):
            connection.changed.clear()
            await connection.changed.wait()
        return answer
    finally:
        transport.close()
