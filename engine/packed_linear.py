"""A model's linear layers with their weights as oneDNN wants them, for CPUs.

PyTorch computes float32 linear layers with MKL from weights as they were saved. For the few rows of a decode step
most of that time goes into rearranging the weights, anew in every step; and on CPUs that are not Intel's, MKL leaves
their widest vectors unused. Rearranged once, when the model is loaded, 8 layers of ``make_model``'s checkpoint took
(two cores of an AMD EPYC): 1 row 3.5 ms instead of 5.9, 16 rows 7.5 instead of 18, 2,000 rows 490 instead of 670.
"""

from __future__ import annotations

import torch

__all__ = ["PackedLinear", "pack_linears"]


class PackedLinear(torch.nn.Module):
    """Computes what ``linear`` does, for float32 on CPU; inference only.

    Args:
        linear: its weight is copied into oneDNN's own order.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # A plain attribute: an opaque tensor cannot be a parameter.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` -> ``[..., out_features]``."""
        outputs: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._weight, self.bias, "none", [], "")
        return outputs


def pack_linears(model: torch.nn.Module) -> None:
    """Put a ``PackedLinear`` in place of every float32 ``torch.nn.Linear`` of a model on CPU.

    Other dtypes are left alone: PyTorch gives them to oneDNN itself. So are subclasses: they may compute otherwise.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                setattr(module, name, PackedLinear(child))
