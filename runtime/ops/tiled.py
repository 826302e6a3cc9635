"""The tiled form of a weight: what the Hopper kernels read (`csrc/nvfp4.cuh` says why it looks like this).

int32 ``[ceil(N/64), ceil(K/64), 576]``: 64 x 64 weights in 2304 bytes: the codes of four units of 16 rows, 512 bytes
each, then 256 bytes of block scales. Padding rows and columns hold zero codes.
"""

from functools import cache

import torch
from torch import Tensor

from fp4pipe.nvfp4 import BLOCK, round_up, unpack

TILE = 64
"""Rows and columns of a block of the layout."""
_CODE_WORDS = 512
"""int32 words of codes in a block; 64 more hold its scales."""
_CHUNK = 1 << 24
"""Weights repacked at a time: bounds the int64 temporaries to about half a gigabyte."""
_SCALE_BIAS = 9
_CODE_MASK = 0x81C081C0


@cache
def _scale_bytes(device: torch.device) -> Tensor:
    """uint8 ``[256]``: e4m3 bits to the byte ``[e0 m2 m1 m0 e4 e3 e2 e1]``; subnormal scales are normalised."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().nan_to_num().abs()
    mantissa, exponent = torch.frexp(torch.where(values > 0, values, 2.0**-_SCALE_BIAS))
    exponent, mantissa = exponent.long() - 1 + _SCALE_BIAS, (mantissa * 16).long() - 8
    return ((exponent & 1) << 7 | mantissa << 4 | exponent >> 1).to(torch.uint8).to(device)


@cache
def _scale_values(device: torch.device) -> Tensor:
    """float32 ``[256]``: inverse of `_scale_bytes`."""
    byte = torch.arange(256)
    exponent, mantissa = (byte & 0xF) << 1 | byte >> 7, byte >> 4 & 7
    return torch.ldexp(1 + mantissa / 8, exponent - _SCALE_BIAS).float().to(device)


def _rotate_right(words: Tensor, by: int) -> Tensor:
    return (words >> by | words << (32 - by)) & 0xFFFFFFFF


def pack_tiled(codes: Tensor, scales: Tensor) -> Tensor:
    """Repack a stored weight: uint8 codes ``[N, K/2]`` and e4m3 scales ``[N, K/16]`` to the tiled form.

    Raises:
        ValueError: A scale is negative or NaN.
    """
    scale_bits = scales.view(torch.uint8)
    if bool((scale_bits > 0x7E).any()):
        raise ValueError("NVFP4 block scales must be finite and not negative")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    step = max(TILE, _CHUNK // columns // TILE * TILE)
    return torch.cat([_pack_rows(codes[i : i + step], scale_bits[i : i + step]) for i in range(0, rows, step)])


def _pack_rows(codes: Tensor, scale_bits: Tensor) -> Tensor:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    nibbles = unpack(codes).unflatten(1, (-1, BLOCK)) * (scale_bits != 0).unsqueeze(-1)  # a zero scale means zeros
    pad = (0, round_up(columns, TILE) - columns, 0, round_up(rows, TILE) - rows)
    nibbles = torch.nn.functional.pad(nibbles.flatten(1), pad).long()
    scale_bytes = _scale_bytes(codes.device)[scale_bits.long()]
    scale_bytes = torch.nn.functional.pad(scale_bytes, (0, pad[1] // BLOCK, 0, pad[3]))

    # Row = (block, unit, half of 8, g), column = (group, t, half of 8, c, even or odd).
    blocks, groups = nibbles.shape[0] // TILE, nibbles.shape[1] // TILE
    split = nibbles.view(blocks, 4, 2, 8, groups, 4, 2, 4, 2).permute(0, 4, 1, 5, 3, 7, 6, 2, 8)
    halves = (split & 8) << 12 | (split & 7) << 6
    pairs = (halves[..., 0] | halves[..., 1] << 16).flatten(-2).unbind(-1)  # registers 0..3 = (column half, row half)
    last = split[..., 1, 1, :]
    spread = (last >> 3 & 1) << 1 | last >> 2 & 1 | (last >> 1 & 1) << 4 | (last & 1) << 3
    words = pairs[0] | _rotate_right(pairs[1], 10) | _rotate_right(pairs[2], 13) | spread[..., 0] | spread[..., 1] << 16
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    scale_bytes = scale_bytes.view(blocks, 4, 2, 8, groups, 4).permute(0, 4, 5, 3, 1, 2).reshape(blocks, groups, -1)
    return torch.cat([words.reshape(blocks, groups, _CODE_WORDS), scale_bytes.contiguous().view(torch.int32)], -1)


def tiled_values(tiled: Tensor) -> Tensor:
    """Code value x block scale of a tiled weight, as float32 ``[N, K]`` padded to multiples of 64.

    Goes through the same bit operations as the kernels, so it is also their specification.
    """
    blocks, groups = tiled.shape[:2]
    words = tiled[..., :_CODE_WORDS].reshape(blocks, groups, 4, 4, 8, 4).long() & 0xFFFFFFFF
    registers = (words, _rotate_right(words, 22), _rotate_right(words, 19), (words & 0x001B001B) * 0x4108)
    bits = torch.stack([register & _CODE_MASK for register in registers], -1)
    bits = torch.stack([bits & 0xFFFF, bits >> 16], -1)
    values = (bits << 16).to(torch.int32).view(torch.float32) * 2.0**126  # bf16 bits in the upper half of a float32
    split = values.view(blocks, groups, 4, 4, 8, 4, 2, 2, 2).permute(0, 2, 7, 4, 1, 3, 6, 5, 8)
    scale_bytes = tiled[..., _CODE_WORDS:].contiguous().view(torch.uint8)
    scales = _scale_values(tiled.device)[scale_bytes.long()].view(blocks, groups, 4, 8, 4, 2)
    scales = scales.permute(0, 4, 5, 3, 1, 2).reshape(blocks * TILE, groups * 4)
    return (split.reshape(blocks * TILE, groups * 4, BLOCK) * scales.unsqueeze(-1)).flatten(1)
