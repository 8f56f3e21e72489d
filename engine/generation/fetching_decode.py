"""The decode instance's part when it requests the prompt itself: fetch its KV from prefill, or fail.

It fails because the emulated engines do: vLLM's ``kv_load_failure_policy`` is ``fail`` by default, and SGLang ends such
a request with a ``KVTransferError``.
"""

from __future__ import annotations

import dataclasses
import logging

from engine.disaggregation import HandoverResult, ask_for_prompt
from engine.generation.base import SharedParts
from engine.generation.decode import DecodeGeneration
from engine.generation.pair_info import FetchPrompt
from engine.scheduling.request import Request

__all__ = ["FetchingDecodeGeneration"]

log = logging.getLogger(__name__)


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
        address = (parts.host, parts.receiver.port)
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
