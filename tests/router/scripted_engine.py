"""An engine with scripted tokens that can be preempted after each token: in FastDeploy's form, without HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

__all__ = ["PROMPT_IDS", "Engine"]

PROMPT_IDS = [7, 8, 9, 10]


class Engine(NamedTuple):
    """A scripted engine, which generates all pieces. ``pieces[i]`` are the bytes of token ``100 + i``.

    Like FastDeploy, it detokenizes only the generated tokens of a request, and delays tokens with text that ends in an
    incomplete character.
    """

    pieces: list[bytes]
    is_chat: bool = True
    returns_text: bool = False
    """Whether a preempted response that is not streamed has its text, and not only its ids."""

    def generate(self, members: dict[str, Any], preempted_after: int | None) -> tuple[list[int], bool]:
        """Return at most ``preempted_after`` ids of one leg, and whether it ended because of max_tokens."""
        resent = members.get("completion_token_ids", [])
        start = len(resent)
        assert resent == [100 + i for i in range(start)]
        wanted = members.get("max_tokens")
        end = len(self.pieces) if wanted is None else min(len(self.pieces), start + wanted)
        assert wanted is None or wanted > 0
        ids = [100 + i for i in range(start, end)]
        return ids[:preempted_after], wanted is not None and end - start == wanted

    def usage(self, members: dict[str, Any], generated: int) -> dict[str, Any]:
        prompt = len(PROMPT_IDS) + len(members.get("completion_token_ids", []))
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    def text(self, ids: list[int]) -> str:
        return b"".join(self.pieces[token - 100] for token in ids).decode("utf-8", "replace")

    def stream(self, members: dict[str, Any], leg: int, preempted_after: int | None, form: str) -> Iterator[bytes]:
        """Yield the events of one leg."""
        shared = {"id": f"chatcmpl-r-retry{leg}" if leg else "chatcmpl-r", "created": 1000 + leg, "model": "m"}
        with_ids = members.get("return_token_ids")

        def event(content: dict[str, Any], finish: str | None = None) -> bytes:
            choice = {"index": 0, "delta": content} if self.is_chat else {"index": 0, **content}
            return b"data: " + orjson.dumps({**shared, "choices": [{**choice, "finish_reason": finish}]}) + b"\n\n"

        key = "content" if self.is_chat else "text"
        first = {"role": "assistant", key: ""} if self.is_chat else {key: ""}
        yield event({**first, "prompt_token_ids": PROMPT_IDS, "prompt_tokens": 'a "p", '} if with_ids else first)
        ids, at_limit = self.generate(members, preempted_after)
        delayed: list[int] = []
        for number, token in enumerate(ids, 1):
            is_last = preempted_after is None and number == len(ids)
            delayed.append(token)
            text = self.text(delayed)
            if text.endswith("\N{REPLACEMENT CHARACTER}") and not is_last:
                text = ""
            else:
                delayed.clear()
            added = {"completion_token_ids": [token], "completion_tokens": text} if with_ids else {}
            yield event({key: text, **added}, ("length" if at_limit else "stop") if is_last else None)
        if preempted_after is not None:
            if form == "error":
                yield b'data: {"error":{"message":"PD Error: decode preempted the request","code":500}}\n\n'
            else:
                yield event({key: ""}, "pd_reschedule")
        elif members.get("stream_options"):
            yield b"data: " + orjson.dumps({**shared, "choices": [], "usage": self.usage(members, len(ids))}) + b" \n\n"
        yield b"data: [DONE]\n\n"

    def answer(self, members: dict[str, Any], leg: int, preempted_after: int | None) -> bytes:
        """Return the complete response of one leg."""
        ids, at_limit = self.generate(members, preempted_after)
        text = self.text(ids) if preempted_after is None or self.returns_text else ""
        finish = "pd_reschedule" if preempted_after is not None else "length" if at_limit else "stop"
        key = "content" if self.is_chat else "text"
        returned_ids = ids if preempted_after is not None or members.get("return_token_ids") else None
        content = {key: text, "completion_token_ids": returned_ids}
        choice = {"message": {"role": "assistant", **content}} if self.is_chat else content
        shared = {"id": f"r{leg}", "created": 1000 + leg, "usage": self.usage(members, len(ids))}
        return orjson.dumps({**shared, "choices": [{"index": 0, **choice, "finish_reason": finish}]})
