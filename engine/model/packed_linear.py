"""A model's linear layers with their weights in oneDNN's own order, for CPUs.

PyTorch computes float32 linear layers with MKL from weights as they were saved. For the few rows of a decode step most
of that time goes into rearranging the weights, again in every step; and on CPUs that are not Intel's, MKL does not use
their widest vectors. Rearranged once, when the model is loaded, 8 layers of ``make_model``'s checkpoint took (two cores
of an AMD EPYC): 1 row 3.5 ms instead of 5.9, 16 rows 7.5 instead of 18, 2,000 rows 490 instead of 670.

oneDNN compiles and caches code for every new number of rows, 0.6 MiB each, until it has 1,024 of them. A prefill
instance has every possible number, and grew by 300 MiB: so rows are padded to one of few numbers.
"""

from __future__ import annotations

import torch

__all__ = ["PackedLinear", "pack_linears", "round_up_rows"]


class PackedLinear(torch.nn.Module):
    """Computes the same as ``linear``, for float32 on CPU; inference only.

    Args:
        linear: the layer to replace; its weight is copied into oneDNN's own order.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute: an opaque tensor cannot be a parameter.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute ``[..., in_features]`` -> ``[..., out_features]``."""
        rows = inputs.numel() // self.in_features
        filled = inputs.reshape(rows, self.in_features)
        if added := round_up_rows(rows) - rows:
            filled = torch.nn.functional.pad(filled, (0, 0, 0, added))
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self.bias, "none", [], "")
        return outputs[:rows].view(*inputs.shape[:-1], self.out_features)


def round_up_rows(rows: int) -> int:
    """Return the number of rows to compute for ``rows``: the same up to 16, then one of eight for each doubling."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack_linears(model: torch.nn.Module) -> None:
    """Replace every float32 ``torch.nn.Linear`` of a model on CPU by a ``PackedLinear``.

    Other dtypes are unchanged: PyTorch passes them to oneDNN itself. So are subclasses: they may compute otherwise.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))
