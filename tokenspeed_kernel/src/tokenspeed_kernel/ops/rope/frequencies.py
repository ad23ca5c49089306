"""Inverse frequencies of every scaling rule, and the table of cosines and sines that the kernels read."""

from __future__ import annotations

import math

import torch

from tokenspeed_kernel.errors import ConfigError
from tokenspeed_kernel.ops.rope.config import RopeConfig


def inverse_frequencies(config: RopeConfig, seq_len: int | None = None) -> torch.Tensor:
    """Rotation per position, in radians, for each pair of elements.

    The arithmetic is in float32 on the CPU, in the order that the models were trained with: at position 60,000 one unit in the
    last place of a frequency turns the angle by 4e-3, so more exact frequencies would be other embeddings than the model's.

    Args:
        config: the embedding.
        seq_len: length that the table is built for; only ``dynamic`` and ``longrope`` look at it. None means
            ``config.max_position`` for ``dynamic``, and the short factors for ``longrope``.
    Returns:
        [rotary_dim / 2] float32 on the CPU.
    Raises:
        Nothing: a `RopeConfig` was checked when it was made.
    Source: arXiv:2104.09864, section 3.2; linear arXiv:2306.15595, section 2.3; yarn arXiv:2309.00071, section 3; longrope
    arXiv:2402.13753, section 3; llama3 arXiv:2407.21783, section 3.4.
    """
    base: float = config.base
    if config.kind == "dynamic":
        length = max(config.max_position if seq_len is None else seq_len, config.max_position)
        stretch = config.factor * length / config.max_position - (config.factor - 1)
        base = base * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device="cpu") / config.rotary_dim
    periods: torch.Tensor = base**exponents
    if config.kind == "linear":
        return (1.0 / periods) / config.factor
    if config.kind == "llama3":
        return _llama3(config, 1.0 / periods)
    if config.kind == "yarn":
        return _yarn(config, periods)
    if config.kind == "longrope":
        is_long = seq_len is not None and seq_len > config.pretraining_length
        factors = config.long_factor if is_long else config.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * periods)
    if config.kind == "proportional":
        turning = int(config.rotated_fraction * config.head_dim // 2)
        still = torch.arange(config.rotary_dim // 2) >= turning
        return (1.0 / periods).masked_fill(still, 0.0) / config.factor
    return 1.0 / periods


def rope_cos_sin(config: RopeConfig, positions: int | torch.Tensor, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Table of cosines and sines, scaled by the embedding's magnitude, that `apply_rope` reads.

    The angle is rounded to float32, as in training (see `inverse_frequencies`); its cosine and sine are computed in float64 and
    rounded once.

    ``dynamic`` fixes its base by the length that the table is built for, as transformers does for that ``seq_len``: an engine
    builds one table of ``max_model_len`` rows, and every sequence, short or long, uses that base. (Recomputing the base as a
    sequence grows, as some implementations do, makes cached keys disagree with new queries.) ``longrope`` chooses its factors in
    the same way: whoever serves no more than the pre-training length builds a table that is no longer, and gets the short ones.

    Args:
        config: the embedding.
        positions: number of rows, for positions 0, 1, ...; or the positions themselves, [n] int32 or int64.
        device: where the table goes; the positions' device, or the CPU.
    Returns:
        [n, rotary_dim] float32: cosines in the first half of a row, sines in the second.
    Raises:
        ConfigError: a negative length or position.
    Source: arXiv:2104.09864, section 3.2.
    """
    if isinstance(positions, torch.Tensor):
        device = positions.device if device is None else device
        where = positions.to("cpu", torch.int64)
        if where.dim() != 1 or (where.numel() and int(where.min()) < 0):
            raise ConfigError(f"rope_cos_sin: positions must be [n] and not negative; got shape {tuple(where.shape)}")
        seq_len = int(where.max()) + 1 if where.numel() else 0
    else:
        if positions < 0:
            raise ConfigError(f"rope_cos_sin: the number of positions must not be negative; got {positions}")
        where = torch.arange(positions, dtype=torch.int64, device="cpu")
        seq_len = positions
    angles = (where.to(torch.float32)[:, None] * inverse_frequencies(config, seq_len)).to(torch.float64)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * config.magnitude
    return table.to(torch.float32).to(device or "cpu")


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between the two bounds."""
    length = config.pretraining_length
    wavelengths = 2 * math.pi / frequencies
    keep = (length / wavelengths - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blended = (1 - keep) * frequencies / config.factor + keep * frequencies
    result = torch.where(wavelengths > length / config.low_freq_factor, frequencies / config.factor, blended)
    return torch.where(wavelengths < length / config.high_freq_factor, frequencies, result)


def _yarn(config: RopeConfig, periods: torch.Tensor) -> torch.Tensor:
    """Extrapolate dimensions that turn often over the pre-training context, interpolate those that turn seldom."""

    def dimension_of(rotations: float) -> float:
        turns = config.pretraining_length / (rotations * 2 * math.pi)
        return (config.rotary_dim * math.log(turns)) / (2 * math.log(config.base))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # the blend is then a step
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return (1.0 / (config.factor * periods)) * (1 - extrapolated) + (1.0 / periods) * extrapolated
