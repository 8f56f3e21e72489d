"""``python -m engine.make_model``: writes a small transformers checkpoint, for machines that cannot download one.

The checkpoint is a complete Qwen2 (grouped-query attention, rotary positions, 23 million parameters) with a byte-level
tokenizer and a chat template. **The weights are random**, so the computation is real, but the text has no meaning. The
program takes seconds and always writes the same bytes. The model has three properties that tests of a KV cache need:

- The answer depends on attention. Queries and keys are scaled so that each head attends to a few distant positions. So
  a wrong byte in a cached block changes the words that follow.
- The text of an answer encodes to the token ids that were generated. Only whole English words are likely, and each is
  one token with its leading space. So if a client sends an answer back in the next turn of a conversation, the instance
  finds the blocks of that answer in its cache.
- The greedy token does not depend on rounding: the difference between the two highest logits is far larger than
  float32's rounding errors. So answers do not depend on the division of the work into batches and blocks.

This program does not need torch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kvcommon.output import run_program

__all__ = ["MODEL_NAME", "MODEL_VERSION", "default_folder", "make_model"]

MODEL_NAME = "kvstore-tiny-qwen2"
MODEL_VERSION = 2
"""Version of the checkpoint; increase it when any byte changes. A folder with another version is written again."""

STAMP = "kvstore_model.json"

SEED = 20250
HIDDEN, LAYERS, INTERMEDIATE = 512, 8, 1408
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
MAX_POSITIONS = 32768
MAX_NEW_TOKENS = 64
"""Default limit of tokens in an answer.

Without a limit, most answers would fill the context: the model rarely ends one.
"""

# Standard deviations of the outputs of parts of the model, for inputs with a standard deviation of 1. Chosen by
# measurement: 100 generated words have 70 to 90 different ones, with prompts of 3 to 8,000 tokens. Rounding changes a
# logit by 2e-5; the difference between the two highest logits is 0.6 (median).
ATTENTION_SCORE = 2.2
ATTENTION_OUT = 0.7
MLP_OUT = 0.7
LOGIT = 3.0

# Channel 0 of the residual stream is 1 for every token, and no layer writes to it. The output layer uses it as a bias:
# each token that is not one of WORDS gets a logit so low that it is never sampled.
CONSTANT_CHANNEL = 0
NOT_A_WORD = -100.0

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
SPACE = "Ġ"  # the letter for the byte 0x20 in byte-level vocabularies
# For a qwen2 checkpoint transformers uses Qwen2's pre-tokenizer and ignores the one in tokenizer.json. So this is
# Qwen2's.
QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_WORDS = """
a able about above across act add after again against age ago air all almost along already also always am
among an and animal answer any are area arm around art as ask at away baby back bad ball bank base be beach
bear beautiful bed been before began begin behind being bell below best better between big bird black blue
board boat body book both box boy bread bright bring brother brown build busy but buy by call came can car
care carry case cat cause center chair change check child choose circle city class clean clear close cloud
coat cold color come common cook cool copy corn corner could count country course cover cross cry cup cut
dance dark day deep did different dog door down draw dream dress drink drive dry each ear early earth east
easy eat edge egg eight end enough even evening ever every eye face fact fall family far farm fast father
feel feet few field fill final find fine fire first fish five floor flower fly follow food foot for forest
form found four free fresh friend from front fruit full game garden gave girl give glass go gold good grass
great green ground group grow had hair half hall hand happy hard has hat have he head hear heart heat heavy
help her here high hill him his hold home hope horse hot hour house how hundred ice idea if in into iron is
island it job join jump just keep key kind king knew know lake land large last late laugh lead leaf learn
left leg less let letter life light like line list listen little live long look lot love low made make man
many map mark may me mean measure meet metal middle might mile milk mind mine minute moon more morning most
mother mountain mouth move much music must my name near neck need never new next night nine no noise north
nose not note now number ocean of off often oil old on once one only open or order other our out over own
page paint pair paper part past path people picture piece place plain plan plant play point pool poor power
press pull push put quick quiet rain ran reach read ready really red rest rice rich ride right ring rise
river road rock roll room root rope rose round rule run safe said sail salt same sand sat saw say school sea
season seat second see seed seem sell send set seven shape she ship shoe shop short should show side silver
simple sing sister sit six size skin sky sleep slow small smell smile snow so soft soil some song soon sound
south space speak spring stand star start stay step still stone stop store story street strong such sugar
summer sun sure sweet swim table tail take talk tall teach tell ten than that the their them then there
these they thing think this those thought thousand three through time to today together told too took top
touch toward town trade train travel tree true try turn two under until up upon us use valley very village
voice wait walk wall want war warm was wash watch water wave way we wear weather week weight well went were
west wet what wheel when where which while white who whole why wide wild will wind window wing winter wish
with woman wonder wood word work world would write yard year yellow yes yet you young your
"""
WORDS = tuple(_WORDS.split())

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

README = f"""\
# {MODEL_NAME}

A test model. **The weights are random: the compute is real, the words are not.** Written by
`python -m engine.make_model` of fastdeploy-kvstore, version {MODEL_VERSION}, the same bytes on every machine.
Qwen2 architecture, {LAYERS} layers, hidden size {HIDDEN}, {HEADS} heads, {KV_HEADS} KV heads, float32.
"""


def default_folder() -> Path:
    """Return the default folder of the model: in ``.cache/models`` of the checkout, else of the home folder."""
    checkout = Path(__file__).resolve().parent.parent
    in_checkout = (checkout / "pyproject.toml").is_file()
    return (checkout / ".cache" if in_checkout else Path.home() / ".cache") / "models" / MODEL_NAME


def make_model(folder: Path) -> bool:
    """Write the checkpoint to ``folder``, unless the folder has this version already; return whether it was written.

    The files are written to a temporary folder, which is then renamed. So several processes may call this concurrently.

    Raises:
        FileExistsError: ``folder`` has files that this program did not write.
    """
    if _holds_this_model(folder):
        return False
    if folder.exists() and not (folder / STAMP).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} has other contents; give an empty or a new folder with --output")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        whole = Path(scratch) / "model"
        whole.mkdir()
        _write_checkpoint(whole)
        if folder.exists():
            folder.rename(Path(scratch) / "old")
        try:
            whole.rename(folder)
        except OSError:
            if not _holds_this_model(folder):  # if it does, another process was faster and wrote the same bytes
                raise
    return True


def _holds_this_model(folder: Path) -> bool:
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
        return bool(stamp["version"] == MODEL_VERSION) and all(
            (folder / name).stat().st_size == size for name, size in stamp["bytes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_checkpoint(folder: Path) -> None:
    tokenizer = _build_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    # The libraries' own writers raise no OSError, and safetensors gives read permission only to the user.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    weights = save(dict(_draw_tensors(vocab_size)), metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(weights)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_json(folder / "config.json", _model_config(tokenizer))
    _write_json(folder / "generation_config.json", _generation_config(tokenizer))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "README.md").write_text(README)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / STAMP, {"model": MODEL_NAME, "version": MODEL_VERSION, "bytes": sizes})


def _build_tokenizer() -> Tokenizer:
    """Build a byte-level BPE tokenizer with Qwen2's rules. Its merges form exactly the words of ``WORDS``.

    Each merge adds one letter to a beginning of a word, from the leading space on. So the order of the merges does not
    matter. A word of ``WORDS`` becomes one token. Another word becomes the longest beginning that it has in common with
    one of ``WORDS``, followed by single bytes. The ids are in this order: bytes (0 to 255), special tokens, beginnings
    of words, words.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [SPACE + word for word in WORDS]
    grown = sorted({word[:end] for word in words for end in range(2, len(word) + 1)}, key=lambda p: (len(p), p))
    beginnings = [piece for piece in grown if piece not in set(words)]
    vocab = {piece: i for i, piece in enumerate([*letters, *SPECIAL, *beginnings, *words])}
    bpe = models.BPE(vocab=vocab, merges=[(piece[:-1], piece[-1]) for piece in grown])
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def _draw_tensors(vocab_size: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the name and the random values of each tensor of the checkpoint.

    All values come from one ``RandomState``, in this order. numpy guarantees that it gives the same numbers for the
    same seed in every version.
    """
    stream = np.random.RandomState(SEED)

    def draw_uniform(rows: int, columns: int, deviation: float) -> NDArray[np.float32]:
        bound = deviation * math.sqrt(3.0)
        return ((2.0 * stream.random_sample((rows, columns)) - 1.0) * bound).astype(np.float32)

    def writes_to_residual(columns: int, deviation: float) -> NDArray[np.float32]:
        weight = draw_uniform(HIDDEN, columns, deviation)
        weight[CONSTANT_CHANNEL] = 0.0
        return weight

    ones = np.ones(HIDDEN, dtype=np.float32)
    fan_in = 1.0 / math.sqrt(HIDDEN)
    score = math.sqrt(ATTENTION_SCORE) * fan_in
    kv = KV_HEADS * HEAD_DIM

    embedding = draw_uniform(vocab_size, HIDDEN, 1.0)
    embedding[:, CONSTANT_CHANNEL] = 1.0
    yield "model.embed_tokens.weight", embedding
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", ones
        for name, rows, deviation in (("q", HIDDEN, score), ("k", kv, score), ("v", kv, fan_in)):
            yield f"{layer}.self_attn.{name}_proj.weight", draw_uniform(rows, HIDDEN, deviation)
            yield f"{layer}.self_attn.{name}_proj.bias", draw_uniform(1, rows, 0.1)[0]
        yield f"{layer}.self_attn.o_proj.weight", writes_to_residual(HIDDEN, ATTENTION_OUT * fan_in)
        yield f"{layer}.post_attention_layernorm.weight", ones
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", draw_uniform(INTERMEDIATE, HIDDEN, fan_in)
        yield (
            f"{layer}.mlp.down_proj.weight",
            writes_to_residual(INTERMEDIATE, MLP_OUT / math.sqrt(INTERMEDIATE)),
        )
    yield "model.norm.weight", ones
    first_word = vocab_size - len(WORDS)
    head = np.zeros((vocab_size, HIDDEN), dtype=np.float32)
    head[first_word:] = draw_uniform(len(WORDS), HIDDEN, LOGIT * fan_in)
    head[:first_word, CONSTANT_CHANNEL] = NOT_A_WORD
    yield "lm_head.weight", head


def _model_config(tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "kvstore_note": "random weights: the compute is real, the words are not",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "use_cache": True,
    }


def _generation_config(tokenizer: Tokenizer) -> dict[str, object]:
    ends = [tokenizer.token_to_id(text) for text in (TURN_END, END_OF_TEXT)]
    return {"do_sample": False, "eos_token_id": ends, "max_new_tokens": MAX_NEW_TOKENS, "pad_token_id": ends[-1]}


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": MAX_POSITIONS,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model to ``--output``, and print the folder; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m engine.make_model", description="Write a small test model.")
    parser.add_argument(
        "--output",
        type=Path,
        default=default_folder(),
        metavar="FOLDER",
        help="folder to write to (default: %(default)s)",
    )
    folder: Path = parser.parse_args(argv).output.absolute()
    try:
        written = make_model(folder)
    except OSError as exc:
        print(f"cannot write the model: {exc}", file=sys.stderr)
        return 1
    print(f"{'wrote' if written else 'already there:'} {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("engine.make_model", main))
