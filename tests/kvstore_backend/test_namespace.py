from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_backend import namespace as module
from kvstore_backend.backend import ConfigError
from kvstore_backend.namespace import Namespace, fingerprint_model, mark_changed_weights, stat_weights

NAMESPACE = Namespace(
    model="fingerprint",
    kv_dtype="float32",
    block_size=64,
    num_layers=24,
    num_kv_heads=2,
    head_size=64,
    layout="layer,kv,head,token,dim",
)
NAMESPACES = st.builds(
    Namespace,
    model=st.text(max_size=4),
    kv_dtype=st.sampled_from(["float32", "bfloat16"]),
    block_size=st.integers(1, 300),
    num_layers=st.integers(1, 300),
    num_kv_heads=st.integers(1, 300),
    head_size=st.integers(1, 300),
    layout=st.text(max_size=4),
    weights_version=st.text(max_size=4),
    tp_size=st.integers(1, 300),
    tp_rank=st.integers(0, 300),
)
Tensors = dict[str, tuple[list[int], bytes]]
TENSORS: Tensors = {"embed": ([4, 64], bytes(range(256))), "norm": ([8], b"normnorm")}
"""Name -> (shape, bytes of int8)."""


@given(NAMESPACES, NAMESPACES)
def test_digests_are_equal_only_if_the_namespaces_are_equal(one: Namespace, other: Namespace) -> None:
    assert (one.digest == other.digest) == (one == other)


@pytest.mark.parametrize("name", [field.name for field in fields(Namespace)])
def test_each_field_alone_changes_digest_and_key(name: str) -> None:
    value = getattr(NAMESPACE, name)
    changed: dict[str, Any] = {name: f"{value}x" if isinstance(value, str) else value + 1}
    other = replace(NAMESPACE, **changed)
    assert other.digest != NAMESPACE.digest
    assert other.key(b"h" * 32) != NAMESPACE.key(b"h" * 32)


def test_another_format_version_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = NAMESPACE.digest
    monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    assert replace(NAMESPACE).digest != digest


@given(NAMESPACES, NAMESPACES, st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_keys_are_equal_only_if_namespace_and_hash_are_equal(
    one: Namespace, other: Namespace, block: bytes, other_block: bytes
) -> None:
    assert (one.key(block) == other.key(other_block)) == ((one, block) == (other, other_block))


def test_a_key_has_the_documented_form() -> None:
    assert NAMESPACE.key(bytes(range(32))) == f"kv1-{NAMESPACE.digest}-{bytes(range(32)).hex()}"
    assert len(NAMESPACE.digest) == 32


def test_digests_stay_the_same_from_release_to_release() -> None:
    """A release finds the blocks that another release stored."""
    assert NAMESPACE.digest == "51f2bd4ba4439d3a823c8cfa78d7e4e8"


def test_fingerprints_stay_the_same_from_release_to_release(tmp_path: Path) -> None:
    large: Tensors = {
        "large": ([5, 200], bytes(range(200)) * 5),
        "small": ([2, 3], b"tensor"),
        "middle": ([7, 11], bytes(range(77))),
        "last": ([200], bytes(range(255, 55, -1))),
    }
    assert fingerprint_model(checkpoint(tmp_path / "safetensors", tensors=large)) == "f0b2502d9ce534277acce1171312d6a3"
    other = checkpoint(tmp_path / "other")
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    for size, fingerprint in (
        (10, "08e9b36fc295f9f852b1ebdf379f9270"),
        (1000, "2d07a6d3a9e93a75eb566716a80fffb7"),
        (100_000, "d78f04805aae92255d983a34f5c69822"),
    ):
        (other / "pytorch_model.bin").write_bytes((bytes(range(251)) * 400)[:size])
        assert fingerprint_model(other) == fingerprint


def test_the_order_of_a_configs_keys_does_not_matter(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", config={"hidden_size": 64, "head_dim": 8})
    two = checkpoint(tmp_path / "two", config={"head_dim": 8, "hidden_size": 64})
    assert fingerprint_model(one) == fingerprint_model(two)


def test_a_checkpoint_of_empty_tensors_has_a_fingerprint(tmp_path: Path) -> None:
    assert len(fingerprint_model(checkpoint(tmp_path / "m", tensors={"bias": ([0], b"")}))) == 32


def test_a_copy_of_a_checkpoint_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    original = checkpoint(tmp_path / "model")
    copied = Path(shutil.copytree(original, tmp_path / "deeper" / "renamed"))
    assert fingerprint_model(copied) == fingerprint_model(original)


def test_the_origin_of_a_config_does_not_matter(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", config={"hidden_size": 64, "_name_or_path": "a", "transformers_version": "4"})
    two = checkpoint(tmp_path / "two", config={"transformers_version": "5", "hidden_size": 64})
    assert fingerprint_model(one) == fingerprint_model(two)


@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"hidden_size": 64, "rope_theta": 1e6}},
        {"tensors": {**TENSORS, "embed": ([4, 64], bytes(128) + bytes(range(128)))}},
        {"tensors": {**TENSORS, "embed": ([4, 64], bytes(range(255)) + b"x")}},
        {"tensors": {**TENSORS, "norm": ([8], b"normnorn")}},
        {"tensors": {**TENSORS, "norm": ([2, 4], b"normnorm")}},
        {"tensors": {"embed": TENSORS["embed"], "mron": TENSORS["norm"]}},
        {"tensors": {**TENSORS, "bias": ([0], b"")}},
        {"file": "other.safetensors"},
        {"index": '{"weight_map": {"embed": "model.safetensors"}}'},
    ],
    ids=["config", "weights", "a row at the end", "last byte", "shape", "name", "tensor added", "file", "index"],
)
def test_a_checkpoint_that_differs_in_one_thing_is_another_model(tmp_path: Path, changed: dict[str, Any]) -> None:
    base, other = checkpoint(tmp_path / "base"), checkpoint(tmp_path / "other", **changed)
    assert fingerprint_model(base) != fingerprint_model(other)


def test_names_and_shapes_far_into_a_long_header_count(tmp_path: Path) -> None:
    names = [f"layers.{i}.weight" for i in range(500)]
    base = checkpoint(tmp_path / "base", tensors={name: ([2, 3], b"weight") for name in names})
    other = checkpoint(tmp_path / "other", tensors={name: ([3, 2], b"weight") for name in names})
    assert fingerprint_model(base) != fingerprint_model(other)


def test_weights_of_other_formats_are_sampled(tmp_path: Path) -> None:
    base, other = checkpoint(tmp_path / "base"), checkpoint(tmp_path / "other")
    for folder, content in ((base, bytes(1000)), (other, bytes(500) + b"x" * 100 + bytes(400))):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        (folder / "pytorch_model.bin").write_bytes(content)
    assert fingerprint_model(base) != fingerprint_model(other)


def test_the_error_names_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model folder '{tmp_path}/none' does not exist"):
        fingerprint_model(tmp_path / "none")


def test_the_error_names_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model folder '{tmp_path}' has no config.json"):
        fingerprint_model(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "m") / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        fingerprint_model(tmp_path / "m")


def test_a_folder_may_lack_weights_if_they_are_not_needed(tmp_path: Path) -> None:
    (checkpoint(tmp_path / "m") / "model.safetensors").unlink()
    other = checkpoint(tmp_path / "other", config={"hidden_size": 8})
    (other / "model.safetensors").unlink()
    one, two = (fingerprint_model(folder, needs_weights=False) for folder in (tmp_path / "m", other))
    assert one != two


def test_the_configuration_may_be_in_another_folder(tmp_path: Path) -> None:
    folder, other = checkpoint(tmp_path / "m"), checkpoint(tmp_path / "other", config={"hidden_size": 8})
    whole = fingerprint_model(folder)
    shutil.move(folder / "config.json", tmp_path)
    assert fingerprint_model(folder, tmp_path) == whole != fingerprint_model(folder, other)


def test_a_folder_in_the_format_of_mistral_is_identified_by_params_json(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", file="consolidated.safetensors")
    (folder / "config.json").rename(folder / "params.json")
    before = fingerprint_model(folder)
    (folder / "params.json").write_text('{"dim": 8}')
    assert fingerprint_model(folder) != before
    assert mark_changed_weights("", folder, age=0) == ""


@pytest.mark.parametrize(("content", "sentence"), [("{", "is not JSON"), ("[1]", "must contain one JSON object")])
def test_the_error_names_a_config_that_cannot_be_used(tmp_path: Path, content: str, sentence: str) -> None:
    (checkpoint(tmp_path / "m") / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"config.json {sentence}"):
        fingerprint_model(tmp_path / "m")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\0\0",
        (2**60).to_bytes(8, "little") + b"{}",
        (90).to_bytes(8, "little") + b"{}",
        (5).to_bytes(8, "little") + b"not j",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 4]}}' + b"abc",
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [3, 1]}}' + b"abc",
        (28).to_bytes(8, "little") + b'{"a": {"data_offsets": [1]}}' + b"abc",
    ],
)
def test_the_error_names_a_broken_safetensors_file(tmp_path: Path, content: bytes) -> None:
    (checkpoint(tmp_path / "m") / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.safetensors is not a (complete )?safetensors file"):
        fingerprint_model(tmp_path / "m")


def test_weights_that_changed_after_the_start_get_a_version_of_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "m")
    assert mark_changed_weights("2", folder, age=0) == "2"
    marked = {mark_changed_weights("2", folder, age=3600) for _ in range(2)}
    assert len(marked) == 2
    assert all(version.startswith("2 ") for version in marked)
    assert f"{folder / 'config.json'} has changed (" in caplog.text


def swap_link(parent: Path) -> None:
    (parent / "new").symlink_to("v2")
    (parent / "new").rename(parent / "current")


def swap_folder(parent: Path) -> None:
    (parent / "v1").rename(parent / "old")
    (parent / "v2").rename(parent / "v1")


def swap_file(parent: Path) -> None:
    (parent / "v1/new").symlink_to("../v2/model.safetensors")
    (parent / "v1/new").rename(parent / "v1/model.safetensors")


@pytest.mark.parametrize(
    ("change", "is_marked"),
    [
        (swap_link, True),
        (swap_folder, True),
        (swap_file, True),
        (lambda parent: (parent / "v1/README.md").touch(), False),
        (lambda parent: (parent / "v1/config.json").unlink(), True),
    ],
    ids=["link", "folder", "file", "another file", "removed"],
)
def test_older_files_that_replaced_the_loaded_weights_count_as_changed(
    tmp_path: Path, change: Callable[[Path], object], is_marked: bool
) -> None:
    """Only the names of the files change, not their contents."""
    checkpoint(tmp_path / "v1")
    checkpoint(tmp_path / "v2")
    (tmp_path / "current").symlink_to("v1")

    def wait_for_later_times() -> float:
        """Wait until a new file has a later time than all older files; return that time."""
        before = time.time()
        while True:
            (tmp_path / "clock").touch()
            if (now := (tmp_path / "clock").stat().st_ctime) > before + 0.05:
                return now

    began = wait_for_later_times()
    assert mark_changed_weights("", tmp_path / "current", age=time.time() - began) == ""
    wait_for_later_times()
    change(tmp_path)
    assert (mark_changed_weights("", tmp_path / "current", age=time.time() - began) != "") is is_marked


def test_files_count_as_changed_only_if_they_are_newer_than_the_process(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    assert mark_changed_weights("", folder) != ""
    code = f"from kvstore_backend.namespace import mark_changed_weights as mark; print([mark('', {str(folder)!r})])"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "['']"


@pytest.mark.parametrize("rank", [0, 11])
def test_weights_of_each_rank_of_a_divided_checkpoint_count(tmp_path: Path, rank: int) -> None:
    """FastDeploy reads only these files if they exist, even next to undivided weights."""
    folders = [checkpoint(tmp_path / str(number)) for number in range(3)]
    for folder, content in zip(folders, (b"one", b"one", b"two"), strict=True):
        (folder / f"rank{rank}").mkdir()
        (folder / f"rank{rank}" / "model.pdparams").write_bytes(content)
    one, same, other = map(fingerprint_model, folders)
    assert one == same != other
    assert f"rank{rank}/model.pdparams" in stat_weights(folders[0])


@given(content=st.binary(max_size=100))
def test_any_bytes_in_a_safetensors_file_give_a_fingerprint_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "arbitrary"
    if not folder.exists():
        checkpoint(folder)
    header_length = max(0, len(content) - 20).to_bytes(8, "little")
    (folder / "model.safetensors").write_bytes(header_length + content)
    with contextlib.suppress(ConfigError):
        fingerprint_model(folder)


@pytest.mark.parametrize(
    "name",
    [
        *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
        *(
            "hf_quant_config.json",
            "quantize_config.json",
            "quant_config.json",
            "params.json",
            "kv_cache_scale.json",
            "modeling_own.py",
        ),
    ],
)
def test_models_with_different_settings_or_code_have_different_fingerprints(tmp_path: Path, name: str) -> None:
    folders = [checkpoint(tmp_path / str(number)) for number in range(4)]
    for folder, content in zip(folders, ["{}", "{}", '{"a": 1}'], strict=False):
        (folder / name).write_text(content)
    one, two, other, none = map(fingerprint_model, folders)
    assert one == two
    assert len({one, other, none}) == 3


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "README.md"])
def test_files_without_effect_on_kv_do_not_change_the_fingerprint(tmp_path: Path, name: str) -> None:
    one, two = (checkpoint(tmp_path / str(number)) for number in range(2))
    (two / name).write_text("{}")
    assert fingerprint_model(one) == fingerprint_model(two)


def checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: Tensors = TENSORS,
    file: str = "model.safetensors",
    index: str = "{}",
) -> Path:
    """Create a small checkpoint in the layout of transformers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"hidden_size": 64}))
    (folder / "model.safetensors.index.json").write_text(index)
    header, data = {}, b""
    for name, (shape, content) in tensors.items():
        header[name] = {"dtype": "I8", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def test_a_key_is_parsed_into_namespace_and_hash() -> None:
    block_hash = bytes(range(32))
    assert module.parse_key(NAMESPACE.key(block_hash)) == (bytes.fromhex(NAMESPACE.digest), block_hash)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "key",
        f"kv2-{'a' * 32}-{'b' * 64}",
        f"kv1-{'a' * 32}_{'b' * 64}",
        f"kv1-{'A' * 32}-{'b' * 64}",
        f"kv1-{'a' * 31}g-{'b' * 64}",
        f"kv1-{'a' * 30}  -{'b' * 64}",
        f"kv1-{'a' * 32}-{'b' * 62}",
        f"kv1-{'a' * 32}-{'b' * 66}",
        f"kv1-{'a' * 32}-{'b' * 64}\n",
        f"kv1-{'a' * 32}-{'b' * 64}é",
    ],
)
def test_any_other_text_is_not_the_key_of_a_block(text: str) -> None:
    with pytest.raises(ValueError, match="is not the key of a block"):
        module.parse_key(text)
