"""MindIE's configuration, from the pair in examples/mindie; MindIE itself needs Ascend cards and is not run."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.backend import ConfigError
from kvstore_backend.cli import doctor, main
from kvstore_backend.cli.report import ok
from kvstore_backend.config import MooncakeSettings
from kvstore_backend.integrations.mindie import find_mistakes, read_server
from tests.support.ascend import AscendMachine
from tests.support.mooncake import MooncakeMaster

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
        (lambda b, m: models(b)[0].update(plugin_params="prefix_cache"), "is a string that is not valid JSON"),
        (lambda b, m: models(b).append({"modelName": "two"}), r"ModelConfig\[1\]"),
        (lambda b, m: b.pop("ModelDeployConfig"), "names no model"),
        (lambda b, m: b["kvPoolConfig"].update(configPath="lost.json"), "lost.json.* does not exist"),
        (lambda b, m: b["kvPoolConfig"].update(backend="unifiedcache"), "'unifiedcache'; it must be mooncake"),
        (lambda b, m: b["kvPoolConfig"].update(asyncWrite="perhaps"), "asyncWrite .* the value must be true or false"),
        (lambda b, m: b.update(npuDeviceIds=[0, 1]), "a list of card ids for each instance"),
        (lambda b, m: m.pop("local_hostname"), '"local_hostname" is not in .* MindIE has no default'),
        (lambda b, m: m.update(metadata_server=" "), "metadata_server"),
        (lambda b, m: m.update(protocol="tcp"), "is 'tcp'; MindIE accepts only 'ascend'"),
    ],
)
def test_what_mindies_server_would_refuse_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server(pair(tmp_path, change))


def test_an_empty_backend_turns_pooling_off_and_asks_for_nothing_else(tmp_path: Path) -> None:
    def off(backend: dict[str, Any], mooncake: dict[str, Any]) -> None:
        backend["kvPoolConfig"].update(backend="", configPath="")
        models(backend)[0].pop("plugin_params")

    assert read_server(pair(tmp_path, off)).pool is None


def test_another_file_is_no_servers_configuration() -> None:
    with pytest.raises(ConfigError, match="is not a configuration of a MindIE server"):
        read_server(EXAMPLE / "mooncake.json")


@pytest.mark.parametrize("as_text", [False, True])
def test_the_pool_may_be_written_as_a_string(tmp_path: Path, as_text: bool) -> None:
    def change(backend: dict[str, Any], _: dict[str, Any]) -> None:
        if as_text:
            backend["kvPoolConfig"] = json.dumps(backend["kvPoolConfig"])

    pool = read_server(pair(tmp_path, change)).pool
    assert pool is not None
    assert isinstance(pool.store, MooncakeSettings)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    def spoil(backend: dict[str, Any], mooncake: dict[str, Any]) -> None:
        models(backend)[0].pop("plugin_params")
        mooncake.update(metadata_server="http://10.0.0.1:15002/metadata", protocol="tcp")
        mooncake.pop("use_ascend_direct")

    told = [mistake.text for mistake in find_mistakes(pair(tmp_path, spoil)) if mistake.is_fatal]
    assert len(told) == 4
    for name, text in zip(("plugin_params", "metadata_server", "protocol", "use_ascend_direct"), told, strict=True):
        assert f'"{name}"' in text


def test_the_model_and_the_cards_that_share_it_are_known() -> None:
    server = read_server(EXAMPLE / "config.json")
    assert (server.model, server.cards_per_model) == (Path("/data/Qwen2.5-7B-Instruct"), 8)


@pytest.fixture
def own_log_level() -> Iterator[None]:
    """The doctor silences the log, for it is a program of its own: here it is part of this one."""
    logger = logging.getLogger("kvstore_backend")
    level = logger.level
    yield
    logger.setLevel(level)


class SetUp:
    """A MindIE server's files on a machine with Ascend cards, beside a master that runs; at first as all should be."""

    def __init__(self, folder: Path, machine: AscendMachine, master: MooncakeMaster) -> None:
        self.folder = folder
        self.machine = machine
        self.cards = 8
        config = json.loads((EXAMPLE / "config.json").read_text())
        self._config: dict[str, Any] = config
        self.backend: dict[str, Any] = config["BackendConfig"]
        self.backend["kvPoolConfig"]["configPath"] = str(folder / "mooncake.json")
        self.mooncake: dict[str, Any] = json.loads((EXAMPLE / "mooncake.json").read_text())
        self.mooncake.update(master_server_address=master.address, global_segment_size="64MB")

    def diagnose(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
        """The exit status of doctor, and what it says of each subject that is not well."""
        (self.folder / "mooncake.json").write_text(json.dumps(self.mooncake))
        (self.folder / "config.json").write_text(json.dumps(self._config))
        status = main(["doctor", "--json", str(self.folder / "config.json"), "--cards", str(self.cards)])
        findings = json.loads(capsys.readouterr().out)["findings"]
        bad = [each for each in findings if each["level"] == ("fail" if status else "warn")]
        return status, {each["subject"]: f"{each['text']} -> {each['remedy']}" for each in bad}


@pytest.fixture
def set_up(
    tmp_path: Path,
    ascend_machine: AscendMachine,
    mooncake_master: MooncakeMaster,
    monkeypatch: pytest.MonkeyPatch,
    own_log_level: None,
) -> SetUp:
    # What only cards can tell; everything before it is as on a machine that has them.
    monkeypatch.setattr(doctor, "try_pool", lambda _: iter([ok("trial", "not tried: there are no cards here")]))
    return SetUp(tmp_path, ascend_machine, mooncake_master)


def test_a_set_up_as_the_guide_wants_it_passes(set_up: SetUp, capsys: pytest.CaptureFixture[str]) -> None:
    status, warnings = set_up.diagnose(capsys)
    assert (status, set(warnings) - {"master's flags"}) == (0, {"context", "protocol"})


@pytest.mark.parametrize(
    ("spoil", "subject", "named", "remedy"),
    [
        pytest.param(
            lambda s: s.mooncake.update(metadata_server="http://10.0.0.1:15002/metadata"),
            "MindIE",
            '"metadata_server" in',
            'write "metadata_server": "P2PHANDSHAKE"',
            id="1 a metadata server",
        ),
        pytest.param(
            lambda s: s.mooncake.update(protocol="rdma"),
            "MindIE",
            "is 'rdma'; MindIE accepts only 'ascend'",
            'write "protocol": "ascend"',
            id="2 another protocol",
        ),
        pytest.param(
            lambda s: s.mooncake.pop("use_ascend_direct"),
            "MindIE",
            '"use_ascend_direct" is not in',
            'write "use_ascend_direct": true',
            id="3 no ascend direct",
        ),
        pytest.param(
            lambda s: s.backend["kvPoolConfig"].update(backend="memory"),
            "MindIE",
            "\"backend\": 'memory'",
            "it must be mooncake",
            id="4 the backend memory",
        ),
        pytest.param(
            lambda s: s.backend["kvPoolConfig"].update(backend="file"),
            "MindIE",
            "\"backend\": 'file'",
            "it must be mooncake",
            id="5 the backend file",
        ),
        pytest.param(
            lambda s: models(s.backend)[0].update(plugin_params='{"plugin_type": "mtp"}'),
            "MindIE",
            '"plugin_params" of ModelConfig[0]',
            "a pool needs the prefix cache",
            id="6 no prefix cache",
        ),
        pytest.param(
            lambda s: s.backend.update(kvPoolConfig="{'backend': 'mooncake'}"),
            "MindIE",
            "kvPoolConfig",
            "a string that is not valid JSON",
            id="7 a string that is not JSON",
        ),
        pytest.param(
            lambda s: s.backend["kvPoolConfig"].update(configPath="/nowhere/mooncake.json"),
            "MindIE",
            "'/nowhere/mooncake.json'",
            "does not exist",
            id="8 a file that is not there",
        ),
        pytest.param(
            lambda s: s.machine.hccn_file.unlink(),
            "hccn.conf",
            "cannot be read (No such file or directory)",
            "docker run -v",
            id="9 a container without hccn.conf",
        ),
        pytest.param(
            lambda s: s.machine.set_variable("ASCEND_BUFFER_POOL", ""),
            "ASCEND_BUFFER_POOL",
            "the variable is not set",
            "export ASCEND_BUFFER_POOL=4:8",
            id="10 no buffers",
        ),
        pytest.param(
            lambda s: s.machine.set_variable("LD_LIBRARY_PATH", "/usr/local/lib"),
            "LD_LIBRARY_PATH",
            "libmooncake_common.so, libtransfer_engine.so, libmooncake_store.so",
            "export LD_LIBRARY_PATH=",
            id="11 libraries that are not found",
        ),
        pytest.param(
            lambda s: s.machine.install("mooncake-transfer-engine-non-cuda"),
            "ascend build",
            "the installed mooncake-transfer-engine-non-cuda has no ascend transport",
            "pip install mooncake-transfer-engine-npu",
            id="12 a Mooncake for other machines",
        ),
        pytest.param(
            lambda s: setattr(s, "cards", 513),
            "HCCL links",
            "513 cards are more than one pool can link",
            "each with at most 512 cards",
            id="13 too many cards",
        ),
        pytest.param(
            lambda s: s.mooncake.update(master_server_address="127.0.0.1:1"),
            "master",
            "no Mooncake master answers at 127.0.0.1:1",
            "kvstore master --port 1",
            id="14 no master",
        ),
        pytest.param(
            lambda s: s.mooncake.pop("local_hostname"),
            "MindIE",
            '"local_hostname" is not in',
            "MindIE has no default for it",
            id="15 no name of the machine",
        ),
    ],
)
def test_a_broken_set_up_is_told_by_name_with_its_remedy(
    set_up: SetUp,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[SetUp], object],
    subject: str,
    named: str,
    remedy: str,
) -> None:
    spoil(set_up)
    status, failures = set_up.diagnose(capsys)
    assert status == 1
    assert list(failures) == [subject]
    assert named in failures[subject]
    assert remedy in failures[subject]


def test_a_path_that_depends_on_where_the_server_is_started_is_a_warning(
    set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up.backend["kvPoolConfig"]["configPath"] = "mooncake.json"
    status, warnings = set_up.diagnose(capsys)
    assert status == 0
    assert "searches it in the folder in which its server is started" in warnings["MindIE"]
    assert f"write '{set_up.folder}/mooncake.json'" in warnings["MindIE"]


def test_a_variable_for_other_engines_changes_nothing_for_mindie(
    set_up: SetUp, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up.machine.set_variable("MOONCAKE_PROTOCOL", "tcp")
    assert set_up.diagnose(capsys)[0] == 0


@pytest.mark.usefixtures("own_log_level")
def test_the_doctor_says_what_the_cards_links_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(EXAMPLE / "config.json")])
    said = capsys.readouterr().out
    assert "the prefix cache is on in every model" in said
    assert "give --cards the number of cards in all servers of the pool" in said
    assert "7 x 4 MB = 28 MB" in said
    assert "lower it from 0.92 to 0.91" in said
    assert "600 MB less for KV on every card" in said
