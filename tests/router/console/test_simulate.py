"""kvrouter simulate: the replay of small traces with the router's policies, and the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from router.console.simulate import Arrival, Cluster, Division, main, replay, spread_arrivals
from router.policies import POLICIES

CLUSTER = Cluster(instances=4, tokens_per_second=1000, cache_blocks=100, pool_blocks=10_000)


def make_conversations(count: int = 40, turns: int = 6) -> list[Arrival]:
    """Return the turns of interleaved conversations with a common system prompt. Each turn adds two blocks."""
    rng, arrivals = random.Random(3), []
    for conversation in range(count):
        at = rng.uniform(0, 300)
        for turn in range(turns):
            blocks = (0, *(1000 * (conversation + 1) + i for i in range(2 * turn + 2)))
            arrivals.append(Arrival(at, 512 * len(blocks), blocks))
            at += rng.uniform(10, 60)
    return sorted(arrivals)


def test_a_single_request_takes_the_time_of_its_tokens() -> None:
    report = replay([Arrival(0.0, 1500, (1, 2, 3))], CLUSTER, POLICIES["pool_aware"])
    assert report.ttft == [1.5]


def test_a_repeated_request_costs_nothing_at_the_same_instance_and_a_quarter_at_another() -> None:
    arrivals = [Arrival(0.0, 1024, (1, 2)), Arrival(10.0, 1024, (1, 2))]
    assert replay(arrivals, CLUSTER, POLICIES["pool_aware"]).ttft == [1.024, 0.0]
    assert replay(arrivals, CLUSTER, POLICIES["round_robin"]).ttft == [1.024, pytest.approx(0.256)]


def test_requests_at_one_instance_wait_for_each_other() -> None:
    arrivals = [Arrival(0.0, 500, (1,)), Arrival(0.1, 500, (2,))]
    report = replay(arrivals, CLUSTER._replace(instances=1), POLICIES["pool_aware"])
    assert report.ttft == [0.5, pytest.approx(0.9)]


def test_a_full_cache_of_an_instance_evicts_blocks() -> None:
    arrivals = [Arrival(10.0 * i, 512, (block,)) for i, block in enumerate([1, 2, 1])]
    small = CLUSTER._replace(instances=1, cache_blocks=1)
    report = replay(arrivals, small, POLICIES["pool_aware"])
    assert (report.own_tokens, report.pool_tokens) == (0, 512)


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_answers_all_requests(name: str) -> None:
    arrivals = make_conversations()
    report = replay(arrivals, CLUSTER, POLICIES[name])
    assert len(report.ttft) == len(arrivals)
    assert report.tokens == sum(arrival.tokens for arrival in arrivals)


@pytest.mark.parametrize("rate", [600, 900, 2000])
def test_pool_aware_is_at_most_5_percent_slower_than_the_best_policy(rate: float) -> None:
    cluster = CLUSTER._replace(tokens_per_second=rate)
    means = {name: fmean(replay(make_conversations(), cluster, POLICIES[name]).ttft) for name in POLICIES}
    assert means["pool_aware"] <= 1.05 * min(means.values())


def test_a_replay_is_reproducible() -> None:
    one, two = (replay(make_conversations(), CLUSTER, POLICIES["random"]) for _ in range(2))
    assert one.ttft == two.ttft


def test_a_router_knows_a_request_of_another_router_after_the_propagation() -> None:
    # One instance is busy for 10 s. A router that knows this chooses the other one; otherwise it chooses either.
    def is_second_delayed(seconds: float, seed: int) -> bool:
        arrivals = [Arrival(0.0, 10_000, ()), Arrival(1.0, 1000, ())]
        division = Division(routers=2, propagation=seconds, seed=seed)
        report = replay(arrivals, CLUSTER._replace(instances=2), POLICIES["request_num"], division)
        return sorted(report.ttft)[0] > 1.5

    assert not any(is_second_delayed(0.9, seed) for seed in range(10))
    assert any(is_second_delayed(1.1, seed) for seed in range(10))


def test_a_router_knows_a_prompt_of_another_router_after_the_propagation() -> None:
    # The second request advances the turns of its router, so that a prompt that it does not know goes elsewhere.
    arrivals = [Arrival(0.0, 1024, (1, 2)), Arrival(1.1, 100, ()), Arrival(2.0, 1024, (1, 2))]

    def count_own_tokens(seconds: float, seed: int) -> int:
        division = Division(routers=2, prefix_propagation=seconds, seed=seed)
        return replay(arrivals, CLUSTER, POLICIES["pool_aware"], division).own_tokens

    # A router sends a prompt to the others 100 ms after its choice.
    assert {count_own_tokens(1.8, seed) for seed in range(20)} == {1024}
    assert {count_own_tokens(2.0, seed) for seed in range(20)} == {0, 1024}


@pytest.mark.parametrize("routers", [2, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_several_routers_answer_all_requests(name: str, routers: int) -> None:
    arrivals = make_conversations(10)
    report = replay(arrivals, CLUSTER, POLICIES[name], Division(routers, 0.05, 0.2))
    assert len(report.ttft) == len(arrivals)


def test_routers_with_a_short_propagation_are_as_fast_as_one() -> None:
    arrivals = make_conversations(200)
    cluster = CLUSTER._replace(tokens_per_second=4000)

    def mean(division: Division) -> float:
        return fmean(replay(arrivals, cluster, POLICIES["pool_aware"], division).ttft)

    single = mean(Division())
    connected = [mean(Division(routers, 0.001, 0.001, seed)) for routers in (2, 4) for seed in range(3)]
    isolated = [mean(Division(routers, 1e9, 1e9, seed)) for routers in (2, 4) for seed in range(3)]
    assert fmean(connected) < 1.03 * single < fmean(isolated)


def test_a_replay_with_several_routers_is_reproducible_by_its_seed() -> None:
    divisions = [Division(3, 0.05, 0.2, seed) for seed in (1, 1, 2)]
    one, two, other = (replay(make_conversations(), CLUSTER, POLICIES["pool_aware"], each).ttft for each in divisions)
    assert one == two != other


def test_requests_with_one_timestamp_can_be_spread_until_the_next_one() -> None:
    arrivals = [Arrival(at, 512, (number,)) for number, at in enumerate([0.0, 0.0, 0.0, 3.0, 6.0, 6.0])]
    spread = spread_arrivals(arrivals)
    assert [arrival.blocks for arrival in spread] == [arrival.blocks for arrival in arrivals]
    assert [3 * int(arrival.at / 3) for arrival in spread] == [arrival.at for arrival in arrivals]
    assert len({arrival.at for arrival in spread}) == 6
    assert spread == sorted(spread_arrivals(arrivals)) != spread_arrivals(arrivals, seed=1)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    entries = ({"timestamp": 1000 * a.at, "input_length": a.tokens, "hash_ids": a.blocks} for a in make_conversations())
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_the_table_has_a_line_for_each_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(trace), "--instances", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("240 requests in ")
    assert [line.split()[0] for line in lines[2:]] == list(POLICIES)


def test_the_table_shows_the_number_of_routers(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--routers", "2", "--propagation-ms", "50", "--prefix-propagation-ms", "200", "--spread", "--seed", "5"]
    assert main(["--trace", str(trace), "--policy", "pool_aware", *flags]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(", 2 routers")


def test_the_progress_is_written_to_standard_error(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.console.simulate._LINE_SECONDS", 0.0)
    assert main(["--trace", str(trace), "--policy", "random", "--policy", "pool_aware"]) == 0
    printed = capsys.readouterr()
    assert "left" not in printed.out
    assert "kvrouter simulate: pool_aware, 50%, about " in printed.err


def test_the_table_can_have_only_one_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", str(trace), "--policy", "pool_aware"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --trace"),
        (["--trace", "nowhere"], "--trace nowhere cannot be read: No such file or directory"),
        (["--trace", "TRACE", "--instances", "0"], "argument --instances: it is 0; it must be more than 0"),
        (["--trace", "TRACE", "--routers", "0"], "argument --routers: it is 0; it must be more than 0"),
        (["--trace", "TRACE", "--propagation-ms", "-1"], "argument --propagation-ms: it is -1; it must be 0 or more"),
        (["--trace", "TRACE", "--headroom", "much"], "argument --headroom: invalid number value: 'much'"),
        (
            ["--trace", "TRACE", "--instance", "4"],
            "--instance is not a flag of this program; did you mean --instances?",
        ),
        (["--tracee=TRACE"], "--tracee is not a flag of this program; did you mean --trace?"),
        (["--trace", "TRACE", "--policy", "best"], "invalid choice: 'best'"),
        (["--trace", "BROKEN"], "line 2 is not a request; it must be a JSON object with timestamp (a number"),
        (["--trace", "EMPTY"], "must have at least two requests with different timestamps"),
    ],
)
def test_an_error_is_one_sentence(
    flags: list[str], message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, empty = tmp_path / "broken.jsonl", tmp_path / "empty.jsonl"
    broken.write_text(trace.read_text().splitlines()[0] + '\n{"timestamp": 0}\n')
    empty.write_text("")
    files = {"TRACE": str(trace), "BROKEN": str(broken), "EMPTY": str(empty)}
    assert main([files.get(flag, flag) for flag in flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"timestamp": %s, "input_length": 5, "hash_ids": [1]}' % ("9" * 400),
        '{"timestamp": 1, "input_length": %s, "hash_ids": [1]}' % ("9" * 400),
        "[" * 100_000,
    ],
)
def test_a_line_with_a_too_large_number_or_too_deep_nesting_is_an_error(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 0, "input_length": 5, "hash_ids": [1]}}\n{line}\n')
    assert main(["--trace", str(path), "--policy", "random"]) == 2
    assert "line 2 is not a request" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kvrouter ")
