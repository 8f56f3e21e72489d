"""Mooncake's own offload to an SSD folder, with a real master and a real owner."""

from __future__ import annotations

import os
import secrets
from functools import partial
from pathlib import Path

from kvstore_backend.backend import Status, StorageBackend
from kvstore_backend.config import PoolConfig
from kvstore_backend.pool import open_store
from tests.support.mooncake import mooncake_master
from tests.support.peer import Peer
from tests.support.waiting import wait_until

OWNER_ENVIRON = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(32 << 20),
}


def test_a_few_blocks_are_written_to_the_ssd(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    folder.mkdir()
    with mooncake_master(tmp_path / "master.log", "--enable_offload=true") as master:
        config = master.config(enable_ssd_offload=True, ssd_offload_path=str(folder))
        with Peer(partial(_open_owner, config)) as owner:
            for count in (3, 2):  # with larger buckets, the owner would never write the first blocks
                blocks = [secrets.token_bytes(4096) for _ in range(count)]
                for block in blocks:
                    assert owner.put(f"block-{secrets.token_hex(8)}", block) is Status.OK
                wait_until(partial(_are_in_folder, blocks, folder), f"{count} blocks to be on the SSD", deadline_s=30)


def _open_owner(config: PoolConfig) -> StorageBackend:
    os.environ.update(OWNER_ENVIRON)
    return open_store(config)


def _are_in_folder(blocks: list[bytes], folder: Path) -> bool:
    files = [path.read_bytes() for path in folder.rglob("*.bucket")]
    return all(any(block in content for content in files) for block in blocks)
