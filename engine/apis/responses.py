"""OpenAI's Responses API: its objects and its stream of typed events, on top of chat."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

from engine.apis.completions import ENGINE_FAILED, REQUEST_ABORTED, BegunResponse, Completions
from engine.apis.response_store import KeptResponse, ResponseStore
from engine.apis.responses_body import ResponsesBody, chat_of_responses, messages_of_input
from engine.apis.typed_events import encode_typed_event
from engine.generation import Choices
from engine.protocol import ApiError, now, quote_short

__all__ = ["Responses", "ResponsesResponse"]

_STATUS_OF_REASON = {"stop": "completed", "length": "incomplete"}
"""The status of a response by the finish reason of its answer; with any other reason it is failed."""
_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
"""Names in this API for fields of chat."""
_LAST_EVENT = {"completed": "response.completed", "incomplete": "response.incomplete"}


class Responses:
    """Begins responses, and stores those that the client asks to store.

    Args:
        completions: renders the conversation and begins its answer.
        store: stores the responses; None: they are not stored, as on prefill instances, because their answers end with
            the
            first token.
    """

    def __init__(self, completions: Completions, store: ResponseStore | None) -> None:
        self._completions = completions
        self._store = store

    async def begin_response(self, body: ResponsesBody) -> ResponsesResponse:
        """Check POST /v1/responses and prepare its response.

        Raises:
            ApiError: the input cannot be rendered or does not fit, or the previous response is not stored here.
        """
        before: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = list(self._find_previous(body.previous_response_id).messages)
        unique = uuid.uuid4().hex
        body.request_id = body.request_id or unique
        try:
            choices = await self._completions.begin_chat_choices(chat_of_responses(body, before))
        except ApiError as exc:
            raise exc.renamed(_NAMES) from None
        messages = [*before, *messages_of_input(body.input)]
        store = self._store if body.store else None
        return ResponsesResponse(f"resp_{unique}", choices, body, messages, self._completions.model, store)

    def retrieve_response(self, response_id: str) -> dict[str, Any]:
        """GET /v1/responses/{id}.

        Raises:
            ApiError: 404, it is not stored here.
        """
        kept = self._store.find_response(response_id) if self._store else None
        if kept is None:
            raise _not_found(response_id)
        return kept.response

    def delete_response(self, response_id: str) -> dict[str, Any]:
        """DELETE /v1/responses/{id}.

        Raises:
            ApiError: 404, it is not stored here.
        """
        if not (self._store and self._store.remove_response(response_id)):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _find_previous(self, response_id: str) -> KeptResponse:
        kept = self._store.find_response(response_id) if self._store else None
        if kept is None:
            message = f"previous_response_id: this instance keeps no response {quote_short(response_id)}"
            raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
        return kept


class ResponsesResponse(BegunResponse):
    """A response: collected into one object, or as a stream of typed events."""

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
        """Collect the whole response.

        Raises:
            ApiError: 500, the engine failed; 503, the request was aborted.
        """
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
        """Yield the response as server-sent events; the last one is the response's end."""
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
        """Return the response's final object; it is stored from now on if the client wants that."""
        status = _STATUS_OF_REASON.get(reason or "", "failed")
        error = {"code": "server_error", "message": _explain_failure(reason)} if status == "failed" else None
        item_status = "completed" if status == "completed" else "incomplete"
        output = [self._describe_item(item_status, [_describe_part(text)])]
        whole = self._describe(status, error=error, output=output, usage=_describe_usage(self._choices.usage()))
        if self._store is not None and status in _LAST_EVENT:
            answer = {"role": "assistant", "content": text}
            self._store.keep_response(self._id, KeptResponse(whole, [*self._messages, answer]))
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


def _explain_failure(reason: str | None) -> str:
    return ENGINE_FAILED if reason == "error" else REQUEST_ABORTED


def _describe_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _describe_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of chat under this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"this instance keeps no response {quote_short(response_id)}", code="response_not_found")
