"""Comparison of two set-ups: why their instances do not share blocks, from the manifests of their namespaces.

Only the digests decide whether they share blocks. The verdict names each field that differs, the most informative
first: a different model explains different shapes, not the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore_backend.manifest import Manifest
from kvstore_backend.why_miss.verdict import Verdict

__all__ = ["compare_setups"]

# Fields with a verdict each, ordered by how much they explain.
_REMEDIES = {
    "weights_version": ("other_weights", "the version of the weights", "one of them has updated its weights in place"),
    "kv_dtype": ("other_dtype", "the dtype of the KV", "start both with one dtype"),
    "block_size": (
        "other_block_size",
        "the block size",
        "for our engine this is the same model in another sharding, which it reads if one size divides the other; else "
        "start both with one block size",
    ),
    "tp_size": (
        "other_tp_size",
        "the tensor-parallel size",
        "for our engine and vLLM this is the same model in another sharding, which they read if its KV heads divide "
        "evenly; "
        "else start both with one tensor-parallel size",
    ),
    "tenant": ("other_tenant", "the tenant", "blocks are shared within one tenant only"),
    "layout": ("other_layout", "the layout of a block", "run one version of the engine with one attention backend"),
}
_SHAPE = ("num_layers", "num_kv_heads", "head_size")
_RANK = "tp_rank"
# First word in the names of facts that are settings of the engine.
_SETTING = "setting "


def compare_setups(first: Manifest, second: Manifest, names: tuple[str, str] = ("the first", "the second")) -> Verdict:
    """Explain why the namespaces of two manifests differ, or report that they are equal.

    Args:
        names: names of the two set-ups for the sentence.
    """
    if first.digest == second.digest:
        return Verdict("same_setup", f"{names[0]} and {names[1]} have one namespace, {first.digest}: they share blocks")
    found = list(_list_differences(first, second, names))
    (reason, sentence), more = found[0], [sentence for _, sentence in found[1:]]
    also = f" (also: {'; '.join(more)})" if more else ""
    changed = {
        name: [first.fields.get(name), second.fields.get(name)]
        for name in sorted({*first.fields, *second.fields})
        if first.fields.get(name) != second.fields.get(name)
    }
    return Verdict(reason, sentence + also, {"fields": changed, "reasons": [each for each, _ in found]})


def _list_differences(first: Manifest, second: Manifest, names: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the reason and a sentence for each difference."""
    one, other = first.fields, second.fields

    def differs(name: str) -> bool:
        return one.get(name) != other.get(name)

    def tell(name: str, title: str) -> str:
        return f"{title} differs: {_tell_values(one.get(name), other.get(name), names)}"

    engines = first.facts.get("block_hashes"), second.facts.get("block_hashes")
    if all(engines) and engines[0] != engines[1]:
        yield (
            "other_engine",
            f"the engines differ, each of which names blocks in its own way: {' and '.join(map(str, engines))}",
        )
    if differs("model"):
        yield _explain_model(first, second, names)
    for name, (reason, title, remedy) in _REMEDIES.items():
        if differs(name):
            yield reason, f"{tell(name, title)}; {remedy}"
    if shapes := [name for name in _SHAPE if differs(name)]:
        yield "other_shape", "; ".join(tell(name, name) for name in shapes)
    for name in sorted({*one, *other} - {"model", _RANK, *_REMEDIES, *_SHAPE}):
        if differs(name):
            yield "other_field", tell(name, name)
    if first.block_format != second.block_format:
        formats = f"{first.block_format} of {names[0]}, {second.block_format} of {names[1]}"
        yield "other_format", f"the format of blocks differs: {formats}; run one version of fastdeploy-kvstore"
    if differs(_RANK):
        yield "other_rank", f"{tell(_RANK, 'the rank')}; each rank of a set-up has its own blocks"


def _explain_model(first: Manifest, second: Manifest, names: tuple[str, str]) -> tuple[str, str]:
    """Explain different fingerprints of models, as far as the facts allow: other architecture, weights, or settings."""
    one, other = first.facts, second.facts
    called = _tell_values(one.get("name"), other.get("name"), names)
    if one.get("architecture") != other.get("architecture") or not one.get("architecture"):
        return "other_model", f"the model differs: {called}"
    settings = [
        name for name in sorted({*one, *other}) if name.startswith(_SETTING) and one.get(name) != other.get(name)
    ]
    if settings and one.get("checkpoint") == other.get("checkpoint"):
        differences = [
            f"{name.removeprefix(_SETTING)} ({_tell_values(one.get(name), other.get(name), names)})"
            for name in settings
        ]
        reason = "other_dtype" if settings == [f"{_SETTING}dtype"] else "other_settings"
        return reason, f"settings that change what is computed differ: {', '.join(differences)}"
    return "other_weights", (
        f"the weights differ ({called}), though both have one architecture: one may be a fine-tune or another "
        "revision; give both the same checkpoint"
    )


def _tell_values(one: object, other: object, names: tuple[str, str]) -> str:
    """Describe which set-up has which value."""
    return f"{_quote(one)} of {names[0]}, {_quote(other)} of {names[1]}"


def _quote(value: object) -> str:
    return "nothing" if value in (None, "") else f"{value!r}" if isinstance(value, str) else str(value)
