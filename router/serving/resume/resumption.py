"""Resumption: how often instances interrupted a request, and whether it is resumed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import orjson

from router.http import ApiError, ConnectionPool, UpstreamError
from router.serving.resume.json_merger import MAX_UNFINISHED_TOKENS, UNFINISHED, ResponseMerger
from router.serving.resume.resumability import find_obstacle
from router.serving.resume.stream import StreamMerger

if TYPE_CHECKING:
    from router.fleet import Instance
    from router.http import InferenceBody
    from router.settings import RouterSettings

__all__ = ["Resumption"]

_log = logging.getLogger("router.serving.resume")

DETOKENIZE_SECONDS = 5.0

_JSON = [(b"content-type", b"application/json")]


class Resumption:
    """State of a request that was preempted or interrupted at least once."""

    __slots__ = ("_breaks", "_broken_by", "_preemptions", "_settings")

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._preemptions = self._breaks = 0
        self._broken_by: ApiError | None = None  # error that ends the request if no instance continues it

    async def prepare_after_preemption(
        self, merger: StreamMerger | ResponseMerger, decode: Instance, upstream: ConnectionPool
    ) -> ApiError | None:
        """Prepare the next segment of a request that decode preempted; return an error if that is impossible."""
        self._preemptions += 1
        self._broken_by = None
        if isinstance(merger, ResponseMerger):
            while (ids := merger.ids_to_detokenize) is not None:
                merger.take_text(await _detokenize(upstream, decode, ids))
        if merger.complete:
            return None
        if self._preemptions > self._settings.preempt_retry_count:
            message = f"decode instances preempted the request {self._preemptions} times; the last was {decode.key}"
            return ApiError(503, message, "preempted")
        if merger.resume_members() is None:
            message = f"decode instance {decode.key} preempted the request, whose answer cannot be continued elsewhere"
            return ApiError(503, message, "preempted")
        if isinstance(merger, StreamMerger):
            merger.begin_segment()
            await self.remove_unfinished_character(
                merger, decode, upstream
            )  # if this fails, the stream continues anyway
        return None

    async def remove_unfinished_character(
        self, merger: StreamMerger | ResponseMerger | None, instance: Instance, upstream: ConnectionPool
    ) -> str:
        """Remove the ids of an incomplete character at a stream's end; return why that is impossible, or ``""``.

        Args:
            instance: the instance that is queried for the ids' text.
        """
        ids = merger.doubtful_ids if isinstance(merger, StreamMerger) else ()
        if not ids or not isinstance(merger, StreamMerger):
            return ""
        for unfinished in range(min(MAX_UNFINISHED_TOKENS + 1, len(ids))):
            text = await _detokenize(upstream, instance, list(ids[: len(ids) - unfinished]))
            if text is None:
                return (
                    f"several tokens came at once, and {instance.key} does not tell whether they end with a character"
                )
            if not text.endswith(UNFINISHED):
                if unfinished and merger.client_reads_ids:
                    return "its client has the id of a token that ends within a character"
                merger.drop_last(unfinished)
                break
        return ""  # or the text contains such a mark itself

    def prepare_after_failure(
        self, merger: StreamMerger | None, body: InferenceBody, instance: Instance, error: ApiError, *, is_chat: bool
    ) -> ApiError | None:
        """Prepare the next segment after an instance died, ended the stream early, or hung; return an error if
        impossible.

        Args:
            merger: None if the client has seen nothing of the answer, or the answer cannot be merged.
            error: ends the request unless it continues.
        """
        self._breaks += 1
        self._broken_by = error
        if merger is not None and merger.complete:
            return None
        limit = self._settings.stream_resume_count
        if self._breaks > limit:
            return self.explain(f"it was resumed {limit} times already")
        if merger is None:
            return None
        if merger.has_content_without_ids:
            return self.explain("its client has seen more of it than its tokens' ids tell")
        if merger.shown_ids and (obstacle := find_obstacle(body, instance.registration.engine, is_chat)):
            return self.explain(obstacle)
        _log.info("%s; the stream goes on elsewhere behind %d tokens", error.message, len(merger.shown_ids))
        merger.begin_segment()
        return None

    def explain(self, why: str) -> ApiError:
        """Return the error of an interrupted or preempted stream, with the reason why it was not resumed."""
        if self._broken_by is None:
            return ApiError(503, f"a decode instance preempted the request, which cannot go on: {why}", "preempted")
        return self._broken_by._replace(message=f"{self._broken_by.message}; the stream was not resumed: {why}")

    @property
    def is_broken(self) -> bool:
        """Whether an instance that died, ended the stream early or hung interrupted it."""
        return self._broken_by is not None


async def _detokenize(upstream: ConnectionPool, instance: Instance, ids: list[int]) -> str | None:
    """Query an instance for the text of ``ids``; return None if it cannot answer."""
    try:
        response = await upstream.fetch(
            instance.address,
            "POST",
            "/detokenize",
            headers=_JSON,
            body=orjson.dumps({"tokens": ids}),
            timeout=DETOKENIZE_SECONDS,
        )
        told = orjson.loads(response.body) if response.status == 200 else {}
        text = told["prompt"] if "prompt" in told else told["text"]  # the second is SGLang's name
    except (UpstreamError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
