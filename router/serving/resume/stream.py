"""StreamMerger: merges the segments of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from router.http import UpstreamError
from router.serving.resume.continuation import count_remaining, resume_by_ids
from router.serving.resume.event_template import EventTemplate, learn_template
from router.serving.resume.events import (
    CACHE_COUNTS,
    DONE,
    IDS_MARK,
    PROMPT_IDS,
    count_integers,
    encode_event,
    find_choices,
    find_ids,
    find_message,
    find_text,
    has_content,
    is_comment,
    is_preemption,
    merge_usage,
    parse_event,
    split_events,
    strip_token_ids,
    undo_token_ids,
)
from router.serving.resume.resumability import follows_grammar

if TYPE_CHECKING:
    from router.http import InferenceBody

__all__ = ["StreamMerger"]

# Events are stored up to this total size. Then they are parsed, and only their ids are stored.
_KEPT_BYTES = 16 * 1024
# If this number of pieces has no ids, the engine sends none, and later pieces are not stored.
_KEPT_WITHOUT_IDS = 3
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# The text of usual events is stored for this number of events. Then only their ids are stored.
_KEPT_USUAL = 256
# Number of last ids that are enough to see whether their text ends within a character.
_DOUBTFUL_IDS = 64
# Maximum number of templates that are learned for a stream. A new one is needed, for example, after reasoning.
_TEMPLATES_TRIED = 32


class StreamMerger:
    """Merges the segments of one client's event stream.

    The request has ``return_token_ids``, so that the events contain token ids. The caller passes all events to
    ``feed``, which removes these ids again, unless the client itself has requested them.

    A segment ends when ``preempted`` becomes true, or when its instance dies. Then, if ``complete`` is true,
    ``make_end`` returns the missing end of the stream. Otherwise the caller adds ``resume_members`` (or, in the format
    of another engine, the result of ``continue_stream``) to the body of the next request. The caller calls
    ``begin_segment`` before it passes the events of the next response to ``feed``.
    """

    __slots__ = (
        *(
            "nulls_ids",
            "preempted",
            "_client_wants_ids",
            "_begun",
            "_not_resumable",
            "_body",
            "_head",
            "_held",
            "_kept",
            "_kept_bytes",
        ),
        *("_is_chat", "_offset", "_prompt_tokens", "_reasoning", "_resent", "_segment", "_shown", "_withheld"),
        *("_is_done", "_is_finished", "_has_usage", "_expected", "_keeps_prompt", "_prompt", "_texts", "_cached"),
        *("_last_count", "_template", "_templates_left", "_usual"),
    )

    def __init__(self, body: InferenceBody, keeps_prompt: bool = False) -> None:
        """
        Args:
            body: the body of the client's request.
            keeps_prompt: whether the ids of the prompt and the text are stored, because the engine needs them to
                continue.
        """
        self.preempted = False
        self.nulls_ids = False
        """Whether the present segment's engine writes null in place of ids that nobody has requested, as vLLM does.
        The caller sets this."""
        self._body = body
        self._client_wants_ids = bool(body.members.get("return_token_ids"))
        self._segment = 0
        self._head: dict[str, Any] = {}  # id, time and model of the first chunk, which all chunks get
        self._is_chat = False
        self._begun = False  # whether a parsed chunk was sent to the client
        self._kept: list[bytes] = []  # stored events that are not parsed yet
        self._kept_bytes = 0
        self._shown: list[int] = []  # ids of the tokens whose text the client has
        self._last_count = 0  # number of ids in the last event with text
        self._held: list[int] = []  # later ids, whose text the engine has not sent yet
        self._withheld: list[bytes] = []  # events with such ids, which are delayed if the client reads ids itself
        self._not_resumable = False  # whether the client has content without ids: text, or a tool call
        self._offset = 0  # number of characters that the client has
        self._reasoning = 0  # number of the ids in ``_shown`` that are reasoning
        self._prompt_tokens: int | None = None
        self._resent = 0  # number of ids that were sent with the request of the present segment
        # Which parts of the stream's end the client has: the finish reason, the usage, [DONE].
        self._is_finished = self._has_usage = self._is_done = False
        self._keeps_prompt = keeps_prompt
        self._prompt = b""  # the ids of the prompt as a JSON array, if ``keeps_prompt``
        self._texts: list[str] = []  # the text that the client has, if ``keeps_prompt``
        self._template: EventTemplate | None = None
        self._templates_left = 0 if self._client_wants_ids else _TEMPLATES_TRIED
        self._usual: list[tuple[bytes | Any, ...]] = []  # text and ids of usual events, which follow those in ``_kept``
        self._cached: Mapping[str, int] = {}  # cached-token counts of the client's prompt, if reported
        self._expected: Sequence[int] | None = None  # the prompt that the present segment must report

    @property
    def members(self) -> Mapping[str, Any]:
        """The members of the body of the client's request."""
        return self._body.members

    @property
    def client_reads_ids(self) -> bool:
        """Whether the client itself has requested token ids."""
        return self._client_wants_ids

    @property
    def shown_ids(self) -> Sequence[int]:
        """The ids of the tokens whose text the client has received."""
        self._fold_events()
        return self._shown

    @property
    def doubtful_ids(self) -> Sequence[int]:
        """The last of ``shown_ids`` if their text may end within a character; else empty.

        An engine does not send the text of a token that ends within a character before the end of the answer. But one
        event may contain several tokens, and the text of only the first of these tokens.
        """
        self._fold_events()
        return self._shown[-_DOUBTFUL_IDS:] if self._last_count > 1 and not self._is_finished else []

    @property
    def prompt_ids(self) -> list[int] | None:
        """The token ids of the client's prompt; None if they are not known."""
        return list(orjson.loads(self._prompt)) if self._prompt else None

    @property
    def text(self) -> str:
        """The text that the client has received, if ``keeps_prompt``; else empty."""
        return "".join(self._texts)

    @property
    def num_reasoning(self) -> int:
        """Number of the ``shown_ids`` that are reasoning."""
        self._fold_events()
        return self._reasoning

    @property
    def has_content_without_ids(self) -> bool:
        """Whether the client has received content for which the ids are not known, or a tool call."""
        self._fold_events()
        return self._not_resumable

    @property
    def has_earlier_segments(self) -> bool:
        """Whether the next segment continues earlier segments. If false, the next segment begins the stream."""
        return bool(self.shown_ids)

    def drop_last(self, count: int) -> None:
        """Remove the last ``count`` of ``shown_ids``, whose text is not complete. The next engine generates them again.

        After this call, ``doubtful_ids`` is empty.
        """
        if count:
            self._reasoning -= count if self._reasoning == len(self._shown) else 0
            del self._shown[-count:]
            self._resent = len(self._shown)
        self._last_count = 0

    def note_cached(self, figures: Mapping[str, int]) -> None:
        """Record the cached-token counts of the first instance, by their names in the usage."""
        self._cached = figures

    def expect_prompt(self, ids: Sequence[int] | None) -> None:
        """Set the prompt that the next segment must report; None if that segment need not report a prompt."""
        self._expected = ids

    def feed_usual(self, event: bytes) -> bytes | None:
        """Process one event like ``feed``, if it matches the stream's ``EventTemplate``.

        Return None if ``event`` does not match, or contains several events.
        """
        shape = self._template
        if shape is None or not event.startswith(shape.beginning):
            return None
        found = shape.rest.fullmatch(event, len(shape.beginning))
        if found is None:
            return None
        self._usual.append(found.group(1, 3))
        if len(self._usual) > _KEPT_USUAL:
            self._fold_events()
        start, end = found.span(2)
        return event[:start] + shape.left + event[end:]

    def feed(self, events: bytes) -> bytes:
        """Process complete events of the present segment, and return the bytes for the client.

        Raises:
            UpstreamError: the segment reports another prompt than expected.
        """
        if self.preempted:
            return b""
        if self.must_parse(events):
            return self._merge_events(events)
        has_ids = events.find(IDS_MARK) >= 0
        if has_ids and self._template is not None and events.count(b"\n\n") > 1:
            return b"".join(map(self._feed_one, split_events(events)))
        if not self._not_resumable:
            self._keep_events(events, has_ids)
        return self._hide_ids(events) if has_ids else events

    def _feed_one(self, event: bytes) -> bytes:
        """Process one event that need not be parsed, like ``feed``."""
        usual = self.feed_usual(event)
        if usual is not None:
            return usual
        has_ids = event.find(IDS_MARK) >= 0
        if not self._not_resumable:
            self._keep_events(event, has_ids)
        return self._hide_ids(event) if has_ids else event

    def _hide_ids(self, events: bytes) -> bytes:
        """Return the events without the ids, which the client has not requested."""
        return undo_token_ids(events) if self.nulls_ids else strip_token_ids(events)

    def must_parse(self, events: bytes) -> bool:
        """Return whether ``events`` must be parsed: one may end the segment, or all must be rewritten."""
        if self._segment > 0 or self._client_wants_ids:
            return True
        # ``find`` is faster than ``in``, which first tries to use bytes as a number (half a microsecond).
        return events.find(b"pd_reschedule") >= 0 or events.find(b'"error"') >= 0

    @property
    def complete(self) -> bool:
        """Whether all requested tokens have arrived, so that only the end of the stream is missing."""
        self._fold_events()
        if self._not_resumable or self._body.choices != 1:
            return False
        is_at_limit = count_remaining(self._body.members, len(self._shown)) == 0
        return self._is_finished or (is_at_limit and not self.doubtful_ids)

    def resume_members(self) -> dict[str, Any] | None:
        """Return the members to set in the body of the next request, which continues the stream.

        Returns:
            The members; ``{}`` if no token has arrived, so that the same request is sent again; None if the stream
            cannot continue.
        """
        self._fold_events()
        if not self._shown and not self._not_resumable:
            return {}
        members = self._body.members
        if self._not_resumable or self._body.choices > 1 or follows_grammar(members):
            return None
        return resume_by_ids(members, self._shown)

    def begin_segment(self) -> None:
        """Begin the next segment, whose events are passed to ``feed`` from now on."""
        self._fold_events()
        self.preempted = False
        self._template, self._templates_left = None, 0  # in later segments, all events are parsed and rewritten
        self._segment += 1
        self._held.clear()
        self._withheld.clear()
        self._resent = len(self._shown)

    def make_end(self) -> bytes:
        """Return the missing end of a stream that is ``complete``: finish reason, usage if requested, and [DONE]."""
        if self._is_done:
            return b""
        chunks: list[dict[str, Any]] = []
        if not self._is_finished:
            choice: dict[str, Any] = {"index": 0, "delta": {}} if self._is_chat else {"index": 0, "text": ""}
            chunks.append({**self._head, "choices": [{**choice, "finish_reason": "length"}]})
        options = self._body.members.get("stream_options")
        wants_usage = isinstance(options, dict) and options.get("include_usage")
        if wants_usage and not self._has_usage and self._prompt_tokens is not None:
            prompt, completion = self._prompt_tokens, len(self._shown) + (len(self._held) if self._is_finished else 0)
            usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
            usage["total_tokens"] = prompt + completion
            if self._cached:
                usage["prompt_tokens_details"] = self._cached
            chunks.append({**self._head, "choices": [], "usage": usage})
        return b"".join(map(encode_event, chunks)) + DONE

    def _keep_events(self, events: bytes, has_ids: bool) -> None:
        """Store events for ``_fold_events``, without the ids of the prompt, which ``_note_prompt`` counts or stores."""
        if has_ids and self._prompt_tokens is None and (found := PROMPT_IDS.search(events)):
            self._note_prompt(found.group(1))
            events = PROMPT_IDS.sub(b'"prompt_token_ids":null', events)
        if self._usual:
            self._fold_events()
        self._kept.append(events)
        if has_ids and self._templates_left:
            self._templates_left -= 1
            last = events.rfind(b"\n\n", 0, -2)
            event = events[last + 2 :] if last >= 0 else events
            self._template = learn_template(event, self.nulls_ids) or self._template
        self._kept_bytes += len(events)
        if self._kept_bytes > _KEPT_BYTES or (not has_ids and len(self._kept) > _KEPT_WITHOUT_IDS):
            self._fold_events()

    def _fold_events(self) -> None:
        """Parse the stored events. Then keep only the ids of the generated tokens and, with ``keeps_prompt``, the text,
        which some engines need to continue a response.
        """
        for event in split_events(b"".join(self._kept)):
            if self._not_resumable:
                break  # the stream cannot be resumed, whatever the other events contain
            chunk = parse_event(event)
            if chunk is not None:
                self._note_chunk(chunk)
            else:
                self._note_other(event)
        self._kept.clear()
        self._kept_bytes = 0
        if self._usual and not self._not_resumable:
            self._fold_usual()
        self._usual.clear()

    def _fold_usual(self) -> None:
        """Store the ids of the events that match the template, and their text if ``keeps_prompt``."""
        texts, ids = zip(*self._usual, strict=True)
        try:
            text = orjson.loads(b'"%s"' % b"".join(texts))
        except orjson.JSONDecodeError:
            self._not_resumable = True
            return
        shown = [*self._held, *orjson.loads(b"[%s]" % b",".join(ids))]
        self._held.clear()
        self._shown += shown
        self._last_count = ids[-1].count(b",") + 1
        self._reasoning += len(shown) if self._template is not None and self._template.is_reasoning else 0
        self._offset += len(text)
        if self._keeps_prompt:
            self._texts.append(text)

    def _note_prompt(self, ids: bytes) -> None:
        self._prompt_tokens = count_integers(ids) - self._resent
        if self._keeps_prompt and not self._resent:
            self._prompt = ids

    def _note_other(self, event: bytes) -> None:
        """Process an event that contains no JSON object."""
        if event.startswith(DONE[:-2]):
            self._is_done = True
        elif not is_comment(event) or not event.endswith(_EVENT_ENDS):
            self._not_resumable = True

    def _note_chunk(self, chunk: dict[str, Any]) -> None:
        """Store the ids and the text that a chunk contains."""
        if not self._begun:
            self._begun = True
            self._head = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
            self._is_chat = any("delta" in choice for choice in find_choices(chunk))
        self._not_resumable |= not isinstance(chunk.get("choices"), list)
        self._has_usage |= not chunk.get("choices") and bool(chunk.get("usage"))
        for choice in find_choices(chunk):
            message = find_message(choice)
            ids, text = find_ids(choice), find_text(message)
            self._is_finished |= bool(choice.get("finish_reason"))
            if not self._resent and isinstance(counts := message.get(CACHE_COUNTS), dict):
                self._cached = counts
            if message.get("tool_calls"):
                self._not_resumable = True
            if not text:
                self._held += ids
            elif not ids and not self._held:
                self._not_resumable = True
            else:
                self._shown += [*self._held, *ids]
                self._last_count = len(ids)
                self._reasoning += 0 if message.get("content") or message.get("text") else len(self._held) + len(ids)
                self._held.clear()
                self._offset += len(text)
                if self._keeps_prompt:
                    self._texts.append(text)

    def _merge_events(self, events: bytes) -> bytes:
        """Parse and process each event, and return the bytes to send to the client, like ``feed``."""
        self._fold_events()
        given: list[bytes] = []
        for event in split_events(events):
            chunk = parse_event(event)
            if chunk is None:
                self._note_other(event)
                given += [*self._withheld, event]
                self._withheld.clear()
                continue
            if is_preemption(chunk):
                self.preempted = True
                self._withheld.clear()
                break
            given += self._emit(chunk, event)
        return b"".join(given)

    def _emit(self, chunk: dict[str, Any], event: bytes) -> list[bytes]:
        if self._expected is not None:
            self._check_prompt(event)
        says_something = not find_choices(chunk) or any(map(has_content, find_choices(chunk)))
        if self._segment and self._begun and not says_something:
            return []  # the event has only a role, which the client already has
        if self._prompt_tokens is None and (found := PROMPT_IDS.search(event)):
            self._note_prompt(found.group(1))
        sent, has_begun = event if self._segment == 0 else self._as_first_segment(chunk), self._begun
        self._note_chunk(chunk)
        if not self._client_wants_ids:
            return [self._hide_ids(sent)]
        if self._held and not any(choice.get("finish_reason") for choice in find_choices(chunk)):
            self._withheld.append(sent)
            self._begun = has_begun
            return []
        given = [*self._withheld, sent]
        self._withheld.clear()
        return given

    def _check_prompt(self, event: bytes) -> None:
        """Compare the prompt that the first chunk of a segment reports with the expected prompt."""
        found = PROMPT_IDS.search(event)
        if found is None or orjson.loads(found.group(1)) != self._expected:
            self._not_resumable = True
            raise UpstreamError("the instance that should continue the stream has tokenized the prompt differently")
        self._expected = None

    def _as_first_segment(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk of a later segment as an event that the first segment's instance could have sent."""
        chunk.update(self._head)
        merge_usage(chunk, self._resent, self._cached, self._reasoning)
        for choice in find_choices(chunk):
            if self._begun:
                for place in (chunk, choice, find_message(choice)):
                    if "prompt_token_ids" in place:
                        place["prompt_token_ids"] = None  # engines report them once; vLLM then writes null
                    place.pop(CACHE_COUNTS, None)
                find_message(choice).pop("role", None)  # clients join the roles of all chunks, as they join the texts
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
                offsets = logprobs["text_offset"]
                logprobs["text_offset"] = [at + self._offset for at in offsets if isinstance(at, int)]
        return encode_event(chunk)
