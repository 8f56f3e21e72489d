"""The model of simulated engines: a hash function as model, a tokenizer of words, and four APIs in vLLM's formats.

The next token is a function of all tokens before it. So a continued response equals an uninterrupted one only if the
continuation begins with exactly the earlier tokens, as ids or as text.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "BLOCK",
    "LIMITS",
    "PATHS",
    "Asked",
    "PrefixCache",
    "answer_text",
    "blocks_of",
    "decode",
    "encode",
    "next_tokens",
]

BLOCK = 16
"""Tokens in a block of KV."""

DEFAULT_TOKENS = 16
VOCABULARY = 1000
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}
PATHS = tuple(LIMITS)
"""The paths for generation."""


def encode(text: str) -> list[int]:
    """Return the token ids of a text, one for each word."""
    return [
        int(word[1:]) if word[:1] == "w" and word[1:].isdigit() else VOCABULARY + zlib.crc32(word.encode()) % 50_000
        for word in text.split()
    ]


def decode(ids: Sequence[int]) -> str:
    """Return the text of generated tokens. Each is a word with the space before it."""
    return "".join(f" w{token}" for token in ids)


def next_tokens(ids: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the model generates after these."""
    said = list(ids)
    for _ in range(count):
        said.append(zlib.crc32(repr(said).encode()) % VOCABULARY)
    return said[len(ids) :]


def blocks_of(ids: Sequence[int]) -> list[int]:
    """Return the hashes of the full blocks of a prompt. Each covers all tokens before its end."""
    return [zlib.crc32(repr(list(ids[:end])).encode()) for end in range(BLOCK, len(ids) + 1, BLOCK)]


@dataclass
class PrefixCache:
    """The cached blocks of an instance."""

    blocks: set[int] = field(default_factory=set)

    def take(self, ids: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt, and add all its full blocks."""
        names = blocks_of(ids)
        found = next((at for at, name in enumerate(names) if name not in self.blocks), len(names))
        self.blocks.update(names)
        return min(found * BLOCK, len(ids) - 1)


@dataclass(frozen=True)
class Asked:
    """A request for generation, as the engine parses it."""

    path: str
    body: dict[str, Any]
    prompts: list[list[int]]

    @classmethod
    def read(cls, path: str, body: dict[str, Any]) -> Asked:
        """Parse a request to one of ``PATHS``."""
        return cls(path, body, _read_prompts(path, body))

    @property
    def limit(self) -> int | None:
        """The maximum number of generated tokens. Chat has two names for it; the newer one has priority."""
        newer = self.body.get("max_completion_tokens") if self.path == "/v1/chat/completions" else None
        limit: int | None = newer if newer is not None else self.body.get(LIMITS[self.path])
        return limit

    @property
    def limit_names(self) -> list[str]:
        """The names of the limits in the body."""
        names = [LIMITS[self.path], *["max_completion_tokens"] * (self.path == "/v1/chat/completions")]
        return [name for name in names if name in self.body]

    @property
    def samples(self) -> int:
        """The number of choices for each prompt."""
        return int(self.body.get("n") or 1)

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def generate(self) -> list[list[int]]:
        """Return the tokens of each choice."""
        count = DEFAULT_TOKENS if self.limit is None else self.limit
        return [next_tokens(prompt, count) for prompt in self.prompts for _ in range(self.samples)]

    def whole(self, answer_id: str, cached: int, choices: list[list[int]], **more: Any) -> bytes:
        """Return the response without streaming, with additional members ``more``."""
        return json.dumps({**self._whole(answer_id, cached, choices), **more}).encode()

    def events(self, answer_id: str, cached: int, choices: list[list[int]]) -> Iterator[str]:
        """Yield the events of a stream: those before the first token, one for each token, those after the last."""
        forms = {"/v1/responses": self._responses_events, "/v1/messages": self._messages_events}
        yield from forms.get(self.path, self._openai_events)(answer_id, cached, choices)

    def _usage(self, cached: int, choices: list[list[int]]) -> dict[str, Any]:
        prompt, generated = self.prompt_tokens, sum(map(len, choices))
        if self.path == "/v1/messages":
            usage = {"input_tokens": prompt - cached, "output_tokens": generated}
            return {**usage, "cache_read_input_tokens": cached}
        if self.path == "/v1/responses":
            usage = {"input_tokens": prompt, "output_tokens": generated, "total_tokens": prompt + generated}
            return {**usage, "input_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}

    def _finish(self) -> str:
        return "stop" if self.limit is None else "length"

    def _whole(self, answer_id: str, cached: int, choices: list[list[int]]) -> dict[str, Any]:
        texts, usage = [decode(ids) for ids in choices], self._usage(cached, choices)
        with_ids = self.body.get("return_token_ids")
        if self.path == "/v1/messages":
            content = [{"type": "text", "text": texts[0]}]
            said: dict[str, Any] = {
                "id": answer_id,
                "type": "message",
                "role": "assistant",
                "content": content,
                "model": "m",
            }
            reason = "end_turn" if self.limit is None else "max_tokens"
            return {**said, "stop_reason": reason, "stop_sequence": None, "usage": usage}
        if self.path == "/v1/responses":
            status = "completed" if self.limit is None else "incomplete"
            said = {"id": answer_id, "object": "response", "created_at": 1, "model": "m", "status": status}
            return {**said, "output": [self._message(texts[0])], "usage": usage}
        if self.path == "/v1/completions":
            listed = [
                {"index": at, "text": text, "finish_reason": self._finish(), "logprobs": None}
                | ({"token_ids": choices[at], "prompt_token_ids": self.prompts[at // self.samples]} if with_ids else {})
                for at, text in enumerate(texts)
            ]
            said = {"id": answer_id, "object": "text_completion", "created": 1, "model": "m"}
            return {**said, "choices": listed, "usage": usage}
        listed = [
            {"index": at, "message": {"role": "assistant", "content": text}, "finish_reason": self._finish()}
            | ({"token_ids": choices[at]} if with_ids else {})
            for at, text in enumerate(texts)
        ]
        said = {"id": answer_id, "object": "chat.completion", "created": 1, "model": "m"}
        ids = {"prompt_token_ids": self.prompts[0]} if with_ids else {}
        return {**said, "choices": listed, "usage": usage, **ids}

    def _message(self, text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}

    def _openai_events(self, answer_id: str, cached: int, choices: list[list[int]]) -> Iterator[str]:
        is_chat = self.path == "/v1/chat/completions"
        with_ids, options = self.body.get("return_token_ids"), self.body.get("stream_options") or {}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        shared = {"id": answer_id, "object": kind, "created": 1, "model": "m"}

        def event(**members: Any) -> str:
            return f"data: {json.dumps({**shared, **members})}\n\n"

        if is_chat:
            for at in range(len(choices)):
                begun = {"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                ids = {"prompt_token_ids": self.prompts[0]} if with_ids and not at else {}
                yield event(choices=[begun], **ids)
        for number in range(max(map(len, choices))):
            for at, ids_of_choice in enumerate(choices):
                text = decode(ids_of_choice[number : number + 1])
                finish = self._finish() if number == len(ids_of_choice) - 1 else None
                said: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
                if with_ids:
                    said["token_ids"] = ids_of_choice[number : number + 1]
                    if not is_chat and not number:
                        said["prompt_token_ids"] = self.prompts[at // self.samples]
                yield event(choices=[{"index": at, **said, "finish_reason": finish}])
        if options.get("include_usage"):
            yield event(choices=[], usage=self._usage(cached, choices))
        yield "data: [DONE]\n\n"

    def _messages_events(self, answer_id: str, cached: int, choices: list[list[int]]) -> Iterator[str]:
        whole = self._whole(answer_id, cached, choices)
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        yield _event("message_start", message=begun)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for token in choices[0]:
            yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": decode([token])})
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta={"stop_reason": whole["stop_reason"]}, usage=whole["usage"])
        yield _event("message_stop")

    def _responses_events(self, answer_id: str, cached: int, choices: list[list[int]]) -> Iterator[str]:
        whole = self._whole(answer_id, cached, choices)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None}
        yield _event("response.created", response=begun)
        yield _event("response.in_progress", response=begun)
        message = {**self._message(""), "status": "in_progress", "content": []}
        yield _event("response.output_item.added", output_index=0, item=message)
        for token in choices[0]:
            yield _event("response.output_text.delta", output_index=0, content_index=0, delta=decode([token]))
        yield _event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield _event(f"response.{whole['status']}", response=whole)


def answer_text(path: str, body: dict[str, Any]) -> str:
    """Return the text of an uninterrupted response, of its first choice."""
    return decode(Asked.read(path, body).generate()[0])


def _event(kind: str, **members: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}\n\n"


def _read_prompts(path: str, body: dict[str, Any]) -> list[list[int]]:
    if "completion_token_ids" in body:  # FastDeploy appends them to the prompt
        rest = {name: value for name, value in body.items() if name != "completion_token_ids"}
        return [[*_read_prompts(path, rest)[0], *body["completion_token_ids"]]]
    if path != "/v1/completions" and (given := (body.get("kv_transfer_params") or {}).get("prompt_token_ids")):
        return [given]  # vLLM uses them in place of the messages
    if path == "/v1/completions":
        prompt = body["prompt"]
        listed = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        return [encode(one) if isinstance(one, str) else list(one) for one in listed]
    if path == "/v1/responses" and isinstance(body["input"], str):
        messages = [{"role": "user", "content": body["input"]}]
    else:
        messages = list(body["input"] if path == "/v1/responses" else body["messages"])
    if path == "/v1/messages" and "system" in body:
        messages.insert(0, {"role": "system", "content": body["system"]})
    ids = [token for message in messages for token in (*encode(message["role"]), *encode(_text(message["content"])))]
    return [ids if body.get("continue_final_message") else ids + encode("assistant")]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content)
