"""The world ``router``: one real router with real HTTP on both sides, instances of one dialect, clients, operators."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from router.serving.proxy import ServingRequest
from router.settings import RouterSettings
from simulation.actors.client import Client, Result
from simulation.actors.engines import Generation
from simulation.actors.http import Asked
from simulation.actors.instance import MOODS, Instance
from simulation.actors.router import RouterActor
from simulation.oracles import RECOVERY_SECONDS, Orders, Requests, Troubles
from simulation.world import Event, Plan, World
from simulation.world.scheduler import SECOND

__all__ = ["RouterWorld"]

# The time of the first requests; instances have registered by then.
BEGIN_SECONDS = 5.0
# Seconds after the last request until the router has freed all state of requests, and closed all idle connections.
REST_SECONDS, IDLE_REST_SECONDS = 20.0, 80.0
# State that is found at rest and at each of these repeated checks is a leak.
LOOK_AGAIN_SECONDS, NUM_LOOKS = 3.3, 3
# A client that reads nothing is cut off 60 s after the end of its answer or of its connection; the connection may be
# idle for 65 s.
DEAF_REST_SECONDS = 240.0
REQUEST_TIMEOUT = 90.0
# An abort reaches the router, and all instances, within this time.
ABORT_SECONDS = 30.0
QUEUE_TIMEOUT = 20.0
# Probes notice an instance that hangs. A request may be sent to two such instances.
PATIENCE = REQUEST_TIMEOUT + QUEUE_TIMEOUT + 10.0

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
ENGINES = (
    *(("fastdeploy", ""), ("fastdeploy", ""), ("vllm", "nixl"), ("vllm", "mooncake"), ("vllm", "kvstore")),
    *(("sglang", ""), ("openai", "")),
)
API_KEYS = str(Path(__file__).parent / "api_keys.txt")
POLICIES = ("pool_aware", "pool_aware", "random", "round_robin", "request_num", "cache_aware", "power_of_two")
FAULTS = (
    *("mood", "kill", "power_loss", "pause", "link_down", "link_slow", "link_refuses"),
    *("router_pause", "clock_step", "reset_connections", "starve", "router_stop", "router_kill"),
)
# In half of the worlds there is only one kind of trouble, so that another kind cannot excuse an error.
TROUBLES = ("all", "all", "all", "all", "faults", "breaks", "idle", "poison")
# Most instances that one request may crash, as docs/operations/instances.md says. The last attempt may go to both
# instances of a pair at the same time. If something delays it, the router may notice the end of one instance of the
# first pair too late, and that of an instance with an unreachable partner.
MAX_KILLED, MAX_KILLED_IN_PAIRS, MAX_KILLED_IN_SLOW_PAIRS = 2, 3, 5
DELAYS = ("link_slow", "link_down", "pause", "router_pause", "starve", "worker_pause")
LONG_LAG_SECONDS = 0.01
KEYS = ("key-of-alice", "key-of-bob")
_HEAD = "POST /v1/completions HTTP/1.1\r\nhost: router\r\n"
RAW = (
    "\x16\x03\x01 this is TLS",
    _HEAD + "content-le",
    _HEAD + 'content-length: 50\r\n\r\n{"prompt": "half',
    _HEAD + "transfer-encoding: chunked\r\n\r\n5\r\n{...}\r\nZ\r\n",
    "GET /v1/models HTTP/1.1\r\nhost: router\r\n" + "x-long: " + 70_000 * "x" + "\r\n\r\n",
    1200 * "GET / HTTP/1.1\r\nhost:\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    20 * "GET /health HTTP/1.1\r\nhost: router\r\n\r\n",
    "GET /metrics HTTP/1.1\r\nhost: router\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: router\r\n\r\n",
    "GET /admin/requests HTTP/1.1\r\nhost: router\r\n\r\nGET /health_generate HTTP/1.1\r\nhost: router\r\n\r\n",
    "POST /v1/pause HTTP/1.1\r\nhost: router\r\ncontent-length: 0\r\n\r\n",
    "POST /v1/update_weights HTTP/1.1\r\nhost: router\r\ncontent-length: 2\r\n\r\n{}",
)
STRANGE_ABORTS: tuple[Any, ...] = (
    {"req_ids": ["\ud800", "job-1"]},
    {"req_ids": [["job-1"]]},
    {"req_ids": 2000 * ["job-1"]},
    {"req_ids": [None, 1, 1.5]},
    {"req_ids": []},
    ["job-1"],
)


class RouterWorld(World):
    """The world ``router``, which the module's docstring describes."""

    name: ClassVar[str] = "router"
    max_seconds: ClassVar[float] = 900.0
    has_idle_clients: ClassVar[bool] = True
    begin_seconds: ClassVar[float] = BEGIN_SECONDS
    faults: ClassVar[tuple[str, ...]] = FAULTS
    usual_faults: ClassVar[tuple[str, ...]] = ("mood", "mood", "mood", "mood")
    """Kinds of faults that are drawn in all worlds with faults."""
    num_requests: ClassVar[tuple[int, int]] = (10, 50)
    limited: ClassVar[float] = 0.3
    """Share of the worlds with a small ``max_concurrent_requests``."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.instances: dict[str, Instance] = {}
        self.routers: list[Any] = []
        self.clients: list[Client] = []
        self.troubles, self.closings = Troubles(), Troubles()
        self.by_prompt: dict[tuple[int, ...], Result] = {}
        self._aborts: list[tuple[float, list[str], str]] = []
        self._quiet_since: float | None = None

    # The plan.

    def draw_plan(self, draw: random.Random) -> Plan:
        splitwise = draw.random() < 0.6
        engine, connector = draw.choice(ENGINES)
        roles = self.draw_roles(draw, splitwise=splitwise)
        settings: dict[str, Any] = {
            "splitwise": splitwise,
            "engine": engine,
            "connector": connector,
            "roles": roles,
            "split": draw.choice((0.0, 0.1, 0.5, 1.0)),
            "latency": draw.choice((0.0001, 0.0005, 0.005)),
            "jitter": draw.choice((0.0, 0.0003, 0.01)),
            "idle_seconds": draw.choice((1.0, 3.9, 5.0, 60.0)),
            "token_seconds": draw.choice((0.002, 0.02, 0.1)),
            "router": self._draw_router_settings(draw),
            "has_keys": draw.random() < 0.35,
            "buffer_bytes": draw.choice((2048, 65536, 262144)),
        }
        names = [f"{role}{number}" for number, role in enumerate(roles)]
        span = draw.uniform(10.0, 60.0)
        events = self._draw_requests(draw, settings, span)
        trouble = self.stream("trouble").choice(TROUBLES)
        if trouble == "faults" or (trouble == "all" and draw.random() < 0.75):
            events += self._draw_faults(draw, settings, names, span)
        if trouble == "breaks" or (trouble == "all" and draw.random() < 0.7):
            events += self._draw_breaks(self.stream("breaks"), settings, names, events, span)
        if trouble in ("all", "idle"):
            events += self._draw_periodic(self.stream("periodic"), settings, is_often=trouble == "idle")
        if trouble == "poison":
            events += [
                self._draw_poison(draw, 800_010 + number, settings, span) for number in range(draw.randint(1, 4))
            ]
        if trouble in ("all", "faults") and draw.random() < 0.6:
            events += self._draw_orders(draw, names, span)
        for _ in range(draw.choice((0, 0, 0, 1, 3)) if self.has_idle_clients else 0):
            at, seconds = self.begin_seconds + draw.random() * span, draw.choice((0.5, 30.0, 200.0))
            events.append(Event(at, "raw", "", {"number": draw.randrange(len(RAW)), "for": seconds}))
        last = max(event.at + event.details.get("seconds", 0.0) for event in events)
        is_calm = not any(event.kind in self.faults or "seconds" in event.details for event in events)
        well = last + (4.0 if is_calm else RECOVERY_SECONDS + 15.0)
        for name in names:
            body = {"instance": f"{name}:8000", "weight": 1}
            events.append(
                Event(last + 1.0, "order", name, {"path": "/admin/resume", "body": {"instance": f"{name}:8000"}})
            )
            events.append(Event(last + 2.0, "order", name, {"path": "/admin/weight", "body": body}))
        for number in range(3):
            details = self._draw_request(draw, 900_000 + number, plain=True)
            if settings["has_keys"]:
                details["key"] = KEYS[0]
            events.append(Event(well + number, "request", "client", details))
        return Plan(settings, sorted(events, key=lambda event: event.at))

    def draw_roles(self, draw: random.Random, *, splitwise: bool) -> list[str]:
        """Draw the roles of the instances."""
        if splitwise:
            return ["prefill"] * draw.randint(1, 3) + ["decode"] * draw.randint(1, 3)
        return ["mixed"] * draw.randint(1, 4)

    def list_routers_of(self, number: int) -> tuple[tuple[str, int], ...]:
        """Return the addresses of the routers at which an instance registers."""
        return (("router", 9000),)

    def _draw_router_settings(self, draw: random.Random) -> dict[str, Any]:
        policy = draw.choice(POLICIES)
        drawn: dict[str, Any] = {"policy": policy, "prefill_policy": policy, "decode_policy": draw.choice(POLICIES)}
        if draw.random() < self.limited:
            drawn["max_concurrent_requests"] = draw.randint(1, 6)
        if draw.random() < 0.3:
            drawn["stream_stall_secs"] = draw.choice((2.0, 10.0))
        if draw.random() < 0.3:
            drawn["sse_keepalive_secs"] = draw.choice((0.5, 5.0))
        if draw.random() < 0.2:
            drawn["stream_resume_count"] = draw.randint(0, 2)
        if draw.random() < 0.3:
            drawn["preempt_retry_exclude_decode"] = True
        if draw.random() < 0.2:
            drawn["dialect"] = "go"
        return drawn

    def _draw_requests(self, draw: random.Random, settings: dict[str, Any], span: float) -> list[Event]:
        events = []
        num_named: Counter[str] = Counter()
        count = draw.randint(*self.num_requests)
        number = 0
        while number < count:
            at = self.begin_seconds + draw.random() * span
            if draw.random() < 0.1:
                parts = [self._draw_request(draw, number + part) for part in range(draw.randint(2, 6))]
                details: dict[str, Any] = {"pipelined": parts}
            else:
                parts = [details := self._draw_request(draw, number)]
            number += len(parts)
            events.append(Event(at, "request", "client", details))
            for part in parts:
                if settings["has_keys"]:
                    part["key"] = draw.choice(KEYS)
                if part.get("id"):
                    # Two tenants use the same ids, but neither tenant uses an id twice.
                    part["id"] = f"job-{num_named[part.get('key', '')]}"
                    num_named[part.get("key", "")] += 1
                    if draw.random() < 0.3:
                        aborted_at = at + draw.choice((0.0, draw.random() * 0.3, draw.random() * 3.0))
                        abort = {"path": "/v1/abort_requests", "body": {"req_ids": [part["id"]]}}
                        # The abort may come from the other tenant, which has no request with this id, or its own one.
                        by = draw.choice(KEYS) if settings["has_keys"] else ""
                        events.append(Event(aborted_at, "order", "", {**abort, "key": by}))
        if draw.random() < 0.1:
            abort = {"path": "/v1/abort_requests", "body": draw.choice(STRANGE_ABORTS)}
            key = draw.choice(KEYS) if settings["has_keys"] else ""
            events.append(Event(self.begin_seconds + draw.random() * span, "order", "", {**abort, "key": key}))
        return events

    def _draw_request(self, draw: random.Random, number: int, *, plain: bool = False) -> dict[str, Any]:
        path = draw.choice(PATHS[:2] if plain else (*PATHS[:2], *PATHS[:2], *PATHS))
        text = (
            f"family-{draw.randrange(3)} " + "shared words of a prompt " * draw.choice((1, 5, 60)) + f"request-{number}"
        )
        body: dict[str, Any] = {"model": "m", "temperature": 0}
        if path == "/v1/embeddings":
            body = {"model": "m", "input": text}
        elif path == "/v1/completions":
            body |= {"prompt": text, "max_tokens": draw.randint(1, 60)}
        elif path == "/v1/responses":
            body["input"] = text
        else:
            body["messages"] = [{"role": "user", "content": text}]
        if path == "/v1/messages" or (path == PATHS[0] and draw.random() < 0.5):
            body["max_tokens"] = draw.randint(1, 60)
        details: dict[str, Any] = {"number": number, "path": path, "body": body}
        if plain or path == "/v1/embeddings":
            return details
        if draw.random() < 0.6:
            body["stream"] = True
            if path in PATHS[:2] and draw.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
            if path in PATHS[:2] and draw.random() < 0.15:
                body["return_token_ids"] = True
        if draw.random() < 0.5:
            details["reuses"] = True
        if draw.random() < 0.4:
            details["id"] = f"job-{number}"
        if draw.random() < 0.15:
            details["leaves_after"] = draw.choice((0.0, draw.random() * 0.2, draw.random() * 3.0))
        elif draw.random() < 0.08:
            details |= {"pauses_at": draw.randrange(3000), "pause": draw.choice((0.5, 5.0, 90.0))}
        elif self.has_idle_clients and draw.random() < 0.03:
            details["is_deaf"] = True
        return details

    def _draw_faults(self, draw: random.Random, settings: dict[str, Any], names: list[str], span: float) -> list[Event]:
        events = []
        # With a few kinds in each seed, faults of the same kinds come together more often than with all kinds.
        kinds = [*draw.sample(sorted(set(self.faults) - {"mood"}), 4), *self.usual_faults]
        moods = draw.sample(MOODS, 3)
        for _ in range(draw.choice((2, 4, 8, 12))):
            kind, at = draw.choice(kinds), self.begin_seconds + draw.random() * span
            seconds = draw.choice((0.2, 1.0, 4.0, 12.0, 40.0)) * draw.uniform(0.5, 1.5)
            details: dict[str, Any] = {"seconds": round(seconds, 3)}
            target = draw.choice(names)
            if kind == "mood":
                details["mood"] = draw.choice(moods)
            elif kind in ("router_stop", "router_kill"):
                target, details["seconds"] = "router", min(details["seconds"], 30.0)
            elif kind in ("router_pause", "starve"):
                target, details["seconds"] = "router", min(details["seconds"], 20.0)
            elif kind == "clock_step":
                target, details = "router", {"step": draw.choice((-86400.0, -45.0, 20.0, 3600.0))}
            events.append(Event(round(at, 3), kind, target, details))
            if draw.random() < 0.3 and (other := self.draw_coincidence(draw, events[-1])) is not None:
                events.append(other)
        if draw.random() < 0.15:
            events.append(self._draw_poison(draw, 800_000, settings, span))
        return events

    def draw_coincidence(self, draw: random.Random, fault: Event) -> Event | None:
        """Draw another fault at nearly the same time as ``fault``; None if its kind has no such companion."""
        if fault.kind != "mood":
            return None
        at = round(fault.at + draw.random() * draw.choice((0.002, 0.1, 1.0)), 3)
        return Event(
            at, draw.choice(("kill", "reset_connections")), fault.target, {"seconds": fault.details["seconds"]}
        )

    def _draw_poison(self, draw: random.Random, number: int, settings: dict[str, Any], span: float) -> Event:
        poison = {"model": "m", "prompt": f"poison number {draw.randrange(1000)}", "max_tokens": 20, "stream": True}
        details = {"number": number, "path": "/v1/completions", "body": poison, "seconds": 20.0}
        if settings["has_keys"]:
            details["key"] = KEYS[0]
        return Event(self.begin_seconds + draw.random() * span, "request", "client", details)

    def _draw_periodic(self, draw: random.Random, settings: dict[str, Any], *, is_often: bool) -> list[Event]:
        """Draw requests at intervals of about the time after which instances close idle connections."""
        if is_often:
            settings["idle_seconds"] = draw.choice((1.0, 3.9))
        elif settings["idle_seconds"] > 5.0 or draw.random() < 0.5:
            return []
        events, at = [], self.begin_seconds
        for number in range(40 if is_often else 10):
            at += settings["idle_seconds"] + draw.uniform(0.0, 0.05)
            body = {"model": "m", "input": f"regularly {number}"}
            details = {"number": 700_000 + number, "path": "/v1/embeddings", "body": body, "reuses": True}
            if settings["has_keys"]:
                details["key"] = KEYS[0]
            events.append(Event(round(at, 4), "request", "client", details))
        return events

    def _draw_breaks(
        self, draw: random.Random, settings: dict[str, Any], names: list[str], events: list[Event], span: float
    ) -> list[Event]:
        """Draw faults while streams run; without them, few streams would be interrupted."""
        settings["token_seconds"] = 0.1
        answering = [name for name in names if not name.startswith("prefill")]
        requests = [event for event in events if event.kind == "request" and "body" in event.details]
        streams = [event.at for event in requests if event.details["body"].get("stream")]
        breaks = [self._draw_poison(draw, 800_001, settings, span)] if draw.random() < 0.3 else []
        for at in streams:
            kind = draw.choice(("mood", "mood", "kill", "reset_connections"))
            if kind == "mood":
                moods = ("cuts", "engine_dies", "preempts", "hangs_in_stream")
                details = {"mood": draw.choice(moods), "seconds": round(draw.uniform(0.5, 4.0), 3)}
                # All instances at the same time, as when memory is short: a stream is then interrupted more than once.
                chosen = answering if draw.random() < 0.4 else [draw.choice(answering)]
                breaks += [Event(round(at - 0.02, 3), kind, name, details) for name in chosen]
            else:
                details = {"seconds": round(draw.uniform(0.5, 4.0), 3)}
                breaks.append(Event(round(at + draw.uniform(0.1, 3.0), 3), kind, draw.choice(answering), details))
        return breaks

    def _draw_orders(self, draw: random.Random, names: list[str], span: float) -> list[Event]:
        events = []
        for _ in range(draw.randint(1, 6)):
            key = f"{draw.choice(names)}:8000"
            path, body = draw.choice(
                (
                    ("/admin/drain", {"instance": key}),
                    ("/admin/drain", {"instance": key, "until_restart": True}),
                    ("/admin/drain", {"instance": key, "undrain": True}),
                    ("/admin/pause", {"instance": key}),
                    ("/admin/resume", {"instance": key}),
                    ("/admin/weight", {"instance": key, "weight": draw.choice((0, 0.25, 1))}),
                )
            )
            at = self.begin_seconds + draw.random() * span
            events.append(Event(round(at, 3), "order", key.partition(":")[0], {"path": path, "body": dict(body)}))
        return events

    # The world.

    def build(self) -> None:
        settings = self.plan.settings
        self.set_links()
        self.make_routers()
        self.requests = Requests(
            self, self.troubles, self.closings, patience=PATIENCE, survives=self.survives_an_instance
        )
        self.orders = Orders(self, self.by_prompt, is_mixed=not settings["splitwise"])
        for number, role in enumerate(settings["roles"]):
            name = f"{role}{number}"
            instance = Instance(
                *(self, self, name, role),
                engine=settings["engine"],
                connector=settings["connector"],
                routers=self.list_routers_of(number),
            )
            instance.token_seconds, instance.idle_seconds = settings["token_seconds"], settings["idle_seconds"]
            self.instances[name] = instance
            instance.start()
        self.make_clients()
        raw = [RAW[event.details["number"]] for event in self.plan.events if event.kind == "raw"]
        has_deaf = any("is_deaf': True" in str(event.details) for event in self.plan.events)
        # A client that closes reads nothing more, but its connection lasts until the router has read all its bytes.
        has_deaf |= any(len(sent) > settings["buffer_bytes"] for sent in raw)
        has_idle = has_deaf or bool(raw)
        self._rest_seconds = DEAF_REST_SECONDS if has_deaf else IDLE_REST_SECONDS if has_idle else REST_SECONDS
        self._is_without_network_faults = not any(
            event.kind in ("kill", "power_loss", "pause", "link_down", "link_slow", "router_pause", "starve")
            or event.kind in ("link_refuses", "reset_connections", "router_stop", "router_kill")
            or event.details.get("number", 0) in range(800_000, 800_100)
            for event in self.plan.events
        )

    def set_links(self) -> None:
        """Set the properties of all links from the plan."""
        settings, network = self.plan.settings, self.network
        network.buffer_bytes = settings["buffer_bytes"]
        network.defaults = {name: settings[name] for name in ("split", "latency", "jitter")}

    def make_routers(self) -> None:
        """Start the router."""
        settings = RouterSettings(
            host="router",
            port=9000,
            splitwise=self.plan.settings["splitwise"],
            access_log="off",
            request_timeout_secs=REQUEST_TIMEOUT,
            queue_timeout_secs=QUEUE_TIMEOUT,
            api_keys_file=API_KEYS if self.plan.settings["has_keys"] else "",
            **self.plan.settings["router"],
        )
        router = RouterActor(self, "router", settings)
        self.routers.append(router)
        router.start()

    def make_clients(self) -> None:
        """Start the clients."""
        self.clients.append(Client(self, self.make_process("client"), ("router", 9000)))
        self.operator = Client(self, self.make_process("operator"), ("router", 9000))

    def perform(self, event: Event) -> None:
        details, seconds = event.details, event.details.get("seconds", 0.0)
        if event.kind == "request":
            self.ask(details)
        elif event.kind == "raw":
            self.clients[0].send_raw(RAW[details["number"]].encode("latin-1"), details["for"])
        elif event.kind == "order":
            if event.target:
                self.orders.on_sent(details["body"]["instance"], details["path"], details["body"])
                self.closings.add(self.now, max(each.at for each in self.plan.events if each.kind == "order"), "order")
            else:
                self._note_abort(details["body"], details["key"])
            self.operator.order(details["path"], details["body"], details.get("key", ""))
        else:
            kind = details.get("mood", event.kind)
            self.troubles.add(
                self.now, self.now + seconds, kind, event.target if event.target in self.instances else ""
            )
            self.break_down(event.kind, event.target, seconds, details)

    def ask(self, details: dict[str, Any]) -> None:
        """Let a client send a request."""
        number = details["pipelined"][0]["number"] if "pipelined" in details else details["number"]
        client = self.clients[number % len(self.clients)]
        client.ask(details)
        for each in details.get("pipelined") or [details]:
            result = client.results[each["number"]]
            # The abort of an id may arrive shortly before its request.
            result.details["is_aborted"] = any(
                each.get("id") in ids and each.get("key", "") == key and self.now - at < ABORT_SECONDS
                for at, ids, key in self._aborts
            )
            if result.generation is not None:
                self.by_prompt[tuple(result.generation.prompt)] = result

    def survives_an_instance(self, result: Result, name: str) -> bool:
        """Return whether another instance can repeat or resume a request if instance ``name`` fails."""
        settings, generation = self.plan.settings, result.generation
        if settings["roles"].count(self.instances[name].role) < 2 or generation is None or result.has_half_character:
            return False
        is_resumed = (
            result.path in PATHS[:2] and settings["engine"] in ("fastdeploy", "vllm") and not generation.resumed
        )
        return not generation.is_stream or (is_resumed and settings["router"].get("stream_resume_count", 1) > 0)

    def _note_abort(self, body: Any, key: str) -> None:
        ids = body["req_ids"] if isinstance(body, dict) else []
        self._aborts.append((self.now, [each for each in ids if isinstance(each, str)], key))
        for client in self.clients:
            for result in client.results.values():
                if result.details.get("id") in ids and result.details.get("key", "") == key:
                    result.details["is_aborted"] = True

    def break_down(self, kind: str, target: str, seconds: float, details: dict[str, Any]) -> None:
        """Begin a fault, and plan its end."""
        later, network = self.scheduler.call_later, self.network
        instance = self.instances.get(target)
        router = self.routers[int(1000 * seconds) % len(self.routers)]
        if kind in ("router_pause", "starve"):
            self._hold_router(router, kind, seconds)
        elif kind in ("router_stop", "router_kill"):
            self._end_router(router, kind, seconds)
        elif kind == "clock_step":
            router.process.clock.step(details["step"])
        elif instance is None or not instance.process.is_alive:
            return
        elif kind == "mood":
            self._set_mood(instance, details["mood"], seconds)
        elif kind in ("kill", "power_loss"):
            instance.crash(silently=kind == "power_loss")
            self.orders.forget(instance.key, process_only=seconds < 15.0)
            self.troubles.add(self.now, self.now + seconds + 10.0, kind, target)

            def restart() -> None:
                self.orders.on_restart(instance.key)
                if seconds >= 15.0:
                    self.orders.forget(instance.key)  # no heartbeat came, so it may have expired
                instance.start()

            later(seconds, restart)
        elif kind == "pause":
            process = instance.process
            process.pause()
            self.orders.forget(instance.key)
            later(seconds, process.resume)
        elif kind == "reset_connections":
            for endpoint in list(network.endpoints.values()):
                if endpoint.process is instance.process:
                    endpoint.reset()
        else:
            self._break_link(kind, instance.host, seconds)

    def _set_mood(self, instance: Instance, mood: str, seconds: float) -> None:
        life = instance.life
        instance.mood = mood

        def end() -> None:
            if instance.life is life and instance.mood == mood:
                instance.mood = ""
                self.trace.add(instance.name, "is well again")

        self.scheduler.call_later(seconds, end)

    def _end_router(self, router: Any, kind: str, seconds: float) -> None:
        if router.is_ending or not router.process.is_alive:
            return
        router.is_ending = True
        grace = 30.0 if kind == "router_stop" else 0.0
        # The trouble lasts until the instances have registered again with their heartbeats.
        self.troubles.add(self.now, self.now + 15.0 + seconds + grace, "router")
        self.orders.part(15.0 + seconds + grace)
        if kind == "router_stop":
            router.stop()
        self.scheduler.call_later(grace, router.crash)
        self.scheduler.call_later(seconds + grace, lambda: router.start(**router.clock))

    def on_poison(self, instance: Instance, generation: Generation) -> None:
        """Crash the instance that got a request with a poisonous prompt; check how many instances it has crashed."""
        result = self.by_prompt[tuple(generation.prompt)]
        killed = result.details.setdefault("killed", [])
        if instance.life.start_id not in killed:
            killed.append(instance.life.start_id)
        self.troubles.add(self.now, self.now + 15.0, "poison")
        if len(killed) > self._count_most_killed(result):
            self.fail("poison", f"request {result.number} was sent to {killed}, which it has ended")
        life = instance.life

        def crash() -> None:
            if instance.life is life and instance.process.is_alive:
                instance.crash(silently=False)
                self.orders.forget(instance.key, process_only=True)
                self.scheduler.call_later(5.0, restart)

        def restart() -> None:
            self.orders.on_restart(instance.key)
            instance.start()

        self.scheduler.call_later(0.01, crash)

    def _count_most_killed(self, result: Result) -> int:
        settings = self.plan.settings
        is_at_once = settings["engine"] in ("fastdeploy", "sglang") or settings["connector"] == "mooncake"
        if not (settings["splitwise"] and is_at_once):
            return MAX_KILLED
        is_slow = self.lag_seconds > LONG_LAG_SECONDS or any(
            event.kind in DELAYS and event.at <= self.now and result.began <= event.at + event.details["seconds"] + 1.0
            for event in self.plan.events
        )
        return MAX_KILLED_IN_SLOW_PAIRS if is_slow else MAX_KILLED_IN_PAIRS

    def _hold_router(self, router: Any, kind: str, seconds: float) -> None:
        processes = router.list_processes()
        self.orders.part(seconds + 1.0)
        if kind == "router_pause":
            for process in processes:
                process.pause()
                self.scheduler.call_later(seconds, process.resume)
            return
        process = processes[0]
        ends_at = self.now + seconds

        def starve() -> None:
            if self.now < ends_at:
                process.pause()
                self.scheduler.call_later(0.3, process.resume)
                self.scheduler.call_later(0.32, starve)

        starve()

    def _break_link(self, kind: str, host: str, seconds: float) -> None:
        links = [
            self.network.link(*ends) for router in self.routers for ends in ((router.name, host), (host, router.name))
        ]
        if kind == "link_down":
            self.orders.forget(f"{host}:8000")
            self.network.set_down(links, True)
            self.scheduler.call_later(seconds, lambda: self.network.set_down(links, False))
            self.scheduler.call_later(seconds, lambda: self.orders.forget(f"{host}:8000"))  # it may have expired
            self.troubles.add(self.now, self.now + seconds + 5.0, kind)
            return
        before = [(link, link.latency, link.bytes_per_second) for link in links]
        for link in links:
            link.is_refusing |= kind == "link_refuses"
            if kind == "link_slow":
                link.latency, link.bytes_per_second = 0.4, 20_000.0

        def heal() -> None:
            for link, latency, speed in before:
                link.latency, link.bytes_per_second, link.is_refusing = latency, speed, False
            if kind == "link_refuses" and seconds >= 15.0:
                self.orders.forget(f"{host}:8000")  # no heartbeat came, so it may have expired

        self.scheduler.call_later(seconds, heal)

    # The oracles.

    def on_arrival(self, instance: Instance, generation: Generation, asked: Asked, leg: str) -> None:
        """Note and check the arrival of a request at an instance."""
        result = self.by_prompt.get(tuple(generation.prompt))
        if result is None:
            self.fail("tokens", f"{instance.name} was asked for a prompt that no client has sent")
            return
        result.arrivals.append((self.now, instance.name, leg))
        self.trace.add(instance.name, f"gets request {result.number} behind {generation.start} tokens")
        self.orders.on_arrival(instance, generation, asked)

    def on_own_error(self, generation: Generation) -> None:
        """Note that an instance answers a request with status 500."""
        self.by_prompt[tuple(generation.prompt)].has_own_error = True

    def check(self) -> None:
        self.orders.check(self.operator)
        self.requests.check(self.clients)

    def is_at_rest(self) -> bool:
        if any(client.running for client in self.clients):
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = self.now
            for client in self.clients:
                client.close_idle()
        return self.now - self._quiet_since > self._rest_seconds

    def check_at_rest(self) -> None:
        left = self._list_leftovers()
        for _ in range(NUM_LOOKS if left else 0):  # a leftover may be a heartbeat, which ends soon
            self.scheduler.run(self.scheduler.now + round(LOOK_AGAIN_SECONDS * SECOND))
            left = {name: leftover for name, leftover in self._list_leftovers().items() if name in left}
        for leftover in left.values():
            self.fail("leftover", leftover)
        for instance in self.instances.values():
            if instance.process.is_alive and self._is_without_network_faults:
                # FastDeploy ignores an abort that has overtaken its request.
                for engine_id in instance.life.running.keys() - instance.life.unknown_aborts:
                    self.fail("reservation", f"{instance.name} still holds {engine_id}")
        if not self.failures:
            apps = {id(app.proxy._live) for router in self.routers for app in router.list_apps()}
            leaked = [each for each in gc.get_objects() if isinstance(each, ServingRequest) and id(each._live) in apps]
            if leaked:
                self.fail("memory", f"{len(leaked)} requests that have ended are still in memory")

    def _list_leftovers(self) -> dict[str, str]:
        return {_name_of(leftover): leftover for router in self.routers for leftover in router.list_leftovers()}


def _name_of(leftover: str) -> str:
    """Return a leftover without its number: ``router: tasks`` for ``router: 3 tasks``."""
    owner, _, count = leftover.partition(": ")
    return f"{owner}: {count.partition(' ')[2]}"
