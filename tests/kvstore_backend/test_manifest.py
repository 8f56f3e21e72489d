"""Manifests are decoded as they were encoded, and refused if they do not match their namespace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_backend.manifest import (
    MANIFEST_BYTES,
    Manifest,
    ManifestError,
    collect_facts,
    decode_manifest,
    encode_manifest,
    manifest_key,
    parse_manifest_key,
)
from kvstore_backend.namespace import FORMAT_VERSION, Namespace

NAMESPACE = Namespace("fingerprint", "float32", 64, 24, 2, 64, "layer,kv,head,token,dim")
MANIFEST = Manifest(NAMESPACE.fields, {"name": "qwen"}, written_at="2026-11-22T15:04:05Z")

TEXTS = st.text("aZ09 -_/:.é漢\U0001f600", max_size=40)
FIELDS = st.dictionaries(TEXTS, TEXTS | st.integers(-(2**63), 2**63), min_size=1, max_size=8)


@settings(max_examples=40)
@given(FIELDS, st.dictionaries(TEXTS, TEXTS, max_size=4), st.integers(1, 9))
def test_an_encoded_manifest_is_decoded(fields: dict[str, str | int], facts: dict[str, str], block_format: int) -> None:
    manifest = Manifest(fields, facts, block_format, "2026-11-22T15:04:05Z")
    try:
        data = encode_manifest(manifest)
    except ManifestError:
        assert len(json.dumps(fields)) > MANIFEST_BYTES // 2
        return
    assert len(data) == MANIFEST_BYTES
    decoded = decode_manifest(data, manifest.digest)
    assert (decoded.fields, decoded.block_format, decoded.written_at) == (fields, block_format, manifest.written_at)
    assert decoded.facts.items() <= facts.items()


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.sampled_from([b"{}", b"[" * 9999, b"null", b'{"manifest":1}', b"9" * 5000]))
def test_other_bytes_are_not_a_manifest(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_manifest(data, NAMESPACE.digest)


def test_the_error_for_other_bytes_is_one_sentence() -> None:
    with pytest.raises(ManifestError, match="the manifest is not JSON"):
        decode_manifest(b"?" * MANIFEST_BYTES, NAMESPACE.digest)


@given(st.sampled_from(["manifest", "fields", "facts", "block_format", "written_at"]), st.data())
def test_a_manifest_with_a_member_of_another_type_is_refused(member: str, data: st.DataObject) -> None:
    wrong = st.none() | st.floats() | st.booleans() | st.lists(st.integers()) | st.just({"model": None})
    value = {**MANIFEST.to_json(), member: data.draw(wrong)}
    with pytest.raises(ManifestError):
        decode_manifest(json.dumps(value).encode(), NAMESPACE.digest)


@pytest.mark.parametrize("field", ["model", "kv_dtype", "block_size", "tp_rank"])
def test_a_manifest_with_fields_of_another_namespace_is_refused(field: str) -> None:
    wrong = replace(MANIFEST, fields={**MANIFEST.fields, field: "other"})
    with pytest.raises(ManifestError, match="the manifest is of namespace "):
        decode_manifest(encode_manifest(wrong), NAMESPACE.digest)


def test_text_that_controls_a_terminal_is_refused() -> None:
    value = {**MANIFEST.to_json(), "facts": {"name": "\x1b[2J"}}
    with pytest.raises(ManifestError, match="facts"):
        decode_manifest(json.dumps(value).encode(), NAMESPACE.digest)


def test_facts_that_do_not_fit_are_omitted_but_fields_never_are() -> None:
    facts = {"name": "qwen", "bell": "\a", **{f"setting {i}": "x" * 390 for i in range(9)}}
    decoded = decode_manifest(encode_manifest(replace(MANIFEST, facts=facts)), NAMESPACE.digest)
    assert decoded.fields == MANIFEST.fields
    assert decoded.facts["name"] == "qwen"
    assert "bell" not in decoded.facts
    with pytest.raises(ManifestError, match="at most 2048"):
        encode_manifest(Manifest({f"field {i}": "x" * 390 for i in range(9)}))


def test_the_digest_is_that_of_the_namespace() -> None:
    assert (MANIFEST.digest, MANIFEST.block_size) == (NAMESPACE.digest, 64)
    assert Manifest(MANIFEST.fields, block_format=FORMAT_VERSION + 1).digest != NAMESPACE.digest


def test_the_key_contains_the_namespace() -> None:
    key = manifest_key(NAMESPACE.digest)
    assert (key, parse_manifest_key(key)) == (f"kvstore-manifest/{NAMESPACE.digest}", NAMESPACE.digest)
    for other in (NAMESPACE.key(bytes(32)), NAMESPACE.digest, "kvstore-manifest/", f"{key}0"):
        with pytest.raises(ValueError, match="is not the key of a manifest"):
            parse_manifest_key(other)


def test_facts_distinguish_a_fine_tune_from_another_architecture(tmp_path: Path) -> None:
    for name, hidden in (("base", 64), ("tuned", 64), ("larger", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden, "_name_or_path": name}))
    base, tuned, larger = (collect_facts(tmp_path / name, "vLLM 1", "vLLM") for name in ("base", "tuned", "larger"))
    assert base["name"] == "base"
    assert base["architecture"] == tuned["architecture"] != larger["architecture"]
