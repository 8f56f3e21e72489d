"""All flags of FastDeploy. Each is accepted, accepted without effect and reported, or refused in one sentence."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from engine import fastdeploy_flags
from engine.args import EngineArgs, parse_args
from kvstore_backend import ConfigError

# Every option of ``make_arg_parser(FlexibleArgumentParser())`` of FastDeploy 2.6 and of its develop branch, with a
# usual value. Add a row when FastDeploy adds a flag.
ACCEPTED = """
--port 8188
--host 127.0.0.1
--metrics-port 8189
--model m
--served-model-name m
--tokenizer m
--max-model-len 4096
--block-size 64
--dynamic-load-weight
--engine-worker-queue-port 8190
--tensor-parallel-size 1
-tp 1
--max-num-seqs 32
--num-gpu-blocks-override 100
--max-num-batched-tokens 4096
--gpu-memory-utilization 0.8
--kvcache-storage-backend mooncake
--enable-prefix-caching
--no-enable-prefix-caching
--enable-output-caching
--no-enable-output-caching
--splitwise-role decode
--cache-transfer-protocol ipc,rdma
--pd-comm-port 8191
--rdma-comm-ports 8192,8193
--router 127.0.0.1:9000
"""
WITHOUT_EFFECT = """
--workers 4
--controller-port -1
--max-waiting-time -1
--max-concurrency 2048
--timeout-graceful-shutdown 0
--timeout 0
--revision master
--model-config-name config.json
--task generate
--runner auto
--convert auto
--use-warmup 0
--limit-mm-per-prompt '{"image": 1}'
--mm-processor-kwargs '{}'
--max-encoder-cache -1
--max-processor-cache -1
--enable-mm
--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'
--benchmark-metrics-config '{}'
--load-strategy normal
--graph-optimization-config '{"use_cudagraph": true}'
--guided-decoding-backend off
--guided-decoding-disable-any-whitespace False
--enable-logprob
--max-logprobs 20
--logprobs-mode raw_logprobs
--seed 0
--lm_head-fp32 --dtype float32
--moe-gate-fp32 --dtype float32
--model-impl auto
--disable-custom-all-reduce
--enable-flashinfer-allreduce-fusion
--use-internode-ll-two-stage
--disable-sequence-parallel-moe
--data-parallel-size 1
--local-data-parallel-id 0
--enable-expert-parallel
--enable-eplb
--eplb-config '{}'
--enable-chunked-moe
--chunked-moe-size 256
--shutdown-comm-group-if-worker-idle
--no-shutdown-comm-group-if-worker-idle
--ep-prefill-use-worst-num-tokens
--load-choices default_v1
--kv-cache-ratio 0.75
--swap-space 10
--prealloc-dec-block-slot-num-threshold 12
--cache-queue-port 8194
--static-decode-blocks 2
--write-policy write_through
--ips 127.0.0.1
--enable-chunked-prefill
--max-num-partial-prefills 1
--max-long-partial-prefills 1
--long-prefill-token-threshold 0
--disable-chunked-mm-input
--scheduler-name local
--scheduler-max-size -1
--scheduler-ttl 900
--scheduler-host 127.0.0.1
--scheduler-port 6379
--scheduler-db 0
--scheduler-password none
--scheduler-topic default
--scheduler-min-load-score 3
--scheduler-load-shards-num 1
--scheduler-sync-period 5
--scheduler-expire-period 3000
--scheduler-release-load-expire-period 600
--scheduler-reader-parallel 4
--scheduler-writer-parallel 4
--scheduler-reader-batch-size 200
--scheduler-writer-batch-size 200
--enable-overlap-schedule
--no-enable-overlap-schedule
--enable-moe-scores-elementwise-fuse
--deploy-modality mixed
--enable-mega-moe
--skip-port-check
--model-loader-extra-config '{}'
--write-through-threshold 2
"""
REFUSED = """
--tensor-parallel-size 2
-tp 2
--data-parallel-size 2
--local-data-parallel-id 1
--ips 10.0.0.1,10.0.0.2
--tokenizer other
--controller-port 8195
--max-waiting-time 10
--enable-mm-output
--api-key secret
--model-config-name other.json
--tokenizer-base-url http://10.0.0.1
--task embed
--runner pooling
--convert embed
--override-pooler-config '{}'
--reasoning-parser ernie-45-vl
--chat-template template.jinja
--tool-call-parser ernie-x1
--tool-parser-plugin plugin.py
--load-strategy ipc_snapshot
--rsync-config '{}'
--load-choices dummy
--quantization wint8
--plas-attention-config '{}'
--guided-decoding-backend xgrammar
--enable-keep-sampling-mask
--logprobs-mode raw_logits
--enable-early-stop
--early-stop-config '{"enable_early_stop": true}'
--logits-processors a.B c.D
--enable-entropy
--routing-replay-config '{}'
--kvcache-storage-backend attention_store
--write-policy write_back
--scheduler-name global
--lm_head-fp32
--moe-gate-fp32 --dtype bfloat16
--kvcache-storage-config '{}'
--max-completion-tokens 100
--min-completion-tokens 1
--reasoning-max-tokens 100
--response-max-tokens 100
--input-max-tokens 100
--output-fallback markdown-bold-colon
--output-fallback-plugin plugin.py
--output-fallback-config '{}'
"""


def rows(table: str) -> list[str]:
    return table.strip().splitlines()


def parse(line: str) -> EngineArgs:
    return parse_args(["--model", "m", *shlex.split(line)], {})


@pytest.mark.parametrize("line", rows(ACCEPTED))
def test_flags_of_the_engine_are_accepted(line: str) -> None:
    assert parse(line).remarks == ()


@pytest.mark.parametrize("line", rows(WITHOUT_EFFECT))
def test_flags_without_effect_are_accepted_and_reported(line: str) -> None:
    flag = line.split()[0]
    assert parse(line).remarks == (f"these flags of FastDeploy have no effect in this engine: {flag}",)


@pytest.mark.parametrize("line", rows(REFUSED))
def test_flags_for_unsupported_features_are_refused_in_one_sentence(line: str) -> None:
    flag = line.split()[0]
    with pytest.raises(ConfigError) as caught:
        parse(line)
    message = str(caught.value)
    assert message.startswith(("argument ", flag, "--tensor-parallel-size 2"))
    assert "\n" not in message


def test_one_remark_names_each_flag_without_effect_once() -> None:
    args = parse("--workers 1 --enable-chunked-prefill --port 9 --workers 2")
    assert args.remarks == (
        "these flags of FastDeploy have no effect in this engine: --workers, --enable-chunked-prefill",
    )
    assert args.port == 9


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--tensor-parallel 1 --max-model 4096", "--tensor-parallel-size 1 --max-model-len 4096"),
        ("--splitwise=decode", "--splitwise-role decode"),
        ("--pd 9", "--pd-comm-port 9"),
        ("--served-model x", "--served-model-name x"),
    ],
)
def test_flags_can_be_abbreviated_as_in_fastdeploy(line: str, meant: str) -> None:
    assert parse(line) == parse(meant)


def test_newer_flags_do_not_change_the_meaning_of_abbreviations() -> None:
    assert parse("--kvcache memory").kvcache_storage_backend == "memory"
    assert parse("--write write_through").remarks == parse("--write-policy write_through").remarks


def test_an_ambiguous_abbreviation_is_refused_with_the_possible_flags() -> None:
    with pytest.raises(ConfigError, match=r"'--max-num-' is ambiguous; .*: --max-num-seqs, --max-num-batched-tokens"):
        parse("--max-num- 8")


def test_the_tokenizer_flag_is_accepted_only_with_the_models_own_tokenizer() -> None:
    assert parse("--tokenizer m") == parse("")
    with pytest.raises(ConfigError, match="--tokenizer other: the tokenizer of --model is used; leave the flag out"):
        parse("--tokenizer other")


@pytest.mark.parametrize("value", ["''", "None"])
def test_fastdeploys_values_for_no_storage_are_accepted(value: str) -> None:
    assert parse(f"--kvcache-storage-backend {value}").kvcache_storage_backend is None


class TestConfigFile:
    def parse_file(self, folder: Path, text: str, line: str = "") -> EngineArgs:
        path = folder / "config.yaml"
        path.write_text(text)
        return parse_args(shlex.split(f"--config {path} {line}"), {})

    def test_the_command_line_takes_precedence_over_the_file(self, tmp_path: Path) -> None:
        text = "model: m\nmax_model_len: 4096\nport: 9\nenable_prefix_caching: false\nrdma_comm_ports: [1, 2]\n"
        args = self.parse_file(tmp_path, text, "--port 10")
        assert (args.model, args.max_model_len, args.port) == ("m", 4096, 10)
        assert (args.enable_prefix_caching, args.rdma_comm_ports) == (False, "1,2")
        assert args.remarks == ()

    def test_settings_without_effect_and_unknown_settings_are_reported(self, tmp_path: Path) -> None:
        text = (
            "model: m\nworkers: 4\nenable_chunked_prefill: true\nenable_mm: false\ngraph_optimization_config: {a: 1}\n"
        )
        args = self.parse_file(tmp_path, f"{text}colour: blue\n")
        assert args.remarks[0].endswith("config.yaml: these names are not flags and are ignored: colour")
        flags = "--workers, --enable-chunked-prefill, --graph-optimization-config"
        assert args.remarks[1] == f"these flags of FastDeploy have no effect in this engine: {flags}"

    @pytest.mark.parametrize(("value", "is_on"), [("'true'", True), ("'False'", False), ("1", True), ("0", False)])
    def test_a_switch_can_be_text_or_a_number(self, tmp_path: Path, value: str, *, is_on: bool) -> None:
        text = f"model: m\nenable_prefix_caching: {value}\ndynamic_load_weight: {value}\n"
        args = self.parse_file(tmp_path, text)
        assert (args.enable_prefix_caching, args.dynamic_load_weight) == (is_on, is_on)

    @pytest.mark.parametrize("value", ["'maybe'", "2", "[true]", "{a: true}"])
    def test_an_invalid_switch_is_refused(self, tmp_path: Path, value: str) -> None:
        with pytest.raises(ConfigError, match=r"config\.yaml: dynamic_load_weight is .*; it must be true or false"):
            self.parse_file(tmp_path, f"model: m\ndynamic_load_weight: {value}\n")

    def test_the_file_refuses_the_same_values_as_the_command_line(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--quantization: this engine uses"):
            self.parse_file(tmp_path, "model: m\nquantization: wint8\n")
        with pytest.raises(ConfigError, match="--tensor-parallel-size 2: this engine runs a model on one device"):
            self.parse_file(tmp_path, "model: m\ntensor_parallel_size: 2\n")

    @pytest.mark.parametrize(
        ("text", "message"),
        [("- a\n", "must be a mapping of flags' names to values"), ("a: [", "is not valid YAML: ")],
    )
    def test_a_file_with_an_invalid_format_is_refused(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.parse_file(tmp_path, text)

    def test_a_missing_file_is_refused(self) -> None:
        with pytest.raises(
            ConfigError, match=r"--config nowhere\.yaml: the file cannot be read: No such file or directory"
        ):
            parse("--config nowhere.yaml")


def test_an_error_does_not_contain_an_api_key() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--api-key hidden")
    assert "hidden" not in str(caught.value)


def test_an_api_key_in_the_environment_is_refused_and_not_in_the_error() -> None:
    with pytest.raises(ConfigError, match="FD_API_KEY: this engine checks no API keys") as caught:
        parse_args(["--model", "m"], {"FD_API_KEY": "hidden,other"})
    assert "hidden" not in str(caught.value)
    parse_args(["--model", "m"], {"FD_API_KEY": ""})  # FastDeploy checks no key in this case


def test_the_tables_contain_all_known_flags_of_fastdeploy() -> None:
    recorded = {line.split()[0] for table in (ACCEPTED, WITHOUT_EFFECT, REFUSED) for line in rows(table)}
    assert recorded - {"-tp"} == {*fastdeploy_flags._NAMES, *fastdeploy_flags._NEWER_FLAGS}
