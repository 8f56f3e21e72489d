"""Linear layers with weights in oneDNN's order, for CPUs.

PyTorch computes float32 linear layers with MKL. MKL rearranges the weights in each call, which takes most of the time
for the few rows of a decode step. On CPUs that are not Intel's, it also does not use the widest vector instructions.
Here the weights are rearranged once, when the model is loaded. Measured with 8 layers of ``make_model``'s checkpoint on
two cores of an AMD EPYC: 3.5 ms instead of 5.9 for 1 row, 7.5 ms instead of 18 for 16 rows, 490 ms instead of 670 for
2,000 rows.

oneDNN compiles code for each number of rows, and caches the code for 1,024 numbers, 0.6 MiB each. A prefill
instance has many different numbers of rows, so this took 300 MiB. So inputs are padded to one of a few numbers of rows.
"""

from __future__ import annotations

import torch

__all__ = ["PackedLinear", "pack_linears", "round_up_rows"]


class PackedLinear(torch.nn.Module):
    """A linear layer for float32 on a CPU that computes the same as ``linear``; for inference only.

    Args:
        linear: the layer to replace. Its weight is copied in oneDNN's order.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute, because a tensor in oneDNN's order cannot be a parameter.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute the output ``[..., out_features]`` for the input ``[..., in_features]``."""
        rows = inputs.numel() // self.in_features
        filled = inputs.reshape(rows, self.in_features)
        if added := round_up_rows(rows) - rows:
            filled = torch.nn.functional.pad(filled, (0, 0, 0, added))
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(filled, self._weight, self.bias, "none", [], "")
        return outputs[:rows].view(*inputs.shape[:-1], self.out_features)


def round_up_rows(rows: int) -> int:
    """Return the number of rows after padding: ``rows`` itself up to 16; above that, for example 18 for 17, 36 for 33.

    Above 16 there are 8 different results between a power of 2 and the next one.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack_linears(model: torch.nn.Module) -> None:
    """Replace each float32 ``torch.nn.Linear`` of a model on a CPU by a ``PackedLinear``.

    Layers of other dtypes stay, because PyTorch computes them with oneDNN. Subclasses stay, because they may compute
    something else.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))
