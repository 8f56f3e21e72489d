"""vLLM's dialect with its NixlConnector: prefill first, then decode with prefill's ``kv_transfer_params``.

Prefill retains the prompt's KV for decode, for a bounded time. Fields are read, and requests refused, as in vLLM:
incomplete parameters do not fail the request; the instance then computes the prompt itself.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

from engine.apis.completions import PairDialect
from engine.generation import PairInfo
from engine.protocol import ApiError, ChatBody, GenerationBody
from simulation.actors.dialects.fetching_decode import FetchPrompt
from simulation.actors.dialects.retained import RetainedPrompt
from simulation.actors.dialects.retaining_prefill import RetainPrompt

__all__ = ["VllmDialect"]

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""vLLM's ``kv_lease_duration``."""
_REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class VllmDialect(PairDialect):
    """Reads and writes ``kv_transfer_params``.

    Args:
        host, port: the address where decode instances request the prompts that are retained here.
    """

    def __init__(self, host: str, port: int) -> None:
        self.registration: dict[str, Any] = {"engine": "vllm", "kv_connector": "nixl"}
        self._host, self._port = host, port
        self._engine_id = str(uuid.uuid4())

    def read_pairs(self, body: GenerationBody, request_id: str, num_prompts: int) -> Sequence[PairInfo | None]:
        # All prompts have the same role: the answer names only the first prompt, and the others are found by their
        # numbers. (vLLM's decode would read the first prompt's blocks for each of them.)
        return [self._read_pair(body, request_id)] * num_prompts

    def _read_pair(self, body: GenerationBody, request_id: str) -> PairInfo | None:
        limit = body.max_completion_tokens if isinstance(body, ChatBody) else None
        limit = body.max_tokens if limit is None else limit
        if limit is not None and body.min_tokens > limit:
            message = f"min_tokens must be less than or equal to max_tokens={limit}, got {body.min_tokens}."
            raise ApiError(400, message, param="min_tokens")
        params = body.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            return RetainPrompt(f"{request_id}-{uuid.uuid4().hex[:8]}", LEASE_SECONDS, describe=self._describe_prompt)
        if not params.get("do_remote_prefill") or not params.get("remote_block_ids"):
            return None
        if any(name not in params for name in _REMOTE_FIELDS) or not _is_port(params["remote_port"]):
            log.warning("Got invalid KVTransferParams: %s. This request will not utilize KVTransfer", params)
            return None
        host, port = str(params["remote_host"]), int(params["remote_port"])
        return FetchPrompt(str(params["remote_request_id"]), host, port, takes_token=False)

    def _describe_prompt(self, retained: RetainedPrompt) -> dict[str, Any]:
        """Return the members of a prefill's answer by which decode finds the prompt."""
        return {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [retained.blocks],
                "remote_engine_id": self._engine_id,
                "remote_request_id": retained.key,
                "remote_host": self._host,
                "remote_port": self._port,
                "tp_size": 1,
                "dcp_size": 1,
                "pp_size": 1,
                "remote_num_tokens": retained.prompt.num_tokens,
                "remote_blocks_expiry_time": None,
                "transfer_mode": "pull",
            }
        }


def _is_port(value: Any) -> bool:
    return isinstance(value, (int, str)) and str(value).isdecimal() and 0 < int(value) < 65536
