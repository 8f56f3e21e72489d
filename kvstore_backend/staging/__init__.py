"""Moves KV blocks between a device's memory and the pool, through buffers in host memory.

In ``kvstore_backend`` only this package needs torch.

>>> from kvstore_backend.staging import KVTensors, StagedMemory
>>> transfers = Transfers(pool, StagedMemory(KVTensors(layers, num_blocks), pool), post)  # doctest: +SKIP

memory.py    StagedMemory: KV memory for ``Transfers``, with a ring of buffers and a stream for each direction
tensors.py   KVTensors: reads and writes the blocks of KV memory as rows of bytes, for any layout
ring.py      Ring: host buffers, registered with the pool, that are used one after another
device.py    Device: the interface of a device with streams, events and memory
cuda.py      CudaDevice: a GPU, with CUDA's streams, events and pinned memory
stand_in.py  StandInDevice: threads and host memory in place of a device

``docs/internals/staging.md`` describes the path of a block, and which copy waits for which.
"""

from kvstore_backend.staging.device import Codec, Device, Step, Stream
from kvstore_backend.staging.memory import StagedGroups, StagedMemory
from kvstore_backend.staging.ring import Registry
from kvstore_backend.staging.stand_in import StandInDevice
from kvstore_backend.staging.tensors import KVTensors

__all__ = [
    "Codec",
    "Device",
    "KVTensors",
    "Registry",
    "StagedGroups",
    "StagedMemory",
    "StandInDevice",
    "Step",
    "Stream",
]
