"""Formats of each engine: reads requests, and builds events and complete responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from simulation.actors.tokens import answer_ids, count_unfinished, natural_length, prompt_ids, split_ids, text_of

__all__ = ["APIS", "Generation", "Script", "read_generation"]

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}


class Generation(NamedTuple):
    """A requested generation: the tokens from ``start`` to ``end`` of the answer to a prompt.

    Attributes:
        api: the API of the request.
        prompt: the token ids of the prompt.
        resumed: the tokens of the answer that were generated before.
        end: number of tokens of the whole answer.
        finish: the finish reason.
        is_stream: whether the response is a stream.
        members: the members of the request's body.
    """

    api: str
    prompt: list[int]
    resumed: list[int]
    end: int
    finish: str
    is_stream: bool
    members: dict[str, Any]

    @property
    def start(self) -> int:
        """Number of tokens of the answer that were generated before."""
        return len(self.resumed)

    @property
    def is_resumed_right(self) -> bool:
        """Whether ``resumed`` is really the beginning of the answer."""
        return self.resumed == answer_ids(self.prompt, 0, len(self.resumed))


def read_generation(path: str, members: dict[str, Any], engine: str) -> Generation:
    """Return the generation that a request with this path and body asks for."""
    api = APIS[path]
    prompt, resumed = _read_prompt(api, members, engine)
    limit = next(
        (members[name] for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if members.get(name)),
        None,
    )
    natural = natural_length(prompt)
    last = natural if limit is None else len(resumed) + limit
    finish = "stop" if natural < last or limit is None else "length"
    return Generation(api, prompt, resumed, min(natural, last), finish, bool(members.get("stream")), members)


def _read_prompt(api: str, members: dict[str, Any], engine: str) -> tuple[list[int], list[int]]:
    given = (members.get("kv_transfer_params") or {}).get("prompt_token_ids")
    if given is not None and api != "completions":
        return split_ids(given)
    if api == "completions":
        prompt = members["prompt"]
        ids, resumed = (prompt_ids(prompt), []) if isinstance(prompt, str) else split_ids(prompt)
    elif api == "responses":
        ids, resumed = prompt_ids(str(members["input"])), []
    else:
        ids, resumed = prompt_ids(" ".join(f"{each['role']} {each['content']}" for each in members["messages"])), []
    if engine == "fastdeploy":
        resumed = [*resumed, *members.get("completion_token_ids", [])]
    return ids, resumed


class Script:
    """Builds the events and responses of one generation in the format of an engine."""

    def __init__(self, generation: Generation, engine: str, answer_id: str, created: int) -> None:
        self._generation = generation
        self._engine = engine
        self._head: dict[str, Any] = {"id": answer_id, "created": created, "model": "m"}
        self._returns_ids = bool(generation.members.get("return_token_ids"))
        self._unfinished: list[int] = []
        self._has_finished = False

    def usage(self, generated: int) -> dict[str, Any]:
        """Return the usage object after ``generated`` tokens of this instance."""
        prompt = len(self._generation.prompt) + self._generation.start
        if self._generation.api in ("responses", "messages"):
            return {"input_tokens": prompt, "output_tokens": generated, "total_tokens": prompt + generated}
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def begin(self) -> list[bytes]:
        """Return the events before the first token."""
        api, ids = self._generation.api, [*self._generation.prompt, *self._generation.resumed]
        if api == "responses":
            return [self._event({"type": "response.created", "response": {**self._head, "status": "in_progress"}})]
        if api == "messages":
            message = {"type": "message", "role": "assistant", "content": [], **self._head}
            return [self._event({"type": "message_start", "message": message})]
        if api == "completions":
            return []
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        members: dict[str, Any] = {}
        if self._returns_ids and self._engine == "fastdeploy":
            delta["prompt_token_ids"] = ids
        elif self._returns_ids:
            members["prompt_token_ids"] = ids
        return [self._chunk([{"index": 0, "delta": delta, "finish_reason": None}], **members)]

    def tokens(self, ids: Sequence[int], *, is_first: bool, finish: str | None) -> bytes:
        """Return the event with some tokens. An incomplete character at their end comes with the next event.

        Args:
            ids: the tokens.
            is_first: whether these are the first tokens of the response.
            finish: the finish reason, if it comes in the same event as the last tokens; else None.
        """
        shown = [*self._unfinished, *ids]
        self._unfinished = shown[len(shown) - count_unfinished(shown) :] if finish is None else []
        self._has_finished = finish is not None
        api, text = self._generation.api, text_of(shown[: len(shown) - len(self._unfinished)])
        if api == "responses":
            return self._event({"type": "response.output_text.delta", "delta": text})
        if api == "messages":
            return self._event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}})
        part: dict[str, Any] = {"content": text} if api == "chat" else {"text": text}
        choice: dict[str, Any] = {"index": 0, "delta": part} if api == "chat" else {"index": 0, **part}
        if self._returns_ids:
            if self._engine == "fastdeploy":
                (part if api == "chat" else choice)["completion_token_ids"] = list(ids)
            else:
                choice["token_ids"] = list(ids)
            if is_first and api == "completions":
                choice["prompt_token_ids"] = [*self._generation.prompt, *self._generation.resumed]
        return self._chunk([{**choice, "finish_reason": finish}])

    def end(self, generated: int, finish: str) -> Iterator[bytes]:
        """Yield the events after the last token."""
        api = self._generation.api
        if api == "responses":
            response = {**self._head, "status": "completed", "usage": self.usage(generated)}
            yield self._event({"type": "response.completed", "response": response})
            return
        if api == "messages":
            yield self._event(
                {"type": "message_delta", "delta": {"stop_reason": finish}, "usage": self.usage(generated)}
            )
            yield self._event({"type": "message_stop"})
            return
        if not self._has_finished:
            # An incomplete character at the end of the answer comes here.
            part = {"content": text_of(self._unfinished)} if self._unfinished and finish != "pd_reschedule" else {}
            choice = {"index": 0, "delta": part} if api == "chat" else {"index": 0, "text": part.get("content", "")}
            if self._returns_ids and api == "completions" and not generated:  # its only token was the end
                choice["prompt_token_ids"] = [*self._generation.prompt, *self._generation.resumed]
            yield self._chunk([{**choice, "finish_reason": finish}])
        options = self._generation.members.get("stream_options")
        if options and options.get("include_usage"):
            yield self._chunk([], usage=self.usage(generated))
        yield b"data: [DONE]\n\n"

    def error(self, message: str, code: int) -> bytes:
        """Return an event with an error."""
        return self._event({"error": {"message": message, "type": "error", "code": code}})

    def whole(self, ids: Sequence[int], finish: str) -> dict[str, Any]:
        """Return a complete response."""
        api, text, usage = self._generation.api, text_of(ids), self.usage(len(ids))
        if api == "responses":
            content = [{"type": "output_text", "text": text}]
            message = {"type": "message", "role": "assistant", "content": content}
            return {**self._head, "object": "response", "status": "completed", "output": [message], "usage": usage}
        if api == "messages":
            content = [{"type": "text", "text": text}]
            return {**self._head, "type": "message", "content": content, "stop_reason": finish, "usage": usage}
        has_ids = self._engine == "fastdeploy" and (self._returns_ids or finish == "pd_reschedule")
        part: dict[str, Any] = {"content": text} if api == "chat" else {"text": text}
        if has_ids:
            part["completion_token_ids"] = list(ids)
        choice = {"message": {"role": "assistant", **part}} if api == "chat" else part
        return {**self._head, "choices": [{"index": 0, **choice, "finish_reason": finish}], "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._generation.api == "chat" else "text_completion"
        return b"data: " + json.dumps({**self._head, "object": kind, **more, "choices": choices}).encode() + b"\n\n"

    def _event(self, value: dict[str, Any]) -> bytes:
        name = f"event: {value['type']}\n".encode() if "type" in value else b""
        return name + b"data: " + json.dumps(value).encode() + b"\n\n"
