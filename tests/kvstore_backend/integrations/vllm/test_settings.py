"""The settings in the namespace of a vLLM instance, and the checkpoint of its weights."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore_backend import ConfigError
from kvstore_backend.config import PRECISION_VARIABLES
from kvstore_backend.integrations.vllm.fields import IGNORED_VARIABLES
from kvstore_backend.integrations.vllm.settings import (
    collect_settings,
    find_checkpoint,
    find_configuration,
    fingerprint_checkpoint,
    is_quantized,
)
from kvstore_backend.namespace import fingerprint_model
from tests.kvstore_backend.integrations.vllm.test_fields import make_kind
from tests.kvstore_backend.test_namespace import checkpoint


class TestSpecialFields:
    """Fields that do not count by their own value."""

    @pytest.fixture(autouse=True)
    def _no_hash_seed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    @staticmethod
    def make(**changes: object) -> Any:
        """Return the settings of an instance with changes: ``<field of VllmConfig>__<field>=value``."""
        config = make_kind("VllmConfig")()
        config.load_config.load_format = "auto"
        config.model_config.model, config.model_config.dtype = "/model", "float16"
        config.model_config.override_generation_config = {}
        config.model_config.try_get_generation_config = dict
        config.speculative_config = config.lora_config = config.model_config.multimodal_config = None
        for path, value in changes.items():
            *above, field = path.split("__")
            found = config
            for name in above:
                if getattr(found, name) is None:
                    setattr(found, name, DEFAULTS[name]())
                found = getattr(found, name)
            setattr(found, field, value)
        return config

    @pytest.mark.parametrize(
        ("rope", "changes", "is_another"),
        [
            ("longrope", {"model_config__max_model_len": 8192}, True),
            ("dynamic", {"model_config__max_model_len": 8192}, True),
            ("yarn", {"model_config__max_model_len": 8192}, False),
            ("yarn", {"model_config__override_generation_config": {"attn_scale": 2}}, True),
            ("yarn", {"model_config__try_get_generation_config": lambda: {"attn_scale": 2}}, True),
            ("yarn", {"model_config__try_get_generation_config": lambda: {"temperature": 2}}, False),
            ("yarn", {"load_config__load_format": "dummy"}, True),
            (
                "yarn",
                {"load_config__load_format": "safetensors", "model_config__model": str(Path(__file__).parent)},
                False,
            ),
            ("yarn", {"load_config__load_format": "hf", "model_config__model": str(Path(__file__).parent)}, False),
            ("yarn", {"load_config__load_format": "tensorizer"}, True),
            ("yarn", {"model_config__seed": 3}, False),
            ("yarn", {"lora_config__lora_dtype": "auto"}, False),
            ("yarn", {"lora_config__lora_dtype": "float16"}, False),
            ("yarn", {"lora_config__lora_dtype": "float32"}, True),
            ("yarn", {"model_config__multimodal_config__mm_encoder_fp8_scale_path": "/nowhere"}, True),
            ("yarn", {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"a": 1})}, True),
            ("yarn", {"cache_config__prefix_caching_hash_algo": "sha256_cbor"}, True),
            ("yarn", {"model_config__hf_config_path": "/elsewhere"}, False),
            ("yarn", {"model_config__quantization_config": {"linear": "fp8"}}, True),
            ("yarn", {"model_config__multimodal_config__video_pruning_rate": 0.5}, True),
            ("yarn", {"model_config__multimodal_config__mm_processor_kwargs": {"do_normalize": False}}, True),
        ],
    )
    def test_special_fields_that_change_kv_count(self, rope: str, changes: dict[str, Any], is_another: bool) -> None:
        text_config = SimpleNamespace(rope_parameters={"rope_type": rope})
        plain = self.make(model_config__hf_text_config=text_config)
        changed = self.make(model_config__hf_text_config=text_config, **changes)
        assert (collect_settings(plain) != collect_settings(changed)) is is_another

    @pytest.mark.parametrize(
        ("length", "override", "is_tuned"),
        [(32768, {}, False), (32769, {}, True), (32769, {"attn_temperature_tuning": False}, False)],
    )
    @pytest.mark.parametrize("level", ["hf_config", "hf_text_config"])
    def test_the_settings_of_llama_4_have_whether_it_scales_attention_by_position(
        self, level: str, length: int, override: dict[str, object], is_tuned: bool
    ) -> None:
        config = self.make(
            model_config__hf_config=SimpleNamespace(),
            model_config__hf_text_config=SimpleNamespace(),
            model_config__max_model_len=length,
            model_config__override_generation_config=override,
        )
        getattr(config.model_config, level).model_type = "llama4_text"
        assert collect_settings(config)["generation_config attn_temperature_tuning"] is is_tuned

    def test_random_weights_count_by_their_seed(self) -> None:
        one, other = (self.make(load_config__load_format="dummy", model_config__seed=seed) for seed in (1, 2))
        assert collect_settings(one) != collect_settings(other)

    def test_scales_of_an_encoder_count_by_the_bytes_of_their_file(self, tmp_path: Path) -> None:
        settings = []
        for number, content in enumerate(["one", "one", "two"]):
            (path := tmp_path / str(number)).write_text(content)
            config = self.make(model_config__multimodal_config__mm_encoder_fp8_scale_path=str(path))
            settings.append(collect_settings(config))
        assert settings[0] == settings[1] != settings[2]

    def test_a_draft_model_counts_by_its_weights(self, tmp_path: Path) -> None:
        folder = checkpoint(tmp_path / "draft")
        draft = SimpleNamespace(model=str(folder), revision=None)
        settings = collect_settings(self.make(speculative_config__draft_model_config=draft))
        assert settings["SpeculativeConfig.draft_model_config"] == fingerprint_model(folder)

    @pytest.mark.parametrize("draft", [None, SimpleNamespace(model="/model")])
    def test_a_draft_model_that_is_the_model_itself_has_no_settings_for_its_weights(self, draft: Any) -> None:
        settings = collect_settings(self.make(speculative_config__draft_model_config=draft))
        assert "SpeculativeConfig.draft_model_config" not in settings

    def test_the_load_format_counts_if_the_folder_has_weights_in_two_formats(self, tmp_path: Path) -> None:
        (tmp_path / "consolidated.safetensors").touch()
        names = ("auto", "hf", "safetensors", "mistral")
        settings = [
            collect_settings(self.make(model_config__model=str(tmp_path), load_config__load_format=name))
            for name in names
        ]
        assert "LoadConfig.load_format" not in settings[0]
        assert [each["LoadConfig.load_format"] for each in settings[1:]] == [*names[1:]]

    @pytest.mark.parametrize("name", ["audio_model_id", "text_model_id"])
    def test_weights_of_models_in_config_json_count(self, tmp_path: Path, name: str) -> None:
        folders = [checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two", config={"hidden_size": 8})]
        plain, *settings = [
            collect_settings(self.make(model_config__hf_config=SimpleNamespace(**{name: folder}), **more))
            for folder in (None, *folders)
            for more in [{"model_config__hf_text_config": SimpleNamespace()}]
        ]
        assert f"weights in {name}" not in plain
        assert [each[f"weights in {name}"] for each in settings] == [*map(fingerprint_model, folders)]

    def test_weights_in_a_subfolder_count_if_the_architecture_reads_them(self, tmp_path: Path) -> None:
        inner = checkpoint(checkpoint(tmp_path / "model") / "whisper-large-v3")
        settings = [
            collect_settings(
                self.make(
                    model_config__model=str(tmp_path / "model"),
                    model_config__hf_config=SimpleNamespace(architectures=[name]),
                    model_config__hf_text_config=SimpleNamespace(),
                )
            )
            for name in ("LlamaForCausalLM", "MoonshotKimiaForCausalLM")
        ]
        assert "weights in whisper-large-v3" not in settings[0]
        assert settings[1]["weights in whisper-large-v3"] == fingerprint_model(inner)

    @pytest.mark.parametrize(
        ("changes", "is_one"),
        [
            ({}, False),
            ({"model_config__quantization": "fp8"}, True),
            ({"model_config__quantization": "awq_marlin"}, False),
            ({"model_config__quantization": "gptq", "cache_config__cache_dtype": "fp8"}, True),
            ({"model_config__quantization_config": {"linear": "fp8"}}, True),
            ({"cache_config__cache_dtype": "fp8_e4m3"}, True),
            ({"cache_config__cache_dtype": "bfloat16"}, False),
        ],
    )
    def test_is_quantized_depends_on_weights_and_kv(self, changes: dict[str, object], is_one: bool) -> None:
        plain = {"model_config__quantization": None, "model_config__quantization_config": None}
        config = self.make(**{**plain, "cache_config__cache_dtype": "auto", **changes})
        assert is_quantized(config) is is_one

    @pytest.mark.parametrize("name", ["PYTHONHASHSEED", "XHS_VIDEO_JPEG_QUALITY", *PRECISION_VARIABLES])
    def test_variables_of_other_software_count(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "0")
        assert collect_settings(self.make())[f"environment {name}"] == "0"

    def test_variables_that_vllm_reads_count_unless_they_cannot_change_bytes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = ["VLLM_FLOAT32_MATMUL_PRECISION", "VLLM_PORT", "VLLM_NOT_SET"]
        monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "tf32")
        monkeypatch.setenv("VLLM_PORT", "1")
        assert "VLLM_PORT" in IGNORED_VARIABLES
        assert collect_settings(self.make(), names) == {
            "dtype": "float16",
            "environment VLLM_FLOAT32_MATMUL_PRECISION": "tf32",
        }


DEFAULTS = {
    "speculative_config": lambda: make_kind("SpeculativeConfig")(),
    "lora_config": lambda: make_kind("LoRAConfig")(lora_dtype="auto"),
    "multimodal_config": lambda: make_kind("MultiModalConfig")(),
}


class TestCheckpoints:
    """The folder with a model's weights."""

    def test_a_folder_as_model_is_the_checkpoint(self, tmp_path: Path) -> None:
        assert find_checkpoint(SimpleNamespace(model=str(tmp_path))) == tmp_path

    def test_a_name_is_looked_up_in_vllms_download_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []

        def snapshot_download(name: str, **more: object) -> str:
            asked.append((name, more))
            return "/cache/snapshot"

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        assert find_checkpoint(SimpleNamespace(model="a/b", revision="r"), "/cache") == Path("/cache/snapshot")
        assert asked == [("a/b", {"revision": "r", "cache_dir": "/cache", "local_files_only": True})]

    def test_with_a_download_folder_the_configuration_is_in_hugging_faces_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM downloads only weights to ``--download-dir``."""
        whole, weights = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "weights")
        (weights / "config.json").unlink()

        def snapshot_download(name: str, *, cache_dir: str | None, **more: object) -> str:
            return str(weights if cache_dir else whole)

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        config = TestSpecialFields.make(load_config__download_dir="/data")
        config.model_config.model, config.model_config.model_weights = "a/b", ""
        assert find_configuration(config.model_config, "/data") == whole
        assert fingerprint_checkpoint(config.model_config, config) == fingerprint_model(whole)

    def test_streamed_weights_need_not_be_in_the_folder(self, tmp_path: Path) -> None:
        (checkpoint(tmp_path / "m") / "model.safetensors").unlink()
        config = TestSpecialFields.make()
        config.model_config.model, config.model_config.model_weights = str(tmp_path / "m"), "s3://models/a"
        assert fingerprint_checkpoint(config.model_config, config)
        config.model_config.model_weights = ""
        with pytest.raises(ConfigError, match="has no weights"):
            fingerprint_checkpoint(config.model_config, config)

    def test_a_name_at_modelscope_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hugging Face's cache can have other weights under the same name."""
        monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
        with pytest.raises(ConfigError, match="'a/b' is not a folder, but a name at ModelScope"):
            find_checkpoint(SimpleNamespace(model="a/b", revision=None))

    def test_a_name_that_is_not_in_the_cache_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def snapshot_download(name: str, **more: object) -> str:
            raise OSError("offline")

        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
        with pytest.raises(
            ConfigError, match="'a/b' is neither a folder nor in Hugging Face's cache on this machine: offline"
        ):
            find_checkpoint(SimpleNamespace(model="a/b", revision=None))
