"""Anthropic's Messages API, for text only: translates requests to chat, and answers to messages and event streams."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.apis.completion_response import REQUEST_ABORTED, BegunResponse, name_answer
from engine.apis.completions import Completions
from engine.apis.plain_body import PlainBody, encode_typed_event
from engine.generation import ENGINE_FAILED, Choices, Piece
from engine.protocol import (
    MAX_STOPS,
    ApiError,
    ChatBody,
    Unsupported,
    anthropic_error_body,
    check_body,
    check_text_content,
    join_texts,
    quote_short,
)

__all__ = ["ConversationBody", "Messages", "MessagesBody", "MessagesResponse"]

_NO_TOOLS = "this engine does not support tools in this API; leave the field out, or use /v1/chat/completions"
_NAMES = {"stop": "stop_sequences", "max_completion_tokens": "max_tokens"}
"""Names of chat's fields in this API, where they differ."""


class ConversationBody(PlainBody):
    """The body of POST /v1/messages/count_tokens: only the fields that form the prompt."""

    unsupported: ClassVar[Unsupported] = {
        "container": ((), "this engine does not support containers; leave the field out"),
        "context_management": ((), "this engine does not truncate conversations; leave the field out"),
        "inference_geo": ((), "this engine runs in one place only; leave the field out"),
        "mcp_servers": (([],), _NO_TOOLS),
        "output_config": (({},), "this engine does not support structured output; leave the field out"),
        "output_format": ((), "this engine does not support structured output; leave the field out"),
        "thinking": (
            ({"type": "disabled"},),
            'this engine does not separate reasoning from the answer; give "disabled"',
        ),
        "tool_choice": (({"type": "none"}, {"type": "auto"}), _NO_TOOLS),
        "tools": (([],), _NO_TOOLS),
    }
    ignored: ClassVar[frozenset[str]] = PlainBody.ignored | {"betas", "metadata"}

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None


class MessagesBody(ConversationBody):
    """The body of POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field(default_factory=list, max_length=MAX_STOPS)


class Messages:
    """Checks requests of the Messages API, and begins their responses.

    Args:
        completions: renders conversations and begins answers.
    """

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def begin_message(self, body: MessagesBody) -> MessagesResponse:
        """Check the body of POST /v1/messages and begin the response.

        Raises:
            ApiError: the messages cannot be rendered, or the prompt is too long.
        """
        choices = await self._completions.begin_chat_choices(chat_of_messages(body))
        return MessagesResponse(choices, is_stream=body.stream, model=self._completions.model)

    async def count_tokens(self, body: ConversationBody) -> dict[str, Any]:
        """Return the response of POST /v1/messages/count_tokens: the number of tokens of the prompt.

        Raises:
            ApiError: the messages cannot be rendered, or the prompt is too long.
        """
        return {"input_tokens": len(await self._completions.encode_chat(chat_of_messages(body)))}


def chat_of_messages(body: ConversationBody) -> ChatBody:
    """Return the chat request that is equivalent to a request of the Messages API.

    If the last message is the assistant's, the answer continues this message.

    Raises:
        ApiError: 400; a message is not text.
    """
    messages = [_read_message(index, message) for index, message in enumerate(body.messages)]
    if system := _read_content("system", body.system or ""):
        messages.insert(0, {"role": "system", "content": system})
    is_continued = messages[-1]["role"] == "assistant"
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": is_continued,
        "add_generation_prompt": not is_continued,
    }
    if isinstance(body, MessagesBody):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    try:
        return check_body(ChatBody, fields | body.fields_of_chat())
    except ApiError as exc:
        raise exc.rename_param(_NAMES) from None


def _read_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ("user", "assistant"):
        raise ApiError(400, f"messages.{index}.role: it is {quote_short(role)}; give user or assistant")
    return {"role": role, "content": _read_content(f"messages.{index}.content", message.get("content"))}


def _read_content(name: str, content: object) -> str | list[dict[str, Any]]:
    """Return the content of a message as one text. If a block of the content has ``cache_control``, return the blocks.

    Raises:
        ApiError: 400; the content is not text. The error has the ``name`` of the field.
    """
    content = check_text_content(name, content)
    if isinstance(content, str) or any(block.get("cache_control") is not None for block in content):
        return content
    return join_texts(content)


class MessagesResponse(BegunResponse):
    """The response of /v1/messages: one object, or a stream of events."""

    def __init__(self, choices: Choices, *, is_stream: bool, model: str) -> None:
        super().__init__(choices, is_stream=is_stream)
        self._model = model

    async def collect_whole(self) -> dict[str, Any]:
        texts: list[str] = []
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for _, piece in pieces:
                texts.append(piece.text)
        _check_end(piece)
        content = [{"type": "text", "text": "".join(texts)}]
        whole = self._describe(content=content, **_describe_end(piece), usage=self._usage())
        return whole | self._choices.describe_transfer()

    async def stream_events(self) -> AsyncIterator[bytes]:
        has_begun = False
        try:
            async with contextlib.aclosing(self._choices.pieces()) as pieces:
                async for _, piece in pieces:
                    if not has_begun:
                        # With the first token, because then it is known which tokens of the prompt were cached.
                        has_begun = True
                        yield encode_typed_event("message_start", message=self._describe(usage=self._usage()))
                        block = {"type": "text", "text": ""}
                        yield encode_typed_event("content_block_start", index=0, content_block=block)
                        yield encode_typed_event("ping")
                    if piece.text:
                        delta = {"type": "text_delta", "text": piece.text}
                        yield encode_typed_event("content_block_delta", index=0, delta=delta)
            _check_end(piece)
        except ApiError as exc:
            yield encode_typed_event("error", error=anthropic_error_body(exc.status, str(exc))["error"])
            return
        yield encode_typed_event("content_block_stop", index=0)
        yield encode_typed_event("message_delta", delta=_describe_end(piece), usage=self._usage())
        yield encode_typed_event("message_stop")

    def _describe(self, **members: Any) -> dict[str, Any]:
        return {
            "id": name_answer("msg_", self.request.request_id),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **members,
        }

    def _usage(self) -> dict[str, Any]:
        """Return the usage in this API's format, in which ``input_tokens`` does not include cached tokens."""
        usage = self._choices.usage()
        details = usage["prompt_tokens_details"]
        cached, written = details["cached_tokens"], details["cache_write_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _check_end(last: Piece) -> None:
    """Raise ``ApiError`` if the answer failed or was aborted, because this API has no stop reason for that."""
    if last.finish_reason == "error":
        raise ApiError(500, ENGINE_FAILED)
    if last.finish_reason == "abort":
        raise ApiError(503, REQUEST_ABORTED)


def _describe_end(last: Piece) -> dict[str, Any]:
    reason: Literal["end_turn", "max_tokens", "stop_sequence"] = "end_turn"
    if last.finish_reason == "length":
        reason = "max_tokens"
    elif last.stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop}
