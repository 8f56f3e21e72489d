"""KV blocks between a device's memory and the pool, copied through host memory.

Only this package of the three needs torch.

>>> from kvstore_backend.staging import KVTensors, StagedMemory
>>> transfers = Transfers(pool, StagedMemory(KVTensors(layers, num_blocks), pool), post)  # doctest: +SKIP

memory.py    StagedMemory: KV memory for ``Transfers``; windows, one ring and one stream for each direction
tensors.py   KVTensors: KV memory of any layout as rows of bytes, one for each block
ring.py      host buffers, registered with the pool, that are used one after another
device.py    the interface of a device: streams, events, memory
cuda.py      a device: CUDA's streams, events and pinned memory
stand_in.py  a replacement of a device: threads and host memory

``docs/internals/staging.md`` describes the path of a block and the rules of order.
"""

from kvstore_backend.staging.device import Codec, Device, Step, Stream
from kvstore_backend.staging.memory import StagedMemory
from kvstore_backend.staging.ring import Registry
from kvstore_backend.staging.stand_in import StandInDevice
from kvstore_backend.staging.tensors import KVTensors

__all__ = ["Codec", "Device", "KVTensors", "Registry", "StagedMemory", "StandInDevice", "Step", "Stream"]
