"""A loaded model that computes steps: the executor of real replicas. Composes the parts of this
package.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from deployments.config import ServiceConfig
from deployments.engine.outputs import (
    ModelLimits,
    ModelOutput,
    OutOfDeviceMemory,
    SchedulerOutput,
)
from deployments.execution import surgery
from deployments.execution.attention.backend import AttentionBackend
from deployments.execution.attention.choice import choose_backend
from deployments.execution.attention.ragged import RaggedAttention
from deployments.execution.compiled_linear import find_linear_kernel
from deployments.execution.current_device import on_device
from deployments.execution.device_memory import is_out_of_memory, release_unused
from deployments.execution.grammar import GrammarCompiler
from deployments.execution.kv_cache import (
    CPU_DEFAULT_MAX_GB,
    FreeMemory,
    LayerSpec,
    PagedKVCache,
    num_block_bytes,
    num_blocks_that_fit,
    num_free_bytes,
)
from deployments.execution.llguidance_grammar import make_grammar_compiler
from deployments.execution.load_gate import (
    check_against_eager,
    eager_answers,
    probe_layers,
)
from deployments.execution.memory_profile import (
    StepParts,
    StepShape,
    find_peak_meter,
    log_reserve,
    measure_largest_step,
)
from deployments.execution.model_forward import ModelForward
from deployments.execution.model_loader import LoadedModel, default_num_threads, load_model
from deployments.execution.model_source import cache_root
from deployments.execution.packed_forward import PackedForward
from deployments.execution.prepack import prepack_linears, restore_linears
from deployments.execution.prompt_logprobs import read_prompt_logprobs
from deployments.execution.quantized import quantize_linears, restore_kept_linears
from deployments.execution.quantized_products import choose_products
from deployments.execution.sampler import Sampler
from deployments.execution.small_ops import find_small_ops
from deployments.execution.static_plans import StaticShape
from deployments.execution.step_runner import StepRunner, choose_graphs
from deployments.execution.tape.runner import choose_tapes
from deployments.protocol import ModelCard

logger = logging.getLogger(__name__)


class ModelExecutor:
    """Computes the steps of one replica.

    Args:
        loaded: the model; its attention is replaced until `close`.
        config: of the whole service.

    Raises:
        UnsupportedModel: the probe or the self-check fails.
        CannotQuantize: quantised weights are asked for and it has nothing to quantise.
        OutOfMemory: no KV cache fits beside the model.
    """

    def __init__(self, loaded: LoadedModel, config: ServiceConfig) -> None:
        self._name = config.model.name
        self._loaded = loaded
        self._attention = RaggedAttention(loaded.model)
        try:
            with on_device(self.device):
                self._prepare(loaded, config)
        except BaseException:
            self.close()
            raise

    def _prepare(self, loaded: LoadedModel, config: ServiceConfig) -> None:
        model = loaded.model
        device, dtype = model.device, model.dtype
        block_size = config.cache.block_size
        # Before anything is asked of the model: what is compared below is compared as it will be.
        if config.model.quantization != "none":
            compiles = config.execution.compile_kernels
            products = choose_products(device, compiles, cache_root(config.model))
            quantize_linears(model, config.model.quantization, products)
        specs = probe_layers(model, self._attention)
        kernel_cache = cache_root(config.model)
        backend = choose_backend(config.execution, specs, dtype, device, kernel_cache)
        answers = eager_answers(model, self._attention, specs, loaded.max_model_len)
        # In between, so that what is replaced is checked as well.
        if device.type == "cpu" and config.execution.prepack_weights:
            self._reshape_for_cpu(loaded, config)
        check_against_eager(model, self._attention, backend, specs, answers, block_size)
        eos_token_ids = sorted(loaded.eos_token_ids)
        self._grammars = make_grammar_compiler(
            loaded.tokenizer_files, loaded.vocab_size, eos_token_ids
        )
        self._sampler = Sampler(eos_token_ids, self._grammars)
        num_step_bytes = self._measure_step(backend, specs, loaded, config)
        num_blocks = num_blocks_that_fit(
            FreeMemory(num_free_bytes(device), num_step_bytes),
            num_block_bytes(specs, block_size, dtype),
            config.cache,
            config.scheduler,
            max_model_len=loaded.max_model_len,
            default_max_gb=CPU_DEFAULT_MAX_GB if device.type == "cpu" else None,
        )
        cache = PagedKVCache(specs, num_blocks, block_size, dtype, device)
        longest = -(-loaded.max_model_len // block_size)
        largest = StaticShape(config.scheduler.max_num_seqs, 0, longest, block_size)
        runner = self._choose_runner(config, backend, largest, num_step_bytes)
        self._forward = PackedForward(model, self._attention, backend, specs, cache, runner)
        with torch.inference_mode():
            self._forward.prepare()
        self._limits = ModelLimits(
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            eos_token_ids=loaded.eos_token_ids,
        )

    def _choose_runner(
        self,
        config: ServiceConfig,
        backend: AttentionBackend[Any],
        largest: StaticShape,
        num_step_bytes: int,
    ) -> Callable[[ModelForward], StepRunner]:
        execution = config.execution
        if self.device.type != "cpu":
            return choose_graphs(
                execution.cuda_graphs, backend, self.device, largest, num_step_bytes
            )
        may_tape = execution.tape_steps and execution.compile_kernels
        return choose_tapes(may_tape, cache_root(config.model), backend)

    def _measure_step(
        self,
        backend: AttentionBackend[Any],
        specs: Sequence[LayerSpec],
        loaded: LoadedModel,
        config: ServiceConfig,
    ) -> int:
        """Bytes that the largest step takes on a GPU; 0 elsewhere."""
        meter = find_peak_meter(loaded.model.device)
        if meter is None:
            return 0
        shape = StepShape.of(config.scheduler, loaded.max_model_len, config.cache.block_size)
        parts = StepParts(loaded.model, self._attention, backend, specs, self._sampler)
        num_bytes = measure_largest_step(parts, shape, meter)
        log_reserve(num_bytes, shape, config.scheduler.gpu_mem_reserve_gb)
        return num_bytes

    def _reshape_for_cpu(self, loaded: LoadedModel, config: ServiceConfig) -> None:
        compiles, cache = config.execution.compile_kernels, cache_root(config.model)
        model = loaded.model
        surgery.operate(
            model, lambda: probe_layers(model, self._attention), find_small_ops(compiles, cache)
        )
        kernel = find_linear_kernel(compiles, cache)
        prepack_linears(model, num_free_bytes(model.device), kernel)

    @classmethod
    def load(cls, config: ServiceConfig) -> ModelExecutor:
        """Load the configured model and make it ready, with the configured number of threads.

        Raises:
            ModelSourceError, UnsupportedModel, OutOfMemory: each says what to change.
        """
        started_s = time.monotonic()
        torch.set_num_threads(config.execution.num_threads or default_num_threads())
        executor = cls(load_model(config.model, config.execution), config)
        logger.info(
            "%s ready in %.1f s: %d KV blocks of %d tokens, %d threads",
            config.model.name,
            time.monotonic() - started_s,
            executor.limits.num_blocks - 1,
            executor.limits.block_size,
            torch.get_num_threads(),
        )
        return executor

    @property
    def limits(self) -> ModelLimits:
        return self._limits

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        device: torch.device = self._loaded.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, keys and values."""
        return self._loaded.model.dtype

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for this model; compile a request's before the request is submitted,
        and keep the result while it runs, so that no step has to.
        """
        return self._grammars

    def model_card(self) -> ModelCard:
        """What an ingress needs to know."""
        return ModelCard(
            name=self._name,
            max_model_len=self._limits.max_num_tokens,
            vocab_size=self._limits.vocab_size,
            block_size=self._limits.block_size,
            eos_token_ids=tuple(sorted(self._limits.eos_token_ids)),
            tokenizer_files=self._loaded.tokenizer_files,
        )

    def execute(self, output: SchedulerOutput) -> ModelOutput:
        """Compute a step and sample where a row asks for it.

        Raises:
            OutOfDeviceMemory: the step does not fit.
        """
        try:
            with on_device(self.device), torch.inference_mode():
                return self._compute(output)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
        release_unused(self._loaded.model.device)
        raise OutOfDeviceMemory(message)

    def _compute(self, output: SchedulerOutput) -> ModelOutput:
        packed = self._forward.run(output.scheduled)
        sampled = self._sampler.sample(packed.logits, [row.request for row in packed.sampled])
        if not packed.prompt_spans:
            return sampled
        prompts = read_prompt_logprobs(packed.prompt_logits, packed.prompt_spans)
        return replace(
            sampled,
            errors={**sampled.errors, **prompts.errors},
            prompt_logprobs=prompts.prompt_logprobs,
        )

    def close(self) -> None:
        """Give the model its own attention and layers back, but for those whose weights were
        quantised and are gone; the executor is of no more use.
        """
        self._attention.restore()
        restore_linears(self._loaded.model)
        restore_kept_linears(self._loaded.model)
        surgery.undo(self._loaded.model)
