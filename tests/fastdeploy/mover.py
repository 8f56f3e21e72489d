"""The process that moves blocks between the pool and the device. The memory of this host replaces the device's."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import sys
import types
from typing import Any

from tests.fastdeploy.link import serve
from tests.support.memory import Memory

_LAYERS, _LAYER_BYTES = 2, 2 * 64 * 16 * 2  # heads, tokens, head_dim, bfloat16
_BLOCKS = 32

_host: list[Memory] = []


def _allocate(nbytes: int) -> int:
    """Replace ``cuda_host_alloc``."""
    _host.append(Memory(nbytes))
    return _host[-1].address


class _Device:
    """The KV of a model: memory for K and V of each layer."""

    def __init__(self) -> None:
        self.kinds = [[Memory(_BLOCKS * _LAYER_BYTES) for _ in range(_LAYERS)] for _ in ("key", "value")]

    def fill(self, contents: list[str]) -> list[str]:
        """Write the first blocks; return their digests."""
        for number, layer in enumerate(layer for kind in self.kinds for layer in kind):
            for block, content in enumerate(contents):
                text = f"{content} {number} ".encode()
                layer.fill((text * _LAYER_BYTES)[:_LAYER_BYTES], block * _LAYER_BYTES)
        return self.digest_blocks(len(contents))

    def clear(self) -> None:
        for layer in (layer for kind in self.kinds for layer in kind):
            layer.fill(b"\xee" * layer.nbytes)

    def digest_blocks(self, blocks: int) -> list[str]:
        """Return the digests of the first blocks."""
        layers = [layer.content for kind in self.kinds for layer in kind]
        return [
            hashlib.sha256(b"".join(layer[i * _LAYER_BYTES : (i + 1) * _LAYER_BYTES] for layer in layers)).hexdigest()
            for i in range(blocks)
        ]


class _Signal:
    def __init__(self, *, array: Any, **_: object) -> None:
        self.value = array + 1


class _Queue:
    """Replaces FastDeploy's queue to the engine."""

    def __init__(self, **_: object) -> None:
        self.done: list[Any] = []

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(wait=lambda: None, reset=lambda: None)

    def put_transfer_done_signal(self, result: Any) -> None:
        self.done.append(result)


def _swap_layout(
    layers: list[Memory], host: int, shape: list[int], device_ids: list[int], host_ids: list[int], _: int, mode: int
) -> None:
    """Replace this kernel: copy between [block, layer, ...] in host memory and [layer][block, ...] on the device."""
    size = math.prod(shape[1:]) * 2
    for number, layer in enumerate(layers):
        for block, place in zip(device_ids, host_ids, strict=True):
            pair = (layer.address + block * size, host + (place * len(layers) + number) * size)
            ctypes.memmove(*(pair if mode == 0 else pair[::-1])[::-1], size)


class TransferProcess:
    """FastDeploy 2.6's transfer process, with its own tasks."""

    def __init__(self) -> None:
        from fastdeploy.cache_manager import cache_transfer_manager as module
        from fastdeploy.cache_manager.cache_tasks import ReadStorageTask, WriteStorageTask

        doubles = {
            "IPCSignal": _Signal,
            "EngineCacheQueue": _Queue,
            "FMQ": lambda: types.SimpleNamespace(queue=lambda *_: None),
            "cuda_host_alloc": _allocate,
            "swap_cache_layout": _swap_layout,
            "logger": logging.getLogger("mover"),
        }
        vars(module).update(doubles)
        self.device = device = _Device()
        self._arguments = module.parse_args()
        self._read, self._write = ReadStorageTask, WriteStorageTask

        class Manager(module.CacheTransferManager):  # type: ignore[misc]
            def _init_gpu_cache(self) -> None:
                self.gpu_cache_k_tensors, self.gpu_cache_v_tensors = device.kinds

            def _init_storage(self, _: object) -> None:
                """Do nothing. The test opens the storage later."""

            def check_cache_status(self, _: object) -> None:
                """Do nothing, because there is no worker."""

            def open_storage(self, arguments: object) -> None:
                self.key_prefix = ""
                super()._init_storage(arguments)

        self._manager = Manager(self._arguments)

    def open(self, environ: dict[str, str]) -> None:
        os.environ.update(environ)
        self._manager.open_storage(self._arguments)

    def update_weights(self) -> None:
        self._manager._update_key_prefix()

    def write(self, hashes: list[str], contents: list[str]) -> list[str]:
        digests = self.device.fill(contents)
        self._manager.write_back_storage_task(self._task(self._write, hashes))
        return digests[: len(self._manager.cache_task_queue.done[-1][3])]

    def read(self, hashes: list[str]) -> list[str]:
        self.device.clear()
        self._manager.read_storage_task(self._task(self._read, hashes, start_read_block_idx=0))
        return self.device.digest_blocks(len(self._manager.cache_task_queue.done[-1][3]))

    def _task(self, kind: Any, hashes: list[str], **more: int) -> Any:
        return kind(task_id="task", keys=hashes, token_ids=None, gpu_block_ids=[*range(len(hashes))], **more)


class Worker:
    """The storage of FastDeploy's worker with cache manager v1."""

    def __init__(self) -> None:
        from fastdeploy.cache_manager import ops

        vars(ops)["cuda_host_alloc"] = _allocate
        self.device = _Device()
        self._staging: Any = None

    def open(self, environ: dict[str, str]) -> None:
        from fastdeploy.cache_manager.v1.storage import create_storage_connector
        from fastdeploy.cache_manager.v1.storage.staging_manager import StagingManager

        os.environ.update(environ)
        config = types.SimpleNamespace(kvcache_storage_backend="mooncake", kvcache_storage_config=None)
        connector = create_storage_connector(config, tp_rank=0)
        assert connector.connect()
        self._staging = StagingManager(connector, 8)
        self._staging.initialize(_LAYERS, {"key": _LAYER_BYTES, "value": _LAYER_BYTES})

    def update_weights(self) -> None:
        """Do nothing, because the keys have no version of the weights."""

    def write(self, hashes: list[str], contents: list[str]) -> list[str]:
        digests = self.device.fill(contents)
        return digests[: self._count_moved(self._staging.batch_set_block, hashes)]

    def read(self, hashes: list[str]) -> list[str]:
        self.device.clear()
        return self.device.digest_blocks(self._count_moved(self._staging.batch_get_block, hashes))

    def _count_moved(self, move: Any, hashes: list[str]) -> int:
        """Move blocks; return how many leading blocks were moved."""
        kinds = ("key", "value")
        keys = {kind: [f"{block_hash}_0_{kind}" for block_hash in hashes] for kind in kinds}
        places = {
            kind: [layer.address for layer in layers] for kind, layers in zip(kinds, self.device.kinds, strict=True)
        }
        return [*move(keys, places, [*range(len(hashes))]), False].index(False)


def main() -> None:
    is_v1 = os.environ["TEST_FASTDEPLOY_FORM"] == "v1"
    mover = Worker() if is_v1 else TransferProcess()
    serve("mover", {name: getattr(mover, name) for name in ("open", "update_weights", "write", "read")})


if __name__ == "__main__":
    sys.modules["tests.fastdeploy.mover"] = sys.modules["__main__"]
    main()
