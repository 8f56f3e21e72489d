"""Mooncake's TransferEngine: writes bytes into the memory of another process, over tcp or rdma.

Measured with version 0.3.13 over tcp on loopback:

- A write returns 0 only after the receiving process has acknowledged that the bytes are in its memory.
- A write to an address outside of the receiver's registered memory returns -1, within 1 ms.
- If the receiver was killed, a write fails within 1 s.
- If the receiver hangs, a write returns -1 after 30 s, and does not write afterwards. Writes to other processes
  continue.
- The source memory need not be registered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kvstore_backend.config import list_rdma_devices, set_native_defaults

__all__ = ["Transfer", "TransferUnavailable", "choose_protocol", "list_protocols"]

log = logging.getLogger(__name__)


class TransferUnavailable(Exception):
    """Raised if TransferEngine cannot be used on this machine; the message says why."""


class Transfer:
    """TransferEngine in this process: writes to memory of other processes, and lets them write to registered memory.

    This object is never closed.

    Args:
        host: the address of this machine, as other machines reach it.
        protocol: ``tcp`` or ``rdma``.
        devices: names of the RDMA devices to use, separated by commas; empty: Mooncake chooses.

    Raises:
        TransferUnavailable: Mooncake's library cannot be loaded, or TransferEngine cannot be started.
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
        """The name of this process for writes of other processes: ``host:port``."""

    def register(self, address: int, nbytes: int, *, headroom: bool = False) -> None:
        """Let other processes write to memory of this process.

        Args:
            address, nbytes: address and size of the memory.
            headroom: has no effect; it is here because ``Registry`` in ``kvstore_backend.staging`` has it.

        Raises:
            TransferUnavailable: TransferEngine cannot register the memory.
        """
        if code := self._engine.register_memory(address, nbytes):
            raise TransferUnavailable(f"TransferEngine cannot register {nbytes} bytes of KV memory: code {code}")

    def unregister(self, address: int, nbytes: int) -> None:
        """End the registration of memory, so that other processes cannot write to it any more."""
        self._engine.unregister_memory(address)

    def write(self, session: str, sources: Sequence[int], targets: Sequence[int], nbytes: int) -> bool:
        """Write to another process. The call blocks until all bytes have arrived, or for 30 s without progress.

        Args:
            session: ``Transfer.session`` of the other process, its ``host:port``.
            sources: addresses in this process.
            targets: the address in the other process for each source.
            nbytes: number of bytes to write from each source.

        Returns:
            Whether all bytes have arrived. If not, some may have arrived, and others may still arrive.
        """
        sizes = [nbytes] * len(sources)
        try:
            code: int = self._engine.batch_transfer_sync_write(session, list(sources), list(targets), sizes)
        except Exception:
            log.exception("TransferEngine raised an exception during a write to the instance at %s", session)
            return False
        if code:
            log.warning(
                "Writing %d blocks to the instance at %s failed: TransferEngine returned the code %d",
                len(sources),
                session,
                code,
            )
        return code == 0


def choose_protocol(wanted: Sequence[str], named: str = "") -> str:
    """Return the protocol for TransferEngine: rdma if the operator wants it and the machine has it, else tcp.

    Args:
        wanted: the values of ``--cache-transfer-protocol``. ``ipc`` means tcp here: in FastDeploy it is memory that
            instances on one machine share, and TransferEngine uses the loopback network for that.
        named: the value of ``MOONCAKE_PROTOCOL``. If it is ``tcp``, the result is tcp, as for the pool.
    """
    if "rdma" not in wanted or named == "tcp":
        return "tcp"
    if list_rdma_devices():
        return "rdma"
    log.warning("--cache-transfer-protocol %s: this machine has no RDMA device; using tcp", ",".join(wanted))
    return "tcp"


def list_protocols(wanted: Sequence[str], chosen: str) -> list[str]:
    """Return the protocols that this instance supports, for its registration.

    These are the values of ``--cache-transfer-protocol``, with the result of ``choose_protocol`` in place of ``rdma``.
    """
    return list(dict.fromkeys(chosen if protocol == "rdma" else protocol for protocol in wanted))
