"""All stages together, and the checks that need more than one of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenspeed_engine.config.cache import CacheConfig
from tokenspeed_engine.config.errors import ConfigError
from tokenspeed_engine.config.model import ModelConfig
from tokenspeed_engine.config.process import ProcessConfig
from tokenspeed_engine.config.scheduling import SchedulingConfig
from tokenspeed_engine.config.server import ServerConfig
from tokenspeed_engine.config.tokenizer import TokenizerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """What the engine core needs: everything but the HTTP server, and no secret."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)

    def __post_init__(self) -> None:
        budget = self.scheduling.max_num_batched_tokens
        if self.scheduling.prefill_chunk_size and budget is not None and self.scheduling.prefill_chunk_size > budget:
            raise ConfigError(
                "--prefill-chunk-size",
                self.scheduling.prefill_chunk_size,
                expected=f"at most --max-num-batched-tokens ({budget})",
                remedy="lower it, or use 0 for the whole budget",
            )
        if budget is not None and budget < self.scheduling.max_num_seqs:
            raise ConfigError(
                "--max-num-batched-tokens",
                budget,
                expected=f"at least --max-num-seqs ({self.scheduling.max_num_seqs}): each sequence needs a token in a step",
                remedy="raise it, or lower --max-num-seqs",
            )
        pages = self.cache.num_pages
        if pages is not None and self.cache.kv_cache_memory_bytes is not None:
            raise ConfigError(
                "--num-gpu-blocks-override",
                pages,
                expected="not together with --kv-cache-memory-bytes",
                remedy="give the size of the KV cache once, in pages or in bytes",
            )
        if pages is not None and pages * self.cache.page_size < 2:
            raise ConfigError("--num-gpu-blocks-override", pages, expected="room for at least 2 tokens", remedy="give more pages")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The whole configuration: the core's stages, and those of the front end."""

    core: CoreConfig = field(default_factory=CoreConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
