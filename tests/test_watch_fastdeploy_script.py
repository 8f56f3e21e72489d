"""``scripts/watch-fastdeploy`` with small trees, and its table compared with our own code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "watch-fastdeploy"
NAMESPACE: dict[str, Any] = runpy.run_path(str(SCRIPT))
GROUPS = NAMESPACE["load_table"](NAMESPACE["TABLE"])

ARGUMENTS = """
class EngineArgs:
    block_size: int = 64

def add_cli_args(parser):
    parser.add_argument("--model", type=str, default="ernie")
    parser.add_argument("--block-size", type=int, default=EngineArgs.block_size)
    parser.add_argument("--enable-mm", action="store_true")
    parser.add_argument("--kvcache-storage-backend", choices=["mooncake", "file"])
"""
KEYS = """
class Manager:
    def read(self, task):
        logger.info(f"reads {task}")
        keys = [f"prefix{self.version}_{key}_{self.rank}_key" for key in task.keys]
"""
CONFIG = """
type Config struct {
	Log LogConfig `yaml:"log"`
}

type LogConfig struct {
	Level  string `yaml:"level"` // debug, info
	Output string `yaml:"output"`
}

	if cfg.Log.Level == "" {
		cfg.Log.Level = "info"
	}
"""
TABLE = [
    {
        "kind": "flag",
        "reader": "arguments",
        "files": ["fastdeploy/args.py"],
        "ours": {"engine/args.py": None},
        "new": "the engine refuses it",
        "names": {"--model": "ernie", "--block-size": 64, "--kvcache-storage-backend": "None of mooncake, file"},
        "optional": {"--write-through-threshold": 2},
        "unused": {"it is for pictures": {"--enable-mm": "store_true"}},
    },
    {
        "kind": "form of a key",
        "reader": "forms",
        "of": "^prefix",
        "files": ["fastdeploy/cache_manager/*.py"],
        "ours": {"kvstore_backend/integrations/fastdeploy.py": "_VERSIONED"},
        "names": {"Manager.read.keys": "prefix{self.version}_{key}_{self.rank}_key"},
    },
    {
        "kind": "setting",
        "reader": "go settings",
        "files": ["fastdeploy/golang_router/config.go"],
        "ours": {"router/settings/router_settings.py": None},
        "names": {"log.level": ["info", "warn"], "log.output": None},
    },
]

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that compares ``TABLE`` with a tree, and returns the exit status and the printed lines."""

    def compare(arguments: str = ARGUMENTS, keys: str = KEYS, config: str = CONFIG) -> tuple[int, list[str]]:
        tree, table = tmp_path / "tree", tmp_path / "table.yaml"
        for name, text in (
            ("args.py", arguments),
            ("cache_manager/manager.py", keys),
            ("golang_router/config.go", config),
        ):
            path = tree / "fastdeploy" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        table.write_text(yaml.safe_dump(TABLE))
        status = NAMESPACE["main"]([str(tree)], table)
        printed = capsys.readouterr()
        return status, (printed.out or printed.err).splitlines()

    return compare


def test_a_tree_that_equals_the_table_has_no_difference(run: Run) -> None:
    assert run() == (0, ["8 names watched: 0 new, 0 gone, 0 different"])


def test_a_flag_that_is_not_in_the_table_is_reported_as_new_without_a_failure(run: Run) -> None:
    status, lines = run(arguments=f'{ARGUMENTS}    parser.add_argument("--turbo", default=3)\n')
    assert status == 0
    assert lines[0] == "new        flag --turbo = 3: fastdeploy/args.py; the engine refuses it"


def test_a_flag_that_fastdeploy_has_removed_is_reported_as_a_failure(run: Run) -> None:
    status, lines = run(arguments=ARGUMENTS.replace('"--model"', '"--checkpoint"'))
    assert status == 1
    assert "gone       flag --model: fastdeploy/args.py; used in engine/args.py" in lines


def test_a_removed_flag_that_we_do_not_use_is_reported_with_the_reason(run: Run) -> None:
    _, lines = run(arguments=ARGUMENTS.replace('"--enable-mm"', '"--mm"'))
    assert "gone       flag --enable-mm: fastdeploy/args.py; not used: it is for pictures" in lines


def test_a_changed_default_is_reported_also_if_it_is_an_attribute_of_a_class(run: Run) -> None:
    status, lines = run(arguments=ARGUMENTS.replace("64", "128"))
    assert status == 1
    assert lines[0] == "different  flag --block-size = 128, not 64: fastdeploy/args.py; used in engine/args.py"


def test_a_changed_choice_of_a_flag_is_reported(run: Run) -> None:
    status, lines = run(arguments=ARGUMENTS.replace('"file"', '"disk"'))
    assert status == 1
    assert "flag --kvcache-storage-backend = None of mooncake, disk, not None of mooncake, file" in lines[0]


def test_a_name_that_only_some_versions_have_is_accepted_with_its_default(run: Run) -> None:
    line = '    parser.add_argument("--write-through-threshold", default={})\n'
    assert run(arguments=ARGUMENTS + line.format(2))[0] == 0
    assert run(arguments=ARGUMENTS + line.format(3))[0] == 1


def test_a_changed_form_of_a_key_is_reported(run: Run) -> None:
    status, lines = run(keys=KEYS.replace("_{self.rank}_key", "_{self.rank}_{layer}_key"))
    assert status == 1
    assert lines[0] == (
        "different  form of a key Manager.read.keys = prefix{self.version}_{key}_{self.rank}_{layer}_key, not "
        "prefix{self.version}_{key}_{self.rank}_key: fastdeploy/cache_manager/manager.py; "
        "used in kvstore_backend/integrations/fastdeploy.py"
    )


@pytest.mark.parametrize(("default", "status"), [("info", 0), ("warn", 0), ("debug", 1)])
def test_a_default_of_the_go_router_is_one_of_those_in_the_table(run: Run, default: str, status: int) -> None:
    assert run(config=CONFIG.replace('= "info"', f'= "{default}"'))[0] == status


def test_a_missing_file_is_reported_in_one_line(run: Run, tmp_path: Path) -> None:
    run()
    (tmp_path / "tree" / "fastdeploy" / "args.py").unlink()
    lines = [line for _, line in NAMESPACE["compare"](NAMESPACE["Group"](**TABLE[0]), tmp_path / "tree")]
    assert lines == ["all 4 of kind flag: fastdeploy/args.py (no such file); used in engine/args.py"]


def test_a_file_that_is_not_python_is_refused_in_one_sentence(run: Run) -> None:
    status, lines = run(arguments="def add_cli_args(parser:\n")
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith("watch-fastdeploy: fastdeploy/args.py cannot be read: ")


def test_a_folder_that_is_not_a_checkout_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    sentence = f"watch-fastdeploy: {tmp_path} has no folder named fastdeploy; it must be a checkout of FastDeploy\n"
    assert ended.stderr == sentence


def test_the_help_describes_the_output_and_the_exit_status() -> None:
    ended = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "scripts/watch-fastdeploy TREE" in ended.stdout
    assert "The exit status is 1" in ended.stdout


# The readers

PYTHON = """
import os
app = FastAPI()
os.environ["MC_HOST"] = "x"

class Info(BaseModel):
    port: int = 0
    role: str

class Other(BaseModel):
    name: str

@app.get("/health")
def health(): ...

@app.api_route("/ping", methods=["GET", "POST"])
def ping(): ...

def make_parser(parser: Parser, *, strict=False): ...

def write(self):
    level = int(os.getenv("MC_LEVEL", "0"))
    self.store.setup(host="a", port=1)
    self.store.put(key, os.environ.get("OTHER"))
    info = {"ip": 1, **rest}
    metrics = {"m": {"type": Counter, "name": "fd:sent", "kwargs": {"labelnames": ["path"]}}}
    plain = {"m": {"type": Gauge, "name": "fd:now", "kwargs": {}}}
"""
GO = """
type Info struct {
	HostIP string `json:"host_ip" yaml:"host_ip"`
	Ports  []Port `json:"ports,omitempty"`
}

	v1 := r.Group("/v1")
	v1.POST("/completions", handle)
	r.GET("/metrics", handle)
	c.Writer.Header().Set("X-Router-URL", url)
"""


@pytest.mark.parametrize(
    ("reader", "of", "text", "found"),
    [
        ("variables", "^MC_", PYTHON, {"MC_HOST": "", "MC_LEVEL": "0"}),
        ("members", "Info", PYTHON, {"Info.port": "int = 0", "Info.role": "str"}),
        ("entries", "info", PYTHON, {"ip": ""}),
        ("calls", r"self\.store", PYTHON, {"setup": "host=, port=", "put": "2 positional"}),
        ("definitions", "make_.*", PYTHON, {"make_parser": "(parser: Parser, *, strict=False)"}),
        ("definitions", "Info", PYTHON, {"Info": "class(BaseModel)"}),
        ("routes", "", PYTHON, {"GET /health": "", "GET, POST /ping": ""}),
        ("metrics", "", PYTHON, {"fd:sent": "Counter['path']", "fd:now": "Gauge"}),
        ("go members", "Info", GO, {"Info.host_ip": "string", "Info.ports": "[]Port"}),
        ("go routes", "", GO, {"POST /v1/completions": "", "GET /metrics": ""}),
        ("pattern", r'Set\("(?P<name>[\w-]+)", (?P<value>\w+)', GO, {"X-Router-URL": "url"}),
        ("file", "api_server", "", {"api_server": ""}),
    ],
)
def test_a_reader_finds_names_and_their_values(reader: str, of: str, text: str, found: dict[str, str]) -> None:
    assert dict(NAMESPACE["READERS"][reader](text, of)) == found


# The table against our code


@pytest.mark.parametrize(
    ("name", "is_found"),
    [("--splitwise-role", True), ("--splitwise-rol", False), ("EngineArgs.block_size", True), ("splitwise", False)],
)
def test_a_name_is_found_in_our_code_as_a_whole_word_in_any_spelling(name: str, is_found: bool) -> None:
    group = NAMESPACE["Group"](kind="flag", reader="arguments", files=[], ours={"engine/args.py": None})
    assert group.find_use(name) == ("used in engine/args.py" if is_found else "not used: no place is known")


def test_each_group_has_a_known_reader_and_existing_files_of_ours() -> None:
    for group in GROUPS:
        assert group.reader in NAMESPACE["READERS"], group.kind
        re.compile(group.of)
    assert [path for group in GROUPS for path in group.ours if not (ROOT / path).exists()] == []


def test_each_name_in_the_table_is_in_our_code() -> None:
    known = [(group, name) for group in GROUPS for name in (*group.names, *group.optional)]
    lost = [(group.kind, name) for group, name in known if not group.find_use(name).startswith("used in ")]
    assert lost == [], "correct the file of ours, or move the name under `unused` with a reason"
