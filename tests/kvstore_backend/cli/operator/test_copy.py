"""kvstore export and import, between folders."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore_backend.cli.operator.archive import ArchiveWriter
from kvstore_backend.config import load_config
from kvstore_backend.pool import open_store
from kvstore_backend.wrappers.checked import CheckedBackend
from tests.kvstore_backend.cli.operator.pools import Commands, chain, fill_pool, folder_url, space, stored_keys
from tests.support.memory import Memory

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


def recompute(url: str, key: str, nbytes: int) -> None:
    """Put other bytes in the place of a block, as where it was evicted and computed in another batch."""
    store = open_store(load_config(url))
    checked = CheckedBackend(store)
    memory = Memory(b"other bytes".ljust(nbytes))
    checked.remove([key], force=True)
    checked.register(memory.address, memory.nbytes)
    assert all(checked.put([key], [memory.value]))
    checked.unregister(memory.address, memory.nbytes)
    checked.close()


@pytest.mark.parametrize("nbytes", [1000, 2000])
def test_exporting_again_takes_what_changed_and_keeps_what_was_evicted(
    tmp_path: Path, source: str, target: str, kvstore: Commands, nbytes: int
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    assert kvstore(*export).status == 0
    changed, evicted, _ = (FIRST.key(each) for each in chain(PROMPT))
    recompute(source, changed, nbytes)
    store = open_store(load_config(source))
    assert all(store.remove([evicted], force=True))
    store.close()
    ended = kvstore(*export)
    assert (ended.status, ended.output.split()[0]) == (0, "2")
    summary = json.loads((tmp_path / "out" / "namespace.json").read_text())
    assert (summary["blocks"], summary["bytes"]) == (3, 2 * 1128 + 128 + nbytes)
    assert kvstore("import", tmp_path / "out", target, "--json").told == {
        "dry_run": False,
        "namespace": FIRST.digest,
        "stored": 3,
        "present": 0,
        "damaged": 0,
        "refused": 0,
    }
    [stored] = (tmp_path / "target").glob(f"blocks/*/{changed}.block")
    assert stored.read_bytes()[128:] == b"other bytes".ljust(nbytes)


def test_exporting_again_repairs_a_damaged_file_and_leaves_out_one_that_is_gone(
    tmp_path: Path, source: str, target: str, kvstore: Commands
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    kvstore(*export)
    one, other, _ = sorted((tmp_path / "out").glob("blocks/*/*"))
    one.write_bytes(one.read_bytes()[:-1] + b"x")
    other.unlink()
    store = open_store(load_config(source))
    assert all(store.remove([FIRST.prefix + other.stem], force=True))
    store.close()
    assert kvstore(*export).status == 0
    assert kvstore("import", tmp_path / "out", target, "--json").told["stored"] == 2


def test_an_export_that_replaces_blocks_and_is_cut_short_is_no_whole_one(
    tmp_path: Path, source: str, target: str, kvstore: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    kvstore(*export)
    recompute(source, FIRST.key(chain(PROMPT)[0]), 1000)
    with monkeypatch.context() as cut:
        cut.setattr(ArchiveWriter, "finish", lambda *_: sys.exit(1))
        assert kvstore(*export).status == 1
    assert "is no whole export" in kvstore("import", tmp_path / "out", target).sentence
    assert kvstore(*export).status == 0
    assert kvstore("import", tmp_path / "out", target, "--json").told["stored"] == 3


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_huge(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 42)  # takes no room on the disk


def make_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(10)


HOSTILE = [replace_by_pipe, replace_by_device, replace_by_link, replace_by_folder, make_huge, make_short]


@pytest.mark.parametrize("change", HOSTILE)
@pytest.mark.parametrize("name", ["a block", "namespace.json", "blocks.jsonl"])
def test_a_hostile_folder_neither_hangs_import_nor_is_read_whole(
    tmp_path: Path, source: str, target: str, kvstore: Commands, name: str, change: Callable[[Path], None]
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    change(next(out.glob("blocks/*/*")) if name == "a block" else out / name)
    sentence = kvstore("import", out, target).sentence
    if name == "a block":
        assert "1 blocks of the folder are damaged and were left out" in sentence
        assert len(stored_keys(tmp_path / "target")) == 3  # two blocks, and the manifest
    else:
        assert str(out / name) in sentence
        assert stored_keys(tmp_path / "target") == []


@pytest.mark.parametrize("nbytes", [-1, True, 1.5, "1128", None, (1 << 30) + 1, 1 << 42], ids=lambda each: f"{each!r}")
def test_an_index_with_a_wrong_size_is_none(
    tmp_path: Path, source: str, target: str, kvstore: Commands, nbytes: object
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    lines = [json.loads(line) for line in (out / "blocks.jsonl").read_text().splitlines()]
    lines[1]["nbytes"] = nbytes
    (out / "blocks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    if nbytes == 1 << 42:
        make_huge(out / "blocks" / lines[1]["name"][:2] / f"{lines[1]['name']}.block")
    assert f"line 2 of {out / 'blocks.jsonl'} is no line of an index" in kvstore("import", out, target).sentence


@pytest.mark.parametrize("blocks", [0, 2, 4, -1, True])
def test_an_index_of_more_or_fewer_lines_than_told_is_refused(
    tmp_path: Path, source: str, target: str, kvstore: Commands, blocks: int
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    summary = json.loads((out / "namespace.json").read_text())
    (out / "namespace.json").write_text(json.dumps({**summary, "blocks": blocks}))
    sentence = kvstore("import", out, target).sentence
    assert "does not name a namespace, a tenant and a number of blocks" in sentence or "export it again" in sentence


def test_import_says_whom_it_trusts(tmp_path: Path, source: str, target: str, kvstore: Commands) -> None:
    kvstore("export", tmp_path / "out", source, "--namespace", FIRST.digest)
    assert "not for forgery: who wrote the folder is trusted" in kvstore("import", tmp_path / "out", target).output


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


def test_a_folder_is_made_with_those_above_it(tmp_path: Path, source: str, kvstore: Commands) -> None:
    out = tmp_path / "new" / "out"
    assert kvstore("export", out, source, "--namespace", FIRST.digest).status == 0
    assert (out / "namespace.json").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "kvstore-export-2"}, "does not say that it is of format kvstore-export-1"),
        ({"namespace": 1}, "does not name a namespace, a tenant and a number of blocks"),
        ({"namespace": "../" * 10 + "ab"}, "does not name a namespace, a tenant and a number of blocks"),
        ({"tenant": 1}, "does not name a namespace, a tenant and a number of blocks"),
        ({"blocks": "3"}, "does not name a namespace, a tenant and a number of blocks"),
        (None, "does not say that it is of format kvstore-export-1"),
    ],
)
def test_a_summary_that_says_something_else_is_refused(
    tmp_path: Path, source: str, target: str, kvstore: Commands, change: dict[str, object] | None, sentence: str
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    summary = json.loads((out / "namespace.json").read_text())
    (out / "namespace.json").write_text(json.dumps([] if change is None else {**summary, **change}))
    assert sentence in kvstore("import", out, target).sentence
    assert stored_keys(tmp_path / "target") == []


@pytest.mark.parametrize("line", ["", "[]", "{}", "[" * 500, '{"name": "x", "nbytes": 1, "sha256": "x"}'])
def test_a_line_that_is_none_is_told_by_its_number(
    tmp_path: Path, source: str, target: str, kvstore: Commands, line: str
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    lines = (out / "blocks.jsonl").read_text().splitlines()
    (out / "blocks.jsonl").write_text("\n".join([lines[0], line, lines[2], ""]))
    assert f"line 2 of {out / 'blocks.jsonl'} is no line of an index" in kvstore("import", out, target).sentence


def test_a_manifest_goes_along_only_where_it_is_true(
    tmp_path: Path, source: str, target: str, kvstore: Commands
) -> None:
    out = tmp_path / "out"
    kvstore("export", out, source, "--namespace", FIRST.digest)
    summary = json.loads((out / "namespace.json").read_text())
    summary["manifest"]["fields"]["model"] = "another"
    (out / "namespace.json").write_text(json.dumps(summary))
    assert kvstore("import", out, target).status == 0
    assert len(stored_keys(tmp_path / "target")) == 3


def test_what_was_done_and_what_would_be_are_told_apart(
    tmp_path: Path, source: str, target: str, kvstore: Commands
) -> None:
    export = ["export", tmp_path / "out", source, "--namespace", FIRST.digest]
    size = "3.305 KiB"
    would = f"3 blocks ({size}) of namespace {FIRST.digest} would be copied\n"
    assert kvstore(*export, "--dry-run").output == would
    assert kvstore(*export).output == would.replace("would be copied", "copied")
    bring = ["import", tmp_path / "out", target]
    stored = f"3 blocks of namespace {FIRST.digest} stored, 0 were there already"
    assert kvstore(*bring, "--dry-run").output.splitlines()[0] == stored.replace("stored", "would be stored")
    assert kvstore(*bring).output.splitlines()[0] == stored
