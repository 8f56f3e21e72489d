"""Resumption: counts the interruptions of a request, and decides whether it is resumed."""

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
    """State of a request that an instance has preempted or interrupted at least once."""

    __slots__ = ("_breaks", "_broken_by", "_preemptions", "_settings")

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._preemptions = self._breaks = 0
        self._broken_by: ApiError | None = None  # the error that ends the request if no instance continues it

    async def prepare_after_preemption(
        self, merger: StreamMerger | ResponseMerger, decode: Instance, upstream: ConnectionPool
    ) -> ApiError | None:
        """Prepare the next segment after decode preempted a request. Return an error if none can follow, else None."""
        self._preemptions += 1
        self._broken_by = None
        if isinstance(merger, ResponseMerger):
            while (ids := merger.ids_to_detokenize) is not None:
                try:
                    merger.take_text(await _detokenize(upstream, decode, ids))
                except UpstreamError:
                    merger.take_text(None)
        if merger.complete:
            return None
        if self._preemptions > self._settings.preempt_retry_count:
            message = f"decode instances preempted the request {self._preemptions} times; the last was {decode.key}"
            return ApiError(503, message, "preempted")
        if merger.resume_members() is None:
            message = (
                f"decode instance {decode.key} preempted the request, and no other instance can continue its response"
            )
            return ApiError(503, message, "preempted")
        if isinstance(merger, StreamMerger):
            merger.begin_segment()
            if why := await self.remove_unfinished_character(merger, decode, upstream, may_guess=True):
                return self.explain(why)
        return None

    async def remove_unfinished_character(
        self,
        merger: StreamMerger | ResponseMerger | None,
        instance: Instance,
        upstream: ConnectionPool,
        *,
        may_guess: bool = False,
    ) -> str:
        """Remove the ids of an incomplete character at the end of a stream.

        Args:
            merger: the merger of the stream.
            instance: the instance that is asked for the text of the ids.
            upstream: the connections to instances.
            may_guess: whether to assume that the ids end with a complete character if ``instance`` cannot report texts
                or does not respond. Then no id is removed.

        Returns:
            Why the stream cannot continue; ``""`` if it can.
        """
        ids = merger.doubtful_ids if isinstance(merger, StreamMerger) else ()
        if not ids or not isinstance(merger, StreamMerger):
            return ""
        for unfinished in range(min(MAX_UNFINISHED_TOKENS + 1, len(ids))):
            try:
                text = await _detokenize(upstream, instance, list(ids[: len(ids) - unfinished]))
            except UpstreamError:
                if may_guess:
                    return ""
                text = None
            if text is None and may_guess:
                if unfinished:
                    return ""
                break
            if text is None:
                return (
                    f"several tokens arrived at once, and {instance.key} does not report whether they end "
                    "with a complete character"
                )
            if not text.endswith(UNFINISHED):
                if unfinished and merger.client_reads_ids:
                    return "the client has the id of a token that ends with an incomplete character"
                merger.drop_last(unfinished)
                return ""
        merger.drop_last(0)  # the text is unknown, or it really contains U+FFFD
        return ""

    def prepare_after_failure(
        self, merger: StreamMerger | None, body: InferenceBody, instance: Instance, error: ApiError, *, is_chat: bool
    ) -> ApiError | None:
        """Prepare the next segment after an instance has died, has ended the stream early, or hangs.

        Args:
            merger: the merger of the stream; None if the client has received nothing, or the stream cannot be merged.
            body: the body of the request.
            instance: the instance that has failed.
            error: the error that ends the request if it is not resumed.
            is_chat: whether the API is chat.

        Returns:
            An error if there can be no next segment; else None.
        """
        self._breaks += 1
        self._broken_by = error
        if merger is not None and merger.complete:
            return None
        limit = self._settings.stream_resume_count
        if self._breaks > limit:
            return self.explain(f"the limit of resumptions ({limit}, see server.stream-resume-count) is reached")
        if merger is None:
            return None
        if merger.has_content_without_ids:
            return self.explain("the client has text whose token ids are not known")
        if merger.shown_ids and (obstacle := find_obstacle(body, instance.registration.engine, is_chat)):
            return self.explain(obstacle)
        _log.info("%s; another instance continues the stream after %d tokens", error.message, len(merger.shown_ids))
        merger.begin_segment()
        return None

    def explain(self, why: str) -> ApiError:
        """Return the error of an interrupted or preempted stream, with the reason why it is not resumed."""
        if self._broken_by is None:
            return ApiError(
                503, f"a decode instance preempted the request, which cannot be continued: {why}", "preempted"
            )
        return self._broken_by._replace(message=f"{self._broken_by.message}; the stream was not resumed: {why}")

    @property
    def is_broken(self) -> bool:
        """Whether the last interruption was a failure of an instance (it died, hung, or ended the stream early)."""
        return self._broken_by is not None


async def _detokenize(upstream: ConnectionPool, instance: Instance, ids: list[int]) -> str | None:
    """Ask an instance for the text of ``ids``. Return None if the instance cannot report texts.

    Raises:
        UpstreamError: the instance has not responded, or has failed.
    """
    response = await upstream.fetch(
        instance.address,
        "POST",
        "/detokenize",
        headers=_JSON,
        body=orjson.dumps({"tokens": ids}),
        timeout=DETOKENIZE_SECONDS,
    )
    if response.status in (408, 429) or (response.status >= 500 and response.status != 501):
        raise UpstreamError(f"{instance.key} responded to /detokenize with the status {response.status}")
    try:
        found = orjson.loads(response.body) if response.status == 200 else {}
        text = found["prompt"] if "prompt" in found else found["text"]  # "text" is SGLang's name
    except (ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None
