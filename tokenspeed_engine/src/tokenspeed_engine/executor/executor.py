"""Loads a model, and turns plans into sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tokenspeed_engine.checkpoint import open_checkpoint
from tokenspeed_engine.config import CacheConfig, ModelConfig, SchedulingConfig
from tokenspeed_engine.executor.batch import BatchBuilder
from tokenspeed_engine.executor.devices import resolve_device, resolve_dtype
from tokenspeed_engine.executor.loading import load_model
from tokenspeed_engine.executor.memory import memory_guard
from tokenspeed_engine.executor.prompt_logprobs import PromptLogprobs
from tokenspeed_engine.executor.runner import ModelRunner, StepLimits
from tokenspeed_engine.kvcache import (
    Completed,
    DevicePageTable,
    HostPool,
    KVLayout,
    KVPool,
    TransferEngine,
    TransferPlan,
    check_cache_dtype,
    num_host_pages_for,
    num_pages_for,
)
from tokenspeed_engine.parallel import Mesh
from tokenspeed_engine.sampling import Sampler
from tokenspeed_engine.scheduler import Plan
from tokenspeed_engine.types import SamplingParams, TokenLogprobs
from tokenspeed_engine.weights import LoadProgress

_GPU_TOKEN_BUDGET = 8192
_CPU_MOST_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step yields.

    Attributes:
        token_ids: [S] int32, one for each sample row of the plan; -1 where the logits hold a NaN or no finite maximum.
        logprobs: one entry for each sample row, None where not asked for; empty when no row asked.
        prompt_logprobs: request id to the entries of the prompt positions that this step computed, in order.
    """

    token_ids: NDArray[np.int32]
    logprobs: Sequence[TokenLogprobs | None] = ()
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class ModelExecutor:
    """A loaded model with its cache and sampler. One thread.

    Args:
        model: what to load, where, as what.
        cache: size of the page pool.
        scheduling: limits that buffers are sized by.
        progress: called while weights load.

    Attributes:
        architecture: Hugging Face name.
        path: the checkpoint on disk.
        vocab_size: V.
        max_model_len: most tokens of a sequence.
        max_num_batched_tokens: most tokens of a step; measured on a CPU where the configuration leaves it open.
        step_limits: what was measured; None where the number is configured or the device's own.
        num_pages: pages of the pool.
        page_size: tokens in a page.
        eos_token_ids: ids that end a sequence.
        dtype: compute type.
        device: where it runs.
        weights: how the weights are held, for the log.
        weights_bytes: memory that they take.
        kv_cache_bytes: memory of the page pool.
        layout: of a page.
        num_host_pages: pages of the pool in the host's memory; 0 without one.
        host_pool: that pool.
        warnings: sentences for the log.

    Raises:
        CheckpointError, UnsupportedModelError, WeightsError: the model cannot be used; the message says why.
        DeviceError: no such device.  KVCacheTypeError: no kernel for the cache's type.
        OutOfMemoryError: weights or cache do not fit.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduling: SchedulingConfig,
        *,
        mesh: Mesh | None = None,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        if model.num_threads:
            torch.set_num_threads(model.num_threads)
        self.device = resolve_device(model.device)
        checkpoint = open_checkpoint(model.model, model.revision)
        self.path = checkpoint.path
        self.eos_token_ids = checkpoint.eos_token_ids
        self.dtype = resolve_dtype(model.dtype, self.device, checkpoint.config)
        mesh = mesh or Mesh()
        own_limit = _own_limit(checkpoint.config)
        self.max_model_len = model.max_model_len or own_limit
        with torch.inference_mode():
            loaded = load_model(
                checkpoint,
                max_model_len=self.max_model_len,
                device=self.device,
                dtype=self.dtype,
                quantization=model.quantization,
                mesh=mesh,
                progress=progress,
            )
            config = loaded.model.config
            self.architecture, self.vocab_size = config.architecture, config.vocab_size
            self.warnings = loaded.report.warnings
            if self.max_model_len > own_limit:
                self.warnings.append(
                    f"--max-model-len: the model is made for {own_limit:,} positions (max_position_embeddings), got "
                    f"{self.max_model_len:,}; text beyond them may be poor"
                )
            self.page_size = cache.page_size
            kv_dtype = self.dtype if cache.kv_cache_dtype == "auto" else resolve_dtype(cache.kv_cache_dtype, self.device, {})
            layout = KVLayout(config.num_layers, config.num_kv_heads // mesh.size, config.head_dim, cache.page_size, kv_dtype)
            check_cache_dtype(layout, self.dtype, self.device)
            pages_per_sequence = -(-self.max_model_len // cache.page_size)
            self.num_pages = num_pages_for(
                cache, layout, self.device, max_useful_pages=pages_per_sequence * scheduling.max_num_seqs
            )
            size = self.num_pages * layout.page_bytes
            remedy = "lower --kv-cache-memory-bytes or --num-pages"
            with memory_guard(f"kv cache ({size / 2**30:.2f} GiB)", self.device, {"weights": loaded.size_bytes}, remedy):
                pool = KVPool(layout, self.num_pages, self.device)
            self.weights, self.weights_bytes, self.kv_cache_bytes = loaded.weights, loaded.size_bytes, size
            self._held = {"weights": loaded.size_bytes, "kv cache": size}
            self._runner = ModelRunner(loaded.model, pool, self.device)
            self.layout = layout
            self.num_host_pages = num_host_pages_for(cache.host_cache_gib, layout)
            self.host_pool = HostPool(layout, self.num_host_pages, self.device) if self.num_host_pages else None
            self._transfers = None if self.host_pool is None else TransferEngine(pool, self.host_pool)
            self.step_limits: StepLimits | None = None
            self.max_num_batched_tokens = scheduling.max_num_batched_tokens or _GPU_TOKEN_BUDGET
            if scheduling.max_num_batched_tokens is None and self.device.type == "cpu":
                most = min(_CPU_MOST_TOKENS, self.max_model_len)
                self.step_limits = self._runner.measure_step_limits(most, self.max_model_len)
                self.max_num_batched_tokens = self.step_limits.num_tokens
        self._batches = BatchBuilder(scheduling.max_num_seqs, cache.page_size, self.device)
        self._sampler = Sampler(self.vocab_size, self.device, eos_token_ids=self.eos_token_ids)
        self._prompt_logprobs = PromptLogprobs()
        self._table: DevicePageTable | None = None
        self._table_host: NDArray[np.int32] | None = None

    def add_request(self, request_id: int, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Prepare the sampler's state of a request.

        Raises:
            ValueError: parameters that the sampler refuses.
        """
        self._sampler.add(request_id, params, prompt_token_ids)
        if params.prompt_logprobs is not None:
            self._prompt_logprobs.add(request_id, prompt_token_ids, params.prompt_logprobs)

    def remove_request(self, request_id: int) -> None:
        """Forget a request; no plan that holds it may be executed afterwards."""
        self._sampler.remove(request_id)
        self._prompt_logprobs.remove(request_id)

    @torch.inference_mode()
    def start_transfers(self, plan: TransferPlan) -> None:
        """Queue the copies that a plan names. Called for each plan, one that computes nothing too, before it is executed."""
        if self._transfers is not None:
            self._transfers.start(plan)

    @property
    def has_pending_transfers(self) -> bool:
        """Whether a copy was started and `poll_transfers` has not told of its end."""
        return self._transfers is not None and self._transfers.has_pending

    def poll_transfers(self, *, wait: bool = False) -> Completed:
        """Copies that are over, each told once, in the order of their start.

        Args:
            wait: wait for the oldest, if there is one.
        """
        if self._transfers is None:
            return Completed(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_))
        return self._transfers.poll(wait=wait)

    def transfer_fence(self) -> Callable[[], None]:
        """A function that waits, on any thread, until the copies that were started so far have left the host's pages alone."""
        return (lambda: None) if self._transfers is None else self._transfers.fence()

    @torch.inference_mode()
    def execute(self, plan: Plan, page_table: NDArray[np.int32]) -> StepResult:
        """Run a plan's forward pass, and sample.

        Args:
            plan: the step; steps are executed in the order in which they were planned.
            page_table: the scheduler's persistent table, the same array at every call.
        Returns:
            One token for each of the plan's sample rows.
        Raises:
            OutOfMemoryError: activations do not fit.
        """
        with memory_guard(
            f"a step of {plan.num_tokens} tokens", self.device, self._held, "lower --max-num-batched-tokens or --max-num-seqs"
        ):
            return self._execute(plan, page_table)

    def _execute(self, plan: Plan, page_table: NDArray[np.int32]) -> StepResult:
        table = self._page_table(page_table)
        table.update(plan.page_updates)
        scored = self._prompt_logprobs.rows_of(plan)
        batch = self._batches.build(plan, table, None if scored is None else scored.rows)
        hidden = self._runner.hidden(batch)
        num_samples = len(plan.sample_rows)
        prompt_logprobs = {} if scored is None else self._prompt_logprobs.score(scored, hidden[num_samples:], self._runner.logits)
        if num_samples == 0:
            return StepResult(np.empty(0, dtype=np.int32), (), prompt_logprobs)
        logits = self._runner.logits(hidden if scored is None else hidden[:num_samples])
        request_ids = plan.request_ids[plan.sample_rows]
        sampled = self._sampler.sample(logits, request_ids, plan.output_index)
        self._batches.remember(plan, sampled.token_ids)
        return StepResult(sampled.token_ids.cpu().numpy(), sampled.logprobs or (), prompt_logprobs)

    def _page_table(self, host: NDArray[np.int32]) -> DevicePageTable:
        if self._table is None or self._table_host is not host:
            # Another view object may show the same memory: only a new address is a new table.
            if self._table is None or self._table_host is None or host.ctypes.data != self._table_host.ctypes.data:
                self._table = DevicePageTable(host, self.device)
            self._table_host = host
        return self._table


def _own_limit(config: object) -> int:
    nested = config.get("text_config") if isinstance(config, dict) else None
    for source in (nested, config):
        if isinstance(source, dict) and isinstance(source.get("max_position_embeddings"), int):
            return int(source["max_position_embeddings"])
    return 2048
