"""The small test model: its files are equal in all runs, and its responses show errors in a KV cache."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.make_model import MAX_NEW_TOKENS, STAMP, WORDS, main, make_model

# A digest of only the tensors, because another version of the file format changes the file.
WEIGHTS_SHA256 = "e3ae6e67a90ce1960ea898bfe00c52c01577c2c239e2925fe2e4c78f0ffa2248"

QUESTIONS = (
    "What is the capital of France, and how many people live there?",
    "Tell me more about the river.",
    "深圳2024年 GDP 是多少",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert make_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def chat(tokenizer: Any, messages: list[dict[str, str]], answer_next: bool = True) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=answer_next, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def ask(tokenizer: Any, question: str) -> list[int]:
    return chat(tokenizer, [{"role": "user", "content": question}])


@torch.inference_mode()
def greedy(model: Any, ids: list[int], count: int = 100) -> tuple[list[int], torch.Tensor]:
    """Return ``count`` generated ids, and their logits [count, vocabulary]."""
    prompt = torch.tensor([ids])
    answer = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return answer.sequences[0, len(ids) :].tolist(), torch.cat(answer.logits)


@pytest.fixture(scope="module")
def answers(model: Any, tokenizer: Any) -> list[tuple[list[int], torch.Tensor]]:
    return [greedy(model, ask(tokenizer, question)) for question in QUESTIONS]


def test_two_runs_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "again")
    first, again = (
        {path.name: path.read_bytes() for path in written.iterdir()} for written in (folder, tmp_path / "again")
    )
    assert first == again


def test_the_weights_are_those_of_this_version(folder: Path) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode() + tensor.tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_a_response_without_a_limit_has_a_default_limit(folder: Path) -> None:
    assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == MAX_NEW_TOKENS


def test_a_second_run_does_not_change_the_folder(folder: Path) -> None:
    before = (folder / STAMP).stat().st_mtime_ns
    assert not make_model(folder)
    assert (folder / STAMP).stat().st_mtime_ns == before


def test_all_files_have_the_same_permissions(folder: Path) -> None:
    """One user may write the model, and another user may serve it."""
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_a_damaged_model_is_written_again(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "tiny"
    make_model(damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert make_model(damaged)
    assert (damaged / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_folder_with_other_files_is_not_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("five years")
    assert main(["--output", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    assert capsys.readouterr().err.count("\n") == 1


def test_the_error_for_a_file_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine.make_model", "--output", str(tmp_path / "model")]
    limited = ["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *command]  # 32 or 64 KiB, as if the disk was full
    ended = subprocess.run(limited, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "cannot write the model: [Errno 27] File too large\n"
    assert list(tmp_path.iterdir()) == []


def test_a_response_in_the_next_turn_encodes_to_the_generated_ids(model: Any, tokenizer: Any) -> None:
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = chat(tokenizer, messages)
        generated, _ = greedy(model, prompt, 25)
        messages.append({"role": "assistant", "content": tokenizer.decode(generated, skip_special_tokens=True)})
        encoded = chat(tokenizer, messages, answer_next=False)
        assert encoded[: len(prompt) + len(generated)] == prompt + generated


def test_a_text_is_unchanged_after_encoding_and_decoding(tokenizer: Any) -> None:
    text = "  Naïve — 深圳 🌊, then\n\n\tthe river's  edge.  "
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_responses_contain_words_and_few_repetitions(
    answers: list[tuple[list[int], torch.Tensor]], tokenizer: Any
) -> None:
    for generated, _ in answers:
        assert set(tokenizer.decode(generated).split()) <= set(WORDS)
        assert len(set(generated)) >= 50


def test_only_words_are_sampled(answers: list[tuple[list[int], torch.Tensor]]) -> None:
    for _, logits in answers:
        hot = torch.softmax(logits / 2.0, dim=-1)
        assert hot[:, : -len(WORDS)].sum(dim=-1).max() < 1e-6


def test_different_questions_get_different_responses(answers: list[tuple[list[int], torch.Tensor]]) -> None:
    assert len({tuple(generated[:5]) for generated, _ in answers}) == len(QUESTIONS)


def test_the_lead_of_the_best_logit_is_much_larger_than_rounding_errors(
    answers: list[tuple[list[int], torch.Tensor]],
) -> None:
    for _, logits in answers:
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).median() > 0.3


@torch.inference_mode()
def test_a_wrong_value_in_an_early_block_changes_the_response(model: Any, tokenizer: Any) -> None:
    ids = torch.tensor([ask(tokenizer, "Tell me a story about the sea. " * 40)])
    continuations = []
    for factor in (1.0, -1.0):
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        cache.layers[0].values[:, :, :64] *= factor
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=20,
            do_sample=False,
        )
        continuations.append(answer[0, ids.shape[1] :].tolist())
    assert continuations[0] != continuations[1]
