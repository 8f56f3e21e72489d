"""Fleets of pairs whose engines are stood in for strictly, behind a router, and clients that ask them in four APIs."""

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
    *("DIALECTS", "LIMIT", "Ended", "PairFleet", "ask_all", "make_body", "path_of", "read_answer"),
    "serve_strictly",
]

DIALECTS = ("nixl", "mooncake", "kvstore", "sglang")
LIMIT = 3
WORDS = " ".join(f"word{number}" for number in range(40))


class Ended(NamedTuple):
    """What one client got."""

    status: int
    text: str
    error: str
    """The code of the error; '' if there was none."""
    begun: bool
    """Whether a byte of an answer came before the error."""


class PairFleet(NamedTuple):
    """Instances of one dialect, and what they noted of it."""

    router: RouterUnderTest
    strict: StrictVllm | StrictSglang
    instances: list[StandIn]

    def of(self, role: str) -> list[StandIn]:
        """The instances of a role."""
        return [instance for instance in self.instances if instance.role == role]

    def ask(self, path: str, number: int | str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        """The answer to one request, of which the strict instances know what it asked."""
        body = make_body(path, number, **more)
        self.strict.asked[str(number)] = body
        return self.router.client.post(path, json=body, headers=headers)

    def check(self, path: str, number: int | str, **more: Any) -> None:
        """Ask, and hold the answer to the one of an engine that nothing disturbs."""
        ended = read_answer(path, self.ask(path, number, **more))
        assert ended == Ended(200, answer_text(path, make_body(path, number, **more)), "", True), (path, more)

    @property
    def left(self) -> int:
        """Legs that run, wait for a partner, or are counted, though nobody waits for them."""
        loads = [instance.load for worker in self.router.workers for instance in worker.app.registry]
        counted: int = sum(abs(load.requests) + abs(load.tokens) + abs(round(load.queued)) for load in loads)
        return counted + self.strict.waiting + sum(instance.running for instance in self.instances)

    def wait_for_end(self) -> None:
        """Until nothing is left."""
        wait_until(lambda: not self.left, "the end of all legs")


def serve_strictly(dialect: str, instances: Sequence[StandIn], stand_in: MakeStandIn) -> StrictVllm | StrictSglang:
    """Have instances answer in a dialect: one of ``DIALECTS``, or "openai"."""
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
            instance.told = {"engine": "openai"}
    return vllm


def make_body(path: str, number: int | str, **more: Any) -> dict[str, Any]:
    """What a client asks, of more than two blocks; each number another prompt. A member of None is left out."""
    text = f"q{number} {WORDS}"
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": LIMIT},
        "/v1/completions": {"prompt": text, "max_tokens": LIMIT},
        "/v1/responses": {"input": text, "max_output_tokens": LIMIT},
        "/v1/messages": {"system": "s", "messages": [{"role": "user", "content": text}], "max_tokens": LIMIT},
    }[path]
    asked |= {"model": "m", "number": str(number), **more}
    return {name: value for name, value in asked.items() if value is not None}


def read_answer(path: str, response: httpx.Response) -> Ended:
    """Of any of the four APIs, whole or a stream."""
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        answered = response.json()
        if "error" in answered:
            return Ended(response.status_code, "", str(answered["error"]["code"]), False)
        return Ended(response.status_code, _read_whole(path, answered), "", True)
    said, error, is_whole = "", "", False
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
            said += delta.get("text", "") if isinstance(delta, dict) else delta
        for choice in event.get("choices", ()):
            said += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    if not is_whole:
        error = error or "a stream without an end"
    return Ended(response.status_code, said, error, bool(said))


def ask_all(fleet: PairFleet, count: int, paths: Sequence[str] = PATHS) -> list[Ended]:
    """So many requests at once, half of them streams, of each path in turn; what each client got."""

    async def ask(client: httpx.AsyncClient, number: int) -> Ended:
        path = path_of(number, paths)
        body = make_body(path, number, stream=number % 4 < 2)
        fleet.strict.asked[str(number)] = body
        workers = fleet.router.workers
        return read_answer(path, await client.post(workers[number // 4 % len(workers)].url + path, json=body))

    async def all_of_them() -> list[Ended]:
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(trust_env=False, timeout=60, limits=limits, verify=False) as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(count))))

    return fleet.router.thread.run(all_of_them(), deadline_s=90)


def path_of(number: int, paths: Sequence[str] = PATHS) -> str:
    """The path that ``ask_all`` takes for a request."""
    return paths[number // 4 % len(paths)]


def _read_whole(path: str, answered: dict[str, Any]) -> str:
    if path == "/v1/messages":
        return str(answered["content"][0]["text"])
    if path == "/v1/responses":
        return str(answered["output"][0]["content"][0]["text"])
    choice = answered["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])
