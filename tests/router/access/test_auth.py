"""API keys of clients, and the tokens for changes of the router's instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.access import auth as auth_module
from router.access.auth import Auth
from router.http.api_error import Refused
from router.settings import RouterSettings, SettingsError
from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.support.waiting import wait_until


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def bearer(secret: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"h"), (b"authorization", f"Bearer {secret}".encode())]


def make_auth(tmp_path: Path, text: str) -> Auth:
    return Auth(RouterSettings(api_keys_file=write(tmp_path / "keys", text)))


def test_without_keys_all_requests_are_of_the_same_client() -> None:
    assert Auth(RouterSettings()).identify_client(bearer("anything")) == ""


def test_a_key_identifies_its_client(tmp_path: Path) -> None:
    auth = make_auth(tmp_path, "# two of ours\nalice: sk-1\nbob: 'sk-2'\n")
    assert (auth.identify_client(bearer("sk-1")), auth.identify_client(bearer("sk-2"))) == ("alice", "bob")


def test_the_scheme_can_be_in_lower_case(tmp_path: Path) -> None:
    assert make_auth(tmp_path, "alice: sk-1").identify_client([(b"authorization", b"bearer sk-1")]) == "alice"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "missing_api_key"),
        ([(b"authorization", b"Basic c2stMQ==")], "missing_api_key"),
        (bearer("sk-3"), "invalid_api_key"),
        (bearer(""), "invalid_api_key"),
    ],
)
def test_a_request_without_a_valid_key_is_a_401_with_the_scheme(
    tmp_path: Path, headers: list[tuple[bytes, bytes]], code: str
) -> None:
    with pytest.raises(Refused) as refused:
        make_auth(tmp_path, "alice: sk-1").identify_client(headers)
    assert (refused.value.error.status, refused.value.error.code) == (401, code)
    assert refused.value.headers == [(b"www-authenticate", b"Bearer")]


@pytest.mark.parametrize(
    "named",
    [
        {"api_keys_file": "/no/such/file"},
        {"admin_token_file": "/no/such/file"},
        {"register_token_file": "/no/such/file"},
    ],
)
def test_the_error_for_an_unreadable_file_is_one_sentence(named: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=r"/no/such/file cannot be read: No such file or directory"):
        Auth(RouterSettings(**named))


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_an_open_registration_is_a_danger_at_a_public_address(host: str, warns: bool) -> None:
    assert ("--admin-token-file" in Auth(RouterSettings(host=host)).danger) is warns


def test_with_an_admin_token_registrations_and_lists_require_it(
    tmp_path: Path, make_router: MakeRouter, stand_in: MakeStandIn
) -> None:
    router = make_router(admin_token_file=write(tmp_path / "token", "s3cret\n"))
    right = {"authorization": "Bearer s3cret"}
    registration = stand_in().registration()
    assert router.client.post("/register", json=registration).json()["error"]["code"] == "missing_admin_token"
    wrong = router.client.post("/register", json=registration, headers={"authorization": "Bearer s3cre"})
    assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
    assert router.client.post("/register", json=registration, headers=right).json() == {"status": "success"}
    assert router.client.get("/registered").status_code == 401
    assert router.client.get("/registered", headers=right).status_code == 200
    assert router.client.get("/admin/explain/1").status_code == 401


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc"])
def test_with_an_admin_token_the_description_of_the_paths_requires_it(
    tmp_path: Path, make_router: MakeRouter, path: str
) -> None:
    client = make_router(admin_token_file=write(tmp_path / "token", "s3cret\n")).client
    refused = client.get(path)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "missing_admin_token")
    assert client.get(path, headers={"authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/registered_number"])
def test_probes_and_metrics_require_no_secret(tmp_path: Path, make_router: MakeRouter, path: str) -> None:
    files = {name: write(tmp_path / name, "s3cret") for name in ("admin_token_file", "api_keys_file")}
    assert make_router(**files).client.get(path).status_code == 200


def test_with_api_keys_the_list_of_models_and_aborts_require_one(tmp_path: Path, make_router: MakeRouter) -> None:
    client = make_router(api_keys_file=write(tmp_path / "keys", "alice: sk-1")).client
    assert client.get("/v1/models").status_code == 401
    assert client.post("/v1/abort_requests", json={"abort_all": True}).status_code == 401
    assert client.get("/v1/models", headers={"authorization": "Bearer sk-1"}).status_code == 200


def test_an_abort_of_all_requests_requires_the_admin_token(tmp_path: Path, make_router: MakeRouter) -> None:
    files = {"admin_token_file": write(tmp_path / "token", "s3cret")}
    client = make_router(**files, api_keys_file=write(tmp_path / "keys", "alice: sk-1")).client

    def abort(secret: str, **body: object) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        return client.post("/v1/abort_requests", json=body, headers=headers).status_code

    assert abort("sk-1", req_ids=["chatcmpl-1_0"]) == 200
    assert abort("sk-1", abort_all=True) == 401
    assert abort("s3cret", abort_all=True) == 200


def test_the_registration_token_is_valid_only_for_paths_of_instances(
    make_router: MakeRouter, stand_in: MakeStandIn, tmp_path: Path
) -> None:
    tokens = {name: write(tmp_path / name, f"{name}\n") for name in ("admin", "instance")}
    router = make_router(admin_token_file=tokens["admin"], register_token_file=tokens["instance"])
    registration = stand_in().registration()

    def status(method: str, path: str, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        body = registration if method == "POST" else None
        return router.client.request(method, path, json=body, headers=headers).status_code

    for method, path, allowed in (
        ("POST", "/register", {"admin", "instance"}),
        ("GET", "/decode_instances", {"admin", "instance"}),
        ("POST", "/admin/drain", {"admin", "instance"}),  # an instance can drain itself before its end
        ("GET", "/admin/drain?instance=h:1", {"admin", "instance"}),
        ("GET", "/registered", {"admin"}),
        ("POST", "/admin/clear_prefix_cache", {"admin"}),
    ):
        passed = {token for token in ("", "admin", "instance", "other") if status(method, path, token) != 401}
        assert passed == allowed, path


def test_a_refused_registration_names_the_valid_kinds_of_tokens(make_router: MakeRouter, tmp_path: Path) -> None:
    router = make_router(register_token_file=write(tmp_path / "token", "t"))
    sent = router.client.post("/register", headers={"Authorization": "Bearer x"}).json()["error"]
    assert sent["code"] == "invalid_register_token"
    assert "neither the router's registration token nor its admin token" in sent["message"]
    assert router.client.post("/register").json()["error"]["code"] == "missing_register_token"


def test_without_an_admin_token_the_other_paths_are_open(
    make_router: MakeRouter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = make_router(register_token_file=write(tmp_path / "token", "t"))
    assert router.client.get("/registered").status_code == 200
    assert router.client.post("/admin/drain", json={"instance": "h:1"}).status_code == 404
    assert "any client that reaches 0.0.0.0 can drain instances" in caplog.text


def test_a_clients_priority_is_from_its_key_and_a_request_can_lower_it(tmp_path: Path) -> None:
    auth = make_auth(tmp_path, "alice: {key: sk-1, priority: 3}\nbob: sk-2\n")
    assert (auth.find_priority("alice", []), auth.find_priority("bob", [])) == (3, 0)
    assert [auth.find_priority("alice", [(b"x-priority", asked)]) for asked in (b"-2", b"9")] == [-2, 3]
    assert Auth(RouterSettings()).find_priority("", [(b"x-priority", b"9")]) == 9


def test_cache_salts_exist_only_with_the_setting(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", "alice: sk-1\n")
    assert Auth(RouterSettings(api_keys_file=keys)).cache_salts is None
    assert Auth(RouterSettings(api_keys_file=keys, cache_salt_per_key=True)).cache_salts is not None


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the files with secrets every 10 ms."""
    monkeypatch.setattr(auth_module, "CHECK_SECONDS", 0.01)


def list_models(router: RouterUnderTest, key: str) -> int:
    return router.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code


@pytest.mark.usefixtures("frequent_checks")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_key_that_is_removed_from_the_file_is_refused_without_a_restart(
    tmp_path: Path, make_router: MakeRouter, workers: int
) -> None:
    keys = tmp_path / "keys"
    routers = make_router(api_keys_file=write(keys, "alice: sk-1\nbob: sk-2\n"), workers=workers).workers
    assert [list_models(router, "sk-1") for router in routers] == [200] * workers
    write(keys, "bob: sk-2\ncarol: sk-3\n")
    for router in routers:
        wait_until(lambda router=router: list_models(router, "sk-1") == 401, "alice's key to be refused")  # type: ignore[misc]
        assert [list_models(router, key) for key in ("sk-2", "sk-3")] == [200, 200]


@pytest.mark.usefixtures("frequent_checks")
@pytest.mark.parametrize("text", ["alice sk-1\nbob: sk-1: x\n", "", "# nobody\n"])
def test_a_wrong_change_of_the_file_has_no_effect_and_is_logged_once(
    tmp_path: Path, make_router: MakeRouter, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    keys = tmp_path / "keys"
    router = make_router(api_keys_file=write(keys, "alice: sk-1\n"))

    def refusals() -> list[str]:
        return [
            record.getMessage() for record in caplog.records if "cannot be used; the previous" in record.getMessage()
        ]

    write(keys, text)
    wait_until(refusals, "the log line")
    assert list_models(router, "sk-1") == 200
    write(keys, "alice: sk-9\n")
    wait_until(lambda: list_models(router, "sk-9") == 200, "the repaired file")
    assert list_models(router, "sk-1") == 401
    (message,) = refusals()
    assert message.startswith(
        "a changed file of keys or tokens cannot be used; the previous keys and tokens stay valid: "
        "server.api-keys-file "
    )
    assert "sk-1" not in message


@pytest.mark.usefixtures("frequent_checks")
def test_a_changed_admin_token_is_used_without_a_restart(tmp_path: Path, make_router: MakeRouter) -> None:
    router = make_router(admin_token_file=write(tmp_path / "token", "old"))

    def status(token: str) -> int:
        return router.client.get("/registered", headers={"authorization": f"Bearer {token}"}).status_code

    assert (status("old"), status("new")) == (200, 401)
    write(tmp_path / "token", "new")
    wait_until(lambda: status("new") == 200, "the new token")
    assert status("old") == 401


@pytest.mark.usefixtures("frequent_checks")
def test_a_changed_limit_of_a_key_is_used_and_a_revoked_key_still_has_a_salt(
    tmp_path: Path, make_router: MakeRouter
) -> None:
    keys = tmp_path / "keys"
    made = write(keys, "alice: {key: sk-1, tokens_per_sec: 5}\n")
    auth = make_router(api_keys_file=made, cache_salt_per_key=True).app.auth
    assert auth.token_rates == {"alice": 5.0}
    assert auth.cache_salts is not None
    salt, rates = auth.cache_salts.derive("alice"), auth.token_rates
    write(keys, "bob: {key: sk-2, tokens_per_sec: 7}\n")
    wait_until(lambda: rates == {"bob": 7.0}, "the new limits")
    assert auth.cache_salts.derive("alice") == salt
    assert auth.cache_salts.derive("bob") != salt


def test_health_shows_the_address_of_redis_only_to_the_admin(tmp_path: Path, make_router: MakeRouter) -> None:
    router = make_router(admin_token_file=write(tmp_path / "token", "s3cret"), workers=2)
    trouble = "Error 111 connecting to 10.9.8.7:6379"
    router.app.link.trouble = trouble
    assert "10.9.8.7" not in router.client.get("/health").text
    assert (
        router.client.get("/health").json()["shared_state"].startswith("Redis (server.shared-state) cannot be reached")
    )
    answer = router.client.get("/health", headers={"authorization": "Bearer s3cret"})
    assert answer.json() == {"status": "ok", "shared_state": trouble}


def test_health_does_not_show_the_address_of_redis_without_an_admin_token(make_router: MakeRouter) -> None:
    router = make_router(workers=2)
    router.app.link.trouble = "Error 111 connecting to 10.9.8.7:6379"
    assert "10.9.8.7" not in router.client.get("/health").text
