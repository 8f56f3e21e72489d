"""MindIE's configuration, from the pair in examples/mindie; MindIE itself needs Ascend cards and is not run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.backend import ConfigError, Status
from kvstore_backend.cli import main
from kvstore_backend.config import MooncakeSettings
from kvstore_backend.integrations.mindie import read_server
from tests.support.memory import Memory
from tests.support.mooncake import mooncake_master

EXAMPLE = Path(__file__).parents[3] / "examples" / "mindie"
Change = Callable[[dict[str, Any], dict[str, Any]], object]


def pair(folder: Path, change: Change = lambda backend, mooncake: None) -> Path:
    """A copy of the example, changed."""
    server, mooncake = (json.loads((EXAMPLE / name).read_text()) for name in ("config.json", "mooncake.json"))
    change(server["BackendConfig"], mooncake)
    (folder / "mooncake.json").write_text(json.dumps(mooncake))
    (folder / "config.json").write_text(json.dumps(server))
    return folder / "config.json"


def models(backend: dict[str, Any]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = backend["ModelDeployConfig"]["ModelConfig"]
    return listed


def test_the_example_is_what_mindies_server_takes() -> None:
    server = read_server(EXAMPLE / "config.json")
    assert server.pool is not None
    assert isinstance(server.pool.store, MooncakeSettings)
    assert server.pool.store.protocol == "ascend"
    assert server.pool.store.global_segment_size == 4 << 30
    assert (server.pool.async_write, server.cards) == (False, 8)


@pytest.mark.parametrize("plugins", ["prefix_cache", "mtp,prefix_cache", "prefix_cache, splitfuse"])
def test_the_prefix_cache_may_be_one_plugin_of_several(tmp_path: Path, plugins: str) -> None:
    path = pair(tmp_path, lambda b, _: models(b)[0].update(plugin_params=json.dumps({"plugin_type": plugins})))
    assert read_server(path).pool is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, m: models(b)[0].pop("plugin_params"), "a pool needs the prefix cache"),
        (lambda b, m: models(b)[0].update(plugin_params='{"plugin_type": "mtp"}'), "a pool needs the prefix cache"),
        (lambda b, m: models(b)[0].update(plugin_params={"plugin_type": "prefix_cache"}), "a pool needs the prefix"),
        (lambda b, m: models(b)[0].update(plugin_params="prefix_cache"), "is not JSON in a string"),
        (lambda b, m: models(b).append({"modelName": "two"}), r"ModelConfig\[1\]"),
        (lambda b, m: b.pop("ModelDeployConfig"), "names no model"),
        (lambda b, m: b["kvPoolConfig"].update(configPath="lost.json"), "lost.json.* does not exist"),
        (lambda b, m: b["kvPoolConfig"].update(backend="unifiedcache"), "'unifiedcache'; it must be mooncake"),
        (lambda b, m: b["kvPoolConfig"].update(asyncWrite="perhaps"), "asyncWrite .* it must be true or false"),
        (lambda b, m: b.update(npuDeviceIds=[0, 1]), "a list of card ids for each instance"),
        (lambda b, m: m.pop("local_hostname"), '"local_hostname" is not in .* MindIE has no default'),
        (lambda b, m: m.update(metadata_server=" "), "metadata_server"),
        (lambda b, m: m.update(protocol="tcp"), "is 'tcp'; MindIE takes 'ascend' only"),
    ],
)
def test_what_mindies_server_would_refuse_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server(pair(tmp_path, change))


def test_an_empty_backend_turns_pooling_off_and_asks_for_nothing_else(tmp_path: Path) -> None:
    def off(backend: dict[str, Any], mooncake: dict[str, Any]) -> None:
        backend["kvPoolConfig"].update(backend="", configPath="")
        models(backend)[0].pop("plugin_params")

    server = read_server(pair(tmp_path, off))
    assert server.pool is None
    with pytest.raises(ConfigError, match="there is no pool"):
        server.open_pool()


def test_another_file_is_no_servers_configuration() -> None:
    with pytest.raises(ConfigError, match="no configuration of a MindIE server"):
        read_server(EXAMPLE / "mooncake.json")


def test_the_pool_it_names_opens_by_another_protocol_where_there_are_no_cards(tmp_path: Path) -> None:
    with mooncake_master(tmp_path / "log") as master:
        path = pair(tmp_path, lambda _, m: m.update(master_server_address=master.address, global_segment_size="64MB"))
        pool = read_server(path).open_pool("tcp")
        source = Memory(b"a block")
        assert pool.put(["key"], [source.value]) == [Status.OK]
        pool.close()


@pytest.fixture
def own_log_level() -> Iterator[None]:
    """The doctor silences the log, for it is a program of its own: here it is part of this one."""
    logger = logging.getLogger("kvstore_backend")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures("own_log_level")
def test_the_doctor_says_what_the_cards_links_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(EXAMPLE / "config.json")])
    said = capsys.readouterr().out
    assert "the prefix cache is on in every model" in said
    assert "give --cards the number of all servers of the pool together" in said
    assert "7 x 4 MB = 28 MB" in said
    assert "lower it from 0.92 to 0.91" in said


@pytest.mark.usefixtures("own_log_level")
def test_the_doctor_stops_at_what_mindie_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(pair(tmp_path, lambda b, _: models(b)[0].pop("plugin_params")))]) == 1
    assert "a pool needs the prefix cache" in capsys.readouterr().out
