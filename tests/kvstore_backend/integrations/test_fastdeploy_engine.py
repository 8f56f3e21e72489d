"""A FastDeploy process reads the settings of its engine, with FastDeploy's own parser if it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore_backend.backend import ConfigError
from kvstore_backend.integrations.fastdeploy_engine import (
    Engine,
    Weights,
    WeightsVersion,
    find_capability,
    find_engine,
    find_version,
    parse_arguments,
)
from kvstore_backend.namespace import find_age

SERVER = ["python", "-m", "fastdeploy.entrypoints.openai.api_server"]

PARSE = """
import json, sys
from kvstore_backend.integrations.fastdeploy_engine import parse_arguments
arguments, defaults = parse_arguments(json.loads(sys.argv[1]))
print(json.dumps({name: value for name, value in arguments.items() if value != defaults.get(name)}, default=str))
"""


def write_process(proc: Path, pid: str, words: Sequence[str], parent: int, **environ: str) -> None:
    """Write the files of a process under ``/proc``."""
    folder = proc / pid
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (folder / "environ").write_bytes(b"".join(f"{name}={text}".encode() + b"\0" for name, text in environ.items()))
    (folder / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\nUid:\t0\n")


@pytest.fixture
def no_fastdeploy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make FastDeploy's parser unavailable."""
    monkeypatch.setitem(sys.modules, "fastdeploy", None)


@pytest.mark.usefixtures("no_fastdeploy")
class TestFindingTheEngine:
    def test_the_engine_can_be_the_process_itself(self, tmp_path: Path) -> None:
        write_process(tmp_path, "self", [*SERVER, "--model", "/m"], 1, FD_ATTENTION_BACKEND="MLA_ATTN", FD_X="a=b")
        assert find_engine(tmp_path) == Engine(
            {"model": "/m"}, environ={"FD_ATTENTION_BACKEND": "MLA_ATTN", "FD_X": "a=b"}
        )

    def test_the_engine_is_the_nearest_parent_that_is_an_api_server(self, tmp_path: Path) -> None:
        write_process(
            tmp_path, "self", ["python", "/fd/cache_manager/cache_transfer_manager.py", "--model", "/of-the-child"], 30
        )
        write_process(tmp_path, "30", ["/bin/sh", "-c", "python cache_transfer_manager.py > log"], 20)
        write_process(tmp_path, "20", [*SERVER, "--model", "/m"], 10)
        write_process(tmp_path, "10", ["python", "-m", "fastdeploy.entrypoints.openai.multi_api_server"], 1)
        assert find_engine(tmp_path).arguments == {"model": "/m"}

    @pytest.mark.parametrize(
        "words",
        [
            ["python", "/usr/lib/python3/site-packages/fastdeploy/entrypoints/openai/api_server.py"],
            ["python3", "-m", "fastdeploy.entrypoints.api_server"],
            ["python3", "-m", "fastdeploy.entrypoints.openai.run_batch"],
        ],
    )
    def test_the_engine_can_be_started_in_several_ways(self, tmp_path: Path, words: list[str]) -> None:
        write_process(tmp_path, "self", [*words, "--model=/m"], 1)
        assert find_engine(tmp_path).arguments == {"model": "/m"}

    def test_without_an_engine_the_settings_are_unknown_and_the_error_names_the_reason(self, tmp_path: Path) -> None:
        write_process(tmp_path, "self", ["python", "my_script.py", "--model", "/m"], 1)
        write_process(tmp_path, "1", ["init"], 0)
        with pytest.raises(ConfigError, match="neither this process nor a parent of it is FastDeploy's API server"):
            find_engine(tmp_path)

    def test_the_start_of_the_engine_is_known(self, tmp_path: Path) -> None:
        write_process(tmp_path, "self", ["python", "cache_transfer_manager.py"], 20)
        write_process(tmp_path, "20", SERVER, 1)
        (tmp_path / "20" / "stat").write_text(Path("/proc/1/stat").read_text())
        (tmp_path / "self" / "stat").write_text(Path("/proc/self/stat").read_text())
        assert abs(time.monotonic() - find_age(Path("/proc/1")) - find_engine(tmp_path).began) < 1

    def test_the_error_names_a_process_that_cannot_be_read(self, tmp_path: Path) -> None:
        write_process(tmp_path, "self", ["python", "worker_process.py"], 7)
        with pytest.raises(ConfigError, match=f"command line cannot be read: .*{tmp_path}/7/cmdline"):
            find_engine(tmp_path)

    def test_a_real_process_finds_its_engine(self, tmp_path: Path) -> None:
        """A module with the server's name starts a shell, and the shell starts a worker."""
        package = tmp_path / "fastdeploy" / "entrypoints"
        package.mkdir(parents=True)
        worker = tmp_path / "worker.py"
        worker.write_text(
            "import sys\nsys.modules['fastdeploy'] = None\n"
            "from kvstore_backend.integrations.fastdeploy_engine import find_engine\n"
            "engine = find_engine()\nprint(engine.arguments, engine.environ['FD_ATTENTION_BACKEND'])\n"
        )
        shell = f"{sys.executable} {worker}; true"
        starts = f"import os\nos.environ['FD_ATTENTION_BACKEND'] = 'later'\nos.system({shell!r})"
        (package / "api_server.py").write_text(starts)
        environ = {**os.environ, "FD_ATTENTION_BACKEND": "at the start"}
        command = [sys.executable, str(package / "api_server.py"), "--model", "/m", "-tp", "2"]
        run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert run.stdout == "{'model': '/m', 'tensor_parallel_size': '2'} at the start\n"


class TestTheGPU:
    def test_the_compute_capability_is_read_from_paddle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = types.SimpleNamespace(get_device_properties=lambda: types.SimpleNamespace(major=9, minor=0))
        paddle = types.SimpleNamespace(device=types.SimpleNamespace(cuda=cuda))
        monkeypatch.setitem(sys.modules, "paddle", paddle)
        assert find_capability() == "9.0"

    def test_without_paddle_the_compute_capability_is_empty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if find_spec("paddle") is None:
            monkeypatch.delitem(sys.modules, "paddle", raising=False)
        assert find_capability() == ""


LINES: list[tuple[list[str], dict[str, Any]]] = [
    (["-tp", "2"], {"tensor_parallel_size": 2}),
    (["--tensor-parallel", "2"], {"tensor_parallel_size": 2}),
    (["--tensor-parallel-size=2"], {"tensor_parallel_size": 2}),
    (["--moe-gate-fp32", "--block-size", "128"], {"moe_gate_fp32": True, "block_size": 128}),
    (["--moe-gate", "--max-model-len", "32768"], {"moe_gate_fp32": True, "max_model_len": 32768}),
    (["--block-size", "128", "--block-size", "256"], {"block_size": 256}),
]


@pytest.mark.usefixtures("no_fastdeploy")
class TestReadingACommandLine:
    @pytest.mark.parametrize(("words", "arguments"), LINES)
    def test_a_command_line_is_read_as_argparse_does(self, words: list[str], arguments: dict[str, Any]) -> None:
        read, defaults = parse_arguments(words)
        assert {name: str(value) for name, value in read.items()} == {
            name: str(value) for name, value in arguments.items()
        }
        assert defaults == {}

    def test_the_command_line_overrides_a_yaml_file(self, tmp_path: Path) -> None:
        file = tmp_path / "config.yaml"
        file.write_text("model: /m\ntensor_parallel_size: 4\nquantization: {kv_cache_quant_type: float8_e4m3fn}\n")
        read, _ = parse_arguments(["--config", str(file), "-tp", "2"])
        assert read == {
            "model": "/m",
            "tensor_parallel_size": "2",
            "quantization": {"kv_cache_quant_type": "float8_e4m3fn"},
        }

    @pytest.mark.parametrize("content", [None, "a: [b"])
    def test_the_error_names_a_yaml_file_that_cannot_be_read(self, tmp_path: Path, content: str | None) -> None:
        file = tmp_path / "config.yaml"
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match=f"--config {file} cannot be read"):
            parse_arguments([f"--config={file}"])

    def test_a_yaml_file_can_be_empty(self, tmp_path: Path) -> None:
        file = tmp_path / "config.yaml"
        file.write_text("")
        assert parse_arguments([f"--config={file}"]) == ({}, {})

    def test_several_words_are_one_value(self) -> None:
        read, _ = parse_arguments(["--logits-processors", "a:A", "b:B", "--model", "/m"])
        assert read == {"logits_processors": "a:A b:B", "model": "/m"}

    def test_unknown_and_ambiguous_arguments_are_unchanged(self) -> None:
        read, _ = parse_arguments(["--new-thing", "1", "--enable", "--max-num=2"])
        assert read == {"new_thing": "1", "enable": True, "max_num": "2"}

    def test_a_word_before_the_first_argument_is_ignored(self) -> None:
        assert parse_arguments(["serve", "--model", "/m"])[0] == {"model": "/m"}


@pytest.mark.skipif(find_spec("fastdeploy") is None, reason="FastDeploy is not installed here")
@pytest.mark.parametrize(("words", "arguments"), LINES[1::2])
def test_fastdeploys_parser_has_the_same_result(words: list[str], arguments: dict[str, Any], tmp_path: Path) -> None:
    environ = {**os.environ, "FD_LOG_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PARSE, json.dumps(words)]
    run = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout.splitlines()[-1]) == arguments


def test_arguments_that_fastdeploy_refuses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parser:
        def parse_args(self, words: list[str]) -> None:
            sys.exit(2)

    doubles: dict[str, dict[str, Any]] = {
        "fastdeploy": {},
        "fastdeploy.entrypoints": {},
        "fastdeploy.entrypoints.openai": {},
        "fastdeploy.entrypoints.openai.utils": {"make_arg_parser": lambda parser: parser},
        "fastdeploy.utils": {"FlexibleArgumentParser": Parser},
    }
    for name, members in doubles.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match="own parser refuses its command line"):
        parse_arguments(["--nonsense"])


class TestVersion:
    @pytest.fixture
    def package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        module = types.ModuleType("fastdeploy")
        module.__file__ = str(tmp_path / "__init__.py")
        module.__version__ = "2.6.0"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fastdeploy", module)
        return tmp_path

    def test_each_build_has_another_version(self, package: Path) -> None:
        found = set()
        for commit in ("one", "two"):
            (package / "version.txt").write_text(f"fastdeploy GIT COMMIT ID: {commit}")
            found.add(find_version())
        assert len(found) == 2
        assert all(version.startswith("2.6.0 ") for version in found)

    def test_without_a_build_the_version_depends_on_the_cache_managers_files(self, package: Path) -> None:
        (package / "cache_manager" / "v1").mkdir(parents=True)
        found = set()
        for source in ("one", "two"):
            (package / "cache_manager" / "v1" / "block_pool.py").write_text(source)
            found.add(find_version())
        assert len(found) == 2

    def test_without_fastdeploy_the_version_is_unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "fastdeploy", raising=False)
        assert find_version() == "of no known version"


class TestWeights:
    def test_a_model_without_a_version_has_the_weights_of_its_folder(self, tmp_path: Path) -> None:
        assert Weights(tmp_path, may_change=False).read() == WeightsVersion("", "")

    @pytest.mark.parametrize("content", ["", "step: 1", "version: ["])
    def test_a_file_without_a_version_counts_by_its_content(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "version.yaml").write_text(content)
        found = Weights(tmp_path, may_change=False).read()
        assert found is not None
        assert (len(found.text), found.step) == (12, "")

    def test_the_version_is_read_again_when_it_changes(self, tmp_path: Path) -> None:
        file = tmp_path / "version.yaml"
        file.write_text("version: RL-STEP1-17-a")
        weights = Weights(tmp_path, may_change=True)
        first = weights.read()
        assert first is not None
        assert (first.text.split()[0], first.step) == ("RL-STEP1-17-a", "RL-STEP1")
        assert weights.read() is first
        file.write_text("version: RL-STEP2-18-b-c")
        second = weights.read()
        assert second is not None
        assert (second.text.split()[0], second.step) == ("RL-STEP2-18-b-c", "RL-STEP2")

    def test_the_same_version_with_another_content_is_another_version(self, tmp_path: Path) -> None:
        file = tmp_path / "version.yaml"
        file.write_text("version: RL-STEP1-17-a")
        weights = Weights(tmp_path, may_change=True)
        first = weights.read()
        file.write_text("version: RL-STEP1-17-a\nstep: 5")
        assert weights.read() != first

    @pytest.mark.parametrize("content", [None, "", "step: 1", "- version", "version: [", "\0"])
    def test_weights_that_can_change_need_a_version(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "version.yaml").write_text(content)
        with pytest.raises(ConfigError, match=f"{tmp_path}/version.yaml has no version of the weights"):
            Weights(tmp_path, may_change=True)

    def test_without_its_file_the_version_is_unknown(self, tmp_path: Path) -> None:
        file = tmp_path / "version.yaml"
        file.write_text("version: RL-STEP1-17-a")
        weights = Weights(tmp_path, may_change=True)
        file.unlink()
        assert weights.read() is None
        file.write_text("version: RL-STEP1-17-a")
        assert weights.read() is not None

    def test_the_version_is_unknown_after_weights_changed_without_a_new_version(self, tmp_path: Path) -> None:
        file, other = tmp_path / "version.yaml", tmp_path / "notes.txt"
        file.write_text("version: RL-STEP1-17-a")
        (tmp_path / "model.safetensors").write_bytes(b"old")
        weights = Weights(tmp_path, may_change=True)
        other.write_text("no weights")
        assert weights.read() is not None
        (tmp_path / "model.safetensors").write_bytes(b"of the next step")
        assert weights.read() is None
        file.unlink()
        assert weights.read() is None
        file.write_text("version: RL-STEP1-17-a")
        assert weights.read() is None, "the new file has the same version"
        file.write_text("version: RL-STEP2-18-b")
        assert weights.read() is not None

    def test_weights_that_the_instance_does_not_load_again_can_change(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").write_bytes(b"old")
        weights = Weights(tmp_path, may_change=False)
        (tmp_path / "model.safetensors").write_bytes(b"of another model")
        assert weights.read() == WeightsVersion("", "")
