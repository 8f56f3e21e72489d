"""EventTemplate: the pattern of a stream's usual event, which contains the text and the ids of the next tokens.

Most events of a stream differ only in this text and these ids. After one event was parsed, a pattern recognises the
other events, and finds their text and ids. Parsing each event would take longer than all other work for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from router.serving.resume.events import (
    find_choices,
    find_ids,
    find_message,
    find_text,
    parse_event,
    strip_token_ids,
    undo_token_ids,
)

__all__ = ["EventTemplate", "learn_template"]

_STRING = rb'[^"\\\n]*(?:\\.[^"\\\n]*)*'
_TEXT = re.compile(rb'"(?:content|text|(reasoning_content|reasoning))"\s*:\s*"(?!")(' + _STRING + rb')"')
_IDS = re.compile(rb'(?<=token_ids")(\s*:\s*\[)\d[\d, ]*\]')
# Further strings and numbers of FastDeploy that are different in each event.
_SECOND_TEXT = re.compile(rb'"(completion_tokens|raw_prediction|text_after_process)"\s*:\s*"' + _STRING + rb'"')
_TIME = re.compile(rb'"(arrival_time)"\s*:\s*[-+.\deE]+')


class EventTemplate(NamedTuple):
    """The beginning that is equal in all usual events of a stream, and a pattern for the part that follows it.

    The groups of the pattern are: the text, as JSON; the members that the client should not get, or should get as null;
    and the ids in these members, separated by commas. The client gets ``left`` in place of the second group.
    """

    beginning: bytes
    rest: re.Pattern[bytes]
    is_reasoning: bool
    left: bytes


def learn_template(event: bytes, nulls_ids: bool = False) -> EventTemplate | None:
    """Return the template of an event; None if the event is not a usual event.

    A usual event has the next tokens of one sequence, and its members have a certain order.

    Args:
        event: the event.
        nulls_ids: whether the client gets null in place of ids; see ``undo_token_ids``.
    """
    chunk = parse_event(event)
    choices = find_choices(chunk or {})
    if chunk is None or len(choices) != 1 or chunk.get("usage") or chunk.get("error"):
        return None
    message = find_message(choices[0])
    if not (find_text(message) and find_ids(choices[0])):
        return None
    if choices[0].get("finish_reason") or choices[0].get("logprobs") or message.get("tool_calls"):
        return None
    stripped = strip_token_ids(event)
    start, end = _find_difference(event, stripped)
    texts = list(_TEXT.finditer(event, 0, start))
    hidden, after = event[start:end], event[end:]
    if len(texts) != 1 or len(_IDS.findall(hidden)) != 1 or event.count(b"\n\n") > 1:
        return None
    text = texts[0]
    pattern = b"".join(
        [
            *(b"(", _STRING, b")", re.escape(event[text.end(2) : start])),
            *(b"(", _loosen(hidden), b")", _loosen(after)),
        ]
    )
    left = undo_token_ids(hidden) if nulls_ids else b""
    shape = EventTemplate(event[: text.start(2)], re.compile(b'(?!")' + pattern), text[1] is not None, left)
    found = shape.rest.fullmatch(event, len(shape.beginning))
    wanted = undo_token_ids(event) if nulls_ids else stripped
    is_right = found is not None and event[: found.start(2)] + left + event[found.end(2) :] == wanted
    return shape if is_right else None


def _find_difference(event: bytes, stripped: bytes) -> tuple[int, int]:
    """Return start and end of the bytes of ``event`` that ``stripped`` lacks, if they are one range."""
    pairs = enumerate(zip(event, stripped, strict=False))
    start = next((at for at, (one, other) in pairs if one != other), len(stripped))
    return start, start + len(event) - len(stripped)


def _loosen(part: bytes) -> bytes:
    """Return a pattern for a part of an event, which also matches other token ids, another text and another time."""
    forms: list[tuple[re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]]] = [
        (_IDS, lambda found: re.escape(found[1]) + rb"(\d[\d, ]*)\]"),
        (_SECOND_TEXT, lambda found: rb'"' + found[1] + rb'"\s*:\s*"' + _STRING + b'"'),
        (_TIME, lambda found: rb'"' + found[1] + rb'"\s*:\s*[-+.\deE]+'),
    ]
    places = sorted(
        (found.span(), make_pattern(found)) for form, make_pattern in forms for found in form.finditer(part)
    )
    pattern, at = b"", 0
    for (start, end), loose in places:
        pattern += re.escape(part[at:start]) + loose
        at = end
    return pattern + re.escape(part[at:])
