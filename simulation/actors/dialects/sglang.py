"""SGLang's dialect: both instances get the request and connect by ``bootstrap_room`` at the ``bootstrap_port``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.apis.completions import PairDialect
from engine.generation import PairInfo
from engine.protocol import ApiError, GenerationBody, quote_short
from simulation.actors.dialects.fetching_decode import FetchPrompt
from simulation.actors.dialects.retaining_prefill import RetainPrompt

__all__ = ["SglangDialect"]

MEETING_SECONDS = 60.0
"""Time that one instance waits for the other; SGLang waits 300 s."""
DEFAULT_PORT = 8998
_MAX_ROOM = 2**63 - 1


class SglangDialect(PairDialect):
    """Reads ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room``; prefill and decode require them.

    Args:
        role: ``mixed``, ``prefill`` or ``decode``.
        port: the port that decode instances connect to.
    """

    def __init__(self, role: str, port: int) -> None:
        self.registration: dict[str, Any] = {"engine": "sglang"}
        if role == "prefill":
            self.registration["bootstrap_port"] = port
        self._role = role

    def find_request_id(self, body: GenerationBody) -> str | None:
        rid = body.rid[0] if isinstance(body.rid, list) and body.rid else body.rid
        return rid if isinstance(rid, str) and rid else body.request_id

    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        if self._role == "mixed":
            return [None] * num_prompts
        return [self._read_pair(body, request_id, prompt, num_prompts) for prompt in range(num_prompts)]

    def _read_pair(self, body: GenerationBody, request_id: str, prompt: int, num_prompts: int) -> PairInfo:
        room = _read_member(body.bootstrap_room, "bootstrap_room", prompt, num_prompts)
        if room is None:
            message = f"Invalid request: Disaggregated request received without bootstrap room id. rid={request_id!r}"
            raise ApiError(400, message, param="bootstrap_room")
        if type(room) is not int or not 0 <= room <= _MAX_ROOM:
            message = f"bootstrap_room: it is {quote_short(room)}; give a whole number from 0 to 2**63 - 1"
            raise ApiError(400, message, param="bootstrap_room")
        if self._role == "prefill":
            return RetainPrompt(f"room {room}", MEETING_SECONDS, waits_for_decode=True)
        host = _read_member(body.bootstrap_host, "bootstrap_host", prompt, num_prompts)
        if not isinstance(host, str) or not host:
            message = f"bootstrap_host: it is {quote_short(host)}; give the prefill instance's address"
            raise ApiError(400, message, param="bootstrap_host")
        port = _read_member(body.bootstrap_port, "bootstrap_port", prompt, num_prompts)
        port = DEFAULT_PORT if port is None else port
        if type(port) is not int or not 0 < port < 65536:
            message = f"bootstrap_port: it is {quote_short(port)}; give a port"
            raise ApiError(400, message, param="bootstrap_port")
        return FetchPrompt(f"room {room}", host, port, takes_token=True, wait_seconds=MEETING_SECONDS)


def _read_member(value: Any, name: str, prompt: int, num_prompts: int) -> Any:
    """Return the value of a field for one of the prompts: a request with a list of prompts has lists."""
    if not isinstance(value, list):
        return value
    if len(value) != num_prompts:
        prompts = "1 prompt" if num_prompts == 1 else f"{num_prompts} prompts"
        raise ApiError(400, f"{name}: it has {len(value)} members for {prompts}; give one for each", param=name)
    return value[prompt]
