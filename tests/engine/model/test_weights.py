"""Identity of a model's weights: version, digest and name in the namespace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.weights import digest_weights, name_weights, read_version
from kvstore_backend import ConfigError


def model_of(value: float) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 1.0)
    with torch.no_grad():
        model.get_parameter("0.weight")[2, 1] = value
    return model


def test_weights_that_differ_in_one_number_have_different_digests() -> None:
    first, same, other = (digest_weights(model_of(value)) for value in (1.0, 1.0, 2.0))
    assert first == same != other


def test_weights_of_dtypes_that_numpy_lacks_have_a_digest() -> None:
    assert digest_weights(model_of(1.0).bfloat16()) != digest_weights(model_of(2.0).bfloat16())


@pytest.mark.parametrize("version", ["", "RL-STEP4"])
def test_different_weights_of_the_same_version_have_different_names(version: str) -> None:
    first, same, other = (name_weights(version, model_of(value)) for value in (1.0, 1.0, 2.0))
    assert first == same != other
    assert first != name_weights("RL-STEP5", model_of(1.0))


def test_the_version_is_read_from_the_trainers_file(tmp_path: Path) -> None:
    assert read_version(tmp_path) == ""
    (tmp_path / "version.yaml").write_text("version: RL-STEP1-20261123-abc\n")
    assert read_version(tmp_path) == "RL-STEP1-20261123-abc"


@pytest.mark.parametrize("text", ["", "step: 1", "- version", "version: [", "\0"])
def test_a_file_without_a_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "version.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"version\.yaml has no version; write one into it"):
        read_version(tmp_path)
