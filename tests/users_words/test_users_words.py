"""Each command in the guides of our users works here, or gets a sentence that helps."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.args import parse_args
from kvstore_backend import ConfigError
from kvstore_backend.config import PoolConfig, load_config, read_config, values
from router.settings import load_settings
from tests.examples.script import EXAMPLES, ROOT
from tests.support import plain_http
from tests.support.mooncake import find_master
from tests.support.nursery import run_forked
from tests.support.ports import free_ports
from tests.support.processes import Child, child
from tests.support.waiting import port_answers, wait_until
from tests.users_words.words import COMMANDS, MINDIE_FILE, MOONCAKE_FILE, SNIPPETS, command, translate

PAGE = (ROOT / "docs" / "migrate.md").read_text().replace("\\|", "|")
MODEL = "PaddlePaddle/ERNIE-4.5-0.3B-Paddle"
QUESTION = EXAMPLES / "question.json"

pytestmark = pytest.mark.timeout(300)


# The page.


@pytest.mark.parametrize("snippet", [each for each in SNIPPETS if each not in ('""', "retrieval")])
def test_the_migration_page_has_each_name(snippet: str) -> None:
    if snippet.startswith("{"):
        assert all(name in PAGE for name in ("`metadata_server`", "`protocol`", "`use_ascend_direct`"))
    elif snippet.startswith("mooncake_master --port 12345"):
        assert snippet in PAGE
    else:
        assert snippet in PAGE or f"/{snippet}" in PAGE


@pytest.mark.parametrize("line", COMMANDS)
def test_the_migration_page_has_each_command(line: str) -> None:
    if line.startswith("curl"):
        assert line.split(" -d ")[0] in PAGE or 'curl ... "http://0.0.0.0:52700/v1/chat/completions"' in PAGE
        return
    if line.startswith("python"):
        line = line.replace("fastdeploy.entrypoints.openai.api_server", "engine.api_server")
        line = line.replace("fastdeploy.router.launch", "router.launch")
    assert line in PAGE


@pytest.mark.parametrize("script", [each for each in SNIPPETS if each.endswith(".sh")])
def test_the_scripts_of_the_guides_exist(script: str) -> None:
    ended = subprocess.run([EXAMPLES / script, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert "--dry-run" in ended.stdout


# Flags.


@pytest.mark.parametrize("line", [line for line in COMMANDS if "api_server" in line])
def test_the_engine_accepts_the_flags_of_an_instance(line: str) -> None:
    words = translate(line, {}, MODEL)
    args = parse_args(words[words.index("engine.api_server") + 1 :], {})
    assert args.port in (52700, 52800, 52400, 52500)
    assert (args.model, args.max_model_len, args.max_num_seqs) == (MODEL, 32768, 32)
    assert args.kvcache_storage_backend == "mooncake"
    assert args.enable_output_caching == (args.splitwise_role == "decode")


def test_our_router_accepts_the_flags_of_the_router() -> None:
    words = translate(command("router.launch", "--splitwise"), {}, MODEL)
    settings = load_settings(words[words.index("router.launch") + 1 :], {})
    assert (settings.port, settings.splitwise) == (52700, True)


def test_fd_debug_enables_debug_logs() -> None:
    name, _, value = command("FD_DEBUG").removeprefix("export ").partition("=")
    assert parse_args(["--model", MODEL], {name: value}).log_level == "debug"


def test_the_message_for_a_missing_model_names_the_searched_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FD_MODEL_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("FD_LOG_DIR", str(tmp_path))
    ended = run_module("engine.api_server", "--model", MODEL, "--host", "127.0.0.1", "--port", str(free_ports(1)[0]))
    assert ended.returncode == 2
    assert f"model '{MODEL}' is not a folder on this machine and was not found among downloaded models" in ended.stderr
    assert str(tmp_path / MODEL) in ended.stderr
    assert f"{tmp_path}/hub/models--{MODEL.replace('/', '--')}" in ended.stderr


# The pool's file and variables.


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of simulated RDMA devices, which is empty."""
    folder = tmp_path / "infiniband"
    monkeypatch.setattr(values, "DEVICES_FOLDER", folder)
    return folder


def write_config(folder: Path, **changes: object) -> dict[str, str]:
    """Write the guide's configuration file; return the environment of the guide."""
    file = folder / "mooncake_config.json"
    file.write_text(json.dumps({**MOONCAKE_FILE, **changes}))
    return {"MOONCAKE_CONFIG_PATH": str(file)}


def mooncake_settings(environ: dict[str, str]) -> dict[str, Any]:
    return asdict(load_config("mooncake", environ=environ).store)


def test_the_guides_configuration_is_read_on_a_machine_with_rdma(tmp_path: Path, devices: Path) -> None:
    (devices / "mlx5_0").mkdir(parents=True)
    found = mooncake_settings(write_config(tmp_path))
    assert {name: found[name] for name in MOONCAKE_FILE} == MOONCAKE_FILE


def test_without_rdma_the_message_names_the_file_the_key_and_the_solution(tmp_path: Path, devices: Path) -> None:
    with pytest.raises(ConfigError, match=r'"protocol" in .*mooncake_config.json is .rdma.; .*no RDMA device; set tcp'):
        mooncake_settings(write_config(tmp_path))


def test_the_solution_without_rdma_works(tmp_path: Path, devices: Path) -> None:
    name, _, value = command("MOONCAKE_PROTOCOL=tcp").partition("=")
    assert mooncake_settings({**write_config(tmp_path), name: value})["protocol"] == "tcp"


@pytest.mark.parametrize("variable", [each for each in SNIPPETS if re.fullmatch(r"MOONCAKE_\w+", each)])
def test_each_variable_of_the_guide_is_read(variable: str, tmp_path: Path, devices: Path) -> None:
    (devices / "mlx5_7").mkdir(parents=True)
    if variable == "MOONCAKE_CONFIG_PATH":
        assert mooncake_settings(write_config(tmp_path))["master_server_addr"] == "0.0.0.0:15001"
        return
    name = variable.removeprefix("MOONCAKE_").lower()
    text = {"protocol": "tcp", "rdma_devices": "mlx5_7", "metadata_server": "P2PHANDSHAKE"}.get(name, "123456789")
    value = "10.0.0.9:15001" if name == "master_server_addr" else text
    plain = {"MOONCAKE_MASTER_SERVER_ADDR": "h:1", "MOONCAKE_METADATA_SERVER": "http://h:2/metadata"}
    assert str(mooncake_settings({**plain, variable: value})[name]) == value


# The master.


@contextlib.contextmanager
def running_master(line: str, ports: dict[int, int], log: Path) -> Iterator[Child]:
    """Run a real master with the guide's command line, on loopback as far as Mooncake allows it."""
    program, *flags = translate(line, ports, MODEL)
    assert program == "mooncake_master"
    rpc_port = next(iter(ports.values()))
    with child([find_master(), *flags, "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"], log) as running:
        running.wait_for(lambda: port_answers(rpc_port), "answering")
        yield running


def test_mindies_master_starts(tmp_path: Path) -> None:
    (port, metrics_port) = free_ports(2)
    line = command("mooncake_master", "12345") + f" --metrics_port={metrics_port}"
    with running_master(line, {12345: port}, tmp_path / "log") as master:
        assert master.exit_code is None


def test_our_command_accepts_mindies_flags() -> None:
    _, *flags = command("mooncake_master", "12345").split()
    ended = run_module("kvstore_backend.cli", "master", "--print", *flags)
    assert ended.returncode == 0, ended.stderr
    for word in ("--rpc_port=12345", "--eviction_high_watermark_ratio=0.8", "--eviction_ratio=0.05"):
        assert f" {word}" in ended.stdout
    assert " --rpc_thread_num=128" in ended.stdout
    assert "export MOONCAKE_MASTER_SERVER_ADDR=127.0.0.1:12345" in ended.stdout


# The guides as a whole.


@dataclass
class Guide:
    """The processes of a guide, started with its own commands in one folder."""

    folder: Path
    ports: dict[int, int]
    processes: ExitStack
    environ: dict[str, str]
    model: str

    def start(self, line: str, name: str) -> Child:
        """Start a command of the guide in the background, with the log file of the guide."""
        words = translate(line, self.ports, self.model)
        assert words[0] == "python"
        environ = {"PYTHONPATH": str(ROOT), **self.environ}
        argv = [sys.executable, *words[1:]]
        is_forked = "engine.api_server" in words
        return self.processes.enter_context(
            child(argv, self.folder / name, environ, cwd=self.folder, is_forked=is_forked)
        )

    def wait_for(self, process: Child, port: int) -> None:
        """Wait until the process at the guide's ``port`` is healthy."""
        process.wait_for(lambda: plain_http.answers_ok(f"http://127.0.0.1:{self.ports[port]}/health"), "healthy", 120)

    def shell(self, line: str) -> str:
        """Run a command of the guide in its folder; return the output."""
        for port, free in self.ports.items():
            line = line.replace(str(port), str(free))
        ended = subprocess.run(
            ["bash", "-c", line], cwd=self.folder, capture_output=True, text=True, timeout=100, check=False
        )
        assert ended.returncode == 0, ended
        return ended.stdout

    def ask(self, line: str) -> Any:
        """Run a curl command of the guide; return the response."""
        answer = json.loads(self.shell(line))
        assert answer["choices"][0]["message"]["content"], answer
        return answer

    def ask_question(self, port: int) -> int:
        """Send a prompt to the guide's ``port``; return the number of its tokens that came from the pool."""
        head = command("curl", "Hello, world!").partition(" -d ")[0].replace("52700", str(port))
        answer = self.ask(f"{head} -d @{QUESTION}")
        return int(answer["usage"]["prompt_tokens_details"]["pool_cached_tokens"])


def saved_keys(guide: Guide) -> int:
    page = plain_http.get(f"http://127.0.0.1:{guide.ports[15003]}/metrics").text
    found = re.search(r"^master_key_count (\d+)", page, re.MULTILINE)
    assert found
    return int(found[1])


@pytest.fixture(scope="module")
def model(few_words: Path) -> str:
    return str(few_words)


@contextlib.contextmanager
def following(folder: Path, model: str, *ports: int) -> Iterator[Guide]:
    """Run the master of a guide."""
    mapped = dict(zip((15001, 15002, 15003, *ports), free_ports(3 + len(ports)), strict=True))
    with ExitStack() as processes:
        processes.enter_context(running_master(command("mooncake_master", "15001"), mapped, folder / "master"))
        yield Guide(folder, mapped, processes, {"MC_TCP_BIND_ADDRESS": "127.0.0.1"}, model)


@pytest.fixture(scope="module")
def two_instances(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Guide]:
    folder = tmp_path_factory.mktemp("two")
    with following(folder, model, 52700, 52800) as guide:
        content = json.dumps({**MOONCAKE_FILE, "protocol": "tcp"})
        for port in (15001, 15002):
            content = content.replace(str(port), str(guide.ports[port]))
        (folder / "mooncake_config.json").write_text(content)
        guide.environ["MOONCAKE_CONFIG_PATH"] = str(folder / "mooncake_config.json")
        lines = [line for line in COMMANDS if "api_server" in line and "--splitwise-role" not in line]
        started = [guide.start(line, str(number)) for number, line in enumerate(lines)]
        for process, port in zip(started, (52700, 52800), strict=True):
            guide.wait_for(process, port)
        yield guide


def test_an_instance_reads_the_blocks_that_the_other_instance_computed(two_instances: Guide) -> None:
    assert two_instances.ask_question(52700) == 0
    wait_until(lambda: saved_keys(two_instances) >= 6, "the prompt to be in the pool")
    assert two_instances.ask_question(52800) >= 64


def test_the_guides_grep_finds_the_hit(two_instances: Guide) -> None:
    two_instances.ask_question(52800)
    found = two_instances.shell(command("grep -E", "storage_cache_token_num"))
    assert re.search(
        rf"^log_{two_instances.ports[52800]}/api_server.log:.*storage_cache_token_num=\d+", found, re.MULTILINE
    )


def test_the_guides_curl_works_at_both_ports(two_instances: Guide) -> None:
    line = command("curl", "Hello, world!")
    for port in ("52700", "52800"):
        answer = two_instances.ask(line.replace("52700", port))
        assert answer["usage"]["prompt_tokens_details"]["pool_cached_tokens"] == 0


def test_the_log_explains_the_miss_of_the_guides_prompt(two_instances: Guide) -> None:
    line = command("curl", "Hello, world!").replace("52700", "52800")
    request_id = two_instances.ask(line)["id"].removeprefix("chatcmpl-")
    log = (two_instances.folder / f"log_{two_instances.ports[52800]}" / "api_server.log").read_text()
    (logged,) = [each for each in log.splitlines() if request_id in each and "storage_cache_token_num" in each]
    assert re.search(
        r'storage_cache_token_num=0 .* storage_cache_reason="shorter than a block \(\d+ of 64 tokens\)"', logged
    )


def test_the_metadata_server_responds_with_400(two_instances: Guide) -> None:
    url = command("curl http://localhost:15002").split()[1].replace("15002", str(two_instances.ports[15002]))
    answer = plain_http.get(url.replace("localhost", "127.0.0.1"))
    assert (answer.status_code, "Missing key parameter" in answer.text) == (400, True)
    assert "400" in PAGE
    assert "Missing key parameter" in PAGE


def test_the_master_has_metrics(two_instances: Guide) -> None:
    line = command("curl http://localhost:15003").replace("localhost", "127.0.0.1")
    assert "master_key_count" in two_instances.shell(f"{line} -s")


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss is not installed")
def test_ss_finds_the_master(two_instances: Guide) -> None:
    assert str(two_instances.ports[15001]) in two_instances.shell(command("ss -ltn"))


@pytest.mark.skipif(shutil.which("lsof") is None, reason="lsof is not installed")
def test_the_pages_lsof_finds_only_the_master_but_the_guides_lsof_also_finds_instances(two_instances: Guide) -> None:
    ours = re.search(r"`kill \$\((lsof [^)]*)\)`", PAGE)
    assert ours
    (listening,) = two_instances.shell(ours[1]).split()
    theirs = command("lsof").partition("$(")[2].rstrip(")")
    assert {listening} < set(two_instances.shell(theirs).split())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Guide]:
    with following(tmp_path_factory.mktemp("pair"), model, 52700, 52400, 52500) as guide:
        guide.environ |= {
            "MOONCAKE_MASTER_SERVER_ADDR": f"127.0.0.1:{guide.ports[15001]}",
            "MOONCAKE_METADATA_SERVER": f"http://127.0.0.1:{guide.ports[15002]}/metadata",
            "MOONCAKE_PROTOCOL": "tcp",
        }
        router = guide.start(command("router.launch", "--splitwise"), "router")
        prefill = guide.start(command("--splitwise-role prefill"), "prefill")
        decode = guide.start(command("--splitwise-role decode"), "decode")
        guide.wait_for(prefill, 52400)
        guide.wait_for(decode, 52500)
        counts = f"http://127.0.0.1:{guide.ports[52700]}/registered_number"

        def are_both_registered() -> bool:
            found = plain_http.get(counts).json()
            return bool(found["prefill"] and found["decode"])

        router.wait_for(lambda: port_answers(guide.ports[52700]) and are_both_registered(), "paired", 60)
        yield guide


def test_a_pair_responds_to_the_guides_curl(pair: Guide) -> None:
    pair.ask(command("curl", "Hello!"))


def test_prefill_reads_the_blocks_of_decode_and_the_guides_grep_finds_the_hit(pair: Guide) -> None:
    pair.ask_question(52500)
    wait_until(lambda: saved_keys(pair) >= 6, "the prompt to be in the pool")
    assert pair.ask_question(52700) >= 64
    found = pair.shell(f'grep -E "storage_cache_token_num" {command("log_prefill/api_server.log")}')
    assert re.search(r"storage_cache_token_num=[1-9]", found)


# MindIE.


Write = Callable[..., Path]


@pytest.fixture
def write_mindie(tmp_path: Path) -> Write:
    """Return a function that writes the two files of MindIE's guide, and returns the path of the first one."""

    def write(pool: object = None, **changes: object) -> Path:
        file = tmp_path / "mooncake.json"
        file.write_text(json.dumps({**MINDIE_FILE, **changes}))
        their_pool = json.loads("{" + command('"kvPoolConfig"') + "}")["kvPoolConfig"] | {"configPath": str(file)}
        plugin = json.loads("{" + command('"plugin_params"') + "}")
        server = {
            "BackendConfig": {
                "modelInstanceNumber": 1,
                "npuDeviceIds": [[0]],
                "multiNodesInferEnabled": False,
                "interNodeTLSEnabled": False,
                "kv_trans_timeout": 10,
                "kv_link_timeout": 1080,
                "kvPoolConfig": pool(their_pool) if callable(pool) else their_pool,
                "ModelDeployConfig": {
                    "maxSeqLen": 2560,
                    "ModelConfig": [
                        {"dp": -1, "sp": -1, "tp": -1, "moe_ep": -1, "moe_tp": -1, "cpuMemSize": 5, "npuMemSize": -1}
                        | plugin
                    ],
                },
            }
        }
        (tmp_path / "config.json").write_text(json.dumps(server))
        return tmp_path / "config.json"

    return write


def pool_of(file: Path) -> PoolConfig | None:
    return read_config(str(file))


def test_mindies_files_are_read_and_their_other_members_are_ignored(write_mindie: Write) -> None:
    config = pool_of(write_mindie())
    assert config is not None
    found = asdict(config.store)
    assert (found["protocol"], found["metadata_server"]) == ("ascend", "P2PHANDSHAKE")
    assert (found["master_server_addr"], found["global_segment_size"]) == ("ip:50051", 268435456)


def doctor(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_module("kvstore_backend.cli", "doctor", *map(str, arguments))


def test_doctor_lists_the_missing_parts_of_an_ascend_machine(write_mindie: Write) -> None:
    file = write_mindie(master_server_address="127.0.0.1:1")
    for needed in ("LD_LIBRARY_PATH", "ASCEND_BUFFER_POOL=4:8", "/etc/hccn.conf", "mooncake-transfer-engine-npu"):
        assert needed in doctor(file).stdout


@pytest.mark.parametrize(
    ("name", "value"), [("metadata_server", "http://127.0.0.1:1/metadata"), ("use_ascend_direct", False)]
)
def test_doctor_names_a_special_key_that_is_not_as_required(name: str, value: object, write_mindie: Write) -> None:
    file = write_mindie(master_server_address="127.0.0.1:1", **{name: value})
    fault = re.search(rf'^fail +MindIE .*"{name}"', doctor(file).stdout, re.MULTILINE)
    assert fault


def test_doctor_names_a_protocol_that_is_not_mindies(write_mindie: Write) -> None:
    file = write_mindie(master_server_address="127.0.0.1:1", protocol="tcp")
    assert re.search(r"^fail +MindIE .*ascend", doctor(file).stdout, re.MULTILINE)


def test_the_memory_of_the_links_is_computed() -> None:
    found = doctor("--cards", 128, "--memory-factor", 0.92).stdout
    assert "127 x 4 MB = 508 MB" in found
    assert "0.91, which frees 600 MB; to 0.88 if cards may be added" in found


# Sparse attention.

THEIR_DEFAULTS = {
    "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "1024",
    "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "7192",
    "VLLM_RETRIEVAL_TOPK_PERCENT": "0.2",
    "VLLM_RETRIEVAL_DENSE_BOUNDARY": "32K",
    "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "64K",
}
LONG = ["--model", MODEL, "--max-model-len", "131072", "--block-size", "128"]


def test_the_retrieval_variables_are_those_of_the_guide() -> None:
    assert list(THEIR_DEFAULTS) == [each for each in SNIPPETS if each.startswith("VLLM_RETRIEVAL_")]


def test_our_retrieval_defaults_are_those_of_the_guide() -> None:
    plain = parse_args([*LONG, "--enable-retrieval"], {}).retrieval
    assert plain is not None
    assert parse_args([*LONG, "--enable-retrieval"], THEIR_DEFAULTS).retrieval == plain


@pytest.mark.parametrize("variable", THEIR_DEFAULTS)
def test_each_retrieval_variable_of_the_guide_is_read(variable: str) -> None:
    value = "0.1" if "PERCENT" in variable else "96K" if "OFFLOAD" in variable else "16K"
    changed = parse_args([*LONG, "--enable-retrieval"], {variable: value}).retrieval
    assert changed != parse_args([*LONG, "--enable-retrieval"], {}).retrieval


def test_the_guides_plugin_list_enables_retrieval() -> None:
    name, _, value = command("VLLM_PLUGINS").removeprefix("export ").partition("=")
    assert parse_args(LONG, {name: value}).retrieval is not None


def test_a_plugin_list_without_retrieval_disables_it() -> None:
    assert parse_args(LONG, {"VLLM_PLUGINS": "ascend_enhanced_model,ascend"}).retrieval is None


def test_retrieval_sizes_without_the_plugin_get_a_warning(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    parse_args(LONG, {"VLLM_RETRIEVAL_INIT_TOKENS_NUM": "512"})
    assert "VLLM_RETRIEVAL_INIT_TOKENS_NUM" in capsys.readouterr().err + caplog.text


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked([sys.executable, "-m", module, *arguments])
