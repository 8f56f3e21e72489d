"""MindIE's configuration, from the two files in examples/mindie. MindIE itself needs Ascend cards, and does not run."""

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


def copy_example(folder: Path, change: Change = lambda backend, mooncake: None) -> Path:
    """Write a changed copy of the example; return the path of the server's file."""
    server, mooncake = (json.loads((EXAMPLE / name).read_text()) for name in ("config.json", "mooncake.json"))
    change(server["BackendConfig"], mooncake)
    (folder / "mooncake.json").write_text(json.dumps(mooncake))
    (folder / "config.json").write_text(json.dumps(server))
    return folder / "config.json"


def models(backend: dict[str, Any]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = backend["ModelDeployConfig"]["ModelConfig"]
    return listed


def test_mindies_server_accepts_the_example() -> None:
    server = read_server(EXAMPLE / "config.json")
    assert server.pool is not None
    assert isinstance(server.pool.store, MooncakeSettings)
    assert server.pool.store.protocol == "ascend"
    assert server.pool.store.global_segment_size == 4 << 30
    assert (server.pool.async_write, server.cards) == (False, 8)


@pytest.mark.parametrize("plugins", ["prefix_cache", "mtp,prefix_cache", "prefix_cache, splitfuse"])
def test_the_prefix_cache_can_be_one_of_several_plugins(tmp_path: Path, plugins: str) -> None:
    path = copy_example(tmp_path, lambda b, _: models(b)[0].update(plugin_params=json.dumps({"plugin_type": plugins})))
    assert read_server(path).pool is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, m: models(b)[0].pop("plugin_params"), "a pool needs the prefix cache"),
        (
            lambda b, m: models(b)[0].update(plugin_params='{"plugin_type": "mtp"}'),
            "a pool needs the prefix cache",
        ),
        (
            lambda b, m: models(b)[0].update(plugin_params={"plugin_type": "prefix_cache"}),
            "a pool needs the prefix",
        ),
        (lambda b, m: models(b)[0].update(plugin_params="prefix_cache"), "is a string that is not valid JSON"),
        (lambda b, m: models(b).append({"modelName": "two"}), r"ModelConfig\[1\]"),
        (lambda b, m: b.pop("ModelDeployConfig"), "names no model"),
        (lambda b, m: b["kvPoolConfig"].update(configPath="lost.json"), "lost.json.* does not exist"),
        (lambda b, m: b["kvPoolConfig"].update(backend="unifiedcache"), "'unifiedcache'; .* MindIE that this project"),
        (lambda b, m: b["kvPoolConfig"].update(asyncWrite="perhaps"), "asyncWrite .* the value must be true or false"),
        (lambda b, m: b.update(npuDeviceIds=[0, 1]), "a list of card ids for each instance"),
        (lambda b, m: m.pop("local_hostname"), '"local_hostname" is not in .* MindIE has no default'),
        (lambda b, m: m.update(metadata_server=" "), "metadata_server"),
        (lambda b, m: m.update(protocol="tcp"), "is 'tcp'; MindIE accepts only 'ascend'"),
        (lambda b, m: m.update(global_segment_size="4GiB"), "is '4GiB'; MindIE knows only B, KB, MB, GB and TB"),
        (lambda b, m: m.update(local_buffer_size="1GB"), "is '1GB'; MindIE accepts only a number of bytes"),
    ],
)
def test_a_configuration_that_mindies_server_refuses_is_refused(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_server(copy_example(tmp_path, change))


def test_an_empty_backend_turns_the_pool_off(tmp_path: Path) -> None:
    def turn_off(backend: dict[str, Any], mooncake: dict[str, Any]) -> None:
        backend["kvPoolConfig"].update(backend="", configPath="")
        models(backend)[0].pop("plugin_params")

    assert read_server(copy_example(tmp_path, turn_off)).pool is None


def test_a_file_that_is_not_a_servers_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a configuration of a MindIE server"):
        read_server(EXAMPLE / "mooncake.json")


@pytest.mark.parametrize("as_text", [False, True])
def test_the_pools_configuration_can_be_a_string(tmp_path: Path, as_text: bool) -> None:
    def change(backend: dict[str, Any], _: dict[str, Any]) -> None:
        if as_text:
            backend["kvPoolConfig"] = json.dumps(backend["kvPoolConfig"])

    pool = read_server(copy_example(tmp_path, change)).pool
    assert pool is not None
    assert isinstance(pool.store, MooncakeSettings)


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    def spoil(backend: dict[str, Any], mooncake: dict[str, Any]) -> None:
        models(backend)[0].pop("plugin_params")
        mooncake.update(metadata_server="http://10.0.0.1:15002/metadata", protocol="tcp")
        mooncake.pop("use_ascend_direct")

    texts = [mistake.text for mistake in find_mistakes(copy_example(tmp_path, spoil)) if mistake.is_fatal]
    assert len(texts) == 4
    for name, text in zip(("plugin_params", "metadata_server", "protocol", "use_ascend_direct"), texts, strict=True):
        assert f'"{name}"' in text


def test_the_model_and_the_number_of_its_cards_are_read() -> None:
    server = read_server(EXAMPLE / "config.json")
    assert (server.model, server.cards_per_model) == (Path("/data/Qwen2.5-7B-Instruct"), 8)


@pytest.fixture
def restored_log_level() -> Iterator[None]:
    """Restore the log level: the doctor, which is usually a program of its own, disables the log."""
    logger = logging.getLogger("kvstore_backend")
    level = logger.level
    yield
    logger.setLevel(level)


class Setup:
    """A MindIE server's files, first without mistakes, on a simulated machine with Ascend cards, and a real master."""

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
        """Return the exit status of the doctor, and its text for each failure, or for each warning if none fails."""
        (self.folder / "mooncake.json").write_text(json.dumps(self.mooncake))
        (self.folder / "config.json").write_text(json.dumps(self._config))
        status = main(["doctor", "--json", str(self.folder / "config.json"), "--cards", str(self.cards)])
        findings = json.loads(capsys.readouterr().out)["findings"]
        bad = [finding for finding in findings if finding["level"] == ("fail" if status else "warn")]
        return status, {finding["subject"]: f"{finding['text']} -> {finding['remedy']}" for finding in bad}


@pytest.fixture
def setup(
    tmp_path: Path,
    ascend_machine: AscendMachine,
    mooncake_master: MooncakeMaster,
    monkeypatch: pytest.MonkeyPatch,
    restored_log_level: None,
) -> Setup:
    # Only this check needs real cards.
    monkeypatch.setattr(doctor, "try_pool", lambda _: iter([ok("trial", "not tried: there are no cards here")]))
    return Setup(tmp_path, ascend_machine, mooncake_master)


def test_a_setup_as_in_the_guide_passes(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    status, warnings = setup.diagnose(capsys)
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
            id="4 a memory backend",
        ),
        pytest.param(
            lambda s: s.backend["kvPoolConfig"].update(backend="file"),
            "MindIE",
            "\"backend\": 'file'",
            "it must be mooncake",
            id="5 a file backend",
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
            id="8 a missing file",
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
            id="11 missing libraries",
        ),
        pytest.param(
            lambda s: s.machine.install("mooncake-transfer-engine-non-cuda"),
            "ascend build",
            "the installed mooncake-transfer-engine-non-cuda has no ascend transport",
            "pip install mooncake-transfer-engine-npu",
            id="12 a Mooncake without Ascend",
        ),
        pytest.param(
            lambda s: setattr(s, "cards", 513),
            "HCCL links",
            "513 cards are more than the 512 that one pool can connect",
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
            id="15 no hostname",
        ),
    ],
)
def test_the_doctor_names_each_mistake_and_its_remedy(
    setup: Setup,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Setup], object],
    subject: str,
    named: str,
    remedy: str,
) -> None:
    spoil(setup)
    status, failures = setup.diagnose(capsys)
    assert status == 1
    assert list(failures) == [subject]
    assert named in failures[subject]
    assert remedy in failures[subject]


def test_a_relative_path_is_a_warning(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.backend["kvPoolConfig"]["configPath"] = "mooncake.json"
    status, warnings = setup.diagnose(capsys)
    assert status == 0
    assert "searches it in the folder in which its server is started" in warnings["MindIE"]
    assert f"write '{setup.folder}/mooncake.json'" in warnings["MindIE"]


def test_a_variable_for_other_engines_does_not_affect_mindie(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.machine.set_variable("MOONCAKE_PROTOCOL", "tcp")
    assert setup.diagnose(capsys)[0] == 0


@pytest.mark.usefixtures("restored_log_level")
def test_the_doctor_reports_the_memory_for_links_between_cards(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(EXAMPLE / "config.json")])
    output = capsys.readouterr().out
    assert "the prefix cache is on in every model" in output
    assert "give --cards the number of cards in all servers of the pool" in output
    assert "7 x 4 MB = 28 MB" in output
    assert "lower it from 0.92 to 0.91" in output
    assert "600 MB less for KV on every card" in output
