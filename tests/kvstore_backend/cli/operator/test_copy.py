"""kvstore export and import, between folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvstore_backend.config import load_config
from kvstore_backend.pool import open_store
from tests.kvstore_backend.cli.operator.pools import Commands, fill_pool, folder_url, space, stored_keys

FIRST, SECOND = space("first"), space("second")
PROMPT = list(range(12))


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A pool with two namespaces."""
    url = folder_url(tmp_path / "source")
    for namespace in (FIRST, SECOND):
        fill_pool(load_config(url), namespace, PROMPT)
    return url


@pytest.fixture
def target(tmp_path: Path) -> str:
    """An empty pool."""
    url = folder_url(tmp_path / "target")
    open_store(load_config(url)).close()
    return url


def test_a_namespace_goes_to_a_folder_and_into_another_pool(
    tmp_path: Path, source: str, target: str, kvstore: Commands
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    assert kvstore(*export, "--dry-run", "--json").told["blocks"] == 3
    assert not (tmp_path / "out").exists()
    told = kvstore(*export, "--json").told
    assert (told["blocks"], told["bytes"], told["gone"], told["damaged"]) == (3, 3 * 1128, 0, 0)
    assert kvstore("import", tmp_path / "out", target, "--dry-run", "--json").told["stored"] == 3
    assert stored_keys(tmp_path / "target") == []
    assert kvstore("import", tmp_path / "out", target, "--json").told["stored"] == 3
    assert kvstore("import", tmp_path / "out", target, "--json").told["present"] == 3
    first = [key for key in stored_keys(tmp_path / "source") if FIRST.digest in key]
    assert stored_keys(tmp_path / "target") == first
    for path in (tmp_path / "target").glob("blocks/*/*.block"):
        assert path.read_bytes() == next((tmp_path / "source").glob(f"blocks/*/{path.name}")).read_bytes()


def test_an_export_that_was_cut_short_is_no_whole_one_and_goes_on(
    tmp_path: Path, source: str, target: str, kvstore: Commands
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    kvstore(*export)
    (tmp_path / "out" / "namespace.json").unlink()
    assert "is no whole export: it has no namespace.json" in kvstore("import", tmp_path / "out", target).sentence
    assert kvstore(*export).status == 0
    assert kvstore("import", tmp_path / "out", target).output.startswith("3 blocks of namespace ")


def test_damaged_blocks_stay_out(tmp_path: Path, source: str, target: str, kvstore: Commands) -> None:
    kvstore("export", tmp_path / "out", source, "--namespace", FIRST.digest)
    one, other, _ = sorted((tmp_path / "out").glob("blocks/*/*"))
    one.write_bytes(one.read_bytes()[:-1] + b"x")
    other.unlink()
    ended = kvstore("import", tmp_path / "out", target)
    assert "2 blocks of the folder are damaged and were left out" in ended.sentence
    assert sum(FIRST.prefix in key for key in stored_keys(tmp_path / "target")) == 1


def test_a_block_under_anothers_name_stays_out(tmp_path: Path, source: str, target: str, kvstore: Commands) -> None:
    kvstore("export", tmp_path / "out", source, "--namespace", FIRST.digest)
    lines = [json.loads(line) for line in (tmp_path / "out" / "blocks.jsonl").read_text().splitlines()]
    paths = {path.stem: path for path in (tmp_path / "out").glob("blocks/*/*")}
    shutil.copy(paths[lines[1]["name"]], paths[lines[0]["name"]])
    lines[0]["sha256"] = lines[1]["sha256"]
    (tmp_path / "out" / "blocks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "1 blocks of the folder are damaged" in kvstore("import", tmp_path / "out", target).sentence


def test_what_cannot_be_copied_gets_one_sentence(tmp_path: Path, source: str, target: str, kvstore: Commands) -> None:
    kvstore("export", tmp_path / "out", source, "--namespace", FIRST.digest)
    out = tmp_path / "out"
    for arguments, sentence in (
        (["import", out, target, "--namespace", SECOND.digest], f"has namespace {FIRST.digest}, and {SECOND.digest}"),
        (["export", out, source, "--namespace", SECOND.digest], f"has namespace {FIRST.digest}: name another folder"),
        (["export", tmp_path / "source", source, "--namespace", FIRST.digest], "holds ledger, writers"),
        (["export", out, source], "nothing is named"),
        (["export", out, source, "--namespace", FIRST.digest, "--namespace", SECOND.digest], "export them one by one"),
        (["import", tmp_path, target], "is no whole export"),
    ):
        assert sentence in kvstore(*arguments).sentence
    summary = json.loads((out / "namespace.json").read_text())
    (out / "namespace.json").write_text(json.dumps({**summary, "tenant": "a"}))
    assert "has blocks of tenant 'a', which those of tenant 'default'" in kvstore("import", out, target).sentence
    assert stored_keys(tmp_path / "target") == []


def test_nothing_to_export_makes_no_folder(tmp_path: Path, target: str, kvstore: Commands) -> None:
    ended = kvstore("export", tmp_path / "out", target, "--namespace", FIRST.digest)
    assert ended.output == f"the pool has no such blocks of namespace {FIRST.digest}: nothing to export\n"
    assert not (tmp_path / "out").exists()
