"""kvstore ls with folders; ``test_mooncake.py`` tests it with Mooncake."""

from __future__ import annotations

from pathlib import Path

from kvstore_backend.config import load_config
from kvstore_backend.pool import open_store
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, folder_url, space
from tests.support.memory import Memory
from tests.support.strict_registration import Announcing

FIRST, SECOND = space("first"), space("second")


def test_namespaces_are_listed_with_their_manifests(tmp_path: Path, kvstore: Commands) -> None:
    url = folder_url(tmp_path / "pool")
    fill_pool(load_config(url), FIRST, list(range(12)))
    fill_pool(load_config(url), SECOND, list(range(4)), manifest=False)
    report = kvstore("ls", url, "--json").json
    first, second = report["namespaces"]
    assert (first["namespace"], first["blocks"], first["bytes"], first["tokens"]) == (FIRST.digest, 3, 3 * 1128, 12)
    assert first["manifest"]["facts"]["name"] == "first"
    assert (second["namespace"], second["blocks"], second["tokens"], second["manifest"]) == (
        SECOND.digest,
        1,
        None,
        None,
    )
    shown = kvstore("ls", url).output.splitlines()
    assert shown[1].split() == [FIRST.digest, "3", "3.305", "KiB", "12", "first", "float32", "0/1"]
    whole = kvstore("ls", url, "--namespace", FIRST.digest[:8]).output
    assert "kv_dtype: float32" in whole
    assert SECOND.digest not in whole


def test_the_stored_blocks_of_a_prefix_are_counted(tmp_path: Path, kvstore: Commands) -> None:
    url = folder_url(tmp_path / "pool")
    fill_pool(load_config(url), FIRST, list(range(12)))
    report = kvstore("ls", url, "--tokens", "0,1,2,3,4,5,6,7,8,9,99,99,1", "--json").json["prefixes"]
    assert [(row["blocks"], row["found"], row["leading"], row["leading_tokens"]) for row in report] == [(3, 2, 2, 8)]
    report = kvstore("ls", url, "--tokens", "0 1 2 3", "--salt", "mine", "--json").json["prefixes"]
    assert [(row["blocks"], row["found"]) for row in report] == [(1, 0)]
    assert "2 of 3 blocks" in kvstore("ls", url, "--tokens", "0,1,2,3,4,5,6,7,8,9,99,99,1").output


def test_keys_of_other_software_are_only_counted(tmp_path: Path, kvstore: Commands) -> None:
    url = folder_url(tmp_path / "pool")
    store = Announcing(open_store(load_config(url)))
    memory = Memory(b"theirs")
    assert all(store.put(["somebody/else's"], [memory.value]))
    store.close()
    lines = ["the pool has no blocks of this software", "the pool has 1 keys of other software"]
    assert kvstore("ls", url).output.splitlines() == lines
    assert kvstore("ls", url, "--json").json == {"namespaces": [], "other_keys": 1, "kept_keys": None}
