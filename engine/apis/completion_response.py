"""Responses to chat and plain completions: one object, or a stream of events, made from the answers' pieces."""

from __future__ import annotations

import codecs
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import orjson

from engine.generation import ENGINE_FAILED, Choices, Piece
from engine.generation.detokenizer import TokenBytes
from engine.protocol import ApiError, GenerationBody, error_body, now
from engine.scheduling.request import Request, TokenLogprobs

__all__ = [
    "REQUEST_ABORTED",
    "BegunResponse",
    "ChatResponse",
    "CompletionResponse",
    "TextResponse",
    "name_answer",
]

REQUEST_ABORTED = "the request was aborted before its response ended"


class BegunResponse(ABC):
    """Base class of responses, for all APIs.

    Args:
        choices: the answers to the request; no piece of them was read yet.
        is_stream: whether the client requested a stream.
    """

    def __init__(self, choices: Choices, *, is_stream: bool) -> None:
        self._choices = choices
        self.is_stream = is_stream

    @property
    def request(self) -> Request:
        """The client's request. If it has several prompts, this has the first prompt."""
        return self._choices.request

    @abstractmethod
    async def collect_whole(self) -> dict[str, Any]:
        """Wait for all answers, and return the response object.

        Raises:
            ApiError: 500, the engine failed; 503, the request was aborted, and the API has no finish reason for that.
        """

    @abstractmethod
    def stream_events(self) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; the last one is the API's mark of the end, or an error."""


class CompletionResponse(BegunResponse):
    """A response in OpenAI's format: one object, or a stream of events. Subclasses are for chat and for texts.

    Args:
        choices: the answers to the request; no piece of them was read yet.
        body: the request body.
        model: the name of the model.
        token_bytes: returns the bytes of a token, for log probabilities.
    """

    prefix: str
    object_whole: str
    object_chunk: str

    def __init__(self, choices: Choices, body: GenerationBody, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(choices, is_stream=body.stream)
        self._body = body
        self._token_bytes = token_bytes
        self._head = {
            "id": name_answer(self.prefix, choices.request.request_id),
            "created": now(),
            "model": model,
        }

    async def collect_whole(self) -> dict[str, Any]:
        by_choice: list[list[Piece]] = [[] for _ in range(len(self._choices))]
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.finish_reason == "error":
                    raise ApiError(500, ENGINE_FAILED)
                by_choice[index].append(piece)
        choices = [
            self._describe_choice(
                index, pieces, self._token_ids(index, pieces, with_prompt=True), is_whole=True, first=True
            )
            for index, pieces in enumerate(by_choice)
        ]
        whole = {**self._head, "object": self.object_whole, "choices": choices, "usage": self._choices.usage()}
        return whole | self._choices.describe_transfer()

    async def stream_events(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options
        pending: dict[int, list[Piece]] = {}
        async with contextlib.aclosing(self._choices.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.finish_reason == "error":
                    yield _encode_event(error_body(500, ENGINE_FAILED))
                    break
                first = index not in pending
                unsent = pending.setdefault(index, [])
                unsent.append(piece)
                if not (piece.text or piece.finish_reason or piece.logprobs or first):
                    continue  # the tokens so far are an incomplete character
                ids = self._token_ids(index, unsent, with_prompt=first)
                # A router may continue from these ids on another instance. Then it needs the cached tokens of this one.
                if first and ids:
                    ids["prompt_cache"] = self._choices.usage()["prompt_tokens_details"]
                choice = self._describe_choice(index, [piece], ids, is_whole=False, first=first)
                unsent.clear()
                chunk: dict[str, Any] = {**self._head, "object": self.object_chunk, "choices": [choice]}
                if options and options.continuous_usage_stats:
                    chunk["usage"] = self._choices.usage()
                elif options and options.include_usage:
                    chunk["usage"] = None
                yield _encode_event(chunk)
        if options and options.include_usage:
            usage = self._choices.usage()
            yield _encode_event({**self._head, "object": self.object_chunk, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _describe_choice(
        self, index: int, pieces: list[Piece], ids: dict[str, Any], *, is_whole: bool, first: bool
    ) -> dict[str, Any]:
        """Return the JSON object of the choice ``index``, with the text of ``pieces``.

        ``ids`` are the JSON members that contain token ids. ``is_whole`` says that the response is one object, not a
        stream; ``first`` says that nothing of the choice was sent before.
        """
        text = "".join(piece.text for piece in pieces)
        return {
            **self._place_text(text, ids, is_whole=is_whole, first=first),
            "logprobs": self._describe_logprobs(index, pieces),
            "index": index,
            "finish_reason": pieces[-1].finish_reason,
        }

    @abstractmethod
    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        """Return the members of a choice with its text and its token ids.

        Args:
            text: the text.
            ids: the members for ``return_token_ids``.
            is_whole: whether the response is one object, not a stream of events.
            first: whether this is the first event of the choice.
        """

    @abstractmethod
    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        """Return the log probabilities of pieces of a choice, or None if the client did not request them."""

    def _token_ids(self, index: int, pieces: list[Piece], *, with_prompt: bool) -> dict[str, Any]:
        """Return the members for ``return_token_ids``: token ids of pieces of a choice, and token ids of its prompt."""
        if not self._body.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": list(self._choices.prompt_of(index))} if with_prompt else {}
        completion = [piece.token_id for piece in pieces if piece.token_id is not None]
        return prompt | {"completion_token_ids": completion}

    def _token_text(self, token_id: int) -> str:
        return self._token_bytes(token_id).decode(errors="replace")


class ChatResponse(CompletionResponse):
    """The response of /v1/chat/completions."""

    prefix = "chatcmpl-"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        if is_whole:  # OpenAI's schema requires the member "refusal", even if it is null
            return {"message": {"role": "assistant", "content": text, "refusal": None, **ids}}
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": text, **ids}}

    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        content = [
            {
                **self._describe_token(piece.token_id, piece.logprobs.chosen),
                "top_logprobs": [self._describe_token(token, value) for token, value in piece.logprobs.top],
            }
            for piece in pieces
            if piece.logprobs is not None and piece.token_id is not None
        ]
        return {"content": content, "refusal": None} if self._body.num_logprobs() is not None else None

    def _describe_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token_id),
            "logprob": logprob,
            "bytes": list(self._token_bytes(token_id)),
        }


class TextResponse(CompletionResponse):
    """The response of /v1/completions."""

    prefix = "cmpl-"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def _place_text(self, text: str, ids: dict[str, Any], *, is_whole: bool, first: bool) -> dict[str, Any]:
        return {"text": text, **ids}

    def __init__(self, choices: Choices, body: GenerationBody, model: str, token_bytes: TokenBytes) -> None:
        super().__init__(choices, body, model, token_bytes)
        self._offsets: dict[int, _Offset] = {}
        """For each choice, the offset of its next token in its text."""

    def _describe_logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._body.num_logprobs() is None:
            return None
        choices: list[tuple[int, TokenLogprobs]] = [
            (piece.token_id, piece.logprobs)
            for piece in pieces
            if piece.token_id is not None and piece.logprobs is not None
        ]
        # The chosen token is always included, even if it is not one of the most likely tokens.
        tops = [dict([*logprobs.top, (token, logprobs.chosen)]) for token, logprobs in choices]
        return {
            "tokens": [self._name_token(token) for token, _ in choices],
            "token_logprobs": [logprobs.chosen for _, logprobs in choices],
            "top_logprobs": [{self._name_token(token): value for token, value in top.items()} for top in tops],
            "text_offset": [self._find_offset(index, token) for token, _ in choices],
        }

    def _name_token(self, token_id: int) -> str:
        """Return the text of a token. If it is a part of a character, return its bytes in OpenAI's format."""
        data = self._token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find_offset(self, index: int, token_id: int) -> int:
        """Return where the next token of a choice begins in the text, in characters, and move past this token."""
        offset = self._offsets.setdefault(index, _Offset())
        before = offset.characters
        if not self._token_bytes.is_special(token_id):
            offset.characters += len(offset.decoder.decode(self._token_bytes(token_id)))
        return before


class _Offset:
    """The number of characters of a text so far, and the decoder for the bytes that follow."""

    def __init__(self) -> None:
        self.characters = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


def name_answer(prefix: str, request_id: str) -> str:
    """Return the id of a response: the request's id with ``prefix``, unless it has the prefix already."""
    return request_id if request_id.startswith(prefix) else prefix + request_id


def _encode_event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
