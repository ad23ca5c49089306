"""How large the KV cache is and how it is shared: the stage of pages and prefixes."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed_engine.config.fields import check, option, parse_count, parse_fraction, parse_seconds

KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16")
HOST_WRITE_POLICIES = ("write-through", "write-back")
EXTERNAL_CACHES = ("none", "file", "mooncake")


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
        host_cache_gib: GiB of the host's memory for pages that the device has no room for: the second tier; 0 is none.
        host_cache_write_policy: when a page is copied to the host: as soon as it is full, or when its room on the device is needed.
        external_cache: where pages are kept outside of the engine: the third tier.
        external_cache_path: folder of the file store.
        external_cache_gib: GiB that the file store may take, for each model and layout.
        external_cache_timeout_s: longest that a request waits for the third tier.
        mooncake_config: JSON file that says how to join a Mooncake store.
        kv_events_endpoint: ZMQ endpoint where changes of the cache are published; empty is none.
        kv_events_replay_endpoint: ZMQ endpoint where missed events are asked for; empty is none.
        kv_events_buffer: batches of events that are kept for that.
        kv_events_topic: first frame of every message.
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

    host_cache_gib: float = option(
        0.0,
        "--host-cache-gib",
        parse=parse_fraction,
        help="GiB of host memory for KV-cache pages that the device has no room for (0: none)",
        metavar="GIB",
    )
    host_cache_write_policy: str = option(
        "write-through",
        "--host-cache-write-policy",
        parse=str,
        choices=HOST_WRITE_POLICIES,
        help="copy pages to the host as soon as they are full, or when their room on the device is needed",
    )
    external_cache: str = option(
        "none",
        "--external-cache",
        parse=str,
        choices=EXTERNAL_CACHES,
        help="keep KV-cache pages outside of the engine: in local files, or in a Mooncake store; needs --host-cache-gib",
    )
    external_cache_path: str = option("", "--external-cache-path", parse=str, help="folder of --external-cache file", metavar="DIR")
    external_cache_gib: float = option(
        8.0,
        "--external-cache-gib",
        parse=parse_fraction,
        help="GiB that --external-cache file may take, for each model and layout",
        metavar="GIB",
    )
    external_cache_timeout_s: float = option(
        2.0,
        "--external-cache-timeout",
        parse=parse_seconds,
        help="longest that a request waits for the external cache",
        metavar="SECONDS",
    )
    mooncake_config: str = option(
        "",
        "--mooncake-config",
        parse=str,
        environment="MOONCAKE_CONFIG_PATH",
        help="JSON file that says how --external-cache mooncake joins its store",
        metavar="FILE",
    )
    kv_events_endpoint: str = option(
        "",
        "--kv-events-endpoint",
        parse=str,
        help="ZMQ endpoint where changes of the KV cache are published, e.g. tcp://127.0.0.1:5557 (default: none)",
        metavar="ENDPOINT",
    )
    kv_events_replay_endpoint: str = option(
        "",
        "--kv-events-replay-endpoint",
        parse=str,
        help="ZMQ endpoint where subscribers ask for events that they missed",
        metavar="ENDPOINT",
    )
    kv_events_buffer: int = option(
        10_000,
        "--kv-events-buffer",
        parse=parse_count,
        help="batches of events that are kept for replay",
        metavar="BATCHES",
    )
    kv_events_topic: str = option("", "--kv-events-topic", parse=str, help="topic of the published events", metavar="TOPIC")

    def __post_init__(self) -> None:
        self._check_tiers()
        self._check_events()
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

    def _check_tiers(self) -> None:
        check(self, "host_cache_gib", 0 <= self.host_cache_gib <= 2**20, expected="0 to 1,048,576 GiB", remedy="use 0 for none")
        if self.host_cache_gib:
            check(
                self,
                "host_cache_gib",
                self.enable_prefix_caching,
                expected="0 with --no-enable-prefix-caching: the host keeps prefixes",
                remedy="leave out one of the two",
            )
        policies = ", ".join(HOST_WRITE_POLICIES)
        is_policy = self.host_cache_write_policy in HOST_WRITE_POLICIES
        check(self, "host_cache_write_policy", is_policy, expected=f"one of {policies}", remedy="use write-through")
        is_external = self.external_cache in EXTERNAL_CACHES
        check(self, "external_cache", is_external, expected=f"one of {', '.join(EXTERNAL_CACHES)}", remedy="use none")
        check(
            self,
            "external_cache",
            self.external_cache == "none" or self.host_cache_gib > 0,
            expected="none without --host-cache-gib: pages go to and from it by way of the host's memory",
            remedy="give --host-cache-gib",
        )
        is_file, is_mooncake = self.external_cache == "file", self.external_cache == "mooncake"
        for name, is_used, value in (
            ("external_cache_path", is_file, self.external_cache_path),
            # The variable may be set for other programs.
            ("mooncake_config", is_mooncake, self.mooncake_config if is_mooncake else ""),
        ):
            kind = "file" if name == "external_cache_path" else "mooncake"
            wanted = f"a path with --external-cache {kind}, and none without"
            check(self, name, bool(value.strip()) == is_used, expected=wanted, remedy="give both flags, or none")
        check(
            self,
            "external_cache_gib",
            0 < self.external_cache_gib <= 2**30,
            expected="more than 0, at most 1,073,741,824 GiB",
            remedy="use 8",
        )
        check(
            self,
            "external_cache_timeout_s",
            0 < self.external_cache_timeout_s <= 600,
            expected="more than 0, at most 600 seconds",
            remedy="use 2",
        )

    def _check_events(self) -> None:
        for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
            endpoint = getattr(self, name)
            scheme, separator, address = endpoint.partition("://")
            has_port = scheme != "tcp" or address.rpartition(":")[2].isdecimal()
            check(
                self,
                name,
                not endpoint or (scheme in ("tcp", "ipc") and bool(separator and address) and has_port),
                expected="tcp://ADDRESS:PORT or ipc://PATH",
                remedy="use tcp://127.0.0.1:5557",
            )
        check(
            self,
            "kv_events_endpoint",
            not self.kv_events_endpoint or self.enable_prefix_caching,
            expected="none with --no-enable-prefix-caching: nothing would be told",
            remedy="leave out one of the two",
        )
        check(
            self,
            "kv_events_replay_endpoint",
            not self.kv_events_replay_endpoint or bool(self.kv_events_endpoint),
            expected="none without --kv-events-endpoint",
            remedy="give --kv-events-endpoint",
        )
        check(
            self,
            "kv_events_replay_endpoint",
            not self.kv_events_replay_endpoint or self.kv_events_replay_endpoint != self.kv_events_endpoint,
            expected="another endpoint than --kv-events-endpoint",
            remedy="use the next port",
        )
        check(self, "kv_events_buffer", 1 <= self.kv_events_buffer <= 10**7, expected="1 to 10,000,000", remedy="use 10000")
