"""Each module has a test file of the same name, such as ``tests/router/fleet/test_health.py`` of
``router/fleet/health.py``, or an entry in ``TESTED_IN`` that names the tests that cover it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path.relative_to(ROOT)
    for package in ("kvcommon", "router", "kvstore_backend", "engine")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__init__.py"
)

TESTED_IN = {
    # The programs that use the base package test it.
    "kvcommon/formats.py": "tests/router/console/dashboard/test_words.py",
    "kvcommon/http_limits.py": "tests/router/http/test_server.py",
    "kvcommon/json_objects.py": "tests/router/serving/resume/test_events.py",
    "kvcommon/mooncake.py": "tests/router/console/dashboard/test_figures.py",
    "kvcommon/request_ids.py": "tests/engine/serving/test_http_server.py",
    "kvcommon/shutdown.py": "tests/router/test_launch.py",
    "kvcommon/versions.py": "tests/kvstore_backend/cli/test_commands.py",
    "router/policies/block_tree.py": "tests/router/policies/test_cached_blocks.py",
    "router/fleet/kv_event_feed.py": "tests/router/fleet/test_kv_events.py",
    "router/serving/services.py": "tests/router/serving/test_attempt.py",
    "router/telemetry/records.py": "tests/router/telemetry/test_audit.py",
    # The connections, the exchanges on them and their errors are tested together.
    "router/http/errors.py": "tests/router/http/test_exchange.py",
    "router/http/message.py": "tests/router/http/test_exchange.py",
    "router/http/pool.py": "tests/router/http/test_exchange.py",
    "router/http/request_id.py": "tests/router/http/test_server.py",
    "router/http/replies.py": "tests/router/test_app.py",
    # A picker in its own process, with a real Envoy.
    "router/console/epp.py": "tests/router/epp/test_faults.py",
    "router/epp/messages.py": "tests/router/epp/test_picker.py",
    "router/epp/protos.py": "tests/router/epp/test_protocol.py",
    "router/epp/request.py": "tests/router/epp/test_picker.py",
    "router/launch/__main__.py": "tests/router/test_launch.py",
    "router/launch/logs.py": "tests/router/test_launch.py",
    "router/launch/forkserver_preload.py": "tests/router/sharing/test_supervisor.py",
    "router/launch/program.py": "tests/router/test_launch.py",
    "router/launch/server.py": "tests/router/test_launch.py",
    "router/launch/worker.py": "tests/router/sharing/test_supervisor.py",
    "router/sharing/prefix_sync.py": "tests/router/sharing/test_fleet_sync.py",
    "router/telemetry/merge.py": "tests/router/telemetry/test_metrics.py",
    # The dashboard's page, in a browser.
    "router/console/dashboard/scraper.py": "tests/router/console/dashboard/test_collector.py",
    "router/console/dashboard/site.py": "tests/router/console/dashboard/test_page.py",
    **{
        f"router/console/dashboard/views/{view}.py": "tests/router/console/dashboard/test_page.py"
        for view in (
            "charts",
            "chat",
            "fleet",
            "frame",
            "style",
            "parts",
            "pool",
            "prompts",
            "request",
            "traffic",
        )
    },
    # Whole requests: streams, pairs, faults at each step.
    "router/serving/reading/api.py": "tests/router/serving/test_attempt.py",
    "router/serving/plan.py": "tests/router/serving/dialects/test_pairs.py",
    "router/serving/dialects/dialect.py": "tests/router/serving/dialects/test_pairs.py",
    "router/settings/flags.py": "tests/router/settings/test_sources.py",
    # The mergers, with the events of an engine, and over HTTP.
    "router/serving/resume/resumability.py": "tests/router/serving/resume/test_resumption.py",
    "router/serving/resume/json_merger.py": "tests/router/serving/resume/test_stream.py",
    # Every backend passes the same suite.
    "kvstore_backend/backend.py": "tests/kvstore_backend/conformance/suite.py",
    "kvstore_backend/wrappers/wrapper.py": "tests/kvstore_backend/conformance/test_wrappers.py",
    # The operator commands, with folders and with real masters.
    **{
        f"kvstore_backend/cli/operator/{name}.py": f"tests/kvstore_backend/cli/operator/test_{tested}.py"
        for name, tested in (
            ("pin", "mooncake"),
            ("pool", "clear"),
            ("scope", "clear"),
        )
    },
    "kvstore_backend/stores/holdings.py": "tests/kvstore_backend/cli/operator/test_mooncake.py",
    # The HTTP API of a master, through the commands that use it.
    "kvstore_backend/stores/mooncake_admin.py": "tests/kvstore_backend/cli/test_commands.py",
    # The file store, in several processes.
    "kvstore_backend/stores/file/folder.py": "tests/kvstore_backend/stores/test_file.py",
    "kvstore_backend/stores/file/ledger.py": "tests/kvstore_backend/stores/test_file.py",
    "kvstore_backend/stores/file/store.py": "tests/kvstore_backend/stores/test_file.py",
    "kvstore_backend/config/settings.py": "tests/kvstore_backend/config/test_sources.py",
    # Commands, in processes of their own.
    "kvstore_backend/cli/__main__.py": "tests/kvstore_backend/cli/test_commands.py",
    "kvstore_backend/cli/bench.py": "tests/kvstore_backend/cli/test_commands.py",
    "kvstore_backend/cli/master.py": "tests/kvstore_backend/cli/test_commands.py",
    "kvstore_backend/cli/report.py": "tests/kvstore_backend/cli/test_commands.py",
    "kvstore_backend/cli/stats.py": "tests/kvstore_backend/cli/test_commands.py",
    **{
        f"kvstore_backend/cli/certify/{name}.py": "tests/kvstore_backend/cli/certify/test_command.py"
        for name in ("cases", "instances", "isolation", "page", "processes", "recipe", "tampering")
    },
    "kvstore_backend/cli/operator/asking.py": "tests/kvstore_backend/cli/operator/test_why_miss.py",
    # Parts of the connector for vLLM.
    **{
        f"kvstore_backend/integrations/vllm/{name}.py": "tests/kvstore_backend/integrations/vllm/test_connector.py"
        for name in ("metrics", "namespace", "support")
    },
    # Staging as a whole, with random delays.
    "kvstore_backend/staging/device.py": "tests/kvstore_backend/staging/test_order.py",
    "kvstore_backend/staging/ring.py": "tests/kvstore_backend/staging/test_memory.py",
    "kvstore_backend/staging/stand_in.py": "tests/kvstore_backend/staging/test_order.py",
    # Attention, compared with that of transformers.
    "engine/serving/control_paths.py": "tests/engine/serving/test_control.py",
    "engine/model/attention/paged.py": "tests/engine/model/test_models.py",
    "engine/model/attention/places.py": "tests/engine/model/test_models.py",
    "engine/model/checkpoint.py": "tests/engine/model/test_model_runner.py",
    "engine/model/layer_groups.py": "tests/engine/model/test_models.py",
    "engine/model/short_conv.py": "tests/engine/model/test_models.py",
    "engine/scheduling/block_groups.py": "tests/engine/scheduling/test_scheduler.py",
    "engine/scheduling/retrieval_config.py": "tests/engine/model/attention/test_retrieval.py",
    "engine/apis/completion_response.py": "tests/engine/apis/test_completions.py",
    # Other APIs, with their own clients.
    "engine/apis/plain_body.py": "tests/engine/apis/test_messages.py",
    "engine/apis/responses_body.py": "tests/engine/apis/test_responses.py",
    # The strategies of the three roles.
    "engine/generation/base.py": "tests/engine/generation/test_generation.py",
    "engine/generation/decode.py": "tests/engine/generation/test_generation.py",
    "engine/generation/live.py": "tests/engine/generation/test_generation.py",
    "engine/generation/prefill.py": "tests/engine/generation/test_generation.py",
    # Prefill and decode, in two processes.
    "engine/disaggregation/decode.py": "tests/engine/test_direct_handover.py",
    "engine/disaggregation/memory.py": "tests/engine/test_direct_handover.py",
    "engine/disaggregation/prefill.py": "tests/engine/test_direct_handover.py",
    # An instance in its own process.
    "engine/serving/endpoints.py": "tests/engine/test_api_server.py",
    "engine/serving/ports.py": "tests/engine/test_api_server.py",
    "engine/serving/surroundings.py": "tests/engine/test_api_server.py",
    "engine/pool/pool_connector.py": "tests/engine/pool/test_pool_faults.py",
    "engine/scheduling/request.py": "tests/engine/scheduling/test_scheduler.py",
    "engine/pool/staging.py": "tests/engine/pool/test_pool_faults.py",
}


def find_test_file(module: Path) -> Path:
    return ROOT / "tests" / module.with_name(f"test_{module.name}")


def test_each_module_has_a_test_file_of_its_name_or_an_entry_in_the_table() -> None:
    wrong = [module for module in MODULES if find_test_file(module).exists() == (str(module) in TESTED_IN)]
    assert wrong == [], "add a test file of this name, or an entry in TESTED_IN, but not both"


def test_the_files_in_the_table_exist() -> None:
    assert [path for pair in TESTED_IN.items() for path in pair if not (ROOT / path).exists()] == []
