"""The decode instance's part if it requests the prompt's KV from prefill itself.

Without this KV, the request fails, as in the emulated engines: vLLM's ``kv_load_failure_policy`` is ``fail`` by
default, and SGLang ends the request with a ``KVTransferError``.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass

from engine.disaggregation import HandoverResult
from engine.generation.base import Generation, SharedParts
from engine.generation.decode import DecodeGeneration
from engine.scheduling.request import Request
from simulation.actors.dialects.retained import ask_for_prompt
from simulation.actors.dialects.retaining_prefill import key_of

__all__ = ["FetchPrompt", "FetchingDecodeGeneration"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchPrompt:
    """Request from a prefill instance the KV of a prompt that it retains, and continue from there, or fail.

    Args:
        key: the key under which prefill retains the prompt.
        host, port: prefill's connector port.
        takes_token: whether the answer begins with prefill's token; else the first token is chosen here.
        wait_seconds: how long to wait if prefill does not know the key yet.
        own_host: this instance's address, as prefill reaches it.
    """

    key: str
    host: str
    port: int
    takes_token: bool
    wait_seconds: float = 0.0
    own_host: str = "127.0.0.1"

    def __call__(self, parts: SharedParts, request: Request) -> Generation:
        return FetchingDecodeGeneration(parts, request, dataclasses.replace(self, key=key_of(self.key, request)))


class FetchingDecodeGeneration(DecodeGeneration):
    """A request with a prompt that another instance retains for this one."""

    _needs_handover = True

    def __init__(self, parts: SharedParts, request: Request, info: FetchPrompt) -> None:
        super().__init__(parts, request)
        self._info = info

    def _cached_tokens(self) -> tuple[int, int]:
        """Return the cached tokens: if the first token is chosen here, all but the prompt's last token, as in vLLM."""
        if self._result is None or self._info.takes_token:
            return super()._cached_tokens()
        return self.sequence.num_prompt_tokens - 1, 0

    async def _receive_prompt(self) -> HandoverResult | None:
        info, parts = self._info, self._parts
        address = (info.own_host, parts.receiver.port)
        reason = await ask_for_prompt(
            info.host, info.port, info.key, self.request.request_id, address, info.wait_seconds
        )
        if reason:
            log.warning("%s: %s", self.request.request_id, reason)
            return None
        result = await super()._receive_prompt()
        if result and result.prefilled and not info.takes_token:
            return dataclasses.replace(result, prefilled=dataclasses.replace(result.prefilled, token=None))
        return result
