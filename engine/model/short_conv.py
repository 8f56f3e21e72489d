"""Short convolutions (LFM2) over the chunks of a step, with states in KV memory.

The state of a layer after ``n`` tokens consists of the convolution's inputs for the last of these tokens. A chunk reads
the state from the block of the token before the chunk. It writes the state after each block that it fills, and the
state after its last token, into the block of that token. So there is a state at each block boundary, and another
request can continue a cached prompt from each block boundary.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.model.attention.paged import PagedBatch

__all__ = ["PagedShortConv", "replace_convolutions"]


class PagedShortConv(torch.nn.Module):
    """A layer that computes the same as ``Lfm2ShortConv`` of transformers, over a ``PagedBatch``; for inference only.

    Args:
        layer: the layer to replace. The new layer has the submodules of ``layer``, under their names.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer_idx = int(layer.layer_idx)
        self.conv, self.in_proj, self.out_proj = layer.conv, layer.in_proj, layer.out_proj

    def forward(self, hidden_states: torch.Tensor, *, paged: PagedBatch, **_: object) -> torch.Tensor:
        """Compute the output ``[1, tokens, hidden]`` for the input ``[1, tokens, hidden]``."""
        number, place = paged.places[self.layer_idx]
        paged.layers.add(self.layer_idx)
        states, memory = paged.states[number], paged.state_memory[:, place]
        before, after, inputs = self.in_proj(hidden_states)[0].chunk(3, dim=-1)
        gated = before * inputs
        weight = self.conv.weight[:, 0].t()  # [length of the state + 1, hidden]
        mixed = torch.empty_like(gated)
        for run in states.runs:
            known = memory.new_zeros(memory.shape[1:]) if run.source is None else memory[run.source]
            tokens = torch.cat([known, gated[run.start : run.stop]])
            mixed[run.start : run.stop] = (tokens.unfold(0, len(weight), 1) * weight.t()).sum(-1)
            memory[run.targets] = tokens[run.ends[:, None] + states.offsets]
        if len(states.rows):
            tokens = torch.cat([memory[states.sources], gated[states.rows, None]], dim=1)
            mixed[states.rows] = (tokens * weight).sum(1)
            memory[states.targets] = tokens[:, 1:]
        if self.conv.bias is not None:
            mixed += self.conv.bias
        output: torch.Tensor = self.out_proj(after * mixed)[None]
        return output


def replace_convolutions(model: torch.nn.Module) -> None:
    """Replace each short convolution of a model by a ``PagedShortConv``."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("ShortConv"):
                setattr(module, name, PagedShortConv(child))
