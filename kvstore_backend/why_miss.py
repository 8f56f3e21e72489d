"""Explains why blocks were not shared: compares two configurations, or two prompts.

Two instances share blocks if their namespaces have the same digest. If not, the manifests of the namespaces show the
reason: the verdict names all fields that differ. It names the most informative field first: for example, a different
model also explains different shapes, but different shapes do not explain a different model.

The hash of a block depends on all tokens before it, so all blocks from the first different token on are a miss. One
token seldom explains the difference: for example, a time in the system prompt changes one digit. So the verdict shows
the words around the token, and what these words probably are, such as a timestamp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kvstore_backend.manifest import Manifest

__all__ = ["OTHER_TEXT", "REASONS", "Verdict", "compare_prompts", "compare_setups", "compare_texts", "count_common"]

REASONS = {
    "same_setup": "both have the same namespace, so they share blocks",
    "other_rank": "two ranks of one configuration, and each rank has its own blocks",
    "other_engine": "another engine, with other block hashes",
    "other_model": "another model",
    "other_weights": "the same architecture with other weights",
    "other_settings": "another setting of the engine that can change KV",
    "other_dtype": "another dtype of the KV",
    "other_block_size": "another block size",
    "other_shape": "another number of layers, heads or elements",
    "other_tp_size": "another tensor-parallel size",
    "other_tenant": "another tenant",
    "other_layout": "the bytes of a block have another layout",
    "other_format": "another version of the format of blocks",
    "other_field": "another value of a further field of the namespace",
    "same_prompt": "both prompts have the same tokens",
    "continues": "one prompt begins with the whole other prompt",
    "diverges": "the prompts differ after a common prefix",
}
"""Reasons that a verdict may have, with a short description."""

OTHER_TEXT = "other text"
"""What ``compare_texts`` calls a difference that is no known pattern; a date, for example, is a known pattern."""

_MONTHS = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_PATTERNS = {
    "a UUID": re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"),
    "a timestamp": re.compile(
        r"\d{4}-\d\d-\d\d[T ]+\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?"
        r"|(?<![\w.])1\d{9}(?:\.\d+|\d{3})?(?![\w])"
    ),
    "a date": re.compile(
        rf"\d{{4}}[-/.]\d\d?[-/.]\d\d?|\d\d?[-/.]\d\d?[-/.]\d{{2,4}}"
        rf"|(?:{_MONTHS})[a-z]*\.? \d\d?(?:(?:st|nd|rd|th)?,? \d{{4}})?|\d\d? (?:{_MONTHS})[a-z]*(?: \d{{4}})?"
    ),
    "a time of day": re.compile(r"(?<!\d)\d\d?:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm])?"),
    "a random id": re.compile(r"(?<![\w-])(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{10,}(?![\w-])"),
    "a number": re.compile(r"\d+"),
}
_WORD_OR_SPACE = re.compile(r"\S+|\s+")
_SHOWN_CHARACTERS = 48
# Numbers of tokens before and behind the difference that are decoded: enough for the longest pattern, even if every
# character is one token.
_TOKENS_BEFORE, _TOKENS_BEHIND = 96, 64
_SAME_AGAIN = 12

# Fields with their own reason, the most informative first -> reason, name of the field in the sentence, remedy.
_REMEDIES = {
    "weights_version": ("other_weights", "the version of the weights", "one of them has updated its weights in place"),
    "kv_dtype": ("other_dtype", "the dtype of the KV", "start both with one dtype"),
    "block_size": (
        "other_block_size",
        "the block size",
        "our engine can read blocks of another size if one size is a multiple of the other; otherwise start both with "
        "the same block size",
    ),
    "tp_size": (
        "other_tp_size",
        "the tensor-parallel size",
        "our engine and vLLM can read blocks of another tensor-parallel size if the KV heads are divided evenly; "
        "otherwise start both with the same tensor-parallel size",
    ),
    "tenant": ("other_tenant", "the tenant", "blocks are shared within one tenant only"),
    "layout": ("other_layout", "the layout of a block", "run one version of the engine with one attention backend"),
}
_SHAPE = ("num_layers", "num_kv_heads", "head_size")
_RANK = "tp_rank"
# Beginning of the names of facts that are settings of the engine.
_SETTING = "setting "


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison: the reason why blocks were not shared, or that they can be shared.

    Attributes:
        reason: one of ``REASONS``.
        sentence: explanation for operators, with values and numbers.
        details: the values and numbers in the sentence, for programs.
    """

    reason: str
    sentence: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a JSON object."""
        return asdict(self)


def compare_setups(first: Manifest, second: Manifest, names: tuple[str, str] = ("the first", "the second")) -> Verdict:
    """Explain why the namespaces of two manifests differ, or report that they are equal.

    Args:
        first: manifest of the first configuration.
        second: manifest of the second configuration.
        names: names of the two configurations, for the sentence.
    """
    if first.digest == second.digest:
        return Verdict(
            "same_setup", f"{names[0]} and {names[1]} have the same namespace, {first.digest}, so they share blocks"
        )
    found = list(_list_differences(first, second, names))
    (reason, sentence), more = found[0], [sentence for _, sentence in found[1:]]
    also = f" (also: {'; '.join(more)})" if more else ""
    changed = {
        name: [first.fields.get(name), second.fields.get(name)]
        for name in sorted({*first.fields, *second.fields})
        if first.fields.get(name) != second.fields.get(name)
    }
    return Verdict(reason, sentence + also, {"fields": changed, "reasons": [each for each, _ in found]})


def _list_differences(first: Manifest, second: Manifest, names: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield a reason and a sentence for each difference between two manifests, the most informative first."""
    one, other = first.fields, second.fields

    def differs(name: str) -> bool:
        return one.get(name) != other.get(name)

    def tell(name: str, title: str) -> str:
        return f"{title} differs: {_tell_values(one.get(name), other.get(name), names)}"

    engines = first.facts.get("block_hashes"), second.facts.get("block_hashes")
    if all(engines) and engines[0] != engines[1]:
        yield (
            "other_engine",
            f"the engines differ, and compute other block hashes: {' and '.join(map(str, engines))}",
        )
    if differs("model"):
        yield _explain_model(first, second, names)
    for name, (reason, title, remedy) in _REMEDIES.items():
        if differs(name):
            yield reason, f"{tell(name, title)}; {remedy}"
    if shapes := [name for name in _SHAPE if differs(name)]:
        yield "other_shape", "; ".join(tell(name, name) for name in shapes)
    for name in sorted({*one, *other} - {"model", _RANK, *_REMEDIES, *_SHAPE}):
        if differs(name):
            yield "other_field", tell(name, name)
    if first.block_format != second.block_format:
        formats = f"{first.block_format} of {names[0]}, {second.block_format} of {names[1]}"
        yield "other_format", f"the format of blocks differs: {formats}; run one version of fastdeploy-kvstore"
    if differs(_RANK):
        yield "other_rank", f"{tell(_RANK, 'the rank')}; each rank of a configuration has its own blocks"


def _explain_model(first: Manifest, second: Manifest, names: tuple[str, str]) -> tuple[str, str]:
    """Return reason and sentence for manifests with different models, weights or settings of the engine."""
    one, other = first.facts, second.facts
    called = _tell_values(one.get("name"), other.get("name"), names)
    if one.get("architecture") != other.get("architecture") or not one.get("architecture"):
        return "other_model", f"the model differs: {called}"
    settings = [
        name for name in sorted({*one, *other}) if name.startswith(_SETTING) and one.get(name) != other.get(name)
    ]
    if settings and one.get("checkpoint") == other.get("checkpoint"):
        differences = [
            f"{name.removeprefix(_SETTING)} ({_tell_values(one.get(name), other.get(name), names)})"
            for name in settings
        ]
        reason = "other_dtype" if settings == [f"{_SETTING}dtype"] else "other_settings"
        return reason, f"settings of the engine that can change KV differ: {', '.join(differences)}"
    return "other_weights", (
        f"the weights differ ({called}), but both have the same architecture: one may be a fine-tune or another "
        "revision; give both the same checkpoint"
    )


def _tell_values(one: object, other: object, names: tuple[str, str]) -> str:
    return f"{_quote(one)} of {names[0]}, {_quote(other)} of {names[1]}"


def _quote(value: object) -> str:
    return "nothing" if value in (None, "") else f"{value!r}" if isinstance(value, str) else str(value)


def compare_prompts(
    first: Sequence[int], second: Sequence[int], decode: Callable[[Sequence[int]], str] | None = None
) -> Verdict:
    """Explain why two prompts do not share more blocks: find the first token that differs.

    Args:
        first: tokens of the earlier prompt.
        second: tokens of the later prompt, which should have shared blocks with the earlier one.
        decode: converts tokens, including special tokens, to text; None if there is no tokenizer.
    """
    token = count_common(first, second)
    if token == len(first) == len(second):
        return Verdict("same_prompt", f"both prompts have the same {token} tokens", {"token": token})
    if token == min(len(first), len(second)):
        shorter, longer = ("first", "second") if token == len(first) else ("second", "first")
        text = (
            f"the {longer} prompt begins with all {token} tokens of the {shorter} one: the full blocks of these tokens "
            "are shared"
        )
        return Verdict("continues", text, {"token": token})
    if decode is None:
        kind, was, now = "other token", str(first[token]), str(second[token])
    else:
        begin, end = max(0, token - _TOKENS_BEFORE), token + _TOKENS_BEHIND
        kind, was, now = compare_texts(decode(first[begin:end]), decode(second[begin:end]))
        was, now = _shorten(was), _shorten(now)
    text = f"the prompts diverge at token {token} ({kind}: {was!r} became {now!r}); blocks with it or after it differ"
    return Verdict("diverges", text, {"token": token, "kind": kind, "first": was, "second": now})


def count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading tokens that two prompts have in common."""
    length = min(len(first), len(second))
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length


def compare_texts(first: str, second: str) -> tuple[str, str, str]:
    """Return what the first difference between two texts is, such as ``a date``, and the words of each text there."""
    place = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if place is None:  # different tokens may have the same text
        return "other tokens of the same text", "", ""
    for kind, pattern in _PATTERNS.items():
        was, now = _match_at(pattern, first, place), _match_at(pattern, second, place)
        if was and now:
            return kind, was, now
    was, now = _match_at(_WORD_OR_SPACE, first, place), _match_at(_WORD_OR_SPACE, second, place)
    if "".join(first[place:].split())[:_SAME_AGAIN] == "".join(second[place:].split())[:_SAME_AGAIN]:
        return "white space", was, now
    if first[place:].casefold()[:_SAME_AGAIN] == second[place:].casefold()[:_SAME_AGAIN]:
        return "upper and lower case", was, now
    return OTHER_TEXT, was, now


def _match_at(pattern: re.Pattern[str], text: str, place: int) -> str:
    """Return the longest match of ``pattern`` that contains the index ``place``, or ends there; "" without a match."""
    found = (match[0] for match in pattern.finditer(text) if match.start() <= place < match.end() + 1)
    return max(found, key=len, default="")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
