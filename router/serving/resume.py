"""Resumption: the segments of a preempted request's generation, merged into the one response that the client gets.

FastDeploy's decode instance may preempt a request (``pd_reschedule``). The router then asks again with the body of
the client plus ``completion_token_ids``, the ids generated so far. The engine appends them to the prompt, generates
on, and answers with the text of the new tokens only; its usage counts the resent ids as prompt, and its
``max_tokens`` starts anew. A segment is the part that one instance generated before it preempted the request or ended
it. The mergers here turn segments into one response: pure functions of bytes, without I/O.

Where a seam cannot be exact, nothing is guessed. A whole response starts again from the beginning, as the client has
seen nothing of it; a stream that has shown text and cannot go on exactly is given up (``resumption`` is None).

A router without a tokenizer does not see everything, so a stream may differ from an undisturbed run in three things: a
stop string whose first part was shown before the seam is not recognised by the engine after it; presence and frequency
penalties, and a seed, start anew at the seam; and a character that begins in an event which shows other text as well
(engines hold a whole token back, but one event may bring several) is lost if the seam comes before its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.http import InferenceBody, hide_escapes, show_escapes, whole_number

__all__ = ["ResponseMerger", "StreamMerger", "strip_token_ids"]

_PREEMPTED = "pd_reschedule"
_PREEMPTION_MESSAGE = re.compile(r"pd.error|pd_reschedule|preempt", re.IGNORECASE)

# The members that return_token_ids adds: FastDeploy's in the delta or the choice, vLLM's (token_ids) in the choice and
# at the top. Usage has members named prompt_tokens and completion_tokens too, but those are numbers. In valid JSON
# a quote after "{", "," or space that is followed by a letter opens a string, so no text can look like a member.
# Escapes must be hidden.
_MEMBER = (
    rb'"(?:(?:prompt_|completion_)?token_ids"\s*:\s*(?:\[[-\d,\s]*\]|null)'
    rb'|(?:prompt_tokens|completion_tokens|text_after_process|raw_prediction)"\s*:\s*'
    rb'(?:"[^"]*"|null))'
)
# Two patterns, because each alone begins with a constant, for which the search is ten times as fast.
_LATER_MEMBER = re.compile(rb",\s*" + _MEMBER)
_FIRST_MEMBER = re.compile(rb"\{\s*" + _MEMBER + rb"(?:\s*,\s*)?")
_PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*(\[[-\d,\s]*\])')
# Every event that has one of the members has one whose name ends so.
_IDS_MARK = b'token_ids"'

_DATA = re.compile(rb"^data: ?(.*?)\s*$", re.MULTILINE)
_DONE = b"data: [DONE]\n\n"
# Events are kept as they came, in case they are needed, up to this size; then only their ids are.
_KEPT_BYTES = 16 * 1024
# Where an engine gives no ids, a few pieces of the stream show it, and nothing need be kept of the others.
_KEPT_WITHOUT_IDS = 3

# Members of a request by which the engine follows a grammar; it would begin again at the seam.
_GRAMMARS = (
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("structural_tag", "structured_outputs"),
)
# A character is four bytes at most, and a token one at least: so many tokens may hold an unfinished one.
_MAX_UNFINISHED_TOKENS = 3
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Markup that an engine takes out of its responses, but a detokenizer asked for the bare ids may leave in.
_MARKUP = re.compile(r"</?think>|<[|\uff5c]|</?s>")


def strip_token_ids(events: bytes) -> bytes:
    """The events without the members that ``return_token_ids`` adds; every other byte as it was."""
    return show_escapes(_FIRST_MEMBER.sub(b"{", _LATER_MEMBER.sub(b"", hide_escapes(events))))


class StreamMerger:
    """One client's event stream, from as many segments as it takes.

    The relay of the stream asks the engine for ``return_token_ids`` and gives all events to ``feed``. Once
    ``preempted``, the segment is over: if ``complete``, ``make_end`` is the rest of the stream; otherwise
    ``resumption`` has the members to add to the body of the next request, and ``begin_segment`` is called before the
    events of its response are fed.
    The added ids are taken out of the events again, unless the client itself asked for them.
    """

    __slots__ = (
        *(
            "preempted",
            "_client_wants_ids",
            "_begun",
            "_blind",
            "_body",
            "_head",
            "_held",
            "_kept",
            "_kept_bytes",
            "_segment",
        ),
        *("_is_chat", "_offset", "_prompt_tokens", "_reasoning", "_resent", "_shown", "_withheld"),
    )

    def __init__(self, body: InferenceBody) -> None:
        self.preempted = False
        self._body = body
        self._client_wants_ids = bool(body.members.get("return_token_ids"))
        self._segment = 0
        self._head: dict[str, Any] = {}  # the first chunk's id, time and model, which stand for all
        self._is_chat = False
        self._begun = False  # whether a chunk has gone to the client, as far as noted
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._shown: list[int] = []  # ids whose text the client has
        self._held: list[int] = []  # ids after them, whose text the engine still holds back
        self._withheld: list[bytes] = []  # events with such ids, kept back where the client reads ids itself
        self._blind = False  # whether the client has seen more than ids stand for: text without them, a tool call
        self._offset = 0  # characters shown
        self._reasoning = 0  # ids that were reasoning
        self._prompt_tokens: int | None = None
        self._resent = 0

    def feed(self, events: bytes) -> bytes:
        """Take whole server-sent events of the current segment; give the bytes that go to the client."""
        if self.preempted:
            return b""
        if self.must_parse(events):
            return self._merge_events(events)
        has_ids = _IDS_MARK in events
        if not self._blind:
            self._keep_events(events, has_ids)
        return strip_token_ids(events) if has_ids else events

    def must_parse(self, events: bytes) -> bool:
        """Whether these events may end the segment, or need more than ids taken out of them."""
        return self._segment > 0 or self._client_wants_ids or b"pd_reschedule" in events or b'"error"' in events

    @property
    def complete(self) -> bool:
        """Whether the preempted segment had already generated as many tokens as were asked for."""
        is_exact = not self._blind and self._body.choices == 1
        return is_exact and _count_remaining(self._body.members, len(self._shown)) == 0

    def resumption(self) -> dict[str, Any] | None:
        """The members to set in the next segment's request: ``{}`` to begin again, None if the stream cannot go on."""
        self._fold_events()
        if not self._shown and not self._blind:
            return {}
        members = self._body.members
        if self._blind or self._body.choices > 1 or _follows_grammar(members):
            return None
        return _make_resumption(members, self._shown)

    def begin_segment(self) -> None:
        """From now on the events of another response are fed: to a body with the members of ``resumption``."""
        self._fold_events()
        self.preempted = False
        self._segment += 1
        self._held.clear()
        self._withheld.clear()
        self._resent = len(self._shown)

    def make_end(self) -> bytes:
        """The end of a stream that is ``complete``: its finish reason, the usage if it was asked for, and [DONE]."""
        choice: dict[str, Any] = {"index": 0, "delta": {}} if self._is_chat else {"index": 0, "text": ""}
        chunks: list[dict[str, Any]] = [{**self._head, "choices": [{**choice, "finish_reason": "length"}]}]
        options = self._body.members.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") and self._prompt_tokens is not None:
            prompt, completion = self._prompt_tokens, len(self._shown)
            usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            chunks.append({**self._head, "choices": [], "usage": usage})
        return b"".join(map(_encode_event, chunks)) + _DONE

    def _keep_events(self, events: bytes, has_ids: bool) -> None:
        """Keep events for ``_fold_events``, less the ids of the prompt: of these only the number matters."""
        if has_ids and self._prompt_tokens is None and (found := _PROMPT_IDS.search(events)):
            self._prompt_tokens = _count_integers(found.group(1))
            events = _PROMPT_IDS.sub(b'"prompt_token_ids":null', events)
        self._kept.append(events)
        self._kept_bytes += len(events)
        if self._kept_bytes > _KEPT_BYTES or (not has_ids and len(self._kept) > _KEPT_WITHOUT_IDS):
            self._fold_events()

    def _fold_events(self) -> None:
        """Read the events kept; go on with their ids only."""
        for event in _split_events(b"".join(self._kept)):
            if self._blind:
                break  # it cannot be resumed, whatever the rest says
            chunk = _parse_event(event)
            if chunk is not None:
                self._note_chunk(chunk)
        self._kept.clear()
        self._kept_bytes = 0

    def _note_chunk(self, chunk: dict[str, Any]) -> None:
        """Note the ids and the text that a chunk shows to the client."""
        if not self._begun:
            self._begun = True
            self._head = {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}
            self._is_chat = any("delta" in choice for choice in _find_choices(chunk))
        for choice in _find_choices(chunk):
            message = _find_message(choice)
            ids, text = _find_ids(choice), _find_text(message)
            if message.get("tool_calls"):
                self._blind = True
            if not text:
                self._held += ids
            elif not ids and not self._held:
                self._blind = True
            else:
                self._shown += [*self._held, *ids]
                self._reasoning += 0 if message.get("content") or message.get("text") else len(self._held) + len(ids)
                self._held.clear()
                self._offset += len(text)

    def _merge_events(self, events: bytes) -> bytes:
        """``feed`` where each event must be looked into."""
        self._fold_events()
        given: list[bytes] = []
        for event in _split_events(events):
            chunk = _parse_event(event)
            if chunk is None:
                given += [*self._withheld, event]
                self._withheld.clear()
                continue
            if _is_preemption(chunk):
                self.preempted = True
                self._withheld.clear()
                break
            given += self._emit(chunk, event)
        return b"".join(given)

    def _emit(self, chunk: dict[str, Any], event: bytes) -> list[bytes]:
        says_something = not _find_choices(chunk) or any(map(_has_content, _find_choices(chunk)))
        if self._segment and self._begun and not says_something:
            return []  # a role, which the client has been told
        if self._prompt_tokens is None and (found := _PROMPT_IDS.search(event)):
            self._prompt_tokens = _count_integers(found.group(1)) - self._resent
        sent = event if self._segment == 0 else self._as_first_segment(chunk)
        self._note_chunk(chunk)
        if not self._client_wants_ids:
            return [strip_token_ids(sent)]
        if self._held and not any(choice.get("finish_reason") for choice in _find_choices(chunk)):
            self._withheld.append(sent)
            return []
        given = [*self._withheld, sent]
        self._withheld.clear()
        return given

    def _as_first_segment(self, chunk: dict[str, Any]) -> bytes:
        """A later segment's chunk as the first one's instance would have written it."""
        chunk.update(self._head)
        _merge_usage(chunk, self._resent, self._reasoning)
        for choice in _find_choices(chunk):
            if self._begun:
                for place in (chunk, choice, _find_message(choice)):
                    place.pop("prompt_token_ids", None)
            logprobs = choice.get("logprobs")
            if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
                offsets = logprobs["text_offset"]
                logprobs["text_offset"] = [at + self._offset for at in offsets if isinstance(at, int)]
        return _encode_event(chunk)


class ResponseMerger:
    """One client's whole (not streamed) response, from as many segments as it takes.

    ``feed`` takes a segment's response, and gives the client's, or None where the segment was preempted. Then, as long
    as ``ids_to_detokenize`` holds ids, an instance is asked for their text, which goes to ``take_text``. After
    that, if ``complete``, ``make_end`` is the response; otherwise ``resumption`` is added to the next request's body.
    """

    __slots__ = ("_body", "_first", "_ids", "_last", "_resent", "_restarts", "_text", "ids_to_detokenize")

    def __init__(self, body: InferenceBody) -> None:
        self.ids_to_detokenize: list[int] | None = None
        """Ids whose text must be known; asked for by ``POST /detokenize {"tokens": [...]}``, vLLM's form."""
        self._body = body
        self._restarts = False  # whether merging would be wrong, so that each segment begins again
        self._ids: list[int] = []
        self._text = ""
        self._first: dict[str, Any] | None = None
        self._resent = 0  # ids that the last preempted segment was given
        self._last: dict[str, Any] = {}

    def feed(self, status: int, body: bytes) -> bytes | None:
        """Take one segment's response: the whole response for the client, or None if it was preempted."""
        if b"pd_reschedule" in body or b"PD Error" in body:
            response = _parse_object(body)
            if response is not None and _is_preemption(response):
                self._take_segment(response)
                return None
        if not self._ids or not 200 <= status < 300:
            return body
        return self._merge(body)

    def take_text(self, text: str | None) -> None:
        """The text of the ids in ``ids_to_detokenize``; None if no instance could tell."""
        ids = self.ids_to_detokenize or []
        self.ids_to_detokenize = None
        if text is None or _MARKUP.search(text):
            self._begin_again()
        elif text.endswith(_UNFINISHED):
            self._drop_last(ids)
        else:
            self._ids, self._text = ids, text
            self._rule_out_stops()

    @property
    def complete(self) -> bool:
        """Whether the preempted segment had already generated as many tokens as were asked for."""
        return bool(self._ids) and _count_remaining(self._body.members, len(self._ids)) == 0

    def resumption(self) -> dict[str, Any]:
        """The members to set in the body of the next segment's request; ``{}`` to begin again."""
        return _make_resumption(self._body.members, self._ids) if self._ids else {}

    def make_end(self) -> bytes:
        """The response that is ``complete``."""
        response = self._last
        choice = _find_choices(response)[0]
        choice["finish_reason"] = "length"
        message = _find_message(choice)
        message["text" if message is choice else "content"] = self._text
        for place in (choice, message):
            for name in ("completion_token_ids", "token_ids"):
                if place.get(name) is not None:
                    place[name] = self._ids if self._body.members.get("return_token_ids") else None
        _merge_usage(response, self._resent)
        return self._as_first_segment(response)

    def _take_segment(self, response: dict[str, Any]) -> None:
        """Take in the tokens that a preempted segment has generated."""
        choices = _find_choices(response)
        if not choices:
            return  # an error: nothing of this segment is known
        self._first = self._first or response
        self._last = response
        message = _find_message(choices[0])
        if self._must_restart() or message.get("tool_calls") or message.get("reasoning_content"):
            self._restarts = True
            self._begin_again()
            return
        ids = _find_ids(choices[0])
        if not ids:
            return
        self._resent = len(self._ids)
        self._ids += ids
        text = _find_text(message)
        if not text:
            self.ids_to_detokenize = list(self._ids)
        elif text.endswith(_UNFINISHED):
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
            or _follows_grammar(members)
        )

    def _begin_again(self) -> None:
        self._ids, self._text = [], ""

    def _drop_last(self, ids: list[int]) -> None:
        """The ids end within a character: ask for the text of one less, if they may still be sound."""
        if len(self._ids) - len(ids) < _MAX_UNFINISHED_TOKENS and len(ids) > 1:
            self.ids_to_detokenize = ids[:-1]
        else:
            self._begin_again()

    def _rule_out_stops(self) -> None:
        """Begin again if a stop string may have begun before the seam: the next segment would not see it end."""
        stop = self._body.members.get("stop")
        strings = stop if isinstance(stop, list) else [stop]
        if any(self._text.endswith(s[:length]) for s in strings if isinstance(s, str) for length in range(1, len(s))):
            self._begin_again()

    def _merge(self, body: bytes) -> bytes | None:
        response = _parse_object(body)
        choices = _find_choices(response or {})
        if response is None or not choices:
            return body
        choice = choices[0]
        message = _find_message(choice)
        if message.get("tool_calls") or message.get("reasoning_content"):
            self._restarts = True
            self._begin_again()
            return None
        key = "text" if message is choice else "content"
        message[key] = self._text + _find_text(message)
        for place in (response, choice) if message is choice else (response, choice, message):
            for name in ("completion_token_ids", "token_ids"):
                if isinstance(place.get(name), list):
                    place[name] = [*self._ids, *place[name]]
            if isinstance(place.get("prompt_token_ids"), list):
                del place["prompt_token_ids"][-len(self._ids) :]
            for name in ("completion_tokens", "raw_prediction"):
                if isinstance(place.get(name), str):
                    place[name] = self._text + place[name]
        _merge_usage(response, len(self._ids))
        return self._as_first_segment(response)

    def _as_first_segment(self, response: dict[str, Any]) -> bytes:
        first = self._first or {}
        response.update({name: first[name] for name in ("id", "created", "model") if name in first})
        return orjson.dumps(response)


def _make_resumption(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    sent = members.get("completion_token_ids")
    added: dict[str, Any] = {"completion_token_ids": [*(sent if isinstance(sent, list) else ()), *ids]}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        limit = whole_number(members.get(name))
        if limit is not None:
            added[name] = max(least, limit - len(ids))
    if members.get("echo"):
        added["echo"] = False  # the first segment has done it
    return added


def _count_remaining(members: Mapping[str, Any], generated: int) -> int | None:
    """How many tokens are still wanted; None if no number was given."""
    limit = whole_number(members.get("max_completion_tokens")) or whole_number(members.get("max_tokens"))
    return None if limit is None else max(0, limit - generated)


def _follows_grammar(members: Mapping[str, Any]) -> bool:
    return any(members.get(name) not in (None, {"type": "text"}) for name in _GRAMMARS)


def _merge_usage(response: dict[str, Any], resent: int, reasoning: int = 0) -> None:
    """Count resent ids in the usage, if there is one, as completion, and not as prompt."""
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return
    prompt, completion = prompt - resent, completion + resent
    usage.update(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    prompt_details, details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    if isinstance(prompt_details, dict) and isinstance(prompt_details.get("cached_tokens"), int):
        prompt_details["cached_tokens"] = min(prompt_details["cached_tokens"], prompt)
    if isinstance(details, dict) and isinstance(details.get("reasoning_tokens"), int):
        details["reasoning_tokens"] += reasoning


def _is_preemption(response: dict[str, Any]) -> bool:
    """Whether a response, or an event of one, says that the request was preempted."""
    error = response.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        return _PREEMPTION_MESSAGE.search(str(message)) is not None
    return any(choice.get("finish_reason") == _PREEMPTED for choice in _find_choices(response))


def _find_choices(response: dict[str, Any]) -> list[dict[str, Any]]:
    found = response.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def _find_message(choice: dict[str, Any]) -> dict[str, Any]:
    """Where a choice keeps its text: a chat's delta or message, or itself."""
    for name in ("delta", "message"):
        message = choice.get(name)
        if isinstance(message, dict):
            return message
    return choice


def _find_text(message: dict[str, Any]) -> str:
    texts = (message.get(name) for name in ("content", "reasoning_content", "reasoning", "text"))
    return next((text for text in texts if text and isinstance(text, str)), "")


def _find_ids(choice: dict[str, Any]) -> list[int]:
    """The ids of a choice's tokens; FastDeploy's negative ones are signals to its own processes, not tokens."""
    ids = (
        _find_message(choice).get("completion_token_ids")
        or choice.get("completion_token_ids")
        or choice.get("token_ids")
    )
    return [token for token in ids if isinstance(token, int) and token >= 0] if isinstance(ids, list) else []


def _has_content(choice: dict[str, Any]) -> bool:
    message = _find_message(choice)
    return bool(_find_text(message) or _find_ids(choice) or message.get("tool_calls") or choice.get("finish_reason"))


def _count_integers(array: bytes) -> int:
    """The number of integers in a JSON array of them."""
    return array.count(b",") + 1 if len(array.strip(b"[] \t\r\n")) else 0


def _split_events(events: bytes) -> list[bytes]:
    """The single events; their ends, of which an engine writes one kind, stay with them."""
    end = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    *whole, rest = events.split(end)
    return [event + end for event in whole] + ([rest] if rest else [])


def _parse_event(event: bytes) -> dict[str, Any] | None:
    """The object that an event carries; None if it carries none, as [DONE] and comments do."""
    if event.startswith(b"data: {"):
        return _parse_object(event[6:])  # orjson takes the line's end for white space
    return _parse_object(b"\n".join(_DATA.findall(event)))


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _encode_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
