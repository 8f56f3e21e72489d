"""Whether an answer may come in several segments, and which merger combines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.serving.resume.continuation import needs_prompt
from router.serving.resume.obstacles import find_obstacle
from router.serving.resume.stream import StreamMerger
from router.serving.resume.whole import ResponseMerger

if TYPE_CHECKING:
    from router.fleet import EngineKind
    from router.http import InferenceBody

__all__ = ["make_merger"]


def make_merger(
    body: InferenceBody, engine: EngineKind, *, is_chat: bool, may_be_preempted: bool, may_be_resumed: bool
) -> StreamMerger | ResponseMerger | None:
    """Return the merger of an answer that may have several segments; None for an answer of one segment.

    Args:
        engine: engine of the instance that answers first.
        may_be_preempted: whether that instance may preempt the request.
        may_be_resumed: whether a stream continues elsewhere if its instance dies.
    """
    is_stream = bool(body.members.get("stream"))
    if not may_be_preempted and not (is_stream and may_be_resumed and not find_obstacle(body, engine, is_chat)):
        return None
    if not is_stream:
        return ResponseMerger(body)
    return StreamMerger(body, keeps_prompt=not may_be_preempted and needs_prompt(engine))
