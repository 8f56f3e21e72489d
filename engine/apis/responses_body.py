"""The request body of OpenAI's Responses API, for text only, and its translation to a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import Field

from engine.apis.plain_body import PlainBody
from engine.protocol import (
    ApiError,
    ChatBody,
    Unsupported,
    check_body,
    check_text_content,
    join_texts,
    quote_short,
)

__all__ = ["ResponsesBody", "chat_of_responses", "messages_of_input"]

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_NO_TOOLS = "this engine does not support tools in this API; leave the field out, or use /v1/chat/completions"
_FORM: dict[str, Any] = {"format": {"type": "text"}}
_VERBOSITY: dict[str, Any] = {"verbosity": "medium"}
# The values of the field "text" that are OpenAI's defaults.
_PLAIN_TEXTS: tuple[dict[str, Any], ...] = ({}, _FORM, _VERBOSITY, _FORM | _VERBOSITY)

# OpenAI's limits. Metadata is stored with the response.
_MetadataName: TypeAlias = Annotated[str, Field(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, Field(max_length=512)]


class ResponsesBody(PlainBody):
    """The body of POST /v1/responses."""

    unsupported: ClassVar[Unsupported] = {
        "background": ((False,), "this engine does not support background responses; give false"),
        "context_management": (([],), "this engine does not truncate conversations; leave the field out"),
        "conversation": ((), "this engine stores responses, not conversations; give previous_response_id"),
        "include": (([],), "this engine supports no additional output; leave the field out"),
        "max_tool_calls": ((), _NO_TOOLS),
        "moderation": ((), "this engine does not support moderation; leave the field out"),
        "prompt": ((), "this engine stores no prompt templates; give input and instructions"),
        "reasoning": (({},), "this engine does not separate reasoning from the answer; leave the field out"),
        "text": (_PLAIN_TEXTS, "this engine supports neither structured output nor verbosity; leave the field out"),
        "tool_choice": (("none", "auto"), _NO_TOOLS),
        "tools": (([],), _NO_TOOLS),
        "top_logprobs": ((0,), "this engine reports probabilities only in /v1/chat/completions; leave the field out"),
        "truncation": (("disabled",), 'this engine does not truncate prompts; give "disabled"'),
    }
    ignored: ClassVar[frozenset[str]] = PlainBody.ignored | {
        "parallel_tool_calls",
        "safety_identifier",
        "stream_options",
        "user",
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    store: bool = True
    previous_response_id: str | None = None
    metadata: dict[_MetadataName, _MetadataValue] = Field(default_factory=dict, max_length=16)
    stop: str | list[str] | None = None


def chat_of_responses(body: ResponsesBody, before: Sequence[dict[str, Any]]) -> ChatBody:
    """Return the chat request that is equivalent to a request of the Responses API.

    ``before`` are the messages of the conversation up to the previous response; it is empty if there is none.
    """
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*instructions, *before, *messages_of_input(body.input)]
    fields = {"messages": messages, "max_completion_tokens": body.max_output_tokens, "stop": body.stop}
    return check_body(ChatBody, fields | body.fields_of_chat())


def messages_of_input(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of chat for the field ``input``, which is a text or a list of items.

    Raises:
        ApiError: 400; an item is not a text message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        raise ApiError(400, "input: it is empty; give a text, or a list of messages", param="input")
    return [_message_of_item(f"input.{index}", item) for index, item in enumerate(items)]


def _message_of_item(name: str, item: dict[str, Any]) -> dict[str, Any]:
    kind, role = item.get("type", "message"), item.get("role")
    if kind != "message":
        raise ApiError(
            400,
            f'{name}: the item has the type {quote_short(kind)}; give only items of the type "message"',
            param="input",
        )
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise ApiError(400, f"{name}.role: it is {quote_short(role)}; give one of {known}", param="input")
    content = check_text_content(f"{name}.content", item.get("content"), "input", _TEXT_PARTS)
    if not isinstance(content, str) and any("prompt_cache_breakpoint" in part for part in content):
        return {"role": _ROLES[role], "content": [{**part, "type": "text"} for part in content]}
    return {"role": _ROLES[role], "content": content if isinstance(content, str) else join_texts(content)}
