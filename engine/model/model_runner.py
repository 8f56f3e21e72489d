"""Owns the weights and the KV memory, and runs one forward pass over the chunks of a step."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from engine.model.attention import paged
from engine.model.attention.block_index import width_of
from engine.model.attention.retrieval import Retrieval, SparseState, reads_host_memory
from engine.model.checkpoint import (
    choose_kernels,
    eos_token_ids,
    read_defaults,
    read_model,
    settle_rope,
    shorten_look_ups,
    warn_of_ignored_settings,
)
from engine.model.device_copies import wait_for_device
from engine.model.layer_groups import group_layers
from engine.model.out_of_memory import LEAVE_ROOM, LEAVE_ROOM_BESIDE, explain_out_of_memory
from engine.model.packed_linear import pack_linears
from engine.model.sampler import Choice, SeenTokens, sample
from engine.model.short_conv import replace_convolutions
from engine.model.weights import name_weights, read_version
from engine.scheduling.retrieval_config import Regime, RetrievalConfig
from engine.scheduling.scheduler import Chunk
from kvstore_backend import ConfigError, Namespace, Span, fingerprint_model
from kvstore_backend.config import PRECISION_VARIABLES, select_variables
from kvstore_backend.manifest import collect_facts
from kvstore_backend.namespace import fingerprint_config
from kvstore_backend.resharding import ShardingFamily, find_family

__all__ = ["KVShape", "ModelRunner"]

LAYOUT = "layer,kv,head,token,dim"
# Block sizes that other instances may have. This instance shares blocks with them if its own size divides theirs, or
# theirs divides its own.
_OTHER_BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class KVShape:
    """Shape of a block in KV memory: ``[num_layers, 2, num_kv_heads, block_size, head_dim]`` of ``dtype``.

    If the model has several groups of layers, a block has the KV of the layers of one group, and may have unused space.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of one block in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    def list_axes(self) -> list[tuple[str, int]]:
        """Return name and size of each axis of a block in memory, in the order of ``LAYOUT``, the outermost axis first.

        The size of the last axis is in bytes, not in elements.
        """
        sizes = (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim * self.dtype.itemsize)
        return list(zip(LAYOUT.split(","), sizes, strict=True))


class ModelRunner:
    """Owns the weights and the KV memory; computes and samples the chunks of a step.

    Call ``allocate_kv`` before ``run``.

    Args:
        folder: the folder of the checkpoint.
        config: the result of ``load_model_config(folder)``.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: dtype of weights and KV.
        block_size: number of tokens in a block.
        has_dynamic_weights: whether the checkpoint's files may change, for ``update_weights``. If so, the weights are
            copied, and their digest is in the namespace. If not, the weights may be mapped from the files, so that
            several instances share the memory.

    Raises:
        ConfigError: the weights cannot be loaded, or a number in the generation_config.json is out of range.
    """

    def __init__(
        self,
        folder: str,
        config: Any,
        device: str,
        dtype: torch.dtype,
        block_size: int,
        *,
        has_dynamic_weights: bool = False,
    ) -> None:
        paged.register_attention()
        self._folder = folder
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.groups = group_layers(folder, config, block_size, 2 * kv_heads * block_size * head_dim)
        """The groups of the model's layers."""
        transformers_logging.disable_progress_bar()
        self.device = torch.device(device)
        choose_kernels(self.device)
        fingerprint = fingerprint_model(folder)
        self.model, self._lacking = read_model(folder, dtype, is_copied=has_dynamic_weights)
        if fingerprint_model(folder) != fingerprint:
            raise ConfigError(f"{folder} changed while its weights were loaded; start again")
        self.version = read_version(folder)
        """The version of the weights, from ``version.yaml`` or from the last update; "" if there is none."""
        named = name_weights(self.version, self.model) if has_dynamic_weights else self.version
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self._place_model(self.model)
        self.shape = KVShape(self.groups.block_layers, kv_heads, block_size, head_dim, dtype)
        self._used_bytes = [
            len(member.layers) * self.groups.conv.size * dtype.itemsize
            if self.groups.conv and member.group.kind == "state"
            else self.shape.nbytes // self.shape.num_layers * len(member.layers)
            for member in self.groups.members
        ]
        self.facts = collect_facts(folder, "fastdeploy-kvstore engine", "kvstore")
        self.namespace = Namespace(
            model=fingerprint,
            kv_dtype=str(dtype).removeprefix("torch."),
            block_size=block_size,
            num_layers=self.shape.num_layers,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            layout=_describe_layout(self.groups.describe()),
            weights_version=named,
        )
        self._configuration = fingerprint_config(folder)
        self.family = self._find_family(self.namespace)
        self.eos_token_ids = eos_token_ids(config, self.model, self.vocab_size)
        self.defaults = read_defaults(folder, self.model.generation_config)
        warn_of_ignored_settings(folder, self.model.generation_config)
        self.kv = torch.empty(0)
        self._kv_memory: mmap.mmap | None = None
        self.retrieval: Retrieval | None = None
        self._has_plain_scores = True
        self._seen_tokens = SeenTokens()

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV memory, with ``num_blocks`` blocks of zeros.

        The zeros are necessary: attention multiplies masked positions by 0, and 0 times NaN is NaN.

        Raises:
            ConfigError: there is not enough memory.
        """
        shape = self.shape
        axes = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        with explain_out_of_memory(f"{num_blocks} KV blocks; {LEAVE_ROOM_BESIDE}"):
            if self.device.type == "cpu":
                self._kv_memory = _map_on_demand(num_blocks * shape.nbytes)
                self.kv = torch.frombuffer(self._kv_memory, dtype=torch.uint8).view(shape.dtype).view(axes)
            else:
                self.kv = torch.zeros(axes, dtype=shape.dtype, device=self.device)

    def _place_model(self, model: Any) -> None:
        """Move a loaded model to the device, and replace the parts that this engine computes in another way."""
        with explain_out_of_memory(f"--model {self._folder!r} on {self.device}; use --device cpu or a smaller one"):
            model.to(self.device).eval()
        settle_rope(model)
        replace_convolutions(model)
        if self.device.type == "cpu":
            pack_linears(model)
        shorten_look_ups(model)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in memory; ``run`` needs them."""
        return self.model is not None

    def free_weights(self) -> None:
        """Free the memory of the weights. Call ``update_weights`` before the next ``run``."""
        self.model = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update_weights(self, version: str = "") -> None:
        """Load the weights that are now in the checkpoint's folder. Then set ``namespace`` and ``family`` for them.

        ``namespace`` is the namespace of this instance's blocks; ``family`` describes the shardings whose blocks this
        instance can read. Do not call this method while ``run`` is running.

        Args:
            version: version of the new weights; "": the version in ``version.yaml``.

        Raises:
            ConfigError: the weights cannot be loaded, or they are of another model. ``namespace`` and ``family`` have
                not changed. If ``has_weights`` is still true, the old weights are in use; otherwise there are none.
        """
        folder, dtype = self._folder, self.shape.dtype
        fingerprint = fingerprint_model(folder)
        if fingerprint_config(folder) != self._configuration:
            raise ConfigError(
                f"{folder}: its configuration has changed, but only weights can be updated; restart the instance"
            )
        version = version or read_version(folder)
        model, lacking = read_model(folder, dtype, is_copied=True)
        if lacking != self._lacking:
            missing = sorted(lacking - self._lacking)
            why = f"tensors are missing: {', '.join(missing)}" if missing else "there are more tensors than before"
            raise ConfigError(f"{folder}: these are not weights of the running model: {why}")
        if fingerprint_model(folder) != fingerprint:
            raise ConfigError(f"{folder} changed while its weights were loaded; update again")
        # Everything that can fail comes first, so that new weights are never used with the old namespace.
        namespace = replace(self.namespace, model=fingerprint, weights_version=name_weights(version, model))
        facts = collect_facts(folder, "fastdeploy-kvstore engine", "kvstore")
        family = self._find_family(namespace)
        if self.model is None or self.device.type == "cpu":
            self._place_model(model)
            self.model = model
        else:  # a GPU may not have memory for both, so the new weights replace the old ones in place
            running, self.model = self.model, None  # a mixture of old and new weights must not run
            try:
                running.load_state_dict(model.state_dict())
            except Exception as exc:  # each device fails in its own way
                reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
                raise ConfigError(f"{folder}: its weights were loaded only in part on {self.device}: {reason}") from exc
            self.model = running
        self.namespace, self.version, self.facts, self.family = namespace, version, facts, family

    def _find_family(self, namespace: Namespace) -> ShardingFamily:
        heads = self.shape.num_kv_heads
        if not self.groups.is_full:  # blocks of models with several groups are read only in their own sharding
            return ShardingFamily(namespace, heads, tuple(self.shape.list_axes()), ())
        return find_family(namespace, heads, self.shape.list_axes(), block_sizes=_OTHER_BLOCK_SIZES)

    def free_kv(self) -> None:
        """Free the pages of the KV memory; its addresses stay valid. Call ``restore_kv`` before the next use."""
        if self._kv_memory is not None:
            self._kv_memory.madvise(mmap.MADV_DONTNEED)  # later reads return zeros
        elif self.device.type == "cuda":
            self.kv.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def restore_kv(self) -> None:
        """Make the KV memory usable again after ``free_kv``; all values are zero.

        Raises:
            ConfigError: there is not enough memory.
        """
        if self.device.type == "cuda":
            with explain_out_of_memory(f"{len(self.kv)} KV blocks; {LEAVE_ROOM_BESIDE}"):
                self.kv.untyped_storage().resize_(self.kv.numel() * self.kv.element_size())
                self.kv.zero_()

    def enable_retrieval(self, config: RetrievalConfig, max_num_seqs: int, max_model_len: int) -> None:
        """Enable sparse attention. Call this after ``allocate_kv`` and ``try_out``.

        Raises:
            ConfigError: there is not enough memory for the index, or the model's attention does not support it.
        """
        if not self._has_plain_scores or self.groups.members[0].group.kind != "full":
            what = "no layers with full attention" if self._has_plain_scores else "soft-capping or sinks"
            raise ConfigError(
                f"--enable-retrieval: {self._folder!r} has {what}, which retrieval does not support; leave the flag out"
            )
        with explain_out_of_memory("the index of retrieval; lower --max-num-seqs or --max-model-len"):
            self.retrieval = Retrieval(config, self.kv, max_num_seqs, max_model_len)

    def try_out(self) -> None:
        """Compute one token, to check that this engine can run the model. Block 0 of KV memory is zero afterwards.

        Raises:
            ConfigError: a layer does not use transformers' AttentionInterface, or uses a feature that ``paged`` does
                not support, or there is not enough memory.
        """
        side_tables = [[0]] * (len(self.groups.members) - 1)
        batch = paged.PagedBatch(
            self.kv, [paged.ChunkShape(0, 1, [0], side_tables=side_tables)], [0], None, self.groups
        )
        reason = ""
        try:
            with explain_out_of_memory(f"one token; {LEAVE_ROOM}", any_failure=False):
                self._compute_logits(batch)
        except ConfigError:
            raise
        except Exception as exc:  # each architecture fails in its own way
            reason = str(exc).strip().splitlines()[0]
        self.kv[0] = 0
        self._has_plain_scores = not batch.scores_changed
        if not reason and batch.layers != self.groups.layers:
            reason = "its layers do not attend through transformers' AttentionInterface"
        if reason:
            kind = type(self.model).__name__
            raise ConfigError(f"--model {self._folder!r}: this engine cannot run a {kind}: {reason}")

    def count_retrieval_bytes(self, config: RetrievalConfig, max_num_seqs: int, max_model_len: int) -> int:
        """Return the maximum number of bytes that sparse attention takes on the device, without KV memory.

        The bytes are for the index and tables, and on a GPU also for the working sets of offloaded sequences.
        """
        shape = self.shape
        blocks = -(-max_model_len // shape.block_size)
        vectors = blocks * shape.num_layers * shape.num_kv_heads
        index = vectors * width_of(config.representative, shape.head_dim) * shape.dtype.itemsize
        index += (vectors + blocks) * torch.long.itemsize
        if reads_host_memory(self.device):
            return max_num_seqs * index
        read = sum(config.max_blocks_read(max_model_len, layer) for layer in range(shape.num_layers))
        return max_num_seqs * (index + read * shape.nbytes // shape.num_layers)

    def count_free_bytes(self) -> int:
        """Return the free memory of the device in bytes."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        with contextlib.suppress(OSError):  # not Linux
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def span(self, block: int) -> Span:
        """Return the address of a block in memory, and the size of the part that the layers of its group use.

        Args:
            block: ``group * len(kv) + b`` for block ``b`` of the group of layers with index ``group``.
        """
        number, own = divmod(block, len(self.kv))
        return Span(self.kv.data_ptr() + own * self.shape.nbytes, self._used_bytes[number])

    def view_group(self, number: int) -> torch.Tensor:
        """Return the part of KV memory that the layers of group ``number`` use: a view ``[block, ...]``."""
        member = self.groups.members[number]
        if member.group.kind != "state":
            return self.kv[:, : len(member.layers)]
        assert self.groups.conv is not None
        return self.kv.flatten(1)[:, : len(member.layers) * self.groups.conv.size]

    def find_broken_blocks(self, blocks: SequenceOf[int]) -> list[bool]:
        """Return for each block whether it has a NaN or an infinity."""
        return [not bool(self.kv[block].isfinite().all()) for block in blocks]

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk]) -> list[Choice]:
        """Compute the chunks of a step, and return the next token of each chunk whose ``samples`` is true, in order.

        The host waits for the device once, at the end of the step.
        """
        token_ids: list[int] = []
        for chunk in chunks:
            start = chunk.sequence.num_computed
            token_ids += chunk.sequence.token_ids[start : start + chunk.num_tokens]
        shapes = [
            paged.ChunkShape(
                *(c.sequence.num_computed, c.num_tokens, c.sequence.block_table, c.samples, state),
                [table.blocks for table in c.sequence.tables[1:]],
            )
            for c, state in zip(chunks, map(self._sparse_state, chunks), strict=True)
        ]
        # Logits are computed only for the rows from which a token is sampled.
        logits = self._compute_logits(paged.PagedBatch(self.kv, shapes, token_ids, self.retrieval, self.groups))
        sequences = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sequences:
            wait_for_device(self.device)
            return []
        return sample(logits, sequences, self.eos_token_ids, self._seen_tokens)

    def wait_for_device(self) -> None:
        """Wait until the device has finished all of its work.

        Raises:
            RuntimeError: the device failed.
        """
        wait_for_device(self.device)

    def _sparse_state(self, chunk: Chunk) -> SparseState | None:
        """Return the state of sparse attention for a chunk, or None if it is computed with full attention."""
        sequence = chunk.sequence
        if self.retrieval is None or sequence.regime is Regime.DENSE or not sequence.is_decoding:
            return None
        return self.retrieval.state_of(sequence)

    @torch.inference_mode()
    def _compute_logits(self, batch: paged.PagedBatch) -> torch.Tensor:
        """Run the model, and return the logits ``[rows, vocabulary]`` of the batch's ``logit_rows``."""
        output = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            paged=batch,
            logits_to_keep=batch.logit_rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def _describe_layout(groups: str) -> str:
    """Return ``Namespace.layout``: the axes of a block, and what decides its bytes besides the model.

    Args:
        groups: the groups of layers, as ``LayerGroups.describe`` returns them.
    """
    precision = "".join(f" with {name}={text}" for name, text in select_variables(PRECISION_VARIABLES).items())
    # Another version of transformers may compute the same model differently.
    return f"transformers {transformers.__version__} {LAYOUT}{groups and f' of {groups}'}{precision}"


def _map_on_demand(nbytes: int) -> mmap.mmap:
    """Map host memory that has only zeros. The system provides each page at the first write, a large page if possible.

    With pages of 4 KiB, the first load into 16 MiB of this memory took 44 ms instead of 11, because of page faults.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
