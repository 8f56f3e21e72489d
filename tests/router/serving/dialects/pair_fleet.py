"""Fleets of pairs of strict stand-ins behind a router, and clients that send requests in four APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx

from tests.router.conftest import MakeStandIn, RouterUnderTest
from tests.router.stand_in import StandIn
from tests.support.strict_sglang import StrictSglang
from tests.support.strict_vllm import StrictVllm
from tests.support.toy_model import PATHS, answer_text
from tests.support.waiting import wait_until

__all__ = [
    *("DIALECTS", "LIMIT", "ClientResult", "PairFleet", "ask_all", "make_body", "path_of", "read_answer"),
    "serve_strictly",
]

DIALECTS = ("nixl", "mooncake", "kvstore", "sglang")
LIMIT = 3
WORDS = " ".join(f"word{number}" for number in range(40))


class ClientResult(NamedTuple):
    """The result of one client's request."""

    status: int
    text: str
    error: str
    """The code of the error; '' if there was none."""
    begun: bool
    """Whether the client got a byte of the response before the error."""


class PairFleet(NamedTuple):
    """Instances of one dialect behind a router."""

    router: RouterUnderTest
    strict: StrictVllm | StrictSglang
    instances: list[StandIn]

    def of(self, role: str) -> list[StandIn]:
        """List the instances of a role."""
        return [instance for instance in self.instances if instance.role == role]

    def ask(self, path: str, number: int | str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """Send a request; the strict instances compare their requests with its body."""
        body = make_body(path, number, **more)
        self.strict.asked[str(number)] = body
        return self.router.client.post(path, json=body, headers=headers)

    def check(self, path: str, number: int | str, **more: Any) -> None:
        """Send a request, and check that the response is that of an engine without faults."""
        result = read_answer(path, self.ask(path, number, **more))
        assert result == ClientResult(200, answer_text(path, make_body(path, number, **more)), "", True), (path, more)

    @property
    def left(self) -> int:
        """The number of legs that run, wait for a partner, or are counted in a load."""
        loads = [instance.load for worker in self.router.workers for instance in worker.app.registry]
        counted: int = sum(abs(load.requests) + abs(load.tokens) + abs(round(load.queued)) for load in loads)
        return counted + self.strict.waiting + sum(instance.running for instance in self.instances)

    def wait_for_end(self) -> None:
        """Wait until no leg is left."""
        wait_until(lambda: not self.left, "the end of all legs")


def serve_strictly(dialect: str, instances: Sequence[StandIn], stand_in: MakeStandIn) -> StrictVllm | StrictSglang:
    """Make instances answer in a dialect: one of ``DIALECTS``, or "openai"."""
    if dialect == "sglang":
        sglang = StrictSglang()
        for port, instance in enumerate(instances, 9001):
            sglang.serve(instance, port)
        return sglang
    connector = "kvstore" if dialect == "openai" else dialect
    vllm = StrictVllm(connector, is_marked=dialect != "openai")  # type: ignore[arg-type]
    for instance in instances:
        has_bootstrap = dialect == "mooncake" and instance.role == "prefill"
        vllm.serve(instance, stand_in("mixed") if has_bootstrap else None)
        if dialect == "openai":
            instance.extra_fields = {"engine": "openai"}
    return vllm


def make_body(path: str, number: int | str, **more: Any) -> dict[str, Any]:
    """Make a body with a prompt of more than two blocks, different for each number, and without members of None."""
    text = f"q{number} {WORDS}"
    body: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": LIMIT},
        "/v1/completions": {"prompt": text, "max_tokens": LIMIT},
        "/v1/responses": {"input": text, "max_output_tokens": LIMIT},
        "/v1/messages": {"system": "s", "messages": [{"role": "user", "content": text}], "max_tokens": LIMIT},
    }[path]
    body |= {"model": "m", "number": str(number), **more}
    return {name: value for name, value in body.items() if value is not None}


def read_answer(path: str, response: httpx.Response) -> ClientResult:
    """Read a response of any of the four APIs, whole or a stream."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response_body = response.json()
        if "error" in response_body:
            return ClientResult(response.status_code, "", str(response_body["error"]["code"]), False)
        return ClientResult(response.status_code, _read_whole(path, response_body), "", True)
    shown, error, is_whole = "", "", False
    for line in response.text.split("\n"):
        if not line.startswith("data: {"):
            is_whole |= line == "data: [DONE]"
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            error = str(event["error"]["code"])
        is_whole |= event.get("type") in ("message_stop", "response.incomplete", "response.completed")
        if path in ("/v1/messages", "/v1/responses"):
            delta = event.get("delta", "")
            shown += delta.get("text", "") if isinstance(delta, dict) else delta
        for choice in event.get("choices", ()):
            shown += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    if not is_whole:
        error = error or "a stream without an end"
    return ClientResult(response.status_code, shown, error, bool(shown))


def ask_all(fleet: PairFleet, count: int, paths: Sequence[str] = PATHS) -> list[ClientResult]:
    """Send ``count`` concurrent requests, half of them streams, to the paths in turn; return the clients' results."""

    async def ask(client: httpx.AsyncClient, number: int) -> ClientResult:
        path = path_of(number, paths)
        body = make_body(path, number, stream=number % 4 < 2)
        fleet.strict.asked[str(number)] = body
        workers = fleet.router.workers
        return read_answer(path, await client.post(workers[number // 4 % len(workers)].url + path, json=body))

    async def ask_concurrently() -> list[ClientResult]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits, verify=False) as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(count))))

    return fleet.router.thread.run(ask_concurrently(), deadline_s=90)


def path_of(number: int, paths: Sequence[str] = PATHS) -> str:
    """Return the path to which ``ask_all`` sends a request."""
    return paths[number // 4 % len(paths)]


def _read_whole(path: str, response_body: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return str(response_body["content"][0]["text"])
    if path == "/v1/responses":
        return str(response_body["output"][0]["content"][0]["text"])
    choice = response_body["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])
