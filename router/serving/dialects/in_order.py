"""Any engine whose instances share a pool: prefill generates one token, then decode finds the blocks in the pool.

Neither request says where the blocks are. Our own connector for vLLM works in the same way, with one additional
parameter (``vllm.py``).
"""

from __future__ import annotations

from router.http import Usage
from router.serving.dialects.dialect import (
    MIN_HANDED_OVER_TOKENS,
    NO_MEMBERS,
    LegPlan,
    Pair,
    members_to_strip,
    request_id_header,
)
from router.serving.reading.parsed_request import ParsedRequest

__all__ = ["InOrderPair", "cut_to_one_token", "plan_by_header"]

# Members that have no meaning for a response of one token. With "background", the response would not have a token.
_NOT_OF_ONE_TOKEN = ("stream_options", "min_tokens", "best_of", "background")
_ONE_ANSWER = {"stream": b'"stream":false'}


class InOrderPair(Pair):
    """Sends prefill a request for one token. When prefill has responded, sends decode the client's request."""

    is_prefill_first = True

    def plan(self, parsed: ParsedRequest, request_id: str) -> tuple[LegPlan, LegPlan, None]:
        head = request_id_header(parsed, request_id)
        return cut_to_one_token(parsed, head), LegPlan(NO_MEMBERS, members_to_strip(parsed), head), None

    def find_lost_hand_over(self, answer: bytes, prefill: Usage, decode: Usage) -> str:
        if decode.cached_tokens == 0 and (decode.prompt_tokens or 0) >= MIN_HANDED_OVER_TOKENS:
            return f"decode had no cached token of a prompt of {decode.prompt_tokens} tokens"
        return ""


def cut_to_one_token(parsed: ParsedRequest, head: bytes) -> LegPlan:
    """Return the changes that turn the client's request into a request for one token, which is not streamed."""
    assert parsed.body is not None
    given = parsed.body.members
    one = dict(_ONE_ANSWER)
    for name in parsed.api.token_limits:
        if name == parsed.api.token_limits[0] or given.get(name) is not None:
            one[name] = b'"%s":1' % name.encode()
    if given.get("n") is not None:
        one["n"] = b'"n":1'
    return LegPlan(one, members_to_strip(parsed, *_NOT_OF_ONE_TOKEN), head)


def plan_by_header(parsed: ParsedRequest, request_id: str) -> LegPlan:
    """Return the changes of a request for one instance, not a pair. A header contains the request's id."""
    return LegPlan(NO_MEMBERS, members_to_strip(parsed), request_id_header(parsed, request_id))
