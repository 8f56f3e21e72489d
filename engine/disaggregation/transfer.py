"""Mooncake's TransferEngine: writes one process's bytes into another's memory, over tcp or rdma.

Measured over tcp on loopback with 0.3.13: a write returns 0 only when the receiving end acknowledged that the bytes are
in memory. An address outside of the receiver's registered memory is refused (-1, within 1 ms). A killed receiver is
detected within 1 s. A hung receiver is detected after 30 s: the write then returns -1 and writes no more, while writes
to other processes continue concurrently. The source need not be registered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvstore_backend.config import list_rdma_devices, set_native_defaults

__all__ = ["Transfer", "TransferUnavailable", "choose_protocol", "list_protocols"]

log = logging.getLogger(__name__)


class TransferUnavailable(Exception):
    """TransferEngine cannot be used here; the message says why."""


class Transfer:
    """This process's end of TransferEngine; other processes may write to memory that it has registered. Never closed.

    Args:
        host: this machine's address, as other machines reach it.
        protocol: ``tcp`` or ``rdma``.
        devices: names of the RDMA devices to use, separated by commas; empty: Mooncake chooses.

    Raises:
        TransferUnavailable: the library cannot be loaded, or it refuses.
    """

    def __init__(self, host: str, protocol: str, devices: str = "") -> None:
        set_native_defaults()
        try:
            from mooncake.engine import TransferEngine
        except ImportError as exc:
            raise TransferUnavailable(f"Mooncake's library cannot be loaded ({exc})") from exc
        self.protocol = protocol
        self._engine: Any = TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices if protocol == "rdma" else ""):
            over = f"{protocol} ({devices})" if protocol == "rdma" and devices else protocol
            raise TransferUnavailable(f"TransferEngine cannot be started at {host} over {over}: code {code}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        """The name that other processes use to write to this process: ``host:port``."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Let other processes write to this memory; ``headroom`` is ignored, only pools need it.

        Raises:
            TransferUnavailable: TransferEngine refuses.
        """
        if code := self._engine.register_memory(address, nbytes):
            raise TransferUnavailable(f"TransferEngine cannot register {nbytes} bytes of KV memory: code {code}")

    def unregister(self, address: int, nbytes: int) -> None:
        """End the registration of memory: no process may write to it any more."""
        self._engine.unregister_memory(address)

    def write(self, session: str, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> bool:
        """Write ``nbytes`` from each source address to its target in ``session``; return whether all of it has arrived.

        After False any part of it may have arrived, or may still be in progress. The call blocks for 30 s at most after
        the last progress.
        """
        sizes = [nbytes] * len(sources)
        try:
            code: int = self._engine.batch_transfer_sync_write(session, list(sources), list(targets), sizes)
        except Exception:
            log.exception("TransferEngine raised on a write to %s", session)
            return False
        if code:
            log.warning("Writing %d blocks to %s failed: code %d", len(sources), session, code)
        return code == 0


def choose_protocol(wanted: Sequence[str], named: str = "") -> str:
    """Return TransferEngine's protocol for ``--cache-transfer-protocol``: rdma if wanted and available, else tcp.

    ``MOONCAKE_PROTOCOL`` (``named``) set to ``tcp`` decides, as it does for the pool, even if rdma is wanted and
    available. ``ipc`` is tcp: FastDeploy means memory shared within one machine, which TransferEngine reaches over
    loopback.
    """
    if "rdma" not in wanted or named == "tcp":
        return "tcp"
    if list_rdma_devices():
        return "rdma"
    log.warning("--cache-transfer-protocol %s: this machine has no RDMA device; using tcp", ",".join(wanted))
    return "tcp"


def list_protocols(wanted: Sequence[str], chosen: str) -> list[str]:
    """Return the values of ``--cache-transfer-protocol`` that really work: tcp for an rdma that was not ``chosen``.

    Args:
        wanted: the flag's values.
        chosen: the result of ``choose_protocol``.
    """
    return list(dict.fromkeys(chosen if protocol == "rdma" else protocol for protocol in wanted))
