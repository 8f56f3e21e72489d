"""The merger of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from router.http import UpstreamError
from router.serving.resume.continuation import count_remaining, resume_by_ids
from router.serving.resume.event_template import EventTemplate, learn_template
from router.serving.resume.events import (
    CACHE_TOLD,
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
)
from router.serving.resume.resumability import follows_grammar

if TYPE_CHECKING:
    from router.http import InferenceBody

__all__ = ["StreamMerger"]

# Events are stored as received up to this size; then only their ids are stored.
_KEPT_BYTES = 16 * 1024
# If an engine sends no ids, the first pieces of the stream show it, and later pieces are not stored.
_KEPT_WITHOUT_IDS = 3
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
# Up to this number, text and ids of usual events are stored; then only their ids.
_KEPT_USUAL = 256
# Enough of the last ids to see how their text ends.
_DOUBTFUL_IDS = 64
# How often the stream's usual event is determined again, for example at the end of reasoning.
_TEMPLATES_TRIED = 32


class StreamMerger:
    """One client's event stream, from one or several segments.

    The relay of the stream sets ``return_token_ids`` in the request and passes all events to ``feed``. When
    ``preempted`` becomes true, the segment is over; the instance may also die after any event. Then, if ``complete``,
    ``make_end`` returns the rest of the stream. Otherwise ``resume_members`` (or ``continue_stream``, in the format of
    any engine) has the members to add to the body of the next request, and ``begin_segment`` is called before the
    events of its response are fed. The added ids are removed from the events again, unless the client itself requested
    them.
    """

    __slots__ = (
        *(
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
            keeps_prompt: whether the engine continues from ids of prompt and answer: then the prompt's ids are stored,
                too.
        """
        self.preempted = False
        self._body = body
        self._client_wants_ids = bool(body.members.get("return_token_ids"))
        self._segment = 0
        self._head: dict[str, Any] = {}  # the first chunk's id, time and model, used in all chunks
        self._is_chat = False
        self._begun = False  # whether a chunk has gone to the client, as far as noted
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._shown: list[int] = []  # ids whose text the client has
        self._last_count = 0  # ids of the last event that showed text
        self._held: list[int] = []  # later ids, whose text the engine still holds back
        self._withheld: list[bytes] = []  # events with such ids, held back if the client reads ids itself
        self._not_resumable = False  # whether the client has seen content without ids: text, a tool call
        self._offset = 0  # characters shown
        self._reasoning = 0  # ids that were reasoning
        self._prompt_tokens: int | None = None
        self._resent = 0
        # The parts of the end that the client has: the finish reason, the usage, [DONE].
        self._is_finished = self._has_usage = self._is_done = False
        self._keeps_prompt = keeps_prompt
        self._prompt = b""  # the JSON array of its ids, if stored
        self._texts: list[str] = []  # the text shown, if the prompt's ids are stored
        self._template: EventTemplate | None = None
        self._templates_left = 0 if self._client_wants_ids else _TEMPLATES_TRIED
        self._usual: list[tuple[bytes | Any, ...]] = []  # text and ids of events after the stored ones
        self._cached: Mapping[str, int] = {}  # cached-token counts of the client's prompt, if reported
        self._expected: Sequence[int] | None = None  # the prompt that the segment should report

    @property
    def members(self) -> Mapping[str, Any]:
        """The members of the client's request."""
        return self._body.members

    @property
    def client_reads_ids(self) -> bool:
        """Whether the client itself reads the ids."""
        return self._client_wants_ids

    @property
    def shown_ids(self) -> Sequence[int]:
        """The ids of the tokens that the client has as text."""
        self._fold_events()
        return self._shown

    @property
    def doubtful_ids(self) -> Sequence[int]:
        """The last of ``shown_ids``, if they may end within a character; empty if that is impossible.

        An engine holds back a token that ends within a character. But one event may contain several tokens, and then
        show the text of the first ones only.
        """
        self._fold_events()
        return self._shown[-_DOUBTFUL_IDS:] if self._last_count > 1 else []

    @property
    def prompt_ids(self) -> list[int] | None:
        """The ids of the client's prompt; None if they are not known."""
        return list(orjson.loads(self._prompt)) if self._prompt else None

    @property
    def text(self) -> str:
        """The text that the client has, if the prompt is stored."""
        return "".join(self._texts)

    @property
    def num_reasoning(self) -> int:
        """Number of ``shown_ids`` that were reasoning."""
        self._fold_events()
        return self._reasoning

    @property
    def has_content_without_ids(self) -> bool:
        """Whether the client has seen content that token ids do not represent."""
        self._fold_events()
        return self._not_resumable

    @property
    def has_earlier_segments(self) -> bool:
        """Whether the next segment continues earlier ones, rather than begin again."""
        return bool(self.shown_ids)

    def drop_last(self, count: int) -> None:
        """Remove the last ids from ``shown_ids``: their text was not shown, and they have to be generated again."""
        if count:
            self._reasoning -= count if self._reasoning == len(self._shown) else 0
            del self._shown[-count:]
            self._resent = len(self._shown)
        self._last_count = 0

    def note_cached(self, figures: Mapping[str, int]) -> None:
        """Note how much of the client's prompt was cached where it was first computed."""
        self._cached = figures

    def expect_prompt(self, ids: Sequence[int] | None) -> None:
        """Set the prompt that the next segment has to report; otherwise the segment does not belong to this stream."""
        self._expected = ids

    def feed_usual(self, event: bytes) -> bytes | None:
        """Process an event that contains only the next tokens, as ``feed`` does; return None for any other event."""
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
        return event[:start] + event[end:]

    def feed(self, events: bytes) -> bytes:
        """Process whole server-sent events of the current segment, and return the bytes for the client.

        Raises:
            UpstreamError: the segment has a different prompt from the requested one.
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
        return strip_token_ids(events) if has_ids else events

    def _feed_one(self, event: bytes) -> bytes:
        """Process an event as ``feed`` does, if it need not be parsed."""
        usual = self.feed_usual(event)
        if usual is not None:
            return usual
        has_ids = event.find(IDS_MARK) >= 0
        if not self._not_resumable:
            self._keep_events(event, has_ids)
        return strip_token_ids(event) if has_ids else event

    def must_parse(self, events: bytes) -> bool:
        """Return whether these events may end the segment, or need more than the removal of ids."""
        if self._segment > 0 or self._client_wants_ids:
            return True
        # ``find``, because ``in`` first tries bytes as a number, and the internal exception costs half a microsecond.
        return events.find(b"pd_reschedule") >= 0 or events.find(b'"error"') >= 0

    @property
    def complete(self) -> bool:
        """Whether only the end is missing: the segment's last token was the last requested one."""
        self._fold_events()
        if self._not_resumable or self._body.choices != 1:
            return False
        return self._is_finished or count_remaining(self._body.members, len(self._shown)) == 0

    def resume_members(self) -> dict[str, Any] | None:
        """Return the members to set in the next segment's request: ``{}`` to begin again, None if impossible."""
        self._fold_events()
        if not self._shown and not self._not_resumable:
            return {}
        members = self._body.members
        if self._not_resumable or self._body.choices > 1 or follows_grammar(members):
            return None
        return resume_by_ids(members, self._shown)

    def begin_segment(self) -> None:
        """Begin the next response, to a body with the members of ``resume_members``; its events are fed from now on."""
        self._fold_events()
        self.preempted = False
        self._template, self._templates_left = None, 0  # in later segments, all events are rewritten
        self._segment += 1
        self._held.clear()
        self._withheld.clear()
        self._resent = len(self._shown)

    def make_end(self) -> bytes:
        """Return the missing end of a stream that is ``complete``.

        That is its finish reason, the usage if requested, and [DONE].
        """
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
        """Store events for ``_fold_events``, without the ids of the prompt: of these only the number matters."""
        if has_ids and self._prompt_tokens is None and (found := PROMPT_IDS.search(events)):
            self._note_prompt(found.group(1))
            events = PROMPT_IDS.sub(b'"prompt_token_ids":null', events)
        if self._usual:
            self._fold_events()
        self._kept.append(events)
        if has_ids and self._templates_left:
            self._templates_left -= 1
            last = events.rfind(b"\n\n", 0, -2)
            self._template = learn_template(events[last + 2 :] if last >= 0 else events) or self._template
        self._kept_bytes += len(events)
        if self._kept_bytes > _KEPT_BYTES or (not has_ids and len(self._kept) > _KEPT_WITHOUT_IDS):
            self._fold_events()

    def _fold_events(self) -> None:
        """Parse the stored events; store only the ids from now on."""
        for event in split_events(b"".join(self._kept)):
            if self._not_resumable:
                break  # it cannot be resumed, for any content of the rest
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
        """Note the ids and the text of the usual events."""
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
        """Note an event without an object."""
        if event.startswith(DONE[:-2]):
            self._is_done = True
        elif not is_comment(event) or not event.endswith(_EVENT_ENDS):
            self._not_resumable = True

    def _note_chunk(self, chunk: dict[str, Any]) -> None:
        """Note the ids and the text that a chunk shows to the client."""
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
            if not self._resent and isinstance(told := message.get(CACHE_TOLD), dict):
                self._cached = told
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
        """Process events as ``feed`` does, if each has to be parsed."""
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
            return []  # a role, which the client already has
        if self._prompt_tokens is None and (found := PROMPT_IDS.search(event)):
            self._note_prompt(found.group(1))
        sent = event if self._segment == 0 else self._as_first_segment(chunk)
        self._note_chunk(chunk)
        if not self._client_wants_ids:
            return [strip_token_ids(sent)]
        if self._held and not any(choice.get("finish_reason") for choice in find_choices(chunk)):
            self._withheld.append(sent)
            return []
        given = [*self._withheld, sent]
        self._withheld.clear()
        return given

    def _check_prompt(self, event: bytes) -> None:
        """Check the prompt that the segment's first chunk reports."""
        found = PROMPT_IDS.search(event)
        if found is None or orjson.loads(found.group(1)) != self._expected:
            self._not_resumable = True
            raise UpstreamError("the instance that was to go on with the stream made another prompt of it")
        self._expected = None

    def _as_first_segment(self, chunk: dict[str, Any]) -> bytes:
        """Rewrite a later segment's chunk as the first one's instance would have written it."""
        chunk.update(self._head)
        merge_usage(chunk, self._resent, self._cached, self._reasoning)
        for choice in find_choices(chunk):
            if self._begun:
                for place in (chunk, choice, find_message(choice)):
                    place.pop("prompt_token_ids", None)
                    place.pop(CACHE_TOLD, None)
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
                offsets = logprobs["text_offset"]
                logprobs["text_offset"] = [at + self._offset for at in offsets if isinstance(at, int)]
        return encode_event(chunk)
