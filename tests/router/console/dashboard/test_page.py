"""The page in Debian's Chromium: real clicks in a real dashboard of a real router. Instances are stand-ins.

All tests share a browser and a dashboard. Each test has its own router, and connects the dashboard to it.
The folder ``.cache/pictures`` has a screenshot of the end of each test.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.router.conftest import MakeRouter, MakeStandIn, RouterUnderTest
from tests.router.stand_in import LoopThread, Received, Responder, StandIn
from tests.support import plain_http
from tests.support.dashboard import PICTURES, Dashboard, note_requests, open_browser, running_dashboard
from tests.support.mooncake import MooncakeMaster
from tests.support.waiting import wait_until

expect = pytest.importorskip("playwright.sync_api").expect
if importlib.util.find_spec("nicegui") is None:
    pytest.skip("NiceGUI is not installed", allow_module_level=True)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


TIMEOUT_MS = 60_000.0
expect.set_options(timeout=TIMEOUT_MS)
TOKEN = "the-admin-token"
VIEWS = {
    "/": "Where prompts come from",
    "/traffic": "Traffic",
    "/fleet": "Fleet",
    "/pool": "Pool",
    "/request": "One request",
    "/try": "Try it",
}
NARROW = 320
CLIPPED_LABELS = """[...document.querySelectorAll(".chart svg")].flatMap(chart => {
    const box = chart.getBoundingClientRect(), isOut = part => part.bottom > box.bottom || part.right > box.right + 1;
    return [...chart.querySelectorAll("text")].filter(text => isOut(text.getBoundingClientRect()));
}).map(text => text.textContent)"""


class Engine:
    """The behaviour of an instance of our engine: it counts its prompt tokens by origin."""

    def __init__(self) -> None:
        self.origins = {"own_cache": 0, "pool": 0, "handed_over": 0, "computed": 0}
        self.usage = {"own_cached_tokens": 128, "pool_cached_tokens": 64, "cached_tokens": 192}
        self.pieces = ["It ", "was ", "night."]
        self.may_continue = asyncio.Event()
        self.fails = False

    async def __call__(self, request: Received, respond: Responder) -> None:
        if request.target == "/metrics":
            lines = [f'kvstore_prompt_tokens_total{{origin="{name}"}} {n}' for name, n in self.origins.items()]
            lines += [
                "kvstore_pool_open 1",
                "fastdeploy:num_requests_waiting 3",
                "fastdeploy:gpu_cache_usage_perc 0.25",
                f"fastdeploy:time_to_first_token_seconds_sum {self.origins['pool'] / 300}",
                f"fastdeploy:time_to_first_token_seconds_count {self.origins['pool'] / 75}",
                f"fastdeploy:generation_tokens_total {self.origins['computed']}",
            ]
            lines.append('kvstore_blocks_total{operation="exists",status="ok"} ' + str(self.origins["pool"] // 64))
            await respond.answer(200, ("\n".join(lines) + "\n").encode(), ("content-type", "text/plain"))
        elif self.fails:
            await respond.answer(500, b'{"error": {"message": "out of order"}}')
        else:
            await self._stream(respond)

    async def _stream(self, respond: Responder) -> None:
        await respond.start_stream()
        for number, piece in enumerate(self.pieces):
            if number == len(self.pieces) - 1:
                await self._wait_for_either(self.may_continue, respond.peer_left)
            if respond.peer_left.is_set():
                respond.keep_alive = False
                return
            choice = {"index": 0, "delta": {"content": piece}, "finish_reason": None}
            await respond.event(json.dumps({"id": "chatcmpl-1", "choices": [choice]}))
        usage = {"prompt_tokens": 200, "completion_tokens": 3, "prompt_tokens_details": self.usage}
        await respond.event(json.dumps({"id": "chatcmpl-1", "choices": [], "usage": usage}))
        await respond.event("[DONE]")
        await respond.end_stream()
        self.count(own_cache=128, pool=64, computed=8)

    async def _wait_for_either(self, *events: asyncio.Event) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in events]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()

    def count(self, **tokens: int) -> None:
        """Count a prompt."""
        for name, number in tokens.items():
            self.origins[name] += number


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as running:
        yield running


@pytest.fixture(scope="module")
def dashboard(browser: Browser, thread: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "token").write_text(f"{TOKEN}\n")
    with running_dashboard(thread, folder, "--token-file", str(folder / "token")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, dashboard: Dashboard, request: pytest.FixtureRequest) -> Iterator[Page]:
    """An empty page, with a screenshot at the end. It may send requests only to the dashboard."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=dashboard.url)
    context.set_default_timeout(TIMEOUT_MS)
    other_requests: list[str] = []
    errors: list[str] = []
    note_requests(context, dashboard.url, other_requests)
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    take_picture(opened, request.node.name.removeprefix("test_"))
    context.close()
    dashboard.router.lead_to(0)
    dashboard.master.lead_to(0)
    assert (other_requests, errors) == ([], [])
    assert "Traceback" not in dashboard.process.output


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def instance(stand_in: MakeStandIn, engine: Engine) -> StandIn:
    return stand_in(behave=engine)


@pytest.fixture
def router(make_router: MakeRouter, instance: StandIn, dashboard: Dashboard) -> RouterUnderTest:
    """A router with an instance. The dashboard is connected to it."""
    made = make_router(instance)
    dashboard.router.lead_to(made.port)
    return made


def take_picture(page: Page, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=PICTURES / f"{re.sub(r'[^a-z0-9_]', '_', name)}.png", full_page=True)


def open_view(page: Page, path: str, text: str) -> None:
    """Open a view, and wait for this text: figures appear after the dashboard's next poll."""
    page.goto(path)
    page.get_by_text(text).first.wait_for()


def test_prompts_show_the_share_of_cached_tokens(
    router: RouterUnderTest, instance: StandIn, engine: Engine, dashboard: Dashboard, page: Page
) -> None:
    open_view(page, "/", instance.key)
    engine.count(own_cache=1000, pool=2000, computed=1000)
    page.get_by_text("3,000 of 4,000 were in a cache").wait_for()
    expect(page.locator(".headline")).to_have_text("75 %")
    expect(page.get_by_role("img", name="Own cache 25 %, Pool 50 %, Computed 25 %").first).to_be_visible()
    row = page.get_by_role("row", name=instance.key)
    assert row.get_by_role("cell").all_inner_texts()[3:] == ["1,000", "2,000", "0", "1,000"]
    page.get_by_label("Instance shown").click()
    page.get_by_role("option", name=instance.key).click()
    page.locator(".chart").get_by_text("Handed over").wait_for()
    page.get_by_role("button", name="1 hour").click()
    page.get_by_text("in the last 1 hour").wait_for()
    page.reload()
    page.get_by_text("in the last 1 hour").wait_for()  # the choice is stored


def test_traffic_shows_responses_times_and_errors(
    router: RouterUnderTest, instance: StandIn, engine: Engine, page: Page
) -> None:
    open_view(page, "/traffic", "Concurrent requests")
    engine.may_continue.set()
    with router.stream() as stream:
        stream.read()
    engine.fails = True
    assert router.chat().status_code == 502 or router.chat().status_code == 500
    page.get_by_role("cell", name="status 50").wait_for()
    tile = page.locator(".tile", has_text="First token, median")
    tile.get_by_text("ms").wait_for()
    expect(tile).to_contain_text("of 1 stream")
    expect(page.locator(".chart")).to_have_count(4)
    page.get_by_text("before the start").first.wait_for()
    page.locator(".chart").get_by_text("4 min ago").first.wait_for()
    assert page.evaluate(CLIPPED_LABELS) == []


def test_a_value_without_neighbours_is_a_point_wherever_it_is(
    browser: Browser, thread: LoopThread, make_router: MakeRouter, instance: StandIn, engine: Engine, tmp_path: Path
) -> None:
    router = make_router(instance)
    engine.may_continue.set()
    places: set[int] = set()
    with running_dashboard(thread, tmp_path) as own, browser.new_page(base_url=own.url) as page:
        own.router.lead_to(router.port)
        open_view(page, "/traffic", "Concurrent requests")
        page.locator(".alive .dot.good").wait_for()
        with router.stream() as stream:
            stream.read()
        points = page.get_by_role("img", name="Time to the first token").locator("path[d^='M1 0A']")

        def has_moved() -> bool:
            """Return whether the point was seen at two places. Below the first, "now" is a label of the axis."""
            boxes = points.evaluate_all("found => found.map(each => each.getBoundingClientRect().toJSON())")
            places.update(round(box["x"]) for box in boxes if box["width"] > 1)
            return len(places) > 1

        wait_until(has_moved, "the point at its second place", 30.0)  # after 60 s, it is below the next label


def test_drain_resume_and_weight_need_a_confirmation(router: RouterUnderTest, instance: StandIn, page: Page) -> None:
    open_view(page, "/fleet", instance.key)
    row = page.get_by_role("listitem").filter(has_text=instance.key)
    row.get_by_text("Healthy").wait_for()
    assert [each.strip() for each in row.locator(".figure span:last-child").all_inner_texts()] == [
        "0",
        "3",
        "25 %",
        "1",
    ]
    row.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    row.get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    row.get_by_text("Draining").wait_for()
    assert router.client.get("/registered").json()["mixed"][0]["state"] == "draining"
    row.get_by_role("button", name="Resume").press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    row.get_by_text("Healthy").wait_for()
    row.get_by_role("button", name="Weight").click()
    page.get_by_role("dialog").get_by_label("Weight, 0 to 1").fill("0.25")
    page.get_by_role("dialog").get_by_role("button", name="Set weight").click()
    row.get_by_text("0.25").wait_for()
    for event in ("drains", "takes requests"):
        page.get_by_role("row", name=instance.key).get_by_text(event).wait_for()


def test_an_instance_has_charts_of_its_work_over_time(
    router: RouterUnderTest, instance: StandIn, engine: Engine, page: Page
) -> None:
    open_view(page, "/fleet", instance.key)
    engine.count(pool=300, computed=100)
    row = page.get_by_role("listitem").filter(has_text=instance.key)
    row.get_by_role("img", name="Hit share, over time: 75 %").wait_for()
    row.get_by_role("img", name="Memory, mean, over time: 25 %").wait_for()
    row.get_by_role("img", name="TTFT, mean, over time: 250 ms").wait_for()
    row.get_by_role("img", name="Tokens/s, mean, over time: ").wait_for()


def test_a_command_that_the_router_does_not_answer_shows_an_error(
    router: RouterUnderTest, instance: StandIn, dashboard: Dashboard, page: Page
) -> None:
    open_view(page, "/fleet", "Healthy")
    page.get_by_role("button", name=f"Drain {instance.key}").click()
    dashboard.router.lead_to(0)
    page.get_by_role("dialog").get_by_role("button", name="Drain").click()
    page.get_by_role("dialog").get_by_text("does not answer").wait_for()


def test_without_the_admin_token_loads_are_shown_and_commands_are_disabled(
    make_router: MakeRouter, instance: StandIn, dashboard: Dashboard, tmp_path: Path, page: Page
) -> None:
    (tmp_path / "token").write_text("another-token\n")
    router = make_router(admin_token_file=str(tmp_path / "token"))
    headers = {"authorization": "Bearer another-token"}
    router.client.post("/register", json=instance.registration(), headers=headers).raise_for_status()
    dashboard.router.lead_to(router.port)
    open_view(page, "/fleet", "requires its admin token for /registered; give the token's file with --token-file")
    expect(page.get_by_role("button", name="Drain")).to_be_disabled()
    page.get_by_text("Unknown").wait_for()


def test_the_pool_shows_its_master_and_then_its_loss(
    router: RouterUnderTest, dashboard: Dashboard, mooncake_master: MooncakeMaster, page: Page
) -> None:
    dashboard.master.lead_to(int(mooncake_master.metrics_url.split("/")[2].rpartition(":")[2]))
    open_view(page, "/pool", "leader")
    expect(page.locator(".tile", has_text="Capacity")).not_to_be_empty()
    dashboard.master.lead_to(0)
    page.get_by_text("The pool is unreachable: ").wait_for()
    page.get_by_text("Instances continue without it").wait_for()


def test_a_conversation_is_streamed_and_shows_the_origins_of_its_prompt(
    router: RouterUnderTest, engine: Engine, page: Page
) -> None:
    open_view(page, "/try", "No messages yet")
    page.get_by_label("Your question").fill("What time was it?")
    page.get_by_label("Your question").press("Enter")
    page.get_by_text("It was", exact=True).wait_for()  # before the engine sends the rest
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    router.thread.loop.call_soon_threadsafe(engine.may_continue.set)
    page.get_by_text("It was night.").wait_for()
    page.get_by_text("of 200 prompt tokens; a square is 4").wait_for()
    for origin, count in {"own_cache": 32, "pool": 16, "computed": 2}.items():
        expect(page.locator(f".turn .blocks .{origin}")).to_have_count(count)
    page.get_by_role("link", name="timeline").click()
    page.get_by_text("128 came from the instance's own cache, 64 from the pool, and 8 were computed").wait_for()


def test_a_response_can_be_stopped_and_a_new_chat_begun(router: RouterUnderTest, instance: StandIn, page: Page) -> None:
    open_view(page, "/try", "No messages yet")
    page.get_by_role("button", name="Use a long question").click()
    page.get_by_role("button", name="Send").click()
    page.get_by_text("It was", exact=True).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    wait_until(lambda: instance.left, "the end of the request at the instance")
    page.get_by_role("button", name="New chat").click()
    page.locator(".turn").wait_for(state="detached")


def test_a_new_chat_has_no_part_of_the_previous_response(
    router: RouterUnderTest, instance: StandIn, engine: Engine, page: Page
) -> None:
    open_view(page, "/try", "No messages yet")
    page.get_by_label("Your question").fill("What time was it?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("It was", exact=True).wait_for()
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("No messages yet").wait_for()
    wait_until(lambda: instance.left, "the end of the request at the instance")
    router.thread.loop.call_soon_threadsafe(engine.may_continue.set)
    page.get_by_label("Your question").fill("And now?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("It was night.").wait_for()
    sent = [each.json for each in instance.received if each.target == "/v1/chat/completions"][-1]
    assert sent["messages"] == [{"role": "user", "content": "And now?"}]
    expect(page.locator(".turn")).to_have_count(1)


def test_the_error_for_a_missing_api_key_is_one_sentence(
    make_router: MakeRouter, instance: StandIn, dashboard: Dashboard, tmp_path: Path, page: Page
) -> None:
    (tmp_path / "keys").write_text("somebody: key\n")
    dashboard.router.lead_to(make_router(instance, api_keys_file=str(tmp_path / "keys")).port)
    open_view(page, "/try", "No messages yet")
    page.get_by_label("Your question").fill("Hello?")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("requires an API key; give the key's file with --api-key-file").wait_for()
    expect(page.get_by_label("Your question")).to_have_value("Hello?")


def test_a_request_is_found_in_the_list_and_shown_with_its_attempts(
    router: RouterUnderTest, engine: Engine, instance: StandIn, page: Page
) -> None:
    engine.may_continue.set()
    router.chat(request_id="r <b>1</b>")
    open_view(page, "/request", "The last requests")
    page.get_by_role("link", name="r <b>1</b>").click()
    page.get_by_role("heading", name="Timeline").wait_for()
    page.get_by_text("1. answered").wait_for()
    expect(page.locator(".attempt").get_by_text(instance.key)).to_be_visible()
    meaning = page.get_by_text("cost of a token from the pool; computing one costs 1")
    expect(meaning).to_be_hidden()
    page.locator(".reasons li", has_text="fetch cost").focus()
    expect(meaning).to_be_visible()
    page.get_by_label("Id of the request").fill("nobody's")
    page.get_by_role("button", name="Look up").click()
    page.get_by_text('no request with the id "nobody\'s" is among the last 10000 requests that have ended').wait_for()


def test_the_last_requests_are_filtered(router: RouterUnderTest, engine: Engine, instance: StandIn, page: Page) -> None:
    engine.may_continue.set()
    router.chat(request_id="good")
    engine.fails = True
    router.chat(request_id="bad")
    open_view(page, "/request?show=failed", "but not 499, or with an error")
    good, bad = page.get_by_role("link", name="good"), page.get_by_role("link", name="bad")
    bad.wait_for()
    expect(good).to_have_count(0)
    page.get_by_role("button", name="Missed").click()
    page.get_by_text("There are no such requests.").wait_for()
    page.get_by_role("button", name="Slow").click()
    good.wait_for()


def test_a_list_fits_on_a_phone(router: RouterUnderTest, engine: Engine, page: Page) -> None:
    engine.may_continue.set()
    router.chat(request_id="7f3c2f8e-1d02-4b7a-9c55-0a1b2c3d4e5f")
    page.set_viewport_size({"width": NARROW, "height": 800})
    open_view(page, "/request", "7f3c2f8e")
    box = page.locator(".table-box")
    assert box.evaluate("box => box.scrollWidth <= box.clientWidth")
    height = box.get_by_role("link", name="7f3c2f8e").evaluate("link => link.offsetHeight")
    assert height < 30  # one line


def test_the_page_shows_that_the_router_is_lost_and_returns(
    router: RouterUnderTest, instance: StandIn, dashboard: Dashboard, page: Page
) -> None:
    open_view(page, "/", instance.key)
    dashboard.router.lead_to(0)
    expect(page.get_by_role("row", name=instance.key)).to_be_visible()
    page.get_by_text("No answer from the router: ").wait_for()
    dashboard.router.lead_to(router.port)
    page.get_by_text("No answer from the router").wait_for(state="hidden")


def test_without_instances_the_fleet_shows_how_to_start_one(
    make_router: MakeRouter, dashboard: Dashboard, page: Page
) -> None:
    dashboard.router.lead_to(make_router().port)
    open_view(page, "/fleet", "The router has no instances. Start one with")


@pytest.mark.parametrize("path", VIEWS)
def test_a_view_is_accessible_in_light_and_dark_colours_and_on_a_phone(
    path: str, router: RouterUnderTest, instance: StandIn, engine: Engine, dashboard: Dashboard, page: Page
) -> None:
    engine.count(pool=64, computed=10)
    open_view(page, path, VIEWS[path])
    page.locator(".alive .dot.good").wait_for()
    assert page.title().startswith(VIEWS[path])
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.locator(f"body.body--{scheme}").wait_for()
        assert find_violations(page, **({} if scheme == "light" else {"runOnly": ["color-contrast"]})) == []
        take_picture(page, f"view_{path.strip('/') or 'prompts'}_{scheme}")
    page.set_viewport_size({"width": NARROW, "height": 800})
    wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= NARROW, "a page as wide as the screen")


def find_violations(page: Page, **options: Any) -> list[tuple[str, Any]]:
    """Return the serious and critical violations that axe-core finds, with their elements."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [
        (each["id"], [node["html"][:200] for node in each["nodes"]])
        for each in violations
        if each["impact"] in ("serious", "critical")
    ]


def test_the_keyboard_reaches_the_navigation_and_colours_are_stored(router: RouterUnderTest, page: Page) -> None:
    open_view(page, "/", "Instance by instance")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    names = []
    for _ in range(8):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent"))
    assert names == [
        "KV pool",
        "Prompts",
        "Traffic",
        "Fleet",
        "Pool",
        "Request",
        "Try it",
        "Colours: As the system",
    ]
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Colours: Light").press("Enter")
    page.locator("body.body--dark").wait_for()
    page.goto("/fleet")
    page.locator("body.body--dark").wait_for()


def test_the_dashboard_answers_only_requests_to_its_own_address(dashboard: Dashboard) -> None:
    """Otherwise, a foreign page with a name that resolves to this machine could read the dashboard (DNS rebinding)."""
    assert plain_http.get(dashboard.url, headers={"host": "elsewhere.example"}).status_code == 421
    assert plain_http.get(dashboard.url, headers={"host": "localhost:1"}).status_code == 200


def test_another_site_cannot_show_the_dashboard_in_a_frame(dashboard: Dashboard, page: Page) -> None:
    """Otherwise, it could make its visitors click on the buttons of the hidden frame."""
    page.set_content(f"<iframe src={dashboard.url}/fleet></iframe>")
    wait_until(lambda: len(page.frames) > 1 and page.frames[1].url != "about:blank", "the frame")
    page.frames[1].wait_for_load_state()
    assert "KV pool" not in page.frames[1].content()
