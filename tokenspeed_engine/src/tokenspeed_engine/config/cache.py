"""How large the KV cache is and how it is shared: the stage of pages and prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count, parse_fraction

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache.

    Attributes:
        page_size: tokens of one page.
        kv_cache_dtype: element type of the pool; `auto` is the compute type. A narrower one takes less memory, and rounds keys and
            values.
        num_pages: pages of the pool; None derives them from memory.
        kv_cache_memory_bytes: memory of the pool; None derives it (GPU: see gpu_memory_utilization; CPU: a quarter of
            the available memory, at most 4 GiB).
        gpu_memory_utilization: share of a GPU's memory that weights, activations and cache may take together.
        enable_prefix_caching: keep finished sequences' pages for requests that begin alike.
    """

    page_size: int = option(
        16, "--block-size", "--page-size", parse=parse_count, help="tokens of one KV-cache page", metavar="TOKENS"
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        parse=str,
        choices=KV_CACHE_DTYPES,
        help="element type of the KV cache (auto: the compute type)",
    )
    num_pages: int | None = option(
        None,
        "--num-gpu-blocks-override",
        "--num-pages",
        parse=parse_count,
        help="pages of the KV cache, instead of as many as fit into its memory",
        metavar="PAGES",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "--kv-cache-memory-bytes",
        parse=parse_count,
        help="memory of the KV cache in bytes, e.g. 2G (default: a quarter of the free memory on a CPU, at most 4G)",
        metavar="BYTES",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "--gpu-memory-utilization",
        parse=parse_fraction,
        help="share of a GPU's memory for weights, activations and KV cache together",
        metavar="SHARE",
    )
    enable_prefix_caching: bool = option(
        True, "--enable-prefix-caching", parse=bool, help="reuse the KV cache of prompts that begin alike"
    )

    def __post_init__(self) -> None:
        check(
            self,
            "page_size",
            1 <= self.page_size <= 4096,
            expected="1 to 4096 tokens",
            remedy="use 16, which every kernel supports",
        )
        check(
            self,
            "kv_cache_dtype",
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            expected=f"one of {', '.join(KV_CACHE_DTYPES)}",
            remedy="use --kv-cache-dtype auto",
        )
        check(
            self,
            "num_pages",
            self.num_pages is None or 1 <= self.num_pages < 2**31,
            expected="1 to 2**31-1 pages",
            remedy="leave the flag out to size the cache from memory",
        )
        check(
            self,
            "kv_cache_memory_bytes",
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes >= 2**20,
            expected="1 MiB (1M) or more",
            remedy="leave the flag out to size the cache from memory",
        )
        check(
            self,
            "gpu_memory_utilization",
            0 < self.gpu_memory_utilization <= 1,
            expected="a share in (0, 1]",
            remedy="use 0.9",
        )
