"""The command line: FastDeploy's examples work, and an error is one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.args import EngineArgs, parse_args
from engine.scheduling.retrieval_config import RetrievalConfig
from kvstore_backend import ConfigError


def parse(line: str, environ: dict[str, str] | None = None) -> EngineArgs:
    return parse_args(line.split(), environ or {})


@pytest.mark.parametrize(
    "line",
    [
        # FastDeploy's examples: global cache, global cache with prefill and decode, splitwise v1, mixed
        "--port 52700 --max-model-len 32768 --max-num-seqs 32 --kvcache-storage-backend mooncake",
        "--port 52400 --max-model-len 32768 --max-num-seqs 32 --splitwise-role prefill "
        "--cache-transfer-protocol rdma --router 0.0.0.0:52700 --kvcache-storage-backend mooncake",
        "--port 52500 --max-model-len 32768 --max-num-seqs 32 --splitwise-role decode "
        "--cache-transfer-protocol rdma --router 0.0.0.0:52700 --enable-output-caching "
        "--kvcache-storage-backend mooncake",
        "--port 52400 --metrics-port 52401 --engine-worker-queue-port 52402 --cache-queue-port 52403 "
        "--max-model-len 32768 --splitwise-role prefill --cache-transfer-protocol rdma --rdma-comm-ports 52404 "
        "--pd-comm-port 52405 --router 0.0.0.0:52700",
        "--port 8100 --metrics-port 8101 --engine-worker-queue-port 8102 --cache-queue-port 8103 "
        "--max-model-len 32768 --router 0.0.0.0:9000",
        "--port 8100 --splitwise-role prefill --router 0.0.0.0:9000",
    ],
)
def test_command_lines_of_fastdeploys_examples_are_accepted(line: str) -> None:
    parse(f"--model PaddlePaddle/ERNIE-4.5-0.3B-Paddle {line}")


def test_defaults_are_fastdeploys() -> None:
    args = parse("--model m")
    assert (args.port, args.max_model_len, args.max_num_seqs, args.block_size) == (8000, 2048, 8, 64)
    assert (args.splitwise_role, args.cache_transfer_protocol) == ("mixed", ("ipc",))
    assert args.enable_prefix_caching
    assert not args.enable_output_caching
    assert (args.served_model_name, args.log_dir, args.log_level) == ("m", None, "info")


def test_several_transfer_protocols_are_separated_by_commas() -> None:
    assert parse("--model m --cache-transfer-protocol ipc,rdma").cache_transfer_protocol == ("ipc", "rdma")


def test_memory_for_hand_overs_is_a_size() -> None:
    assert parse("--model m").handover_memory == 2 << 30
    assert parse("--model m --handover-memory 512MiB").handover_memory == 512 << 20
    with pytest.raises(ConfigError, match=r"--handover-memory.*a size is a number of bytes"):
        parse("--model m --handover-memory much")


def test_the_environment_sets_the_log_folder_and_debug() -> None:
    args = parse("--model m", {"FD_LOG_DIR": "/tmp/logs", "FD_DEBUG": "1"})
    assert (args.log_dir, args.log_level) == (Path("/tmp/logs"), "debug")
    assert parse("--model m --log-level warn", {"FD_DEBUG": "1"}).log_level == "warn"


@pytest.mark.parametrize(
    ("line", "problem", "remedy"),
    [
        ("--splitwise-role prefil", "--splitwise-role: invalid choice: 'prefil'", "mixed"),
        ("--kvcache-storage-backend redis", "--kvcache-storage-backend: 'redis' is neither one of", "mooncake"),
        ("--device tpu", "--device: invalid choice: 'tpu'", "cpu"),
        ("--dtype int4", "--dtype: invalid choice: 'int4'", "bfloat16"),
        (
            "--kvcache-storage-backend mooncake --no-enable-prefix-caching",
            "--kvcache-storage-backend mooncake needs prefix caching",
            "leave out --no-enable-prefix-caching",
        ),
        (
            "--enable-output-caching --no-enable-prefix-caching",
            "--enable-output-caching needs prefix caching",
            "leave out --no-enable-prefix-caching",
        ),
        ("--tensor-parallel-size 2", "--tensor-parallel-size 2", "only 1 works"),
        ("--port 0", "--port: 0 is not a port", "1 to 65535"),
        ("--port 65536", "--port: 65536 is not a port", "1 to 65535"),
        ("--port http", "--port: 'http' is not a whole number", "see --help"),
        ("--port 9 --pd-comm-port 9", "--pd-comm-port 9 is also --port or --metrics-port", "choose another"),
        ("--metrics-port 9 --pd-comm-port 9", "--pd-comm-port 9 is also --port or --metrics-port", "choose another"),
        ("--max-model-len 0", "--max-model-len: 0 is not a positive number", "see --help"),
        ("--max-model-len 4k", "--max-model-len: '4k' is not a whole number", "see --help"),
        ("--gpu-memory-utilization 90", "--gpu-memory-utilization: 90 is not a fraction", "at most 1"),
        ("--gpu-memory-utilization most", "--gpu-memory-utilization: most is not a fraction", "at most 1"),
        ("--max-num-seqs 64 --max-num-batched-tokens 32", "--max-num-batched-tokens 32", "--max-num-seqs"),
        ("--cache-transfer-protocol rmda", "--cache-transfer-protocol 'rmda'", "ipc, rdma, tcp"),
        ("--cache-transfer-protocol ipc,", "--cache-transfer-protocol 'ipc,'", "ipc, rdma, tcp"),
        ("--max-modle-len 5", "'--max-modle-len' is not a flag", "did you mean --max-model-len?"),
        ("--kvcache-storage-backends=file", "'--kvcache-storage-backends'", "did you mean --kvcache-storage-backend?"),
        ("--quantization wint4", "--quantization: this engine uses the checkpoint's weights", "leave the flag out"),
        ("--log-dir x", "'--log-dir' is not a flag", "see --help"),  # FastDeploy uses FD_LOG_DIR
        ("stray", "'stray' is not a flag", "see --help"),
        ("--port", "--port: expected one argument", "see --help"),
    ],
)
def test_the_error_for_a_bad_flag_is_one_sentence_with_the_flag_and_a_remedy(
    line: str, problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"--model m {line}")
    message = str(caught.value)
    assert problem in message
    assert remedy in message
    assert "\n" not in message


def test_a_model_is_required() -> None:
    with pytest.raises(ConfigError, match="--model is not given; it must be a checkpoint folder"):
        parse("--port 8000")


def test_an_invalid_debug_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match="FD_DEBUG='yes': set it to 1 for debug logs, or to 0 for none"):
        parse("--model m", {"FD_DEBUG": "yes"})


def test_sparse_attention_is_off_by_default() -> None:
    assert parse("--model m").retrieval is None
    assert parse("--model m", {"VLLM_PLUGINS": "ascend,not_retrieval"}).retrieval is None


@pytest.mark.parametrize("plugins", ["retrieval", "ascend_enhanced_model,ascend,retrieval", " retrieval , other"])
def test_the_plugin_of_sparse_attention_enables_it_like_the_flag(plugins: str) -> None:
    environ = {"VLLM_PLUGINS": plugins, "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "512"}
    line = "--model m --max-model-len 65536"
    config = parse(f"{line} --retrieval-stride 2", environ).retrieval
    assert config == RetrievalConfig(64, 512, stride=2)
    assert config == parse(f"{line} --retrieval-stride 2 --enable-retrieval", {**environ, "VLLM_PLUGINS": ""}).retrieval


def test_the_flag_that_disables_sparse_attention_takes_precedence_over_its_plugin() -> None:
    assert (
        parse("--model m --max-model-len 65536 --no-enable-retrieval", {"VLLM_PLUGINS": "retrieval"}).retrieval is None
    )


def test_one_warning_names_the_variables_without_effect_while_sparse_attention_is_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse("--model m", {"VLLM_RETRIEVAL_TOPK_PERCENT": "0.5", "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "many"})
    assert caplog.messages == [
        "Sparse attention is off, so these environment variables have no effect: VLLM_RETRIEVAL_INIT_TOKENS_NUM, "
        "VLLM_RETRIEVAL_TOPK_PERCENT; add --enable-retrieval"
    ]


def test_no_warning_names_variables_while_sparse_attention_is_on(caplog: pytest.LogCaptureFixture) -> None:
    parse("--model m --max-model-len 65536", {"VLLM_PLUGINS": "retrieval", "VLLM_RETRIEVAL_TOPK_PERCENT": "0.5"})
    assert not caplog.messages


def test_sparse_attention_has_the_methods_defaults() -> None:
    config = parse("--model m --max-model-len 131072 --enable-retrieval --block-size 128").retrieval
    assert config == RetrievalConfig(128, 1024, 7192, 0.2, 32768, 65536, "min_max", 1, 0)


def test_flags_of_sparse_attention_take_precedence_over_its_variables() -> None:
    environ = {
        "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "512",
        "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "4K",
        "VLLM_RETRIEVAL_TOPK_PERCENT": "0.5",
        "VLLM_RETRIEVAL_DENSE_BOUNDARY": "8K",
        "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY": "1M",
    }
    line = "--model m --max-model-len 65536 --enable-retrieval --retrieval-topk-percent 0.1 --retrieval-stride 4"
    config = parse(f"{line} --retrieval-representative mean --retrieval-offload-boundary 16k", environ).retrieval
    assert config == RetrievalConfig(64, 512, 4096, 0.1, 8192, 16384, "mean", 4)


@pytest.mark.parametrize(
    ("line", "environ", "sentence"),
    [
        ("--retrieval-stride 2", {}, "--retrieval-stride has no effect without --enable-retrieval"),
        ("--enable-retrieval", {}, "no prompt reaches --retrieval-dense-boundary 32768 with --max-model-len 2048"),
        ("--retrieval-stride 2 --no-enable-retrieval", {"VLLM_PLUGINS": "retrieval"}, "has no effect without"),
        (
            "",
            {"VLLM_PLUGINS": "retrieval"},
            "VLLM_PLUGINS names retrieval: no prompt reaches --retrieval-dense-boundary",
        ),
        (
            "--enable-retrieval --retrieval-local-tokens 64",
            {},
            "--retrieval-local-tokens 64 is not more than one block",
        ),
        ("--enable-retrieval --retrieval-topk-percent 1.5", {}, "--retrieval-topk-percent: 1.5 is not a fraction"),
        ("--enable-retrieval --retrieval-init-tokens 3X", {}, "'3X' is not a number of tokens, such as 1024 or 32K"),
        (
            "--enable-retrieval",
            {"VLLM_RETRIEVAL_TOPK_PERCENT": "0"},
            "VLLM_RETRIEVAL_TOPK_PERCENT: 0 is not a fraction",
        ),
        ("--enable-retreival", {}, "did you mean --enable-retrieval?"),
    ],
)
def test_invalid_settings_of_sparse_attention_are_refused(line: str, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"--model m {line}", environ)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("program", "begins"), [("-m", "engine: the engine needs torch"), ("app.py", "Traceback")])
def test_the_error_for_missing_packages_names_the_packages_to_install(program: str, begins: str) -> None:
    code = f"""
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "torch" else find_spec(name, *args)
sys.argv = [{program!r}]
import engine
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith(begins)
    assert "the engine needs torch; run pip install '/path/to/this/repository[engine]'" in ended.stderr


def test_an_unknown_flag_is_reported_before_a_missing_one() -> None:
    with pytest.raises(ConfigError, match="did you mean --model"):
        parse("--modl m")


def test_the_flag_names_the_file_of_the_routers_token_and_else_the_environment_does() -> None:
    environ = {"FD_ROUTER_TOKEN_FILE": "/b"}
    assert parse("--model m --router r:1").router_token_file is None
    assert parse("--model m --router r:1 --router-token-file /a", environ).router_token_file == Path("/a")
    assert parse("--model m --router r:1", environ).router_token_file == Path("/b")
    assert parse("--model m", environ).router_token_file is None
    with pytest.raises(ConfigError, match="--router-token-file has no effect without --router; add --router"):
        parse("--model m --router-token-file /a")
