"""Detects tensor operations that would make the host wait for a GPU, on machines without a GPU.

On a CPU no operation waits, so this module detects them by their names and arguments. There are two kinds: operations
that read a tensor's value on the host (``.item()``, an ``if``, a boolean index), and blocking copies of host numbers to
a tensor (``torch.tensor(numbers)``, a list as an index, tensors of two devices in one operation).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["DeviceWatch", "HostWaits"]

_WAITING_OPERATIONS = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_WAITING_METHODS = {"cpu", "numpy", "tolist"}
_COPIES = {"_to_copy", "copy_", "to"}


class HostWaits(AssertionError):
    """The host would have waited for the device."""


class DeviceWatch:
    """Fails a ``with`` block that would wait for a device. Functions that ``allow`` wraps may wait."""

    def __init__(self) -> None:
        self.times_allowed = 0
        self._is_watching = True
        self._allows_lists = False

    def allow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` so that it may wait, and count its calls. It is the only place where a step may wait."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.times_allowed += 1
            self._is_watching = False
            try:
                return function(*args, **kwargs)
            finally:
                self._is_watching = True

        return call

    @contextlib.contextmanager
    def watching(self, *, allows_lists: bool = False) -> Iterator[None]:
        """Watch all tensor operations of this thread.

        Args:
            allows_lists: host tensors may be made from lists. Use it only with a device other than the CPU, which
                shows if they are used without a copy.
        """
        self._allows_lists = allows_lists
        with _Calls(self.check_call), _Operations(self.check_operation):
            yield

    def check_call(self, name: str) -> None:
        """Check a Python call, before torch divides it into operations."""
        if self._is_watching and name in _WAITING_METHODS:
            raise HostWaits(f"Tensor.{name}() in a step")

    def check_operation(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watching:
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in _WAITING_OPERATIONS:
            raise HostWaits(f"{name} in a step")
        if name == "repeat_interleave" and isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None:
            raise HostWaits("as many repetitions as a tensor says, in a step")
        if name == "where" and len(tensors) == 1:
            raise HostWaits("the places where a condition holds, in a step")
        if name in ("index", "index_put_") and any(tensor.dtype == torch.bool for tensor in tensors[1:]):
            raise HostWaits("a boolean index in a step")
        if name == "lift_fresh" and not self._allows_lists and any(tensor.dim() for tensor in tensors):
            raise HostWaits("a tensor made of a list of numbers in a step")
        if name not in _COPIES and len({tensor.device.type for tensor in tensors if tensor.dim()}) > 1:
            raise HostWaits(f"{name} of tensors on two devices in a step")


class _Calls(TorchFunctionMode):
    def __init__(self, check: Callable[[str], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, check: Callable[[str, tuple[Any, ...], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(func.overloadpacket.__name__, args, kwargs or {})
        return func(*args, **(kwargs or {}))
