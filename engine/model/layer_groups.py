"""Divides a model's layers into groups by the part of a prefix that they read.

All groups use one KV memory, so all blocks have the same size: room for the KV of ``block_layers`` layers. This is the
number of layers with full attention, or the number of layers with a window if no layer has full attention. The layers
with full attention are one group. The layers with a window form as few groups as possible, each with at most
``block_layers`` layers. A block of convolution layers has the states of these layers after the last token of the block.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kvstore_backend import ConfigError
from kvstore_backend.groups import Group

__all__ = ["ConvState", "LayerGroup", "LayerGroups", "group_layers"]

_WINDOW, _FULL, _CONV = "sliding_attention", "full_attention", "conv"
_SUPPORTED = (_FULL, _WINDOW, _CONV)


@dataclass(frozen=True)
class LayerGroup:
    """A group of a model's layers, and the indices of these layers in the order of their KV in a block."""

    group: Group
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ConvState:
    """Shape of the state of a convolution layer: the inputs of the last ``length`` tokens, with ``width`` channels."""

    length: int
    width: int

    @property
    def size(self) -> int:
        """Number of elements of a state."""
        return self.length * self.width


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers.

    Attributes:
        members: the groups. If a group has full attention, it is the first group.
        block_layers: a block has room for the KV of this number of layers.
        conv: the state of each convolution layer, or None if the model has no convolution layers.
        ignored_window: length of a sliding window that no sequence exceeds: layers with this window are in the group
            with full attention. 0: there is no such window.
    """

    members: tuple[LayerGroup, ...]
    block_layers: int
    conv: ConvState | None = None
    ignored_window: int = 0

    @classmethod
    def of_full(cls, num_layers: int, block_size: int) -> LayerGroups:
        """Return the groups of a model in which all layers have full attention: a single one."""
        return cls((LayerGroup(Group("full", block_size), tuple(range(num_layers))),), num_layers)

    @property
    def is_full(self) -> bool:
        """Whether all layers have full attention."""
        return [member.group.kind for member in self.members] == ["full"]

    @property
    def groups(self) -> list[Group]:
        """For each group, which part of a prefix its layers read."""
        return [member.group for member in self.members]

    @property
    def layers(self) -> set[int]:
        """The indices of all layers."""
        return set(self.places)

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """For each layer, the index of its group, and its index among the layers of a block of this group."""
        return {
            layer: (index, place)
            for index, member in enumerate(self.members)
            for place, layer in enumerate(member.layers)
        }

    def describe(self) -> str:
        """Return a text that lists the groups and their layers; empty if all layers have full attention.

        It becomes a part of ``Namespace.layout``, so that instances whose blocks have different contents do not share
        them.
        """
        if self.is_full:
            return ""
        state = f" of {self.conv.length}x{self.conv.width}" if self.conv else ""
        texts = [
            f"{member.group.name}{state if member.group.kind == 'state' else ''}: {' '.join(map(str, member.layers))}"
            for member in self.members
        ]
        return "; ".join(texts)


def group_layers(folder: str, config: Any, block_size: int, layer_elements: int) -> LayerGroups:
    """Divide the layers of a checkpoint into groups.

    Args:
        folder: the folder of the checkpoint, for messages.
        config: the text configuration of the checkpoint.
        block_size: number of tokens in a block.
        layer_elements: number of elements of one layer's KV in a block.

    Raises:
        ConfigError: this engine does not support a type of layers, or a state does not fit in a block.
    """
    kinds, ignored_window = _list_layer_types(folder, config), _find_ignored_window(config)
    if ignored_window:
        kinds = [_FULL if kind == _WINDOW else kind for kind in kinds]
    full, window, conv = ([i for i, kind in enumerate(kinds) if kind == each] for each in _SUPPORTED)
    members: list[LayerGroup] = []
    if full:
        members.append(LayerGroup(Group("full", block_size), tuple(full)))
    block_layers = len(full) or len(window)
    for layers in _split(window, block_layers):
        members.append(LayerGroup(Group("window", block_size, int(config.sliding_window)), tuple(layers)))
    found = LayerGroups(tuple(members), block_layers, ignored_window=ignored_window)
    if not conv:
        return found
    state = ConvState(int(config.conv_L_cache) - 1, int(config.hidden_size))
    in_block = block_layers * layer_elements // state.size
    if not in_block:
        least = -(-state.size * block_size // max(1, block_layers * layer_elements))
        raise ConfigError(
            f"--model {folder!r}: blocks of {block_size} tokens are too small for the state of a convolution layer; "
            f"give --block-size {least} or more"
        )
    states = [LayerGroup(Group("state", block_size), tuple(layers)) for layers in _split(conv, in_block)]
    return replace(found, members=(*members, *states), conv=state)


def _list_layer_types(folder: str, config: Any) -> list[str]:
    """Return the layers' types, with transformers' names for them; raise ``ConfigError`` if one is not supported."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or [_WINDOW if window else _FULL] * config.num_hidden_layers
    kinds = list(types)[: config.num_hidden_layers]
    if unknown := sorted(set(kinds) - set(_SUPPORTED)):
        raise ConfigError(
            f"--model {folder!r} has layers of type {', '.join(unknown)}; this engine supports only full attention, "
            "sliding windows and short convolutions"
        )
    if _WINDOW in kinds and not window:
        raise ConfigError(f"--model {folder!r} has layers with a sliding window, but its config.json gives no length")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ConfigError(f"--model {folder!r} has layers that use the KV of other layers; this engine cannot run it")
    if _CONV in kinds and (getattr(config, "conv_L_cache", 0) < 2 or set(kinds) == {_CONV}):
        raise ConfigError(
            f"--model {folder!r} has convolution layers in a form that this engine does not support; it supports "
            "the convolutions of LFM2 with a conv_L_cache of at least 2, in models that also have attention"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise ConfigError(f"--model {folder!r} has bidirectional attention; this engine generates from left to right")
    return kinds


def _find_ignored_window(config: Any) -> int:
    """Return the length of the model's sliding window if no sequence can be longer than this window, else 0.

    Some models (PhiMoE) have such a window in their configuration, but do not pass it to attention.
    """
    window, longest = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    return int(window) if window and longest and window >= longest else 0


def _split(layers: list[int], most: int) -> list[list[int]]:
    """Split a list of layers into as few lists as possible, with at most ``most`` layers each, of similar lengths."""
    if not layers:
        return []
    count = -(-len(layers) // most)
    bounds = [len(layers) * i // count for i in range(count + 1)]
    return [layers[begin:end] for begin, end in itertools.pairwise(bounds)]
