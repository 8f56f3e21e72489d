"""FastDeploy's tests of its routers, our tests with the same checks, and the differences.

``recorded_names.txt`` has the name of each test of FastDeploy 2.6 (branch r3_eos_2.6): of its Python router
(``tests/router``), and of its Go router (``fastdeploy/golang_router``, named without its first folder). After the name
are our tests in ``tests/router``, separated by commas, or ``-``. ``DIFFERENT`` has the reasons why our results differ;
``NOT_APPLICABLE`` those why there is no test of ours. ``docs/internals/fastdeploy_router_tests.md`` has the same lists;
print them with::

    python -m tests.router.fastdeploy.origins
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["DIFFERENT", "NOT_APPLICABLE", "RECORDED", "render_lists"]

RECORDED = {
    name: [] if ours == "-" else ours.split(",")
    for name, ours in map(str.split, Path(__file__).with_name("recorded_names.txt").read_text().splitlines())
}
"""Our tests with the same checks, by FastDeploy's test as ``file::name``."""

_UTILS = "tests/router/test_router_utils.py"
_GATEWAY = "golang_router/internal/gateway/completions_test.go"
_MANAGER = "golang_router/internal/manager"
_SCHEDULER = "golang_router/internal/scheduler/handler"

_WORDS = "also refused; the message differs: it names the field, its value and a valid one"
_PROMPT = (
    "policies compare the text that a chat template would render, with roles and untrimmed, in chunks of 128 tokens; "
    "the texts and their order are equal"
)
_PREFILL = "decode's response does not wait for prefill's; an engine's decode sends none before it has the KV"
_FIGURES = (
    "running and waiting requests are equal; if one is missing, both are unknown and the router uses its own count, "
    "as the Go router's policies do; `available_gpu_block_num` is not read, because no policy of either router uses it"
)
_NO_CANDIDATES = "the same choice; without candidates the request is refused before a policy is called"
_FILE = "a router that cannot read its file does not start, and one sentence says why"
_CUSTOM_ROLE = "any name other than the three is refused when the registration is read, not later"
_NAMES = "an instance may also have a host name, as pods do"
_TOKENIZER = (
    "the router uses no tokenizer, because it compares prompts as text; "
    "it accepts the settings, and a line in the log says so"
)

DIFFERENT: Mapping[str, str] = {
    "tests/router/test_router.py::TestRouterSelection::test_select_pd_no_decode_raises": "the error names the "
    "missing role in another sentence, and is a 503 instead of a 500 without a message",
    f"{_UTILS}::TestInstanceInfoFromDict::test_from_dict_missing_required_field_raises_keyerror": _WORDS,
    f"{_UTILS}::TestInstanceInfoFromDict::test_from_dict_missing_role_raises_keyerror": _WORDS,
    f"{_UTILS}::TestInstanceInfoPostInit::test_invalid_role_string_raises_valueerror": _WORDS,
    f"{_UTILS}::TestInstanceInfoPostInit::test_invalid_role_type_raises_typeerror": _WORDS,
    f"{_GATEWAY}::TestExtractPromptFromChatRequest": _PROMPT,
    f"{_GATEWAY}::TestExtractPromptFromCompletionsRequest": _PROMPT,
    f"{_GATEWAY}::TestRedirect": "the bytes of a response are not changed; the Go router ends each line of a "
    "stream with a line feed, even if the instance sent none",
    f"{_GATEWAY}::TestPostToPD": _PREFILL,
    f"{_GATEWAY}::TestPostToPD_PrefillHangs": _PREFILL,
    f"{_GATEWAY}::TestGetClientWithRetry": "after a lost connection the router tries another instance, not the "
    "same one three times: if the request crashed the instance, it crashes two at most",
    f"{_MANAGER}/instance_test.go::TestRole_UnmarshalJSON": _CUSTOM_ROLE,
    f"{_MANAGER}/instance_test.go::TestRole_MarshalJSON": _CUSTOM_ROLE,
    f"{_MANAGER}/instance_test.go::TestNewInstanceInfo": f"{_NAMES}; everything else that is refused "
    "there is refused here, in a sentence that names the field, its value and a valid one",
    f"{_MANAGER}/instance_test.go::TestIsValidIP": _NAMES,
    f"{_MANAGER}/metrics_test.go::TestParseMetricsResponseOptimized": _FIGURES,
    f"{_MANAGER}/metrics_test.go::TestGetMetricsByURL_Integration": _FIGURES,
    f"{_MANAGER}/metrics_test.go::TestManagerGetMetrics_Integration": _FIGURES,
    f"{_MANAGER}/metrics_test.go::TestMetricsParsingHelper": _FIGURES,
    f"{_MANAGER}/register_test.go::TestPortStringToInt": "a port that is not a number is refused, not read as 0",
    f"{_MANAGER}/register_test.go::TestHostFromURL": 'an address without a host is refused, not read as ""',
    f"{_MANAGER}/register_test.go::TestRegisterInstancesFromConfig_InvalidYAML": _FILE,
    "golang_router/internal/middleware/logger_test.go::TestRecoveryMiddleware": "an internal error of the router is "
    "a 500, too; the message differs, in OpenAI's form of errors",
    f"{_SCHEDULER}/handler_test.go::TestCounterOperations": "the same counts; instead of a guard against negative "
    "counts, each request decrements once, even if it is ended several times",
    f"{_SCHEDULER}/handler_test.go::TestCleanupInvalidCounters": "a count belongs to a registered instance: "
    "after it is removed, its requests end as before, and a new instance at its address begins with 0",
    f"{_SCHEDULER}/handler_test.go::TestEstimateTokens": "a token is four bytes of the body, not half a "
    "character: closer to the engines' counts, and the same for all instances",
    f"{_SCHEDULER}/load_strategy_test.go::TestProcessTokensSelectWorker": _NO_CANDIDATES,
    f"{_SCHEDULER}/load_strategy_test.go::TestRequestNumSelectWorker": _NO_CANDIDATES,
}
"""The reasons for intended differences, by test."""

NOT_APPLICABLE: Mapping[str, str] = {
    f"{_GATEWAY}::TestMain": "sets up the log for the other tests of its package",
    f"{_SCHEDULER}/tokenizer_test.go::TestNewHTTPTokenizer": _TOKENIZER,
    f"{_SCHEDULER}/tokenizer_test.go::TestNewHTTPTokenizer_URLParsing": _TOKENIZER,
    f"{_SCHEDULER}/tokenizer_test.go::TestNewHTTPTokenizer_ImplementsInterface": _TOKENIZER,
    f"{_SCHEDULER}/tokenizer_test.go::TestHTTPTokenizer_Tokenize": _TOKENIZER,
    f"{_SCHEDULER}/tokenizer_test.go::TestParseTokensFromBody": f"{_TOKENIZER}; fails in FastDeploy 2.6 itself",
    "golang_router/pkg/logger/logger_test.go::TestContextPrefix": "the router's log has no such "
    "prefix, a request's id is in the access log; fails in FastDeploy 2.6 itself, which writes no `[request_id:null]`",
}
"""The reasons why a test does not apply, by test."""


def render_lists() -> str:
    """Return the lists of the page by file: the tests that pass, that differ, and that do not apply."""
    passing = dict.fromkeys(RECORDED.keys() - DIFFERENT.keys() - NOT_APPLICABLE.keys(), "")
    parts = ["## Pass\n"]
    for file, _, names in _group_by_reason(passing):
        parts.append(f"**`{file}`** ({len(names)}): {_join_names(names)}.\n")
    for title, reasons in (("Different on purpose", DIFFERENT), ("Does not apply", NOT_APPLICABLE)):
        parts.append(f"## {title}\n\n| file | tests | why |\n|---|---|---|")
        parts += [f"| `{file}` | {_join_names(names)} | {why} |" for file, why, names in _group_by_reason(reasons)]
        parts.append("")
    return "\n".join(parts)


def _group_by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the tests with these reasons by file and reason, in the recorded order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in RECORDED:
        if each in reasons:
            file, _, name = each.partition("::")
            groups.setdefault((file, reasons[each]), []).append(name)
    for (file, why), names in groups.items():
        yield file, why, names


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(render_lists(), end="")
