"""The endpoint picker protocol: single messages, without a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import LoopThread, StandIn, streams
from tests.support.certificates import make_certificate
from tests.support.waiting import wait_until

MakeClient = Callable[..., "Client"]

grpc = pytest.importorskip("grpc", reason="the extra epp is not installed")

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
DESTINATION = "x-gateway-destination-endpoint"
BODY = b'{"messages": []}'


class Client:
    """A gateway that sends the messages of a test."""

    def __init__(self, thread: LoopThread, router: RouterUnderTest, channel: Any) -> None:
        self.thread = thread
        self.router = router
        self.channel = channel

    def exchange(self, messages: Sequence[Any], num_answers: int) -> list[Any]:
        """Send messages in one stream, return this number of answers, and cancel the stream."""
        return self.thread.run(self._exchange(messages, num_answers))

    def check(self, service: str) -> str:
        """Return the status of a service."""
        from router.epp.protos import SERVING, HealthCheckRequest, HealthCheckResponse

        async def ask() -> str:
            call = self.channel.unary_unary(CHECK, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
            answer = await call(HealthCheckRequest(service=service))
            return "SERVING" if answer.status == SERVING else "NOT_SERVING"

        return self.thread.run(ask())

    def open(self) -> Any:
        """Begin a stream, for tests that depend on the times of messages."""
        return self.thread.run(self._open())

    async def _open(self) -> Any:
        from router.epp.protos import ProcessingRequest, ProcessingResponse

        return self.channel.stream_stream(METHOD, ProcessingRequest.SerializeToString, ProcessingResponse.FromString)()

    async def _exchange(self, messages: Sequence[Any], num_answers: int) -> list[Any]:
        call = await self._open()
        for message in messages:
            await call.write(message)
        answers = [await asyncio.wait_for(call.read(), 10) for _ in range(num_answers)]
        call.cancel()
        return answers


@pytest.fixture
def make_client(make_router: MakeRouter, thread: LoopThread) -> Iterator[Callable[..., Client]]:
    """A function that starts a picker and its client: ``make_client(*stand_ins, **settings)``."""
    from router.epp import Picker

    opened: list[tuple[Picker, Any]] = []

    def start(*instances: StandIn, credentials: Any = None, **settings: Any) -> Client:
        router = make_router(*instances, **settings)

        async def open_both() -> Any:
            picker = Picker(router.app)
            await picker.start()
            address = f"localhost:{picker.port}"
            secure = grpc.aio.secure_channel
            channel = secure(address, credentials) if credentials else grpc.aio.insecure_channel(address)
            opened.append((picker, channel))
            return channel

        return Client(thread, router, thread.run(open_both()))

    yield start
    for picker, channel in opened:
        thread.run(channel.close())
        thread.run(picker.stop(0))


def make_head(path: str = "/v1/chat/completions", subset: Sequence[str] | None = None, method: str = "POST") -> Any:
    """Return the first message of a request."""
    from router.epp.protos import HeaderValue, ProcessingRequest

    message = ProcessingRequest()
    for name, value in ((":method", method), (":path", path), ("content-type", "application/json")):
        message.request_headers.headers.headers.append(HeaderValue(key=name, raw_value=value.encode()))
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint[f"{DESTINATION}-subset"] = list(subset)
    return message


def make_body(data: bytes = BODY, *, is_end: bool = True) -> Any:
    """Return a message with a piece of a request's body."""
    from router.epp.protos import HttpBody, ProcessingRequest

    return ProcessingRequest(request_body=HttpBody(body=data, end_of_stream=is_end))


def make_response_head(status: int = 200, served: str = "") -> Any:
    """Return the message with the head of a response."""
    from router.epp.protos import HeaderValue, ProcessingRequest

    message = ProcessingRequest()
    headers = message.response_headers.headers.headers
    headers.append(HeaderValue(key=":status", raw_value=b"%d" % status))
    headers.append(HeaderValue(key="content-type", raw_value=b"application/json"))
    if served:
        message.metadata_context.filter_metadata["envoy.lb"][f"{DESTINATION}-served"] = served
    return message


def make_response_body(data: bytes, *, is_end: bool = True) -> Any:
    """Return the message with the body of a response."""
    from router.epp.protos import HttpBody, ProcessingRequest

    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=is_end))


def read_choice(answer: Any) -> tuple[str, str]:
    """Return the endpoint in the header and that in the metadata."""
    set_headers = answer.request_headers.response.header_mutation.set_headers
    header = {each.header.key: each.header.raw_value.decode() for each in set_headers}[DESTINATION]
    return header, answer.dynamic_metadata["envoy.lb"][DESTINATION]


def test_the_choice_is_in_a_header_and_in_the_metadata(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    head, body = make_client(instance).exchange(
        [make_head(), make_body(BODY[:5], is_end=False), make_body(BODY[5:])], 2
    )
    assert read_choice(head) == (instance.key, instance.key)
    streamed = body.request_body.response.body_mutation.streamed_response
    assert streamed.body.startswith(BODY[:-1])
    assert streamed.end_of_stream


def test_only_instances_of_the_subset_are_chosen(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    instances = [stand_in() for _ in range(3)]
    client = make_client(*instances)
    wanted = instances[1].key
    for _ in range(4):
        head, _ = client.exchange([make_head(subset=[wanted, "10.9.9.9:1"]), make_body()], 2)
        assert read_choice(head) == (wanted, wanted)


@pytest.mark.parametrize("form", ["10.9.9.9:1,{key}", "127.0.0.1"], ids=["list as a string", "without port"])
def test_other_forms_of_a_subset_are_understood(make_client: MakeClient, stand_in: MakeStandIn, form: str) -> None:
    instance = stand_in()
    head, _ = make_client(instance).exchange([make_head(subset=[form.format(key=instance.key)]), make_body()], 2)
    assert read_choice(head) == (instance.key, instance.key)


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ["127.0.0.1:1"]])
def test_a_subset_without_an_instance_is_503(make_client: MakeClient, stand_in: MakeStandIn, subset: list[str]) -> None:
    (answer,) = make_client(stand_in()).exchange([make_head(subset=subset), make_body()], 1)
    assert answer.immediate_response.status.code == 503


def test_a_request_without_body_needs_only_its_head(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    instance = stand_in()
    head = make_head("/v1/responses/resp_1", method="GET")
    head.request_headers.end_of_stream = True
    (answer,) = make_client(instance).exchange([head], 1)
    assert read_choice(answer) == (instance.key, instance.key)


def test_a_body_with_trailers_ends_with_them(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    from router.epp.protos import HttpTrailers, ProcessingRequest

    trailers = ProcessingRequest(request_trailers=HttpTrailers())
    messages = [make_head(), make_body(is_end=False), trailers]
    _, body, end = make_client(stand_in()).exchange(messages, 3)
    assert not body.request_body.response.body_mutation.streamed_response.end_of_stream
    assert end.HasField("request_trailers")


def test_a_body_beyond_the_limit_is_413(make_client: MakeClient) -> None:
    client = make_client(max_body_bytes=100)
    (answer,) = client.exchange([make_head(), make_body(b"x" * 99, is_end=False), make_body(b"xx")], 1)
    assert answer.immediate_response.status.code == 413


def test_the_load_of_a_cancelled_request_is_released(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    client = make_client(stand_in())
    (instance,) = client.router.app.registry
    client.exchange([make_head(), make_body()], 2)
    wait_until(lambda: instance.load.requests == 0 and not client.router.app.proxy.num_requests, "the release")


def test_a_response_counts_for_the_instance_that_the_gateway_has_used(
    make_client: MakeClient, stand_in: MakeStandIn
) -> None:
    instances = [stand_in(), stand_in()]
    client = make_client(*instances)
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"many words " * 200)
    head, _ = client.exchange([make_head(), make_body(body)], 2)
    chosen = read_choice(head)[0]
    (other,) = {instance.key for instance in instances} - {chosen}
    usage = b'{"usage": {"prompt_tokens": 600, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}}'
    messages = [make_head(), make_body(body), make_response_head(served=other), make_response_body(usage)]
    client.exchange(messages, 4)
    record, _ = client.router.client.get("/admin/requests").json()["requests"]
    assert (record["mixed"], record["status"], record["prompt_tokens"]) == (other, 200, 600)
    assert [instance.load.requests for instance in client.router.app.registry] == [0, 0]


def test_the_health_service_reports_if_there_is_an_instance(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    names = ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")
    client = make_client(stand_in())
    assert [client.check(name) for name in names] == ["SERVING"] * 4
    client = make_client()
    assert [client.check(name) for name in names] == ["SERVING", "NOT_SERVING", "NOT_SERVING", "SERVING"]
    client.router.app.prepare_to_leave()
    assert client.check("") == "NOT_SERVING"
    with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'x'"):
        client.check("x")


def test_the_picker_has_tls_if_the_router_has(make_client: MakeClient, tmp_path: Any) -> None:
    certificate = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials(certificate.certfile.read_bytes())
    files = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    assert make_client(credentials=credentials, **files).check("liveness") == "SERVING"


def test_a_stream_that_does_not_begin_with_a_head_is_refused(make_client: MakeClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="the first message of a stream must be request_headers"):
        make_client().exchange([make_body()], 1)


UPLOAD: list[Callable[[], Any]] = [make_head, lambda: make_body(BODY[:5], is_end=False)]


@pytest.mark.parametrize("num_sent", [0, 1, 2], ids=["no request", "head", "part of the body"])
def test_the_gateways_own_response_is_passed_on(make_client: MakeClient, stand_in: MakeStandIn, num_sent: int) -> None:
    from router.epp.protos import HttpTrailers, ProcessingRequest

    client = make_client(stand_in())
    own = [make_response_head(429), make_response_body(b"slow ", is_end=False), make_response_body(b"down")]
    late = [make_body(BODY[5:])]  # arrives late, and must not complete the request
    head, *pieces = client.exchange([make() for make in UPLOAD[:num_sent]] + own + late[:num_sent], 3)
    assert head.HasField("response_headers")
    assert not head.response_headers.response.header_mutation.set_headers
    streamed = [each.response_body.response.body_mutation.streamed_response for each in pieces]
    assert [(each.body, each.end_of_stream) for each in streamed] == [(b"slow ", False), (b"down", True)]
    trailers = ProcessingRequest(response_trailers=HttpTrailers())
    *_, end = client.exchange([*own[:2], trailers], 3)
    assert end.HasField("response_trailers")
    assert list_records(client) == []
    assert [instance.load.requests for instance in client.router.app.registry] == [0]


def test_the_gateways_own_response_ends_the_wait_for_an_instance(
    make_client: MakeClient, stand_in: MakeStandIn
) -> None:
    client = make_client(stand_in(), max_concurrent_requests=1)
    app = client.router.app
    first, second = client.open(), client.open()
    for call in (first, second):
        send(client, call, make_head(), make_body())
        if call is first:
            assert read_choice(read(client, call))
    wait_until(lambda: app.admission.waiting == 1, "the wait of the second request")
    send(client, second, make_response_head(504))
    assert read(client, second).HasField("response_headers")
    wait_until(lambda: app.admission.waiting == 0 and app.proxy.num_requests == 1, "the end of the wait")
    assert [record["status"] for record in list_records(client)] == [499]
    first.cancel()
    wait_until(lambda: not app.proxy.num_requests, "the end of the first request")
    assert [instance.load.requests for instance in app.registry] == [0]


def test_a_response_without_status_is_refused(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    from router.epp.protos import ProcessingRequest

    client = make_client(stand_in())
    bad = ProcessingRequest()
    bad.response_headers.headers.SetInParent()
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        client.exchange([make_head(), make_body(), bad], 4)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [instance.load.requests for instance in client.router.app.registry] == [0]


@pytest.mark.parametrize("path", ["/v1/chat completions", "/v1/models?a=\u00e4", "/v1/models\r\nx: y"])
def test_a_path_that_is_not_valid_in_http_is_refused(make_client: MakeClient, path: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="the header ':path' is not valid in HTTP"):
        make_client().exchange([make_head(path)], 1)


def test_a_failure_of_the_control_plane_is_500(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("broken")

    client, head = make_client(), make_head("/v1/models", method="GET")
    monkeypatch.setattr(type(client.router.app), "__call__", fail)
    head.request_headers.end_of_stream = True
    (answer,) = client.exchange([head], 1)
    assert answer.immediate_response.status.code == 500


def test_a_stream_does_not_end_while_a_message_is_being_written(make_client: MakeClient) -> None:
    from router.epp.picker import _Stream

    client, head = make_client(), make_head("/v1/models", method="GET")
    head.request_headers.end_of_stream = True

    class SlowGateway:
        """Closes its half of the stream while it receives the first message."""

        def __init__(self) -> None:
            self.messages = [head]
            self.receives, self.may_end = asyncio.Event(), asyncio.Event()

        async def read(self) -> Any:
            if self.messages:
                return self.messages.pop()
            await self.receives.wait()
            return grpc.aio.EOF

        async def write(self, _: Any) -> None:
            self.receives.set()
            await self.may_end.wait()

    async def close_early() -> bool:
        gateway = SlowGateway()
        running = asyncio.ensure_future(_Stream(client.router.app, gateway).run())
        await gateway.receives.wait()
        for _ in range(20):  # more turns of the event loop than the stream needs to notice the end
            await asyncio.sleep(0)
        has_ended = running.done()
        gateway.may_end.set()
        await asyncio.wait_for(running, 10)
        return has_ended

    assert not client.thread.run(close_early())


@pytest.mark.parametrize("num_sent", [1, 2], ids=["head", "part of the body"])
def test_an_incomplete_request_is_408_and_its_stream_ends(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, num_sent: int
) -> None:
    monkeypatch.setattr("router.epp.picker.READ_SECONDS", 0.2)
    client = make_client()
    call = client.open()
    send(client, call, *(make() for make in UPLOAD[:num_sent]))
    answer = read(client, call).immediate_response
    assert answer.status.code == 408
    assert b'"the rest of the request did not arrive within 0.2 s"' in answer.body
    assert read(client, call) is grpc.aio.EOF
    assert client.thread.run(get_code(call)) is grpc.StatusCode.OK
    assert [(record["status"], record["error"]) for record in list_records(client)] == [(408, "request_incomplete")]


def test_a_request_that_arrives_slowly_ends_at_the_request_timeout(make_client: MakeClient) -> None:
    client = make_client(request_timeout_secs=1)
    call = client.open()
    send(client, call, make_head())
    seconds, answered = 0.0, client.thread.run(begin_reading(call))
    while not answered.done() and seconds < 20:
        send(client, call, make_body(b" ", is_end=False))
        seconds += client.thread.run(pause())
    answer = client.thread.run(get_result(answered)).immediate_response
    assert answer.status.code == 408
    assert b"did not arrive within 1 s" in answer.body


def test_a_gateway_may_be_silent_while_it_buffers_the_body(
    make_client: MakeClient, stand_in: MakeStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from router.epp.protos import BUFFERED, FULL_DUPLEX_STREAMED

    monkeypatch.setattr("router.epp.picker.READ_SECONDS", 0.05)
    client, head = make_client(stand_in(), request_timeout_secs=30), make_head()
    head.protocol_config.request_body_mode = BUFFERED
    head.protocol_config.response_body_mode = FULL_DUPLEX_STREAMED
    call = client.open()
    send(client, call, head)
    assert read(client, call).HasField("request_headers")
    client.thread.run(pause(0.3))
    send(client, call, make_body())
    assert read(client, call).HasField("request_body")
    call.cancel()


def test_a_stream_without_a_message_ends(make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.epp.picker.READ_SECONDS", 0.1)
    client = make_client()
    assert read(client, client.open()) is grpc.aio.EOF


def test_the_pickers_own_exchange_pauses_while_the_gateway_reads_nothing(
    make_client: MakeClient, stand_in: MakeStandIn
) -> None:
    events = ["x" * 100_000] * 300
    client = make_client(*(stand_in("mixed", streams(*events)) for _ in range(2)))
    call = client.open()
    send(client, call, make_head(), make_body(b'{"messages": [], "stream": true}'))
    assert [read(client, call).WhichOneof("response") for _ in range(2)] == ["request_headers", "request_body"]
    send(client, call, make_response_head(500), make_response_body(b"{}"))
    (serving,) = client.router.app.proxy._live
    wait_until(lambda: serving.attempt is not None and serving.attempt.answering.exchange.is_paused, "the pause")
    assert read(client, call).HasField("response_headers")
    size, is_end = 0, False
    while not is_end:
        piece = read(client, call).response_body.response.body_mutation.streamed_response
        size, is_end = size + len(piece.body), piece.end_of_stream
    assert size > 300 * 100_000
    call.cancel()


def test_a_refusal_without_a_key_names_the_form_of_the_key(make_client: MakeClient, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client: secret-of-this-test\n")
    keys.chmod(0o600)
    messages = [make_head(), make_body(BODY[:5], is_end=False), make_body(BODY[5:7], is_end=False)]
    (answer,) = make_client(api_keys_file=str(keys)).exchange(messages, 1)
    set_headers = answer.immediate_response.headers.set_headers
    assert answer.immediate_response.status.code == 401
    assert {each.header.key: each.header.raw_value for each in set_headers}["www-authenticate"] == b"Bearer"


def test_the_unfinished_bodies_of_one_client_are_limited(
    make_client: MakeClient, stand_in: MakeStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from router.epp.protos import HeaderValue

    monkeypatch.setattr("router.serving.proxy.MAX_HELD_BYTES", 1000)
    keys = tmp_path / "keys"
    keys.write_text("alice: secret-of-this-test\n")
    keys.chmod(0o600)
    client, head = make_client(stand_in(), api_keys_file=str(keys), max_concurrent_requests=4), make_head()
    key = HeaderValue(key="authorization", raw_value=b"Bearer secret-of-this-test")
    head.request_headers.headers.headers.append(key)
    held, begun = client.router.app.proxy._held, [head, make_body(b" " * 800, is_end=False)]
    first, leaving = client.open(), client.open()
    send(client, first, *begun)
    wait_until(lambda: held["alice"] == 800, "the bytes to arrive")
    (answer,) = client.exchange(begun, 1)
    assert answer.immediate_response.status.code == 429
    send(client, first, make_body())
    assert read_choice(read(client, first))
    assert not +held
    send(client, leaving, *begun)
    wait_until(lambda: held["alice"] == 800, "the bytes to arrive")
    leaving.cancel()
    wait_until(lambda: not +held, "the end of the stream")
    first.cancel()


def list_records(client: Client) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = client.router.client.get("/admin/requests").json()["requests"]
    return records


def send(client: Client, call: Any, *messages: Any) -> None:
    async def write() -> None:
        for message in messages:
            await call.write(message)

    client.thread.run(write())


def read(client: Client, call: Any) -> Any:
    async def wait() -> Any:
        return await asyncio.wait_for(call.read(), 10)

    return client.thread.run(wait())


async def get_code(call: Any) -> Any:
    return await call.code()


async def begin_reading(call: Any) -> Any:
    return asyncio.ensure_future(call.read())


async def get_result(future: Any) -> Any:
    return await asyncio.wait_for(future, 10)


async def pause(seconds: float = 0.05) -> float:
    await asyncio.sleep(seconds)
    return seconds
