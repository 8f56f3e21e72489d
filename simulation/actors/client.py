"""Client: sends requests to a router, and judges the responses. The right answer follows from the prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.actors.engines import APIS, Generation, read_generation
from simulation.actors.http import Answer, ClientConnection, format_request
from simulation.actors.tokens import answer_ids, count_unfinished, text_of

if TYPE_CHECKING:
    from simulation.world import Process, World

__all__ = ["Client", "Result", "judge"]

IDLE_SECONDS = 50.0


@dataclass
class Result:
    """A request of a client, and its result.

    Attributes:
        number: the number of the request.
        path: its path.
        generation: the answer that it requests; None: it requests no generation.
        began: virtual time of the request.
        details: what to send and how to read the response, as the plan of the run says.
        ended: virtual time of the end; None: it is running.
        outcome: ``right``, ``error``, ``wrong``, ``cut`` (the response broke off), ``left`` (the client disconnected),
            ``refused`` (no connection); "" while it is running.
        status: the HTTP status; 0: no response has begun.
        code: the code of the error in the response; "" if there is none.
        why: what is wrong with the response; "" if nothing is.
        text: the text of the answer.
        behind: the previous request on its connection, if the client did not wait for the response to that one.
        has_own_error: whether an instance has answered it with status 500. A client gets this error only if no other
            instance can serve the request.
        is_behind_cut: whether an earlier request on its connection was cut, and was no generation.
        has_half_character: whether the token ids that it has got end within a character. Then the router cannot
            continue the stream at another instance (``router/serving/resume``).
    """

    number: int
    path: str
    generation: Generation | None
    began: float
    details: dict[str, Any]
    ended: float | None = None
    outcome: str = ""
    status: int = 0
    code: str = ""
    why: str = ""
    text: str = ""
    behind: Result | None = None
    has_own_error: bool = False
    is_behind_cut: bool = False
    has_half_character: bool = False
    arrivals: list[tuple[float, str, str]] = field(default_factory=list)
    """Virtual time, instance and role of each arrival of the request at an instance."""

    @property
    def is_cut_passed_on(self) -> bool:
        """Whether the response was cut and is no generation. The router then closes the client's connection, too."""
        return self.outcome == "cut" and self.generation is None and bool(self.status)


class Client:
    """A process that sends requests of clients and orders of an operator to a router."""

    def __init__(self, world: World, process: Process, address: tuple[str, int]) -> None:
        self.world = world
        self.process = process
        self.address = address
        self.results: dict[int, Result] = {}
        self.orders: list[tuple[str, dict[str, Any], Answer | None, float, float]] = []
        """Orders that were answered: path, body, answer, time of the order, time of the answer."""
        self._deaf: list[ClientConnection] = []
        self._idle: list[tuple[float, ClientConnection]] = []
        process.start_loop(self._live)

    async def _live(self) -> None:
        await asyncio.Event().wait()

    @property
    def running(self) -> list[Result]:
        """The requests that are running."""
        return [result for result in self.results.values() if not result.outcome]

    def ask(self, details: dict[str, Any]) -> None:
        """Send one request, or several on one connection if ``details`` has ``pipelined``.

        Call this outside of the simulated threads.
        """
        asked = details.get("pipelined") or [details]
        before = None
        for each in asked:
            generation = read_generation(each["path"], each["body"], "") if each["path"] in APIS else None
            now = self.world.now
            before = Result(each["number"], each["path"], generation, now, each, behind=before)
            self.results[each["number"]] = before
        self._loop.post(lambda: asyncio.ensure_future(self._converse(asked)) and None)

    def order(self, path: str, body: Any, key: str = "", method: str = "POST") -> None:
        """Send an order to the control plane of the router. The answer is added to ``orders``."""
        self._loop.post(lambda: asyncio.ensure_future(self._order(method, path, body, key)) and None)

    @property
    def _loop(self) -> Any:
        return self.process.loops[0]

    async def _order(self, method: str, path: str, body: Any, key: str) -> None:
        sent_at, answer = self.world.now, None
        data = json.dumps(body).encode() if method == "POST" else b""
        headers = [("authorization", f"Bearer {key}")] if key else []
        try:
            connection = await self._connect()
            answer = connection.send(format_request(method, path, data, headers))
            while not (answer.is_whole or connection.is_lost):
                connection.changed.clear()
                await asyncio.wait_for(connection.changed.wait(), 60.0)
            connection.transport.close()
        except (OSError, asyncio.TimeoutError):
            pass
        if answer is not None and answer.is_whole:
            self.orders.append((path, body, answer, sent_at, self.world.now))
            self.world.trace.add(self.process.name, f"{path} {body} gets {answer.status}")

    async def _converse(self, asked: Sequence[dict[str, Any]]) -> None:
        results = [self.results[each["number"]] for each in asked]
        try:
            await self._exchange(asked, results)
        except OSError as exc:
            for result in results:
                if not result.outcome:
                    self._end(result, "refused", why=str(exc))

    async def _exchange(self, asked: Sequence[dict[str, Any]], results: list[Result]) -> None:
        connection, is_used = self._take_idle() if asked[0].get("reuses") else None, True
        if connection is None:
            connection, is_used = await self._connect(), False
        answers = [connection.send(self._format(each)) for each in asked]
        for each, result, answer in zip(asked, results, answers, strict=True):
            if any(earlier.get("has_left") for earlier in asked):
                each["has_left"] = True
            await self._read(connection, each, answer)
            is_stale = is_used and connection.is_lost and not answer.status and not each.get("has_left")
            # A new id, because an engine may still compute the request that was sent before.
            if is_stale and not each.get("is_again"):
                await self._exchange([{**each, "reuses": False, "is_again": True, "id": ""}], [result])
                continue
            result.is_behind_cut = any(earlier.is_cut_passed_on or earlier.is_behind_cut for earlier in results)
            self._finish(result, answer, connection, each)
        if not connection.is_lost and connection.keep_alive:
            self._idle.append((self.world.now, connection))
        elif connection not in self._deaf:
            connection.transport.close()

    async def _connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(ClientConnection, *self.address)
        assert isinstance(connection, ClientConnection)
        return connection

    def _take_idle(self) -> ClientConnection | None:
        while self._idle:
            since, connection = self._idle.pop()
            if not connection.is_lost and self.world.now - since < IDLE_SECONDS:
                return connection
            connection.transport.close()
        return None

    def send_raw(self, data: bytes, seconds: float) -> None:
        """Send bytes on a new connection, ignore the response, and close the connection after ``seconds``."""

        async def send() -> None:
            try:
                connection = await self._connect()
            except OSError:
                return
            connection.transport.write(data)
            await asyncio.sleep(seconds)
            connection.transport.close()

        self._loop.post(lambda: asyncio.ensure_future(send()) and None)

    def close_idle(self) -> None:
        """Close all connections without a request. Call this outside of threads."""

        def close() -> None:
            for _, connection in self._idle:
                connection.transport.close()
            self._idle.clear()

        self._loop.post(close)

    def _format(self, each: dict[str, Any]) -> bytes:
        headers = [("x-request-id", each["id"])] if each.get("id") else []
        if each.get("key"):
            headers.append(("authorization", f"Bearer {each['key']}"))
        return format_request("POST", each["path"], json.dumps(each["body"]).encode(), headers)

    async def _read(self, connection: ClientConnection, each: dict[str, Any], answer: Answer) -> None:
        """Read an answer to its end. ``each`` says whether the client pauses, does not read, or disconnects early."""
        leaves_at = self.world.now + each["leaves_after"] if "leaves_after" in each else None
        if each.get("is_deaf"):
            connection.transport.pause_reading()
            self._deaf.append(connection)
            connection.is_lost = each["has_left"] = True
        pauses_at, pause = each.get("pauses_at"), each.get("pause", 0.0)
        while not (answer.is_whole or connection.is_lost):
            if pauses_at is not None and len(answer.body) >= pauses_at:
                pauses_at = None
                connection.transport.pause_reading()
                await asyncio.sleep(pause if leaves_at is None else min(pause, leaves_at - self.world.now))
                connection.transport.resume_reading()
            connection.changed.clear()
            left = None if leaves_at is None else max(0.0, leaves_at - self.world.now)
            try:
                await asyncio.wait_for(connection.changed.wait(), left)
            except asyncio.TimeoutError:
                connection.transport.abort()
                connection.is_lost = True
                each["has_left"] = True

    def _finish(self, result: Result, answer: Answer, connection: ClientConnection, each: dict[str, Any]) -> None:
        result.status = answer.status
        outcome, code, why, text = judge(result, answer, str(each["body"].get("model", "")))
        result.text = text
        if outcome == "cut" and each.get("has_left"):
            outcome = "left"
        self._end(result, outcome, code, why)

    def _end(self, result: Result, outcome: str, code: str = "", why: str = "") -> None:
        if result.outcome:
            self.world.fail("once", f"request {result.number} ended twice: {result.outcome}, then {outcome}")
        result.outcome, result.code, result.why, result.ended = outcome, code, why, self.world.now
        text = " ".join(filter(None, (outcome, str(result.status or ""), code, why)))
        self.world.trace.add(self.process.name, f"request {result.number} ends: {text}")


def judge(result: Result, answer: Answer, _: str) -> tuple[str, str, str, str]:
    """Return the outcome of a request, the code of its error, a description of its fault, and the answer's text."""
    if "set-cookie" in answer.headers:
        return "wrong", "", "it has an instance's cookie", ""
    if not answer.status:
        return "cut", "", "no answer", ""
    if answer.status >= 400:
        return ("error", *_read_error(answer), "") if answer.is_whole else ("cut", "", "within an error", "")
    if result.generation is None:
        return ("right" if answer.is_whole else "cut"), "", "", ""
    generation = result.generation
    expected = answer_ids(generation.prompt, 0, generation.end)
    contents = _Contents(generation.api)
    try:
        contents.read_stream(bytes(answer.body)) if answer.is_stream else contents.read_whole(answer)
    except (ValueError, KeyError, TypeError, IndexError) as exc:
        return "wrong", "", f"cannot be parsed: {exc!r}: {bytes(answer.body)[-300:]!r}", ""
    result.has_half_character = bool(count_unfinished(contents.ids))
    want = text_of(expected)
    if not want.startswith(contents.text):
        return (
            "wrong",
            contents.code,
            f"it has {contents.text[-60:]!r}, not {want[: len(contents.text) + 20][-60:]!r}",
            contents.text,
        )
    if contents.error:
        return ("error" if answer.is_whole else "cut"), contents.code, contents.error, contents.text
    if not answer.is_whole:
        return "cut", "", f"within the answer, after {len(contents.text)} characters", contents.text
    if contents.text != want:
        return "wrong", "", f"ended after {contents.text.count(' ')} of {len(expected)} tokens", contents.text
    why = contents.find_fault(generation, expected, answer)
    return "wrong" if why else "right", "", why, contents.text


def _read_error(answer: Answer) -> tuple[str, str]:
    try:
        value = json.loads(bytes(answer.body))
        error = value.get("error", value)
        return (str(error.get("code", "")), str(error.get("message", ""))) if isinstance(error, dict) else ("", error)
    except (ValueError, AttributeError):
        return "", repr(bytes(answer.body)[:200])


class _Contents:
    """The parsed contents of an answer: text, error, token ids, finish reasons, usage."""

    def __init__(self, api: str) -> None:
        self._api = api
        self.text = self.error = self.code = ""
        self.ids: list[int] = []
        self.finishes: list[str] = []
        self.usages: list[dict[str, Any]] = []
        self.names: set[str] = set()
        self.num_done = 0

    def read_whole(self, answer: Answer) -> None:
        """Parse an answer that is one object, if it is complete."""
        if not answer.is_whole:
            return
        value = json.loads(bytes(answer.body))
        self.usages.append(value["usage"])
        self.num_done = 1
        if self._api == "responses":
            self.text = value["output"][0]["content"][0]["text"]
        elif self._api == "messages":
            self.text = value["content"][0]["text"]
        else:
            self._read_choice(value["choices"][0])

    def read_stream(self, body: bytes) -> None:
        """Parse the complete events of a stream."""
        for event in body.split(b"\n\n")[:-1]:
            lines = [line for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                continue
            data = lines[0][5:].strip()
            if data == b"[DONE]":
                self.num_done += 1
            else:
                self._read_event(json.loads(data))

    def find_fault(self, generation: Generation, expected: list[int], answer: Answer) -> str:
        """Return a description of the fault in an answer with the right text; "" if there is none."""
        if self._api in ("chat", "completions"):
            if self.finishes != [generation.finish]:
                return f"it finished by {self.finishes}, not {generation.finish}"
            if generation.members.get("return_token_ids") and answer.is_stream and self.ids != expected:
                return f"its ids are {self.ids}, not {expected}"
            if not generation.members.get("return_token_ids") and self.ids:
                return "it has token ids that the request did not ask for"
            if len(self.names) > 1:
                return f"it has several ids: {sorted(self.names)}"
        if self.num_done != 1:
            return f"it ended {self.num_done} times"
        return self._find_fault_of_usage(generation, len(expected), answer.is_stream)

    def _find_fault_of_usage(self, generation: Generation, count: int, is_stream: bool) -> str:
        options = generation.members.get("stream_options") or {}
        wanted = not is_stream or self._api in ("responses", "messages") or bool(options.get("include_usage"))
        if len(self.usages) != int(wanted):
            return f"it has {len(self.usages)} usages, not {int(wanted)}"
        names = ("input_tokens", "output_tokens") if self._api in ("responses", "messages") else _TOKENS
        for usage in self.usages:
            found = [usage[name] for name in names]
            if found != [len(generation.prompt), count] or usage["total_tokens"] != sum(found):
                return f"its usage is {usage}, of {len(generation.prompt)} and {count} tokens"
        return ""

    def _read_event(self, value: dict[str, Any]) -> None:
        if value.get("error"):
            error = value["error"]
            self.error = str(error.get("message")) if isinstance(error, dict) else str(error)
            self.code = str(error.get("code", "")) if isinstance(error, dict) else ""
            return
        kind = value.get("type", "")
        if kind == "response.output_text.delta":
            self.text += value["delta"]
        elif kind == "response.completed":
            self.num_done += 1
            self.usages.append(value["response"]["usage"])
        elif kind == "content_block_delta":
            self.text += value["delta"]["text"]
        elif kind == "message_delta":
            self.usages.append(value["usage"])
        elif kind == "message_stop":
            self.num_done += 1
        elif not kind:
            self._read_chunk(value)

    def _read_chunk(self, value: dict[str, Any]) -> None:
        self.names.add(value["id"])
        if value.get("usage"):
            self.usages.append(value["usage"])
        for choice in value["choices"]:
            self._read_choice(choice)

    def _read_choice(self, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or choice
        self.text += message.get("content") or message.get("text") or ""
        self.ids += message.get("completion_token_ids") or choice.get("token_ids") or []
        if choice.get("finish_reason"):
            self.finishes.append(choice["finish_reason"])


_TOKENS = ("prompt_tokens", "completion_tokens")
