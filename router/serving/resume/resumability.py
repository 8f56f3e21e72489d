"""Finds out why a stream cannot continue exactly after its instance has died: because of the request or the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router.fleet import EngineKind

if TYPE_CHECKING:
    from router.http import InferenceBody

__all__ = ["find_obstacle", "follows_grammar", "streams_token_ids"]

# Members that make the engine follow a grammar, which would begin again with the next segment.
_GRAMMARS = (
    *("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    *("structural_tag", "structured_outputs"),
)
# Options for which an engine counts only tokens that it has generated itself. Zero and empty values have no effect.
_COUNTED_OVER_THE_ANSWER = ("presence_penalty", "frequency_penalty", "bad_words")
# Engines that accept return_token_ids in streams, for chat and for completions. SGLang refuses it for chat.
_WITH_IDS = {
    True: frozenset({EngineKind.FASTDEPLOY, EngineKind.VLLM}),
    False: frozenset({EngineKind.FASTDEPLOY, EngineKind.VLLM, EngineKind.SGLANG}),
}
_MAY_CALL_TOOLS = "the request may call tools, and the tool parser would start again"


def streams_token_ids(engine: EngineKind, is_chat: bool) -> bool:
    """Return whether this engine can add token ids to its streams and can continue a stream from token ids."""
    return engine in _WITH_IDS[is_chat]


def follows_grammar(members: Mapping[str, Any]) -> bool:
    """Return whether the generated text must follow a grammar."""
    return any(members.get(name) not in (None, {"type": "text"}) for name in _GRAMMARS)


def find_obstacle(body: InferenceBody, engine: EngineKind, is_chat: bool) -> str:
    """Return why a stream of which the client has received text cannot be resumed; ``""`` if it can be resumed."""
    members = body.members
    if not streams_token_ids(engine, is_chat):
        where = "in chat" if engine is EngineKind.SGLANG else ""
        return f"the engine {engine.value} reports no token ids {where}".rstrip()
    if body.choices > 1:
        return "the request generates several answers at once"
    if follows_grammar(members):
        return "the answer follows a grammar, which would start again"
    if members.get("logprobs") not in (None, False) or members.get("prompt_logprobs") is not None:
        return "the request has logprobs"
    if members.get("seed") is not None and members.get("temperature") != 0:
        return "the request has a seed, and the random sequence would start again"
    if any(members.get(name) for name in _COUNTED_OVER_THE_ANSWER):
        return "the request has a penalty on generated tokens, whose count would start again"
    if members.get("stop"):
        return "the request has a stop string, and the engine may hold back a part of this string"
    if engine is EngineKind.FASTDEPLOY:
        return ""
    return _find_obstacle_in_chat(members) if is_chat else _find_obstacle_in_completions(members, engine)


def _find_obstacle_in_chat(members: Mapping[str, Any]) -> str:
    if (members.get("tools") and members.get("tool_choice") != "none") or members.get("functions"):
        return _MAY_CALL_TOOLS
    if members.get("echo"):
        return "the response echoes the prompt"
    messages = members.get("messages")
    listed = messages if isinstance(messages, list) else []
    if not all(isinstance(message, dict) and _is_text(message.get("content")) for message in listed):
        return "the messages of the request contain more than text"
    return ""


def _find_obstacle_in_completions(members: Mapping[str, Any], engine: EngineKind) -> str:
    if members.get("echo"):
        return "the response echoes the prompt"
    if members.get("suffix") or members.get("prompt_embeds"):
        return "the prompt of the request is not one text"
    if engine is EngineKind.SGLANG and members.get("max_tokens") is None:
        return "the request has no max_tokens, and the engine's own limit would start again"
    return ""


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
