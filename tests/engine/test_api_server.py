"""One real instance as a process. Tests send it the requests of clients, operators and routers."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from engine.api_server import main
from tests.engine.router import Router
from tests.support import plain_http
from tests.support.ports import free_port, free_ports
from tests.support.processes import Child, child
from tests.support.waiting import wait_until

MODEL = "words"
LONG_PROMPT = " the river runs through the town" * 20
ENDLESS: dict[str, Any] = {"max_tokens": 3900, "temperature": 0, "ignore_eos": True}
"""Decoding takes many seconds, so only an abort can end it in time."""


@dataclass(frozen=True)
class RunningInstance:
    """A running instance, and its clients."""

    process: Child
    port: int
    metrics_port: int
    log: Path
    card: dict[str, Any]

    @property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60, trust_env=False, verify=False)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: Any) -> Any:
        with self.http as client:
            return client.post(path, json=body).json()

    def metric(self, name: str) -> float:
        """Return the current value of a metric. ``name`` includes the labels, in Prometheus' text format."""
        with self.http as client:
            lines = client.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    @property
    def num_running(self) -> float:
        return self.metric("fastdeploy:num_requests_running")

    @property
    def num_aborted(self) -> float:
        return self.metric('kvstore_requests_finished_total{reason="abort"}')


@contextlib.contextmanager
def serving(model: Path, folder: Path) -> Iterator[RunningInstance]:
    port, metrics_port = free_ports(2)
    router = Router()
    argv = [sys.executable, "-m", "engine.api_server", "--model", str(model), "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--metrics-port", str(metrics_port), "--device", "cpu"]
    argv += ["--max-model-len", "4000", "--block-size", "16", "--num-gpu-blocks-override", "256"]
    argv += ["--router", f"127.0.0.1:{router.port}", "--splitwise-role", "mixed", "--rdma-comm-ports", "7100,7101"]
    try:
        with child(argv, folder / "output", {"FD_LOG_DIR": str(folder)}, is_forked=True) as process:
            process.wait_for(lambda: bool(router.registered), "registration", 60)
            path, card = router.registered[0]
            assert path == "/register"
            yield RunningInstance(process, port, metrics_port, folder / "api_server.log", card)
    finally:
        router.stop()


@pytest.fixture(scope="module")
def instance(word_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningInstance]:
    with serving(word_model, tmp_path_factory.mktemp("instance")) as instance:
        yield instance


@pytest.fixture(autouse=True)
def wait_until_the_instance_is_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test leaves the shared instance idle."""
    yield
    if "instance" in request.fixturenames:
        instance: RunningInstance = request.getfixturevalue("instance")
        wait_until(lambda: instance.num_running == 0, "the instance to be idle")


def chat(instance: RunningInstance, text: str = "Where is the river?", **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    with instance.openai as client:
        return client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, **more})


def chat_stream(instance: RunningInstance, text: str = "Where is the river?", **more: Any) -> list[Any]:
    with instance.openai as client:
        messages: Any = [{"role": "user", "content": text}]
        options = {"temperature": 0, "stream": True, **more}
        return list(client.chat.completions.create(model=MODEL, messages=messages, **options))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


class TestChat:
    def test_a_response_without_streaming_is_complete(self, instance: RunningInstance) -> None:
        answer = chat(instance, max_tokens=12)
        assert answer.object == "chat.completion"
        assert answer.model == MODEL
        assert answer.id.startswith("chatcmpl-")
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert len(answer.choices[0].message.content.split()) == 12
        assert answer.usage.completion_tokens == 12
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12

    def test_a_stream_has_the_same_text_in_pieces(self, instance: RunningInstance) -> None:
        chunks = chat_stream(instance, max_tokens=12)
        assert text_of(chunks) == chat(instance, max_tokens=12).choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 11 + ["length"]
        assert len({chunk.id for chunk in chunks}) == 1

    def test_a_stream_reports_usage_if_requested(self, instance: RunningInstance) -> None:
        *_, last = chat_stream(instance, max_tokens=5, stream_options={"include_usage": True})
        assert last.choices == []
        assert last.usage.completion_tokens == 5

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_string_ends_the_response_before_it(self, instance: RunningInstance, stream: bool) -> None:
        whole = chat(instance, max_tokens=12).choices[0].message.content
        stop = whole[20:26]
        expected = whole.partition(stop)[0]
        if stream:
            chunks = chat_stream(instance, max_tokens=12, stop=stop)
            assert text_of(chunks) == expected
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            answer = chat(instance, max_tokens=12, stop=[stop, "never generated"])
            assert answer.choices[0].message.content == expected
            assert answer.choices[0].finish_reason == "stop"
            # A word is a token. The tokens that contain the stop string count, too.
            assert answer.usage.completion_tokens == len(whole[: whole.index(stop) + len(stop)].split())

    def test_logprobs_contain_each_token_and_its_likeliest_alternatives(self, instance: RunningInstance) -> None:
        answer = chat(instance, max_tokens=6, logprobs=True, top_logprobs=3)
        tokens = answer.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == answer.choices[0].message.content
        for token in tokens:
            values = [other.logprob for other in token.top_logprobs]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert (token.token, token.logprob) == (token.top_logprobs[0].token, values[0])  # greedy
            assert bytes(token.bytes).decode() == token.token

    def test_streamed_logprobs_come_with_their_tokens(self, instance: RunningInstance) -> None:
        chunks = chat_stream(instance, max_tokens=6, logprobs=True)
        for chunk in chunks:
            (token,) = chunk.choices[0].logprobs.content
            assert token.token == chunk.choices[0].delta.content

    def test_a_stop_string_ends_no_response_before_min_tokens(self, instance: RunningInstance) -> None:
        whole = chat(instance, max_tokens=12).choices[0].message.content
        first, last = whole.split()[0], whole.split()[10]
        for stop, num_tokens in ((first, 12), ([first, last], 11)):
            answer = chat(instance, max_tokens=12, stop=stop, extra_body={"min_tokens": 8})
            assert answer.usage.completion_tokens == num_tokens
            chunks = chat_stream(instance, max_tokens=12, stop=stop, extra_body={"min_tokens": 8})
            assert text_of(chunks) == answer.choices[0].message.content


class TestCompletions:
    def test_a_response_and_a_stream_have_the_same_text(self, instance: RunningInstance) -> None:
        with instance.openai as client:
            ask: dict[str, Any] = {"model": MODEL, "prompt": " the river", "max_tokens": 8, "temperature": 0}
            whole = client.completions.create(**ask)
            chunks = list(client.completions.create(**ask, stream=True))
        assert (whole.object, whole.id[:5]) == ("text_completion", "cmpl-")
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
        assert len(whole.choices[0].text.split()) == 8


class TestEndpoints:
    def test_the_model_list_has_the_served_model_and_its_context_length(self, instance: RunningInstance) -> None:
        with instance.openai as client:
            (model,) = client.models.list().data
        assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, 4000)

    @pytest.mark.parametrize("path", ["/clear_prefix_cache", "/reset_prefix_cache"])
    def test_both_paths_clear_the_own_cache(self, instance: RunningInstance, path: str) -> None:
        chat(instance, LONG_PROMPT, max_tokens=1)
        assert instance.post(path, {}) == {"status": "success"}
        details = chat(instance, LONG_PROMPT, max_tokens=1).usage.prompt_tokens_details.model_dump()
        assert details["own_cached_tokens"] == 0

    def test_an_instance_does_not_empty_the_pool(self, instance: RunningInstance) -> None:
        with instance.http as client:
            answer = client.post("/reset_prefix_cache?reset_external=true")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "reset_external")
        assert "not the shared pool; leave the parameter out" in answer.json()["error"]["message"]

    def test_an_instance_is_ready(self, instance: RunningInstance) -> None:
        with instance.http as client:
            answer = client.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})

    def test_both_ports_serve_metrics_in_prometheus_format(self, instance: RunningInstance) -> None:
        for port in (instance.port, instance.metrics_port):
            answer = plain_http.get(f"http://127.0.0.1:{port}/metrics")
            assert answer.headers["content-type"].startswith("text/plain")
            for name in ("num_requests_running", "available_gpu_block_num", "time_to_first_token_seconds_bucket"):
                assert f"fastdeploy:{name}" in answer.text

    def test_a_model_is_found_only_by_its_name(self, instance: RunningInstance) -> None:
        with instance.openai as client:
            assert client.models.retrieve(MODEL).id == MODEL
            with pytest.raises(openai.NotFoundError, match='serves no model "other/one"; it serves "words"') as caught:
                client.models.retrieve("other/one")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/abort_requests"])
    def test_the_error_for_a_body_that_is_not_json_says_so(self, instance: RunningInstance, path: str) -> None:
        with instance.http as client:
            answer = client.post(path, content=b"{'single': 'quotes'}")
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("the body is not valid JSON")

    def test_the_openai_client_raises_bad_request_with_the_message(self, instance: RunningInstance) -> None:
        with pytest.raises(openai.BadRequestError, match="temperature: Input should be greater than or equal to 0"):
            chat(instance, temperature=-1)

    def test_every_request_has_a_line_in_the_log(self, instance: RunningInstance) -> None:
        chat(instance, max_tokens=3, extra_body={"request_id": "logged"})
        line = wait_until(
            lambda: next((one for one in instance.log.read_text().splitlines() if "request_id=logged" in one), ""),
            "the request's log line",
        )
        for field in ("finish_reason=length", "output_token_num=3", "storage_cache_token_num=0", "ttft="):
            assert field in line

    def test_the_registration_has_fastdeploys_fields(self, instance: RunningInstance) -> None:
        card = dict(instance.card)
        assert card.pop("connector_port") > 0
        assert card.pop("start_id")  # this field and the next two are ours
        assert card.pop("max_num_seqs") == 8
        assert card.pop("cache_salt") is True
        # In a pair, FastDeploy's Go router refuses an engine_worker_queue_port of null.
        assert card == {
            "role": "mixed",
            "host_ip": "127.0.0.1",
            "port": instance.port,
            "metrics_port": instance.metrics_port,
            "rdma_ports": ["7100", "7101"],
            "device_ids": ["0"],
            "transfer_protocol": ["ipc"],
            "tp_size": 1,
            "is_paused": False,
            "version": None,
            "connected_decodes": [],
        }


class TestAborts:
    @pytest.mark.parametrize(
        ("aborted", "not_found"),
        [({"req_ids": ["chatcmpl-abc_0", "unknown"]}, ["unknown"]), ({"abort_all": True}, [])],
        ids=["by id", "all"],
    )
    def test_an_abort_ends_a_request(
        self, instance: RunningInstance, aborted: dict[str, Any], not_found: list[str]
    ) -> None:
        body = {"messages": [{"role": "user", "content": "go on"}], "stream": True, "request_id": "abc", **ENDLESS}
        with instance.http as client, client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = instance.post("/v1/abort_requests", aborted)
            assert (answer["aborted"], answer["not_found"]) == (["abc"], not_found)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"

    def test_an_abort_without_requests_is_refused(self, instance: RunningInstance) -> None:
        with instance.http as client:
            refused = client.post("/v1/abort_requests", json={})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith('the body must have "req_ids"')

    def test_a_client_that_disconnects_while_it_sends_causes_no_error(self, instance: RunningInstance) -> None:
        with socket.create_connection(("127.0.0.1", instance.port)) as client:
            client.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"pro')
        chat(instance, max_tokens=1)
        assert "Traceback" not in instance.log.read_text()

    @pytest.mark.parametrize("stream", [True, False])
    def test_the_sequence_of_a_disconnected_client_is_aborted(self, instance: RunningInstance, stream: bool) -> None:
        before = instance.num_aborted
        body = json.dumps({"prompt": " the", "stream": stream, **ENDLESS}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", instance.port)) as client:
            client.sendall(head + body)
            wait_until(lambda: instance.num_running == 1, "the request to run")
        wait_until(lambda: instance.num_running == 0, "the sequence to end")
        assert instance.num_aborted == before + 1


class TestStarting:
    @pytest.fixture(autouse=True)
    def prevent_serving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prevent ``main`` from changing the logs of this process, and from serving."""
        monkeypatch.setattr("engine.telemetry.logs.set_up", lambda *_, **__: None)
        monkeypatch.setattr("engine.serving.server.InstanceServer", None)

    def get_error(self, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
        """Assert that a start with these flags fails; return its whole standard error."""
        assert main(["--host", "127.0.0.1", "--port", str(free_port()), *flags]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("engine.api_server: ")
        assert err.count("\n") == 1
        return err

    @pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--pd-comm-port"])
    def test_the_error_for_a_used_port_names_its_flag(
        self, capsys: pytest.CaptureFixture[str], word_model: Path, flag: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            error = self.get_error(capsys, "--model", str(word_model), flag, str(port))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another {flag}" in error

    @pytest.mark.timing  # how long the kernel keeps the connection's port
    def test_a_start_waits_for_a_port_that_a_closed_connection_still_uses(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word_model: Path
    ) -> None:
        monkeypatch.setattr(
            "engine.serving.instance.Instance", interrupt := unittest.mock.Mock(side_effect=KeyboardInterrupt)
        )
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            # Linux may give a port of its own choice to several connections.
            socket.create_connection(server.getsockname(), source_address=("127.0.0.1", free_port())) as client,
        ):
            accepted, _ = server.accept()

            wait = time.sleep

            def end_connection(seconds: float) -> None:
                if client.fileno() == -1:  # it is closed, but may still wait for its last acknowledgement
                    wait(seconds)
                else:
                    accepted.close()
                    client.recv(1)  # the server closes first, so the client's port does not stay in use
                    client.close()

            port = client.getsockname()[1]
            monkeypatch.setattr("kvcommon.ports.time.sleep", end_connection)
            assert main(["--host", "127.0.0.1", "--port", str(port), "--model", str(word_model)]) == 130
        assert interrupt.called
        assert f"waiting for port {port}, which a closed connection still uses" in capsys.readouterr().out

    @pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--pd-comm-port"])
    def test_the_error_names_the_flag_of_a_port_that_another_instance_takes_while_the_model_is_loaded(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word_model: Path, flag: str
    ) -> None:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            monkeypatch.setattr("engine.serving.instance.Instance", lambda *_: other.listen())
            port = other.getsockname()[1]
            error = self.get_error(capsys, "--model", str(word_model), flag, str(port))
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another {flag}" in error

    def test_an_interrupt_while_the_model_is_loaded_prints_no_error(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word_model: Path
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("engine.serving.instance.Instance", interrupt)
        assert main(["--host", "127.0.0.1", "--port", str(free_port()), "--model", str(word_model)]) == 130
        assert capsys.readouterr() == ("", "")

    def test_a_sigterm_before_the_server_runs_stops_it(self, monkeypatch: pytest.MonkeyPatch, word_model: Path) -> None:
        class Server(uvicorn.Server):
            def __init__(self, _: object) -> None:
                super().__init__(uvicorn.Config(FastAPI()))

            def run(self, sockets: list[socket.socket] | None = None) -> None:
                signal.raise_signal(signal.SIGTERM)
                should_exit.append(self.should_exit)

        should_exit: list[bool] = []
        monkeypatch.setattr("engine.serving.instance.Instance", lambda *_: None)
        monkeypatch.setattr("engine.serving.server.InstanceServer", Server)
        before = signal.getsignal(signal.SIGTERM)
        try:
            main(["--host", "127.0.0.1", "--port", str(free_port()), "--model", str(word_model)])
        finally:
            signal.signal(signal.SIGTERM, before)
        assert should_exit == [True]

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
            (["--model", "/no/such/folder"], "--model '/no/such/folder': there is no such folder"),
            (["--model", "EMPTY"], "/empty' is not a checkpoint: it has no config.json"),
            (["--model", "TINY", "--max-model-len", "64", "--device", "cpu"], "has no tokenizer"),
            (
                ["--num-gpu-blocks-override", "3", "--max-model-len", "512"],
                "3 KV blocks of 64 tokens cannot hold one sequence of --max-model-len 512",
            ),
        ],
        ids=["host", "no folder", "no checkpoint", "no tokenizer", "too few blocks"],
    )
    def test_the_error_says_why_an_instance_cannot_start(
        self,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
        word_model: Path,
        tiny_checkpoint: Path,
        flags: list[str],
        sentence: str,
    ) -> None:
        (tmp_path / "empty").mkdir()
        folders = {"EMPTY": str(tmp_path / "empty"), "TINY": str(tiny_checkpoint)}
        assert sentence in self.get_error(
            capsys, "--model", str(word_model), *(folders.get(flag, flag) for flag in flags)
        )

    def test_a_model_name_from_a_hub_selects_the_downloaded_folder(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FD_MODEL_CACHE", str(tmp_path))
        (tmp_path / "Some" / "Model").mkdir(parents=True)
        (tmp_path / "Some" / "Model" / "config.json").write_text("{}")
        error = self.get_error(capsys, "--model", "Some/Model")
        assert f"--model '{tmp_path}/Some/Model' is not a checkpoint" in error

    def test_the_error_says_that_a_checkpoint_has_no_weights(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_checkpoint: Path
    ) -> None:
        (tmp_path / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
        error = self.get_error(capsys, "--model", str(tmp_path), "--max-model-len", "64")
        assert f"model folder '{tmp_path}' has no weights (" in error

    @pytest.mark.parametrize(
        ("flag", "status"), [("--help", 0), ("--pord=1", 2), ("--model=/no/such/folder", 2)], ids=str
    )
    def test_runs_that_need_only_the_command_line_do_not_import_torch(self, flag: str, status: int) -> None:
        lines = (
            "import sys, engine.api_server as program",
            "program.logs.set_up = lambda *_: None",
            "try: status = program.main(sys.argv[1:])",
            "except SystemExit as ended: status = ended.code",
            "print(status, sorted({'torch', 'transformers', 'uvicorn'} & sys.modules.keys()))",
        )
        argv = [sys.executable, "-c", "\n".join(lines), flag, "--host=127.0.0.1", f"--port={free_port()}"]
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
        assert ended.stdout.endswith(f"{status} []\n")

    def test_a_failed_start_exits_with_2_and_one_sentence(self, instance: RunningInstance, tmp_path: Path) -> None:
        argv = [sys.executable, "-m", "engine.api_server", "--model", "m", "--host", "127.0.0.1"]
        argv += ["--port", str(instance.port)]
        with child(argv, tmp_path / "output", {"FD_LOG_DIR": str(tmp_path)}, is_forked=True) as second:
            assert second.wait() == 2
            assert second.output == (
                f"engine.api_server: cannot listen on 127.0.0.1:{instance.port}: Address already in use; "
                "choose another --port\n"
            )


@pytest.mark.parametrize(
    ("max_tokens", "reason"),
    [(None, None), (8, "length"), (3900, "abort")],
    ids=["idle", "short response", "long response"],
)
def test_sigterm_waits_for_responses_or_aborts_them_and_the_process_exits_with_0(
    word_model: Path, tmp_path: Path, max_tokens: int | None, reason: str | None
) -> None:
    with serving(word_model, tmp_path) as instance:
        with contextlib.ExitStack() as stack:
            if max_tokens:
                body = {"prompt": " the", "stream": True, **ENDLESS, "max_tokens": max_tokens}
                client = stack.enter_context(instance.http)
                lines = stack.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines()
                next(lines)
            instance.process.signal(signal.SIGTERM)
            if max_tokens:
                *_, last, done = (line.removeprefix("data: ") for line in lines if line)
                assert done == "[DONE]"
                assert json.loads(last)["choices"][0]["finish_reason"] == reason
        assert instance.process.wait() == 0
        if reason == "abort":
            line = "stopping: waiting for 1 running request\n"
            assert f"engine.api_server: {line}" in instance.process.output
            assert line in instance.log.read_text()
        assert "Traceback" not in instance.process.output
        assert "Traceback" not in instance.log.read_text()
