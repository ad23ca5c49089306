"""The compiled kernels. Addresses, sizes and strides are integers; strides count elements. Nothing is checked here."""

def instruction_set() -> str:
    """What the kernels use: ``amx``, ``avx512_vnni``, ``avx512`` or ``avx2``; empty on a processor that has none of them."""

def instruction_sets() -> list[str]:
    """Those that the processor has, best first."""

def give_same_products(one: str, other: str) -> bool:
    """Whether two of them give the same bits for products of every panel format, on made-up numbers.

    Raises:
        ValueError: the processor does not have one of them.
    """

def use_instruction_set(name: str) -> None:
    """Use another one, for tests.

    Raises:
        ValueError: the processor does not have it.
    """

def team_size() -> int:
    """How many threads the kernels have started in this process."""

def rms_norm(
    x: int, x_inner: int, x_outer_stride: int, x_inner_stride: int, residual: int, residual_inner: int,
    residual_outer_stride: int, residual_inner_stride: int, weight: int, out: int, sum: int, rows: int, columns: int,
    eps: float, threads: int, /,
) -> None:
    """Normalize rows; with a residual (not 0) of x + residual, which goes to ``sum``."""

def silu_and_mul(
    gate_up: int, inner_rows: int, outer_stride: int, inner_stride: int, out: int, rows: int, inner: int, threads: int, /,
) -> None:
    """Gate rows."""

def apply_rope(
    q: int, q_out: int, q_heads: int, q_token: int, q_head: int, q_out_token: int, q_out_head: int,
    k: int, k_out: int, k_heads: int, k_token: int, k_head: int, k_out_token: int, k_out_head: int,
    positions: int, position_stride: int, wide_positions: bool, cos_sin: int, max_position: int, rotary_dim: int,
    head_dim: int, interleaved: bool, tokens: int, threads: int, /,
) -> int | None:
    """Rotate heads; returns a position that the table does not have, having written nothing, or None."""

def argmax(logits: int, row_stride: int, rows: int, columns: int, out: int, out_stride: int, threads: int, /) -> None:
    """Place of each row's largest float, the first of equal ones; -1 where there is none that is finite, or a NaN."""

def write_kv(
    k: int, type: int, k_token: int, k_head: int, v: int, v_token: int, v_head: int, k_cache: int, cache_type: int, k_page: int,
    k_slot: int, k_cache_head: int, v_cache: int, v_page: int, v_slot: int, v_cache_head: int, slots: int, slot_stride: int,
    tokens: int, num_pages: int, page_size: int, heads: int, head_dim: int, /,
) -> None:
    """Copy heads into slots, rounded to the type of the cache."""

def attend_paged(
    q: int, q_type: int, q_row: int, q_head: int, k: int, cache_type: int, k_page: int, k_token: int, k_head: int,
    v: int, v_page: int, v_token: int, v_head: int, out: int, out_row: int, out_head: int,
    page_table: int, table_row: int, table_column: int, max_pages: int, starts: int, start_stride: int,
    lengths: int, length_stride: int, rows: int, num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int,
    num_pages: int, page_size: int, causal: bool, scale: float, window: int, cap: float, sinks: int, lse: int, threads: int, /,
) -> int:
    """Attend to pages; without ``starts`` (0) each request has one query. Types are 0 for fp32, 1 for bf16, 2 for fp16.

    Returns the longest length, having written nothing where the page table has no room for it; -1 where ``starts`` are no offsets.
    """

def attend_ragged(
    q: int, q_type: int, q_row: int, q_head: int, k: int, k_token: int, k_head: int, v: int, v_token: int, v_head: int,
    out: int, out_row: int, out_head: int, starts_q: int, stride_q: int, starts_k: int, stride_k: int, rows: int,
    num_keys: int, num_reqs: int, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool, scale: float, window: int,
    cap: float, sinks: int, lse: int, threads: int, /,
) -> int:
    """Attend to ragged keys; 1 or 2 where the offsets of queries or keys are none, having written nothing."""

class Weight:
    """A quantized weight [rows, columns] at an address that its owner keeps."""

    def __init__(
        self, panel: int, is_stored: bool, is_exact: bool, data: int, rows: int, columns: int, row_bytes: int, group: int,
        scale: int, /,
    ) -> None:
        """Formats are those of ``formats.py``; ``is_stored``: the blocks of the file, with ``row_bytes`` from row to row.

        ``is_exact``: activations are not rounded.
        """

    def multiply(
        self, x: int, x_stride: int, x_bf16: bool, tokens: int, bias: int, bias_bf16: bool, out: int, out_stride: int,
        out_bf16: bool, threads: int, /,
    ) -> None:
        """Multiply rows of fp32 or bf16, rounded to 8 bits unless the weight is exact, and add the bias (0 for none)."""

def panel_bytes(panel: int, columns: int, /) -> int:
    """Bytes of 16 rows of a GGUF format in panels."""

def group_bytes(scale: int, group: int, /) -> int:
    """Bytes of 16 rows of one group of 4-bit values."""

def pack_stored(stored: int, data: int, row_bytes: int, rows: int, columns: int, panels: int, threads: int, /) -> None:
    """Put rows of GGUF blocks into panels."""

def pack_int4(
    values: int, scales: int, zeros: int, rows: int, columns: int, group: int, scale: int, is_signed: bool, panels: int, /,
) -> None:
    """Put rows of 4-bit values into panels; without ``zeros`` (0) every zero point is 8."""

def embedding(
    stored: int, data: int, row_bytes: int, rows: int, columns: int, ids: int, wide_ids: bool, id_stride: int, tokens: int,
    out: int, out_stride: int, out_bf16: bool, /,
) -> None:
    """Dequantize rows; zeros for an id that is none of them."""
