"""The compiled kernels. Addresses, sizes and strides are integers; strides count elements. Nothing is checked here."""

def instruction_set() -> str:
    """What the kernels use: ``avx512`` or ``avx2``; empty on a processor that has neither."""

def use_instruction_set(name: str) -> None:
    """Use another one, for tests.

    Raises:
        ValueError: the processor does not have it.
    """

def has_team() -> bool:
    """Whether PyTorch's OpenMP runtime was found, so that several threads can be used."""

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

def write_kv(
    k: int, k_token: int, k_head: int, v: int, v_token: int, v_head: int, k_cache: int, k_page: int, k_slot: int,
    k_cache_head: int, v_cache: int, v_page: int, v_slot: int, v_cache_head: int, slots: int, slot_stride: int,
    tokens: int, num_pages: int, page_size: int, heads: int, head_dim: int, /,
) -> None:
    """Copy heads into slots."""

def mha_decode(
    q: int, q_row: int, q_head: int, k: int, k_page: int, k_token: int, k_head: int, v: int, v_page: int, v_token: int,
    v_head: int, out: int, out_row: int, out_head: int, page_table: int, table_row: int, table_column: int, max_pages: int,
    seq_lens: int, seq_len_stride: int, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, num_pages: int,
    page_size: int, scale: float, window: int, cap: float, sinks: int, lse: int, threads: int, /,
) -> int:
    """Attend; returns the longest length, having written nothing where the page table has no room for it."""
