"""The endpoint picker protocol, message by message, without a gateway between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.router.conftest import RouterUnderTest
from tests.router.stand_in import LoopThread, StandIn
from tests.support.certificates import make_certificate
from tests.support.waiting import wait_until

MakeRouter = Callable[..., RouterUnderTest]
MakeStandIn = Callable[..., StandIn]
MakeClient = Callable[..., "Client"]

grpc = pytest.importorskip("grpc", reason="the extra epp is not installed")

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
DESTINATION = "x-gateway-destination-endpoint"
BODY = b'{"messages": []}'


class Client:
    """A gateway that sends what a test wants."""

    def __init__(self, thread: LoopThread, router: RouterUnderTest, channel: Any) -> None:
        self.thread = thread
        self.router = router
        self.channel = channel

    def exchange(self, messages: Sequence[Any], num_answers: int) -> list[Any]:
        """Send messages in one stream; return so many answers, and leave."""
        return self.thread.run(self._exchange(messages, num_answers))

    def check(self, service: str) -> str:
        """Return the status of a service."""
        from router.epp.protos import SERVING, HealthCheckRequest, HealthCheckResponse

        async def ask() -> str:
            call = self.channel.unary_unary(CHECK, HealthCheckRequest.SerializeToString, HealthCheckResponse.FromString)
            answer = await call(HealthCheckRequest(service=service))
            return "SERVING" if answer.status == SERVING else "NOT_SERVING"

        return self.thread.run(ask())

    async def _exchange(self, messages: Sequence[Any], num_answers: int) -> list[Any]:
        from router.epp.protos import ProcessingRequest, ProcessingResponse

        call = self.channel.stream_stream(METHOD, ProcessingRequest.SerializeToString, ProcessingResponse.FromString)()
        for message in messages:
            await call.write(message)
        answers = [await asyncio.wait_for(call.read(), 10) for _ in range(num_answers)]
        call.cancel()
        return answers


@pytest.fixture
def make_client(make_router: MakeRouter, thread: LoopThread) -> Iterator[Callable[..., Client]]:
    """Starts a picker, and a client of it: ``make_client(*stand_ins, **settings)``."""
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


def make_response_body(data: bytes) -> Any:
    """Return the message with the body of a response."""
    from router.epp.protos import HttpBody, ProcessingRequest

    return ProcessingRequest(response_body=HttpBody(body=data, end_of_stream=True))


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


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"]])
def test_a_subset_without_an_instance_is_503(make_client: MakeClient, stand_in: MakeStandIn, subset: list[str]) -> None:
    (answer,) = make_client(stand_in()).exchange([make_head(subset=subset), make_body()], 1)
    assert answer.immediate_response.status.code == 503


def test_a_request_without_body_is_placed_by_its_head(make_client: MakeClient, stand_in: MakeStandIn) -> None:
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


def test_the_load_of_a_request_that_is_given_up_is_released(make_client: MakeClient, stand_in: MakeStandIn) -> None:
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


def test_the_health_service_knows_whether_there_is_an_instance(make_client: MakeClient, stand_in: MakeStandIn) -> None:
    names = ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")
    client = make_client(stand_in())
    assert [client.check(name) for name in names] == ["SERVING"] * 4
    client = make_client()
    assert [client.check(name) for name in names] == ["SERVING", "NOT_SERVING", "NOT_SERVING", "SERVING"]
    client.router.app.prepare_to_leave()
    assert client.check("") == "NOT_SERVING"
    with pytest.raises(grpc.aio.AioRpcError, match="there is no service 'x'"):
        client.check("x")


def test_it_has_tls_if_the_router_has(make_client: MakeClient, tmp_path: Any) -> None:
    certificate = make_certificate(tmp_path)
    credentials = grpc.ssl_channel_credentials(certificate.certfile.read_bytes())
    files = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    assert make_client(credentials=credentials, **files).check("liveness") == "SERVING"


def test_a_stream_that_does_not_begin_with_a_head_is_refused(make_client: MakeClient) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="the first message must be a head"):
        make_client().exchange([make_body()], 1)
