"""Makes the request for the next instance: the client's request with the tokens so far, in the format of its engine.

- FastDeploy, and our own engine, append ``completion_token_ids`` to the prompt.
- For completions of vLLM and SGLang, the prompt consists of the ids of the prompt and of the tokens so far.
- For vLLM's chat, these ids are in ``kv_transfer_params``, and replace the prompt that vLLM would create from the
  messages. The text so far is also the last message, for versions of vLLM that ignore the ids. So ``StreamMerger``
  compares the prompt that the next instance reports with the expected one, and ends the stream if they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from router.fleet import EngineKind
from router.http import whole_number

__all__ = ["CannotContinue", "continue_stream", "count_remaining", "needs_prompt", "resume_by_ids"]

# vLLM's default for completions without a length limit.
_COMPLETION_TOKENS = 16


class Merger(Protocol):
    """The attributes of a ``StreamMerger`` that ``continue_stream`` needs."""

    @property
    def members(self) -> Mapping[str, Any]:
        """The members of the body of the client's request."""

    @property
    def num_reasoning(self) -> int:
        """Number of the ``shown_ids`` that are reasoning."""

    @property
    def prompt_ids(self) -> list[int] | None:
        """The token ids of the prompt; None if the instance did not report them."""

    @property
    def shown_ids(self) -> Sequence[int]:
        """The ids of the tokens whose text the client has received."""

    @property
    def text(self) -> str:
        """The text of ``shown_ids``."""

    def expect_prompt(self, ids: Sequence[int] | None) -> None:
        """Set the prompt that the next instance must report; None if that instance need not report a prompt."""


class CannotContinue(Exception):
    """The stream cannot be continued exactly. The message is the reason."""


def needs_prompt(engine: EngineKind) -> bool:
    """Return whether an engine of this kind needs the token ids of the prompt to continue a response.

    If so, the merger must store these ids.
    """
    return engine is not EngineKind.FASTDEPLOY


def continue_stream(merger: Merger, engine: EngineKind, is_chat: bool) -> dict[str, Any]:
    """Return the members to set in the request for an instance of ``engine``; empty if no token must be continued.

    Raises:
        CannotContinue: this engine cannot continue the stream exactly.
    """
    members, shown = merger.members, merger.shown_ids
    merger.expect_prompt(None)
    if not shown:
        return {}
    if not needs_prompt(engine):
        return {**resume_by_ids(members, shown), **_count_reasoning(merger)}
    prompt = merger.prompt_ids
    if prompt is None:
        raise CannotContinue("the token ids of the prompt are not known")
    ids = [*prompt, *shown]
    merger.expect_prompt(ids)
    if not is_chat:
        limits = _count_limits(members, shown)
        if "max_tokens" not in members:
            limits["max_tokens"] = max(1, _COMPLETION_TOKENS - len(shown))
        return {"prompt": ids, **limits}
    if merger.num_reasoning:
        raise CannotContinue(
            "the client already has a part of the reasoning, and the reasoning parser would start again"
        )
    # If the client has set continue_final_message, its last message is the beginning of the response.
    messages = list(members["messages"])
    given = messages.pop() if members.get("continue_final_message") else {}
    text = given.get("content")
    if not isinstance(text, str | None):
        raise CannotContinue("the last message of the request has content parts")
    messages.append({"role": "assistant", **given, "content": (text or "") + merger.text})
    return {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "kv_transfer_params": {"prompt_token_ids": ids},
        **_count_limits(members, shown),
    }


def resume_by_ids(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    """Return the members with which FastDeploy continues a response after the generated tokens ``ids``."""
    sent = members.get("completion_token_ids")
    added: dict[str, Any] = {"completion_token_ids": [*(sent if isinstance(sent, list) else ()), *ids]}
    added |= _count_limits(members, ids)
    if members.get("echo"):
        added["echo"] = False  # the first segment already contains the echo
    return added


def count_remaining(members: Mapping[str, Any], generated: int) -> int | None:
    """Return the number of tokens that remain to be generated; None if there is no limit."""
    limit = whole_number(members.get("max_completion_tokens")) or whole_number(members.get("max_tokens"))
    return None if limit is None else max(0, limit - generated)


def _count_reasoning(merger: Merger) -> dict[str, int]:
    """Return FastDeploy's limits of reasoning and of the text after it, minus the tokens that were already generated.

    FastDeploy counts only tokens that the request itself generates. The end of the prompt decides whether the request
    begins with reasoning.

    Raises:
        CannotContinue: the remaining limits are not known exactly.
    """
    members, shown, reasoning = merger.members, len(merger.shown_ids), merger.num_reasoning
    is_reasoning = reasoning == shown
    limits = {}
    limit = whole_number(members.get("reasoning_max_tokens"))
    if limit is not None and reasoning and is_reasoning:
        if shown >= limit:
            raise CannotContinue("the reasoning reached its limit, and the end of the reasoning was not sent")
        limits["reasoning_max_tokens"] = limit - shown
    limit = whole_number(members.get("response_max_tokens"))
    if limit is not None and not is_reasoning:
        if reasoning:  # the tokens that end the reasoning are not known
            raise CannotContinue(
                "the request limits the tokens after the reasoning, and some of these tokens were already sent"
            )
        limits["response_max_tokens"] = max(1, limit - shown)
    return limits


def _count_limits(members: Mapping[str, Any], ids: Sequence[int]) -> dict[str, int]:
    """Return the client's token limits, minus the tokens that were already generated."""
    limits = {}
    for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0)):
        limit = whole_number(members.get(name))
        if limit is not None:
            limits[name] = max(least, limit - len(ids))
    return limits
