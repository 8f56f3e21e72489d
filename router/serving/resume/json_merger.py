"""ResponseMerger: merges the segments of a response that is not streamed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from kvcommon.json_objects import load_object
from router.serving.resume.continuation import count_remaining, resume_by_ids
from router.serving.resume.events import (
    find_choices,
    find_ids,
    find_message,
    find_text,
    is_preemption,
    merge_usage,
)
from router.serving.resume.resumability import follows_grammar

if TYPE_CHECKING:
    from router.http import InferenceBody

__all__ = ["MAX_UNFINISHED_TOKENS", "UNFINISHED", "ResponseMerger"]

# Maximum number of tokens in an incomplete character: a character has up to four bytes, and a token at least one.
MAX_UNFINISHED_TOKENS = 3
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Markup that an engine removes from its responses, but a detokenizer may not remove from the text of token ids.
_MARKUP = re.compile(r"</?think>|<[|\uff5c]|</?s>")


class ResponseMerger:
    """Merges the segments of one response that is not streamed.

    ``feed`` takes the response of a segment. It returns the response for the client; or None if the segment was
    preempted, or cannot be merged with the earlier segments. After None, while ``ids_to_detokenize`` is not None, the
    caller asks an instance for the text of these ids, and passes the text to ``take_text``. Then, if ``complete`` is
    true, ``make_end`` returns the response; otherwise the caller adds ``resume_members`` to the body of the next
    request.
    """

    __slots__ = ("_body", "_cached", "_first", "_ids", "_last", "_resent", "_restarts", "_text", "ids_to_detokenize")

    def __init__(self, body: InferenceBody) -> None:
        self.ids_to_detokenize: list[int] | None = None
        """Token ids whose text is needed; None if no text is needed."""
        self._body = body
        self._restarts = False  # whether segments cannot be merged, so that each one begins again
        self._ids: list[int] = []
        self._text = ""
        self._first: dict[str, Any] | None = None
        self._resent = 0  # number of ids that were sent with the request of the last preempted segment
        self._last: dict[str, Any] = {}
        self._cached: Mapping[str, int] = {}

    def feed(self, status: int, body: bytes) -> bytes | None:
        """Process the response of one segment. Return the client's response; None if a further segment is needed."""
        # ``find`` is faster than ``in``, which first tries to use bytes as a number (half a microsecond).
        if body.find(b"pd_reschedule") >= 0 or body.find(b"PD Error") >= 0:
            response = load_object(body)
            if response is not None and is_preemption(response):
                self._take_segment(response)
                return None
        if not self._ids or not 200 <= status < 300:
            return body
        return self._merge(body)

    def take_text(self, text: str | None) -> None:
        """Set the text of the ids in ``ids_to_detokenize``; None if no instance reports it."""
        ids = self.ids_to_detokenize or []
        self.ids_to_detokenize = None
        if text is None or _MARKUP.search(text):
            self._begin_again()
        elif text.endswith(UNFINISHED):
            self._drop_last(ids)
        else:
            self._ids, self._text = ids, text
            self._rule_out_stops()

    @property
    def complete(self) -> bool:
        """Whether the segments that were preempted already have as many tokens as the client requested."""
        return bool(self._ids) and count_remaining(self._body.members, len(self._ids)) == 0

    @property
    def has_earlier_segments(self) -> bool:
        """Whether the next segment continues earlier segments. If false, the next segment begins the response."""
        return bool(self._ids)

    def note_cached(self, figures: Mapping[str, int]) -> None:
        """Record the cached-token counts of the first instance, by their names in the usage."""
        self._cached = figures

    def resume_members(self) -> dict[str, Any]:
        """Return the members to set in the body of the next segment's request.

        If the response is generated from the beginning, return ``{}``.
        """
        return resume_by_ids(self._body.members, self._ids) if self._ids else {}

    def make_end(self) -> bytes:
        """Return the response that joins all segments. Call this only if ``complete`` is true."""
        response = self._last
        choice = find_choices(response)[0]
        choice["finish_reason"] = "length"
        message = find_message(choice)
        message["text" if message is choice else "content"] = self._text
        for place in (choice, message):
            for name in ("completion_token_ids", "token_ids"):
                if place.get(name) is not None:
                    place[name] = self._ids if self._body.members.get("return_token_ids") else None
        merge_usage(response, self._resent, self._cached)
        return self._as_first_segment(response)

    def _take_segment(self, response: dict[str, Any]) -> None:
        """Store the tokens of a preempted segment."""
        choices = find_choices(response)
        if not choices:
            return  # an error, which contains no tokens
        self._first = self._first or response
        self._last = response
        message = find_message(choices[0])
        if self._must_restart() or message.get("tool_calls") or message.get("reasoning_content"):
            self._restarts = True
            self._begin_again()
            return
        ids = find_ids(choices[0])
        if not ids:
            return
        self._resent = len(self._ids)
        self._ids += ids
        text = find_text(message)
        if not text:
            self.ids_to_detokenize = list(self._ids)
        elif text.endswith(UNFINISHED):
            self._text += text
            self._drop_last(self._ids)
        else:
            self._text += text
            self._rule_out_stops()

    def _must_restart(self) -> bool:
        members = self._body.members
        has_logprobs = members.get("logprobs") is not None and members["logprobs"] is not False
        return (
            self._restarts
            or self._body.choices > 1
            or has_logprobs
            or bool(members.get("tools") or members.get("functions") or members.get("echo"))
            or follows_grammar(members)
        )

    def _begin_again(self) -> None:
        self._ids, self._text = [], ""

    def _drop_last(self, ids: list[int]) -> None:
        """Drop the last of ``ids``, because their text ends within a character. Set ``ids_to_detokenize`` to the rest.

        After too many dropped ids, discard all tokens, so that the response is generated from the beginning.
        """
        if len(self._ids) - len(ids) < MAX_UNFINISHED_TOKENS and len(ids) > 1:
            self.ids_to_detokenize = ids[:-1]
        else:
            self._begin_again()

    def _rule_out_stops(self) -> None:
        """Discard all tokens if the text ends with the beginning of a stop string.

        The next engine would not recognise this stop string, so the response is generated from the beginning.
        """
        stop = self._body.members.get("stop")
        strings = stop if isinstance(stop, list) else [stop]
        if any(self._text.endswith(s[:length]) for s in strings if isinstance(s, str) for length in range(1, len(s))):
            self._begin_again()

    def _merge(self, body: bytes) -> bytes | None:
        response = load_object(body)
        choices = find_choices(response or {})
        if response is None or not choices:
            return body
        choice = choices[0]
        message = find_message(choice)
        if message.get("tool_calls") or message.get("reasoning_content"):
            self._restarts = True
            self._begin_again()
            return None
        key = "text" if message is choice else "content"
        message[key] = self._text + find_text(message)
        for place in (response, choice) if message is choice else (response, choice, message):
            for name in ("completion_token_ids", "token_ids"):
                if isinstance(place.get(name), list):
                    place[name] = [*self._ids, *place[name]]
            if isinstance(place.get("prompt_token_ids"), list):
                del place["prompt_token_ids"][-len(self._ids) :]
            for name in ("completion_tokens", "raw_prediction"):
                if isinstance(place.get(name), str):
                    place[name] = self._text + place[name]
        merge_usage(response, len(self._ids), self._cached)
        return self._as_first_segment(response)

    def _as_first_segment(self, response: dict[str, Any]) -> bytes:
        first = self._first or {}
        response.update({name: first[name] for name in ("id", "created", "model") if name in first})
        return orjson.dumps(response)
