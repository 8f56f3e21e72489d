"""Bodies of requests and responses: parse a request, add members to it, and read the token usage in a response.

The router parses the body of a request once, and inserts its own members into the original bytes. If it serialised the
parsed body again, the client's text would change: 1.0 becomes 1, big integers lose digits, escapes change.

In the body of a response, the router reads or replaces only the engine's token usage, and does not parse the rest. The
usage has OpenAI's names for chat, completions and responses, and Anthropic's names for messages. Anthropic's
``input_tokens`` does not count tokens that were read from a cache or written to it.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import orjson

from router.http.large_body import UNCHECKED_BYTES, BadBody, LargeBody, hide_escapes, weigh_values

__all__ = [
    *("CONTROL_BYTES", "InferenceBody", "TokenCount", "Usage", "encode_member", "estimate_tokens", "find_model"),
    *("parse_inference", "parse_object", "read_cached_figures", "read_usage", "rename_model"),
    *("set_figures", "splice", "splice_parts", "whole_number"),
]

CONTROL_BYTES = 1024 * 1024
"""Limit of a control-plane body: larger than any registration, command, or list of ids to abort."""
# Limits for bodies that Python's own JSON parser reads, which is slower than orjson.
_LENIENT_BYTES, _LENIENT_WEIGHT = 16 * 1024 * 1024, 250_000

# A complete string, an array without nested values, or a bracket, brace or comma. Escapes must be hidden.
_TOKEN = re.compile(rb'"[^"]*"|\[[^"{}\[\]]*\]|[{}\[\],]')
# A body up to this size is split by ``_TOKEN``. A longer one is split with numpy, which has a constant overhead.
_TOKENS_BYTES = 8 * 1024
_DEPTH_CHANGE = np.zeros(256, np.int8)
_DEPTH_CHANGE[list(b"{[")], _DEPTH_CHANGE[list(b"}]")] = 1, -1
# Limit of the members of a body. A member that is repeated counts each time.
MAX_MEMBERS = 1000
# This table translates each byte except line ends to a space, so that later lines keep their line numbers.
_BLANK = bytes(each if each in b"\r\n" else 0x20 for each in range(256))
_SPACES = b" " * 65536
_COMMA, _QUOTE, _OPENING, _CLOSING = b',"{}'
# How ``find_model`` finds a model's name: its member in a JSON body, the end of the header line of its part in a form,
# and the number of bytes that are searched at both ends of a large body. Each byte is scanned at most a few times.
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')
_MODEL_FIELDS = (b' name="model"', b';name="model"', b" name=model", b";name=model")
_MODEL_BYTES = 16_384
# Maximum length of the boundary between the parts of a form, with its two dashes (RFC 2046, 5.1.1).
_LONGEST_BOUNDARY = 72
_NO_BLANKS: Sequence[tuple[int, int]] = ()
# English text has about four bytes per token. An inexact value is enough, because policies only compare estimates.
_BYTES_PER_TOKEN = 4
# Marks in front of media in a JSON body: in the URL "data:image/png;base64,...", and as members of OpenAI's
# input_audio, of Anthropic's source, and of vLLM's embeddings. Media shorter than _SMALL_MEDIA_BYTES count as text.
_MEDIA_MARKS = (b";base64,", b'"data"', b'embeds"')
_SMALL_MEDIA_BYTES, _SAMPLE_BYTES = 1024, 512
_MAX_MARKS = 1000
_STRING_BEGIN = re.compile(rb'\s*:\s*"')
_MEDIA_MEMBER = re.compile(rb'(?:"data"|embeds")\s*:\s*"\Z')
_NAME_BYTES = 64
# Number of positions at which ``_sample_media`` checks a large body.
_SAMPLES = 256
_BASE64 = re.compile(rb"[A-Za-z0-9+/_\\-]*")
# The _SAMPLE_BYTES of base64 that media begin with contain such a run at a multiple of the distance between two runs.
_RUN_BYTES = 64
_BASE64_RUN = re.compile(rb"[A-Za-z0-9+/_\\-]{%d}" % _RUN_BYTES)
# Limit of ``InferenceBody.choices``, more than any engine generates for one request: a client's number must not
# determine the size of a list in the router.
_MOST_CHOICES = 1024


_USAGE_MARK = b'"usage"'
_USAGE_BEGIN = re.compile(rb'"usage"\s*:\s*(?=\{)')
# Limit of the bytes of a usage object; no engine sends a longer one.
_USAGE_BYTES = 2048
# Limit of a token count. No request has so many tokens, so an instance with such a usage is damaged or hostile.
_MOST_TOKENS = 100_000_000
_COUNT = re.compile(rb'"(prompt|completion|input|output|cache_(?:read|creation)_input)_tokens"\s*:\s*(\d{1,15})\b')
# Names that engines and APIs have for the number of cached prompt tokens.
_CACHED_NAME = (
    rb"(?:own_|pool_)?cached_tokens|created_cache_tokens|cache_write_tokens|cache_(?:read|creation)_input_tokens"
)
_CACHED_FIGURE = re.compile(rb'"(' + _CACHED_NAME + rb')"\s*:\s*(\d{1,15})\b')
_INPUT_FIGURE = re.compile(rb'"(input_tokens)"\s*:\s*(\d{1,15})\b')
# The ids of generated tokens, and the generated text, in an event of any API.
_GENERATED_IDS = re.compile(rb'(?<!prompt_)token_ids"\s*:\s*\[\s*(\d[\d,\s]*)\]')
_TEXT = re.compile(
    rb'"(?:content|text|reasoning_content|reasoning|thinking|arguments|partial_json|delta)"\s*:\s*"'
    rb'([^"\\]*(?:\\.[^"\\]*)*)"'
)


class InferenceBody(NamedTuple):
    """The body of a completion request: its bytes, and the members that the router needs."""

    data: bytes
    members: dict[str, Any]
    request_id: str | None
    prompt_tokens: int
    """Estimated number of prompt tokens; exact if the client sent token ids."""
    choices: int
    """Upper limit of the number of sequences that the engine generates."""
    large: LargeBody | None = None
    """Knows which parts of a large body were removed before it was parsed; None for a small body."""


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse the body of a control-plane request as a JSON object.

    Raises:
        BadBody: the body is not a JSON object, or is too large.
    """
    if len(data) > CONTROL_BYTES:
        raise BadBody(f"the body has {len(data)} bytes; this path accepts at most {CONTROL_BYTES}")
    if len(data) > UNCHECKED_BYTES:
        for _ in LargeBody(data).check_values():
            pass
    return _parse_object(data)


def _parse_object(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        value = _parse_leniently(data, exc)
    if not isinstance(value, dict):
        raise BadBody(f"the body is a JSON {_kind(value)}; it must be an object")
    return value


def parse_inference(data: bytes, large: LargeBody | None = None) -> InferenceBody:
    """Parse the body of a completion request.

    Args:
        large: the scanned body, if it is larger than ``UNCHECKED_BYTES``.

    Raises:
        BadBody: the body is not a JSON object, has too many members, or its ``request_id`` is not a printable string.
    """
    members = _parse_object(data if large is None else large.shorten())
    for name, numbers in large.numbers.items() if large is not None else ():
        if members.get(name) == []:
            members[name] = numbers
    if len(members) > MAX_MEMBERS:
        raise BadBody(f"the body has {len(members)} members; at most {MAX_MEMBERS} are allowed")
    request_id = members.get("request_id")
    if request_id is not None and not (isinstance(request_id, str) and request_id.isprintable()):
        message = f"request_id is {reprlib.repr(request_id)}; it must be a string of printable characters"
        raise BadBody(message, "request_id")
    token_ids = members.get("prompt_token_ids")
    if isinstance(token_ids, list) and not (token_ids and isinstance(token_ids[0], list)):
        prompt_tokens = len(token_ids)
    elif large is not None and large.prompt_tokens:
        prompt_tokens = large.prompt_tokens
    else:
        prompt_tokens = len(data) // _BYTES_PER_TOKEN if len(data) < _SMALL_MEDIA_BYTES else estimate_tokens(data)
    n, prompts = members.get("n"), 1
    choices = 1 if n is None else max(1, whole_number(n) or 1)
    for prompt in (token_ids, members.get("prompt")):  # if both exist, FastDeploy uses the ids
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = max(prompts, len(prompt))
    choices *= prompts
    return InferenceBody(data, members, request_id or None, prompt_tokens, min(choices, _MOST_CHOICES), large)


def find_model(data: bytes) -> str:
    """Return the name of the model in a JSON body or a form that the router does not parse; ``""`` if none is found.

    In a small JSON object, only its own member ``model`` counts, not those of nested objects. In other bodies, the
    first text that looks like such a member counts; in a form, the first field ``model``.
    """
    if len(data) <= _MODEL_BYTES and data.startswith(b"{"):
        try:
            name = orjson.loads(data).get("model")
        except orjson.JSONDecodeError:
            return ""
        return name if isinstance(name, str) else ""
    place = _search_model(data)
    if place is None:
        return ""
    name = data[place]
    try:
        return name.decode() if data.startswith(b"--") else str(orjson.loads(name))
    except ValueError:
        return ""


def rename_model(data: bytes, model: str) -> bytes:
    """Return the body with ``model`` in place of the model's name that ``find_model`` found."""
    if len(data) <= _MODEL_BYTES and data.startswith(b"{"):
        body = InferenceBody(data, orjson.loads(data), None, 0, 1)
        return splice(body, {"model": encode_member("model", model)})
    place = _search_model(data)
    assert place is not None
    name = model.encode() if data.startswith(b"--") else orjson.dumps(model)
    return data[: place.start] + name + data[place.stop :]


def _search_model(data: bytes) -> slice | None:
    """Return the position of the model's name in a large body or a form; None if it is not found.

    Only the beginning and the end of the body are searched.
    """
    search = _search_form if data.startswith(b"--") else _search_object
    first = search(data, 0, _MODEL_BYTES)
    return first if first is not None else search(data, max(0, len(data) - _MODEL_BYTES), len(data))


def _search_object(data: bytes, start: int, end: int) -> slice | None:
    found = _MODEL.search(data, start, end)
    return None if found is None else slice(*found.span(1))


def _search_form(data: bytes, start: int, end: int) -> slice | None:
    """Return the position of the model's name in a form; None if it is not found.

    Only fields of the form that lie completely between ``start`` and ``end`` are searched.
    """
    boundary, line_end, _ = data[: _LONGEST_BOUNDARY + 2].partition(b"\r\n")
    if not line_end:
        return None
    boundary += line_end
    for part in data[start:end].split(boundary):
        head, blank_line, rest = part.partition(b"\r\n\r\n")
        value, line_end, _ = rest.partition(b"\r\n")
        if line_end and any(line.endswith(_MODEL_FIELDS) for line in head.split(b"\r\n")):
            first = start + len(head) + len(blank_line)
            return slice(first, first + len(value))
        start += len(part) + len(boundary)
    return None


def whole_number(value: Any) -> int | None:
    """Return a member's value as an integer; None if it is no integer. Like engines, accept 10.0, "10" and "10.0"."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def estimate_tokens(data: bytes) -> int:
    """Estimate the number of prompt tokens in a body: its text counts, but not images, audio and files."""
    if len(data) < _SMALL_MEDIA_BYTES:
        return len(data) // _BYTES_PER_TOKEN
    if data.startswith(b"--"):
        return 0  # a form with a file
    if len(data) > UNCHECKED_BYTES:
        return (len(data) - _sample_media(data)) // _BYTES_PER_TOKEN
    media = sum(_measure_media(data, mark) for mark in _MEDIA_MARKS) if _may_have_media(data) else 0
    return (len(data) - media) // _BYTES_PER_TOKEN


def _may_have_media(data: bytes) -> bool:
    """Return whether a body may contain media. A search for ``_MEDIA_MARKS`` would take five times as long."""
    match = _BASE64_RUN.match
    return any(match(data, place) for place in range(0, len(data), _SAMPLE_BYTES - _RUN_BYTES))


def _sample_media(data: bytes) -> int:
    """Estimate the number of bytes in base64 strings of a large JSON body.

    A search through the whole body would block the router. So only the strings at certain positions are examined, which
    are one stride apart. A string longer than a stride is always found, and counts exactly. A shorter string is found
    only by chance; if found, it counts as a whole stride, so the sum is about right.
    """
    stride = len(data) // _SAMPLES
    size, place, known = 0, stride, 0
    while place < len(data):
        start = data.rfind(b'"', known, place) + 1 or known
        end = data.find(b'"', place)
        known = end = len(data) if end < 0 else end
        if end - start >= _SMALL_MEDIA_BYTES:
            mark = data.find(_MEDIA_MARKS[0], start, start + _SAMPLE_BYTES)
            begin = start if mark < 0 else mark + len(_MEDIA_MARKS[0])
            is_marked = mark >= 0 or _MEDIA_MEMBER.search(data[max(0, start - _NAME_BYTES) : start]) is not None
            if is_marked and _BASE64.fullmatch(data, begin, begin + _SAMPLE_BYTES):
                size += max(end - begin, stride)
        place += stride * ((end - place) // stride + 1)
    return min(size, len(data))


def _measure_media(data: bytes, mark: bytes) -> int:
    """Return the bytes of the base64 strings that follow ``mark`` in a JSON body, of at most ``_MAX_MARKS`` strings."""
    size, place = 0, data.find(mark)
    for _ in range(_MAX_MARKS):
        if place < 0:
            break
        start = place + len(mark)
        if mark.endswith(b'"'):  # a member's name; its value follows
            value = _STRING_BEGIN.match(data, start)
            start = start if value is None else value.end()
        end = data.find(b'"', start)
        if end < 0:
            break
        if end - start >= _SMALL_MEDIA_BYTES and _BASE64.fullmatch(data, start, start + _SAMPLE_BYTES):
            size += end - start
        place = data.find(mark, end)
    return size


def encode_member(name: str, value: Any) -> bytes:
    """Return one member of a JSON object as JSON bytes, for ``splice``."""
    return orjson.dumps({name: value})[1:-1]


def splice(body: InferenceBody, added: Mapping[str, bytes]) -> bytes:
    """Return the body with the members ``added``, like ``splice_parts``, but in one piece."""
    return b"".join(splice_parts(body, added))


def splice_parts(body: InferenceBody, added: Mapping[str, bytes], dropped: Collection[str] = ()) -> tuple[bytes, ...]:
    """Return the body with members added or removed, as parts to join. Other members stay at the same byte positions.

    The new members follow at the end, and removed members are overwritten with blanks. So if an instance reports the
    position of an error in the body, it is correct for the client's body, too. If the client sent a member of the same
    name as a new one, that member is overwritten, too, because a parser might prefer it.

    Args:
        added: new members by name, each encoded by ``encode_member``.
        dropped: names of members to remove.

    Raises:
        BadBody: the body has too many members.
    """
    data, has_members, blanks = body.data, bool(body.members), _NO_BLANKS
    if not body.members.keys().isdisjoint(dropped) or not added.keys().isdisjoint(body.members):
        blanks, has_members = _find_blanks(body, {*added, *dropped})
    end = data.rindex(b"}")
    # A large body is not copied, because that would block the router.
    kept = data if end < UNCHECKED_BYTES else cast(bytes, memoryview(data))
    parts: list[bytes] = []
    start = 0
    for first, last in blanks:
        if body.large is None:
            parts += (kept[start:first], data[first:last].translate(_BLANK))
        else:
            parts += (kept[start:first], *_blank(data, body.large, first, last))
        start = last
    comma = b"," if has_members and added else b""
    return (*parts, kept[start:end], comma, b",".join(added.values()), data[end:])


def _blank(data: bytes, large: LargeBody, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes that replace a large body from ``start`` to ``end``, in pieces: blanks, and the line ends.

    For the long parts that ``large`` has removed for parsing, the pieces are views, which is faster than copies.
    """
    for first, last, is_blank in large.list_cuts(start, end):
        yield data[start:first].translate(_BLANK)
        if is_blank:
            yield cast(bytes, memoryview(data)[first:last])
        else:  # a text or numbers
            for place in range(first, last, len(_SPACES)):
                yield cast(bytes, memoryview(_SPACES)[: last - place])
        start = last
    yield data[start:end].translate(_BLANK)


def _find_blanks(body: InferenceBody, names: Container[str]) -> tuple[Sequence[tuple[int, int]], bool]:
    """Return the positions of the members with these names in the body, and whether other members remain."""
    data, large = body.data, body.large
    blanks, is_any_left = [], False
    parsed = data if large is None else large.shorten()
    hidden = None if large is None else large.hidden
    for key, start, end in _members(parsed) if len(parsed) <= _TOKENS_BYTES else _members_of_long(parsed, hidden):
        if key not in names:
            is_any_left = True
            continue
        first, last = (start, end) if large is None else (large.find_place(start), large.find_place(end))
        # The comma before the member is blanked, too. If no member remains before it, the comma after the member is.
        blanks.append((first - 1, last) if is_any_left else (first, last + (data[last] == _COMMA)))
    return blanks, is_any_left


def _members(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each member of the JSON object in ``data``. A name may occur twice."""
    depth, start = 0, 0
    key: str | None = None
    for token in _TOKEN.finditer(hide_escapes(data)):
        first = data[token.start()]
        if token.end() > token.start() + 1:
            if depth == 1 and key is None:
                key = json.loads(data[token.start() : token.end()])
            continue
        if first in b"{[":
            depth += 1
            start = token.end() if depth == 1 else start
            continue
        if depth == 1:  # a comma, or the object's end
            if key is not None:
                yield key, start, token.start()
            key, start = None, token.end()
        depth -= first in b"}]"


def _members_of_long(data: bytes, hidden: bytes | None = None) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of each member of a long JSON object, as ``_members`` does.

    The time does not grow with the number of values in the members.

    Args:
        data: the object.
        hidden: the result of ``hide_escapes(data)``, if the caller has it.
    """
    hidden = hide_escapes(data) if hidden is None else hidden
    characters = np.frombuffer(hidden, np.uint8)
    folded = characters | 0x20  # makes brackets equal to braces
    is_structural = (folded == _OPENING) | (folded == _CLOSING) | (characters == _QUOTE) | (characters == _COMMA)
    places = np.flatnonzero(is_structural)
    kinds = characters[places]
    is_quote = kinds == _QUOTE
    is_outside = ~is_quote & (np.cumsum(is_quote, dtype=np.int32) % 2 == 0)
    places, kinds = places[is_outside], kinds[is_outside]
    change = _DEPTH_CHANGE[kinds]
    depth = np.cumsum(change, dtype=np.int32)
    # The positions of the object's beginning, of the commas between its members, and of its end.
    seams = places[((depth == 1) & (change >= 0)) | ((depth == 0) & (change < 0))].tolist()
    if len(seams) > MAX_MEMBERS + 1:
        raise BadBody(f"the body has {len(seams) - 1} members; at most {MAX_MEMBERS} are allowed")
    for before, end in itertools.pairwise(seams):
        quote = hidden.find(b'"', before, end)
        if quote >= 0:
            yield json.loads(data[quote : hidden.index(b'"', quote + 1) + 1]), before + 1, end


def _parse_leniently(data: bytes, error: orjson.JSONDecodeError) -> Any:
    # NaN, half a surrogate pair and numbers out of range are not JSON, but engines written in Python accept them. So
    # orjson's ``error`` may be about something that is allowed, and an actual mistake may come later.
    if len(data) > _LENIENT_BYTES or weigh_values(data, 0, len(data)) > _LENIENT_WEIGHT:
        raise BadBody(f"the body is not valid JSON: {error}")
    try:
        return json.loads(data.decode())
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        column = exc.start - data.rfind(b"\n", 0, exc.start)
        where = f"line {line} byte {column} (byte {exc.start}) is 0x{data[exc.start]:02x}"
        raise BadBody(f"the body is not valid JSON: it is not UTF-8: {where}") from None
    except json.JSONDecodeError as exc:
        raise BadBody(f"the body is not valid JSON: {exc}") from None
    except (ValueError, RecursionError):
        raise BadBody(f"the body is not valid JSON: {error}") from None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "boolean", str: "string", list: "array"}.get(type(value), "number")


class Usage(NamedTuple):
    """Token counts of a response's ``usage``; a count that the response lacks is None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    own_cached_tokens: int | None = None
    """Cached tokens from the instance's own cache; the others came from the pool. Only our engine reports this count.
    """


_NO_FIGURES = Usage()


def read_usage(data: bytes) -> Usage | None:
    """Return the last usage in ``data``, which is a response or the end of an event stream; None if it has no usage.

    If ``data`` has several, the counts of tokens are the largest ones in ``data``. All but one may be in parts of the
    request that the engine repeats, such as metadata or the schema of a tool, before or after the engine's own usage.
    So a client can make its counts too high, but not too low.
    """
    mark, last = data.rfind(_USAGE_MARK), None
    while mark >= 0 and (last := _USAGE_BEGIN.match(data, mark)) is None:  # a text, or null
        mark = data.rfind(_USAGE_MARK, 0, mark)
    if last is None:
        return None
    usage = _parse_usage(data, last.end())
    if data.find(_USAGE_MARK, 0, mark) < 0 or _USAGE_BEGIN.search(data, 0, mark) is None:
        return usage
    largest: Counter[bytes] = Counter()
    for name, digits in _COUNT.findall(data):
        if largest[name] < (count := int(digits)) <= _MOST_TOKENS:
            largest[name] = count
    own = usage or _NO_FIGURES
    inputs = largest[b"input"] + largest[b"cache_read_input"] + largest[b"cache_creation_input"]
    prompt = max(largest[b"prompt"], inputs) or own.prompt_tokens
    completion = max(largest[b"completion"], largest[b"output"]) or own.completion_tokens
    return own._replace(prompt_tokens=prompt, completion_tokens=completion) if largest else usage


def _parse_usage(data: bytes, start: int) -> Usage | None:
    """Return the counts in the usage that begins at ``start`` in ``data``; None if it has none, or invalid ones."""
    end = data.find(b"}", start) + 1
    is_flat = data.find(b"{", start + 1, end) < 0
    try:
        found = orjson.loads(data[start : end if is_flat else _find_end(data, start, end)])
    except orjson.JSONDecodeError:
        return None
    if not is_flat:
        found = _add_details(found)
    prompt, completion, cached = found.get("prompt_tokens"), found.get("completion_tokens"), found.get("cached_tokens")
    if prompt is None and "input_tokens" in found:
        read, written = found.get("cache_read_input_tokens"), found.get("cache_creation_input_tokens")
        completion, cached = found.get("output_tokens"), read if cached is None else cached
        try:
            prompt = found["input_tokens"] + (read or 0) + (written or 0)
        except TypeError:
            return None
    usage = Usage(prompt, completion, cached, found.get("own_cached_tokens"))
    for figure in usage:
        if figure is not None and (type(figure) is not int or not 0 <= figure <= _MOST_TOKENS):
            return None
    return None if usage == _NO_FIGURES else usage


def _find_end(data: bytes, start: int, end: int) -> int:
    """Return the end of the usage object that begins at ``start``; 0 if ``_USAGE_BYTES`` do not contain its end.

    Args:
        end: the end of the first object that is nested in the usage.
    """
    limit = start + _USAGE_BYTES
    while end and data.count(b"{", start, end) > data.count(b"}", start, end):
        end = data.find(b"}", end, limit) + 1
    return end


def _add_details(members: dict[str, Any]) -> dict[str, Any]:
    """Return the members of a usage and of the objects nested in it, in one dictionary."""
    found = members
    for details in members.values():
        if type(details) is dict:
            found = {**found, **details}
    return found


def read_cached_figures(data: bytes) -> Mapping[bytes, bytes]:
    """Return the cached-token counts in the usage of a response, by name."""
    start = data.rfind(_USAGE_MARK)
    if start < 0:
        return {}
    figures = dict(_CACHED_FIGURE.findall(data, start))
    if b"cache_read_input_tokens" in figures:
        figures.update(_INPUT_FIGURE.findall(data, start))
    return figures


def set_figures(data: bytes, figures: Mapping[bytes, bytes]) -> bytes:
    """Return a response, or its events, in which the numbers of the usage are replaced.

    Args:
        data: the response or the events.
        figures: the new number of each member of the usage that is replaced, by the member's name.
    """
    start = data.find(_USAGE_MARK)
    if start < 0 or not figures:
        return data
    pattern = rb'("(' + b"|".join(figures) + rb')"\s*:\s*)\d{1,15}\b'
    return data[:start] + re.sub(pattern, lambda found: found[1] + figures[found[2]], data[start:])


class TokenCount:
    """Counts the tokens of an event stream, for the case that the engine sends no usage."""

    __slots__ = ("_by_ids", "_by_text", "_has_ids")

    def __init__(self, *, has_ids: bool) -> None:
        """
        Args:
            has_ids: whether engines can send token ids at this endpoint. At other endpoints, ids do not count, because
                they may be in a part of the request that the engine repeats.
        """
        self._has_ids = has_ids
        self._by_ids = self._by_text = 0

    @property
    def tokens(self) -> int:
        """The number of token ids if the engine sends them; else an estimate from the text, at least one per event."""
        return self._by_ids or self._by_text

    def add(self, events: bytes) -> None:
        """Count the tokens in ``events``, which are bytes from the engine."""
        for ids in _GENERATED_IDS.findall(events) if self._has_ids else ():
            self._by_ids += ids.count(b",") + 1
        if not self._by_ids:
            text = sum(map(len, _TEXT.findall(events)))
            self._by_text += max(events.count(b"data:"), text // _BYTES_PER_TOKEN)
