"""The packings of four bits that checkpoints have, brought to the one layout of `QuantizedTensor`. For loading: not on a hot path.

A checkpoint whose parts are in that layout already needs none of these: fp8 with `weight_scale` or `weight_scale_inv`, and nvfp4
with `weight_scale` and a multiplier `weight_scale_2`, are given to `QuantizedTensor` as they are.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel.errors import ShapeError
from tokenspeed_kernel.quantized import QuantizedTensor
from tokenspeed_kernel.signature import Format

__all__ = ["int4_from_awq", "int4_from_gptq", "int4_from_packed_int32", "mxfp4_from_blocks", "nvfp4_from_divisor"]

_EACH = 8
"""Numbers of four bits in an int32."""
# Which of eight neighbouring columns lies in which four bits, from the lowest.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SYMMETRIC = 8
_GROUPS = (32, 64, 128)


def int4_from_packed_int32(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_zero_point: torch.Tensor | None = None
) -> QuantizedTensor:
    """Return an int4 (with zero points uint4) weight from the `pack-quantized` form of compressed-tensors.

    Args:
        weight_packed: [out_features, in_features / 8] int32: eight columns, the first in the lowest bits, each plus 8.
        weight_scale: [out_features, groups] fp32, bf16 or fp16.
        weight_zero_point: optional [ceil(out_features / 8), groups] int32: eight rows, the first in the lowest bits, each plus 8.
    Returns:
        [out_features, in_features] int4@group_N or @channel; uint4 where there are zero points other than 8.
    Raises:
        ShapeError: shapes or dtypes disagree, or the groups have another size than 32, 64, 128 or the whole row.
    Source: the `pack-quantized` compressor of compressed-tensors, for 4 bits.
    """
    _check("int4_from_packed_int32", weight_packed=weight_packed, weight_zero_point=weight_zero_point)
    out_features, in_features = weight_packed.shape[0], weight_packed.shape[1] * _EACH
    data = weight_packed.contiguous().view(torch.uint8)
    zeros = None
    if weight_zero_point is not None:
        zeros = _unpacked(weight_zero_point.t()).t()[:out_features]
    return _grouped(data, weight_scale, zeros, out_features, in_features)


def int4_from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    stored_minus_one: bool = True,
) -> QuantizedTensor:
    """Return an int4 (where zero points are not all 8, uint4) weight from the form of GPTQ.

    Args:
        qweight: [in_features / 8, out_features] int32: eight rows, the first in the lowest bits.
        scales: [groups, out_features] fp32, bf16 or fp16.
        qzeros: [groups, out_features / 8] int32: eight columns, the first in the lowest bits.
        g_idx: optional [in_features], group of each input; groups must lie one after the other.
        stored_minus_one: zero points are stored less 1, as the first version of the format has them.
    Returns:
        [out_features, in_features] int4@group_N or @channel; uint4 where there are zero points other than 8.
    Raises:
        ShapeError: shapes or dtypes disagree, or the inputs are in another order than that of the groups.
    Source: GPTQ, arXiv:2210.17323; the packing of its checkpoints.
    """
    name = "int4_from_gptq"
    _check(name, qweight=qweight, qzeros=qzeros)
    in_features, out_features = qweight.shape[0] * _EACH, qweight.shape[1]
    if g_idx is not None:
        wanted = torch.arange(in_features, device=g_idx.device) // (in_features // max(scales.shape[0], 1))
        if not torch.equal(g_idx.to(wanted.dtype), wanted):
            fix = "use a checkpoint without activation order, or reorder the inputs by g_idx first"
            raise ShapeError(name, expected="inputs in the order of their groups", got="another g_idx", fix=fix)
    codes = _unpacked(qweight.t())  # [out_features, in_features]
    zeros = _unpacked(qzeros).t() + int(stored_minus_one)
    return _grouped(_packed(codes), scales.t().contiguous(), zeros, out_features, in_features)


def int4_from_awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> QuantizedTensor:
    """Return an int4 (where zero points are not all 8, uint4) weight from the form of AWQ.

    Args:
        qweight: [in_features, out_features / 8] int32: of eight columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up.
        scales: [groups, out_features] fp32, bf16 or fp16.
        qzeros: [groups, out_features / 8] int32, in the same order.
    Returns:
        [out_features, in_features] int4@group_N or @channel; uint4 where there are zero points other than 8.
    Raises:
        ShapeError: shapes or dtypes disagree.
    Source: AWQ, arXiv:2306.00978, section 4 (packing); the packing of its checkpoints.
    """
    _check("int4_from_awq", qweight=qweight, qzeros=qzeros)
    in_features, out_features = qweight.shape[0], qweight.shape[1] * _EACH

    def ordered(packed: torch.Tensor) -> torch.Tensor:
        codes = _unpacked(packed).view(packed.shape[0], packed.shape[1], _EACH)
        straight = torch.empty_like(codes)
        straight[..., list(_AWQ_ORDER)] = codes
        return straight.view(packed.shape[0], packed.shape[1] * _EACH)

    codes, zeros = ordered(qweight).t().contiguous(), ordered(qzeros).t()
    return _grouped(_packed(codes), scales.t().contiguous(), zeros, out_features, in_features)


def mxfp4_from_blocks(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
    """Return an mxfp4 weight from blocks of 16 bytes, as gpt-oss has them. The values are not copied.

    Args:
        blocks: [..., rows, columns / 32, 16] uint8.
        scales: [..., rows, columns / 32] uint8, exponents plus 127.
    Returns:
        [..., rows, columns] mxfp4@block_32, whose values lie in `blocks`.
    Raises:
        ShapeError: shapes or dtypes disagree.
    Source: OCP Microscaling Formats (MX) 1.0, section 5; gpt-oss, arXiv:2508.10925, section 2.1.
    """
    if blocks.dim() < 3 or blocks.shape[-1] != 16:
        expected = "blocks [..., rows, columns / 32, 16] uint8"
        raise ShapeError("mxfp4_from_blocks", expected=expected, got=f"{list(blocks.shape)} {blocks.dtype}")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    return QuantizedTensor(blocks.flatten(-2), Format.parse("mxfp4@block_32"), shape, scales)


def nvfp4_from_divisor(
    weight_packed: torch.Tensor, weight_scale: torch.Tensor, weight_global_scale: torch.Tensor
) -> QuantizedTensor:
    """Return an nvfp4 weight whose global scale divides, as compressed-tensors writes it. ModelOpt's multiplies, as ours does.

    Args:
        weight_packed: [..., rows, columns / 2] uint8.
        weight_scale: [..., rows, columns / 16] fp8_e4m3.
        weight_global_scale: [1] or [...] fp32, divides.
    Returns:
        [..., rows, columns] nvfp4@block_16, whose global scale multiplies.
    Raises:
        ShapeError: shapes or dtypes disagree.
    Source: arXiv:2509.25149, section 2 (scales of blocks under a scale of the tensor); the `nvfp4-pack-quantized` compressor of
    compressed-tensors.
    """
    shape = (*weight_packed.shape[:-1], weight_packed.shape[-1] * 2)
    total = 1.0 / weight_global_scale.float()
    return QuantizedTensor(weight_packed, Format.parse("nvfp4@block_16"), shape, weight_scale, total)


def _check(name: str, **packed: torch.Tensor | None) -> None:
    for part, tensor in packed.items():
        if tensor is not None and (tensor.dim() != 2 or tensor.dtype is not torch.int32):
            raise ShapeError(name, expected=f"{part} of two dimensions, int32", got=f"{list(tensor.shape)} {tensor.dtype}")


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """[rows, columns] of codes from [rows, columns / 8] int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & 15).flatten(1).to(torch.uint8)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, ::2] | codes[:, 1::2] << 4


def _grouped(
    data: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, out_features: int, in_features: int
) -> QuantizedTensor:
    groups = scale.shape[1] if scale.dim() == 2 else 0
    size = in_features // groups if groups and in_features % groups == 0 else 0
    if size not in _GROUPS and groups != 1:
        expected = f"groups of {', '.join(map(str, _GROUPS))} or all {in_features} inputs"
        raise ShapeError("QuantizedTensor", expected=expected, got=f"scales {list(scale.shape)}")
    layout = f"group_{size}" if size in _GROUPS else "channel"
    symmetric = zeros is None or bool((zeros == _SYMMETRIC).all())
    fmt = Format.parse(f"{'int4' if symmetric else 'uint4'}@{layout}")
    kept = None if symmetric or zeros is None else zeros.contiguous().to(torch.uint8)
    return QuantizedTensor(data, fmt, (out_features, in_features), scale, None, kept)
