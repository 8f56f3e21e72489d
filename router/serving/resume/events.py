"""Server-sent events and their chunks: parses and writes them, and removes ids that the client did not request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from kvcommon.json_objects import load_object
from router.http import UpstreamError, hide_escapes, show_escapes, whole_number

__all__ = [
    "CACHE_COUNTS",
    "DONE",
    "IDS_MARK",
    "PROMPT_IDS",
    "EngineFailed",
    "count_integers",
    "encode_event",
    "find_choices",
    "find_engine_failure",
    "find_ids",
    "find_message",
    "find_text",
    "has_content",
    "is_comment",
    "is_preemption",
    "merge_usage",
    "parse_event",
    "split_events",
    "strip_token_ids",
    "strip_usage",
    "undo_token_ids",
]

DONE = b"data: [DONE]\n\n"

CACHE_COUNTS = "prompt_cache"
"""Name of the member in which our engine reports the number of cached prompt tokens before the usage."""

_PREEMPTED = "pd_reschedule"
_PREEMPTION_MESSAGE = re.compile(r"pd.error|pd_reschedule|preempt", re.IGNORECASE)
_DATA = re.compile(rb"^data: ?(.*?)\s*$", re.MULTILINE)

# The members that return_token_ids adds. FastDeploy adds them to the delta or the choice, vLLM adds token_ids to the
# choice and to the chunk, our engine adds CACHE_COUNTS. (In the usage, prompt_tokens and completion_tokens are numbers,
# which this pattern does not match.) A text of a user cannot match by mistake: in valid JSON, a quote that follows
# "{", "," or a space and precedes a letter begins a string. Escaped quotes must be hidden before the search.
_CACHED_NAME = re.compile(r"\w*cached?_(?:write_)?tokens")
_MEMBER = (
    rb'"(?:(?:prompt_|completion_)?token_ids"\s*:\s*(?:\[[-\d,\s]*\]|null)'
    rb'|(?:prompt_tokens|completion_tokens|text_after_process|raw_prediction)"\s*:\s*'
    rb'(?:"[^"]*"|null)'
    rb'|prompt_cache"\s*:\s*\{[^{}]*\})'
)
# Two patterns, because a pattern that begins with a constant is found ten times as fast.
_LATER_MEMBER = re.compile(rb",\s*" + _MEMBER)
_FIRST_MEMBER = re.compile(rb"\{\s*" + _MEMBER + rb"(?:\s*,\s*)?")
# The ids that vLLM writes. Without return_token_ids it writes null in their place, and leaves out the events of a chat
# that have only ids, because its parser of reasoning or tool calls waits for more text.
_IDS = re.compile(rb'("(?:prompt_)?token_ids"\s*:\s*)\[[-\d,\s]*\]')
_EMPTY_DELTA = b'"delta":{}'
_IDS_ALONE = re.compile(rb'data: [^\n]*"delta":\{\},"logprobs":null,"finish_reason":null,[^\n]*\n\n')
PROMPT_IDS = re.compile(rb'"prompt_token_ids"\s*:\s*(\[[-\d,\s]*\])')
# Each event with one of these members contains this text.
IDS_MARK = b'token_ids"'
_USAGE_MARK = b'"usage"'
_NULL_USAGE = re.compile(rb',\s*"usage"\s*:\s*null')
_QUOTED_CHARACTERS = 500


class EngineFailed(UpstreamError):
    """The engine failed and reported this in an event of a stream. The stream ends early, with its connection open."""


def find_engine_failure(events: bytes) -> tuple[int, str] | None:
    """Return the position of the first event that reports an engine failure, and its message; None if there is none.

    An engine failure is an error with code 500 or more and without choices, as vLLM sends it when its engine has died.
    Errors of the request (4xx) and preemptions are not engine failures.
    """
    place = 0
    for event in split_events(events):
        chunk = parse_event(event) if event.find(b'"error"') >= 0 else None
        error = chunk.get("error") if chunk is not None and not chunk.get("choices") else None
        if isinstance(error, dict) and (whole_number(error.get("code")) or 0) >= 500 and not is_preemption(chunk or {}):
            message = str(error.get("message", ""))[:_QUOTED_CHARACTERS]
            return place, "".join(each if each.isprintable() else " " for each in message)  # the log quotes it
        place += len(event)
    return None


def strip_token_ids(events: bytes) -> bytes:
    """Return the events without the members that ``return_token_ids`` adds. All other bytes are unchanged."""
    return show_escapes(_FIRST_MEMBER.sub(b"{", _LATER_MEMBER.sub(b"", hide_escapes(events))))


def undo_token_ids(events: bytes) -> bytes:
    """Return vLLM's events as it writes them without ``return_token_ids``: null in place of ids, and no event with ids
    alone.
    """
    left = _IDS.sub(rb"\1null", hide_escapes(events))
    return show_escapes(_IDS_ALONE.sub(b"", left) if left.find(_EMPTY_DELTA) >= 0 else left)


def strip_usage(events: bytes, *, has_nulls: bool) -> bytes:
    """Return the events without the parts that ``stream_options.include_usage`` adds. All other bytes are unchanged.

    Args:
        events: complete events.
        has_nulls: whether the option also adds a null usage to the other events.
    """
    if events.find(_USAGE_MARK) < 0:
        return events
    kept = [event for event in split_events(events) if event.find(_USAGE_MARK) < 0 or not _is_usage(event)]
    left = b"".join(kept)
    return _NULL_USAGE.sub(b"", left) if has_nulls else left


def _is_usage(event: bytes) -> bool:
    chunk = parse_event(event)
    return chunk is not None and chunk.get("choices") == [] and isinstance(chunk.get("usage"), dict)


def merge_usage(response: dict[str, Any], resent: int, cached: Mapping[str, int], reasoning: int = 0) -> None:
    """Correct the usage of a later segment: count the tokens that were sent again as completion, not as prompt.

    Args:
        response: the response, or a chunk of it, which may have no usage.
        resent: number of tokens that were sent again.
        cached: cached-token counts of the client's prompt, by name. They replace those in the usage.
        reasoning: number of reasoning tokens among those that were sent again.
    """
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if not (isinstance(prompt, int) and isinstance(completion, int)):
        return
    prompt, completion = prompt - resent, completion + resent
    usage.update(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    prompt_details, details = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    if isinstance(prompt_details, dict) and resent:
        for name in [name for name in prompt_details if _CACHED_NAME.fullmatch(name)]:
            del prompt_details[name]
        prompt_details.update(cached)
    if isinstance(details, dict) and isinstance(details.get("reasoning_tokens"), int):
        details["reasoning_tokens"] += reasoning


def is_preemption(response: dict[str, Any]) -> bool:
    """Return whether a response, or a chunk of it, reports that the request was preempted."""
    error = response.get("error")
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        return _PREEMPTION_MESSAGE.search(str(message)) is not None
    return any(choice.get("finish_reason") == _PREEMPTED for choice in find_choices(response))


def find_choices(response: dict[str, Any]) -> list[dict[str, Any]]:
    found = response.get("choices")
    return [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []


def find_message(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the object that contains the text of a choice: its ``delta`` or ``message`` in chat, else the choice."""
    for name in ("delta", "message"):
        message = choice.get(name)
        if isinstance(message, dict):
            return message
    return choice


def find_text(message: dict[str, Any]) -> str:
    texts = (message.get(name) for name in ("content", "reasoning_content", "reasoning", "text"))
    return next((text for text in texts if text and isinstance(text, str)), "")


def find_ids(choice: dict[str, Any]) -> list[int]:
    """Return the token ids in a choice. FastDeploy's negative ids are signals, not tokens, and are left out."""
    ids = (
        find_message(choice).get("completion_token_ids")
        or choice.get("completion_token_ids")
        or choice.get("token_ids")
    )
    return [token for token in ids if isinstance(token, int) and token >= 0] if isinstance(ids, list) else []


def has_content(choice: dict[str, Any]) -> bool:
    message = find_message(choice)
    return bool(find_text(message) or find_ids(choice) or message.get("tool_calls") or choice.get("finish_reason"))


def count_integers(array: bytes) -> int:
    """Return the number of integers in a JSON array of integers."""
    return array.count(b",") + 1 if len(array.strip(b"[] \t\r\n")) else 0


def split_events(events: bytes) -> list[bytes]:
    """Split bytes into events. Each event includes the blank line at its end.

    An engine ends all its lines in the same way: with LF, or with CRLF.
    """
    end = b"\r\n\r\n" if b"\r\n\r\n" in events else b"\n\n"
    *whole, rest = events.split(end)
    return [event + end for event in whole] + ([rest] if rest else [])


def parse_event(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object in an event; None if there is none, as in ``[DONE]`` and comments."""
    if event.startswith(b"data: {"):
        return load_object(event[6:])  # the end of the line is white space for orjson
    return load_object(b"\n".join(_DATA.findall(event)))


def is_comment(event: bytes) -> bool:
    """Return whether an event is only a comment, without data for the client."""
    return not _DATA.search(event)


def encode_event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
