"""OpenAI's Responses API, for text only: begins answers as chats, and builds response objects and event streams."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from engine.apis.completion_response import REQUEST_ABORTED, BegunResponse
from engine.apis.completions import Completions
from engine.apis.plain_body import encode_typed_event
from engine.apis.response_store import ResponseStore, StoredResponse
from engine.apis.responses_body import ResponsesBody, chat_of_responses, messages_of_input
from engine.generation import ENGINE_FAILED, Choices
from engine.protocol import ApiError, join_texts, now, quote_short

__all__ = ["Responses", "ResponsesResponse"]

_STATUS_OF_REASON = {"stop": "completed", "length": "incomplete"}
"""Status of a response, by the finish reason of its answer. For other reasons the status is ``failed``."""
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
"""Names of chat's fields in this API, where they differ."""
_LAST_EVENT = {"completed": "response.completed", "incomplete": "response.incomplete"}


class Responses:
    """Checks requests of the Responses API, begins their responses, and stores responses.

    Args:
        completions: renders conversations and begins answers.
        store: stores a response if its client wants that. None if responses are not stored. This is for prefill
            instances, because their answers end after the first token.
    """

    def __init__(self, completions: Completions, store: ResponseStore | None) -> None:
        self._completions = completions
        self._store = store

    async def begin_response(self, body: ResponsesBody) -> ResponsesResponse:
        """Check the body of POST /v1/responses and begin the response.

        Raises:
            ApiError: the input cannot be rendered, the prompt is too long, or the previous response is not stored here.
        """
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = list(self._find_previous(body.previous_response_id).messages)
        unique = uuid.uuid4().hex
        body.request_id = body.request_id or unique
        try:
            choices = await self._completions.begin_chat_choices(chat_of_responses(body, before))
        except ApiError as exc:
            raise exc.rename_param(_NAMES) from None
        messages = [*before, *map(_join_content, messages_of_input(body.input))]
        store = self._store if body.store else None
        return ResponsesResponse(f"resp_{unique}", choices, body, messages, self._completions.model, store)

    def retrieve_response(self, response_id: str) -> dict[str, Any]:
        """Return the response of GET /v1/responses/{id}.

        Raises:
            ApiError: 404; the response is not stored here.
        """
        stored = self._store.find_response(response_id) if self._store else None
        if stored is None:
            raise _make_not_found_error(response_id)
        return stored.response

    def delete_response(self, response_id: str) -> dict[str, Any]:
        """Remove a stored response, and return the response of DELETE /v1/responses/{id}.

        Raises:
            ApiError: 404; the response is not stored here.
        """
        if not (self._store and self._store.remove_response(response_id)):
            raise _make_not_found_error(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _find_previous(self, response_id: str) -> StoredResponse:
        stored = self._store.find_response(response_id) if self._store else None
        if stored is None:
            message = f"previous_response_id: this instance has stored no response {quote_short(response_id)}"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return stored


class ResponsesResponse(BegunResponse):
    """The response of /v1/responses: one object, or a stream of events."""

    def __init__(
        self,
        response_id: str,
        choices: Choices,
        body: ResponsesBody,
        messages: list[dict[str, Any]],
        model: str,
        store: ResponseStore | None,
    ) -> None:
        super().__init__(choices, is_stream=body.stream)
        self._body = body
        self._messages = messages
        self._store = store
        self._id = response_id
        self._item_id = f"msg_{response_id.removeprefix('resp_')}"
        self._created = now()
        self._model = model
        self._num_events = 0

    async def collect_whole(self) -> dict[str, Any]:
        texts: list[str] = []
        reason: str | None = None
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for _, piece in pieces:
                texts.append(piece.text)
                reason = piece.finish_reason
        if reason not in _STATUS_OF_REASON:
            raise ApiError(500 if reason == "error" else 503, _explain_failure(reason))
        return self._finish("".join(texts), reason) | self._choices.describe_transfer()

    async def stream_events(self) -> AsyncIterator[bytes]:
        begun = self._describe("in_progress")
        yield self._encode("response.created", response=begun)
        yield self._encode("response.in_progress", response=begun)
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        item = self._describe_item("in_progress", [])
        yield self._encode("response.output_item.added", output_index=0, item=item)
        yield self._encode("response.content_part.added", **place, part=_describe_part(""))
        text, reason = "", None
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for _, piece in pieces:
                reason = piece.finish_reason
                if piece.text:
                    text += piece.text
                    yield self._encode("response.output_text.delta", **place, delta=piece.text, logprobs=[])
        yield self._encode("response.output_text.done", **place, text=text, logprobs=[])
        yield self._encode("response.content_part.done", **place, part=_describe_part(text))
        whole = self._finish(text, reason)
        yield self._encode("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._encode(_LAST_EVENT.get(whole["status"], "response.failed"), response=whole)

    def _encode(self, kind: str, **members: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return encode_typed_event(kind, sequence_number=number, **members)

    def _finish(self, text: str, reason: str | None) -> dict[str, Any]:
        """Return the complete response object, and store it if the client wants that."""
        status = _STATUS_OF_REASON.get(reason or "", "failed")
        error = {"code": "server_error", "message": _explain_failure(reason)} if status == "failed" else None
        item_status = "completed" if status == "completed" else "incomplete"
        output = [self._describe_item(item_status, [_describe_part(text)])]
        whole = self._describe(status, error=error, output=output, usage=_describe_usage(self._choices.usage()))
        if self._store is not None and status in _LAST_EVENT:
            answer = {"role": "assistant", "content": text}
            self._store.store_response(self._id, StoredResponse(whole, [*self._messages, answer]))
        return whole

    def _describe(self, status: str, **members: Any) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._model,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": self._store is not None,
            "temperature": self.request.params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self.request.params.top_p,
            "truncation": "disabled",
            "usage": None,
            **members,
        }

    def _describe_item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def _join_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one text, without hints for the cache: a hint is for one request."""
    content = message["content"]
    return message if isinstance(content, str) else {**message, "content": join_texts(content)}


def _explain_failure(reason: str | None) -> str:
    return ENGINE_FAILED if reason == "error" else REQUEST_ABORTED


def _describe_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _describe_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return chat's ``usage`` in this API's format."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _make_not_found_error(response_id: str) -> ApiError:
    return ApiError(404, f"this instance has stored no response {quote_short(response_id)}", code="response_not_found")
