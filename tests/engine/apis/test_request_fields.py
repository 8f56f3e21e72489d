"""Every field of another engine's requests is supported, refused, or known to change no response.

``request_fields.json`` has the fields of the other engines' requests, by engine and version. Where vLLM is installed,
the recorded fields are compared with its own. The fields of OpenAI's API come from its client.
"""

from __future__ import annotations

import importlib.util
import json
import typing
from pathlib import Path
from typing import Any

import openai.types.chat.completion_create_params as chat_params
import openai.types.completion_create_params as text_params
import pytest

from engine.protocol import ApiError, ChatBody, CompletionBody, GenerationBody, check_body

RECORDED: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("request_fields.json").read_text())
KINDS: dict[str, type[GenerationBody]] = {"chat": ChatBody, "text": CompletionBody}

CHANGES_NO_RESPONSE = frozenset(
    {
        # the client, priorities and storage
        *(
            "custom_labels",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "routed_dp_rank",
            "metadata",
            "priority",
        ),
        *("safety_identifier", "service_tier", "session_id", "store", "trace_context"),
        # for images and sound, which are refused
        *("ec_transfer_params", "images_config", "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch"),
        *("mm_hashes", "mm_payload", "mm_processor_kwargs", "return_mm_kwargs", "use_audio_in_video", "video_config"),
        "video_fps",
        # additional output
        *(
            "collect_metrics",
            "include_draft_logprobs",
            "return_cached_tokens_details",
            "return_flat_raw_output_top_logprobs",
        ),
        *("return_flat_raw_top_logprobs_b64", "return_hidden_states", "return_input_ids_in_sglext", "return_meta_info"),
        *("return_output_ids_in_sglext", "return_prompt_text", "return_prompt_token_ids", "return_routed_experts"),
        *("return_sampling_mask", "return_spec_tokens_details", "return_token_offsets", "routed_experts_prompt_start"),
        "routed_experts_start_len",
        # pieces of a stream, and parsing of tools and reasoning, which this engine does not do
        *("max_streaming_response_tokens", "parallel_tool_calls", "separate_reasoning", "stream_interval"),
        "stream_reasoning",
        # for truncate_prompt_tokens, which is refused
        "truncation_side",
    }
)


def list_fields() -> list[tuple[str, str, str]]:
    openais = {
        "chat": [*typing.get_type_hints(chat_params.CompletionCreateParamsBase), "stream"],
        "text": [*typing.get_type_hints(text_params.CompletionCreateParamsBase), "stream"],
    }
    return [
        (engine, path, field)
        for engine, paths in {**RECORDED, "OpenAI": openais}.items()
        for path, fields in paths.items()
        for field in fields
    ]


def test_only_fields_that_change_no_response_are_ignored() -> None:
    unknown = [
        (engine, path, field)
        for engine, path, field in list_fields()
        if field not in {*KINDS[path].model_fields, *KINDS[path].unsupported, *CHANGES_NO_RESPONSE}
    ]
    assert unknown == []


def test_a_field_is_in_one_class_only() -> None:
    for kind in KINDS.values():
        assert not CHANGES_NO_RESPONSE & {*kind.model_fields, *kind.unsupported}


@pytest.mark.parametrize("path", KINDS)
def test_the_error_names_a_refused_field_and_its_harmless_values_are_accepted(path: str) -> None:
    kind = KINDS[path]
    plain: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "prompt": "a"}
    for name, (harmless, _) in kind.unsupported.items():
        for value in harmless:
            check_body(kind, {**plain, name: value})
        with pytest.raises(ApiError, match=f'^{name}: it is "?\\{{?') as caught:
            check_body(kind, {**plain, name: {"another": "value"}})
        assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_the_recorded_fields_are_equal_to_those_of_the_installed_vllm() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    recorded = next(fields for engine, fields in RECORDED.items() if engine.startswith("vLLM"))
    for path, kind in (("chat", ChatCompletionRequest), ("text", CompletionRequest)):
        assert set(kind.model_fields) == set(recorded[path])
