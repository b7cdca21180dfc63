"""Updates over many tensors in one launch: unscale, clip, update, cast to the model's dtype in one pass over memory.

Every rule is a body over the elements of one program; what is read and written, and from which tensors, is the same for
all of them. `many.py` makes the table of tensors and launches.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pointer(row, column, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    found = tl.load(row + column).to(tl.pointer_type(TYPE))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _size(places, tensor, ALIGNED: tl.constexpr):
    found = tl.load(places + 2 * tensor + 1)
    if ALIGNED:  # as addresses are: what is inside ends with a whole vector, otherwise elements are moved one by one
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _read(row, column, at, inside, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    return tl.load(_pointer(row, column, TYPE, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write(row, column, at, inside, values, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    tl.store(_pointer(row, column, TYPE, ALIGNED) + at, values.to(TYPE), mask=inside)


@triton.jit
def _read_moment(
    row, column, at, inside, TYPE: tl.constexpr, CODED: tl.constexpr, SIGNED: tl.constexpr, SHARE: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    if CODED:
        codes = tl.load(_pointer(row, column, tl.uint8, ALIGNED) + at, mask=inside, other=0)
        scales = tl.load(_pointer(row, column + 3, tl.float32, ALIGNED) + at // SHARE, mask=inside, other=0.0)
        return decode(codes, SIGNED) * scales
    else:
        return _read(row, column, at, inside, TYPE, ALIGNED)


@triton.jit
def _write_moment(
    row, column, start, size, values, step, TYPE: tl.constexpr, CODED: tl.constexpr, SIGNED: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    if CODED:
        codes, scales = encode(values, inside, at, step, SIGNED, BLOCK, SHARE)
        tl.store(_pointer(row, column, tl.uint8, ALIGNED) + at, codes, mask=inside)
        block = start // SHARE + tl.arange(0, BLOCK // SHARE)
        tl.store(_pointer(row, column + 3, tl.float32, ALIGNED) + block, scales, mask=block * SHARE < size)
    else:
        _write(row, column, at, inside, values, TYPE, ALIGNED)


@triton.jit
def _advanced(m, v, g, first, second, rest):
    return m + first * (g - m), second * v + rest * g * g


@triton.jit
def _lamb_direction(p, m, v, inner, outer, decay):
    return m / (tl.sqrt(v + inner) + outer) + decay * p


@triton.jit
def _keep_squares(beside, number, p, u):
    tl.store(beside + 2 * number, tl.sum(p * p))
    tl.store(beside + 2 * number + 1, tl.sum(u * u))


@triton.jit(do_not_specialize=["step"])
def update_kernel(
    table, owners, places, divisor_ptr, skip_ptr, beside, factor, step, n0, n1, n2, n3, n4, n5, n6, n7,
    RULE: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    OUT: tl.constexpr, HAS_OUT: tl.constexpr, CODED: tl.constexpr, CONDITIONS: tl.constexpr, SHARE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of a row of the table: parameter, gradient, first moment, second, out, scales of both moments."""
    number = tl.program_id(0)
    tensor = tl.load(owners + number)
    start = (number - tl.load(places + 2 * tensor)) * BLOCK
    size = _size(places, tensor, ALIGNED)
    row, scale = table + 7 * tensor, factor
    if CONDITIONS:
        if tl.load(skip_ptr) != 0.0:
            return
        scale = factor / tl.load(divisor_ptr)
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    m = _read_moment(row, 2, at, inside, FIRST, CODED, True, SHARE, ALIGNED)
    if RULE != "muon_direction":
        p = _read(row, 0, at, inside, PARAM, ALIGNED)
    if RULE == "muon_direction":  # 1 - beta, and how much of the gradient is looked ahead
        g = _read(row, 1, at, inside, GRAD, ALIGNED) * scale
        advanced = m + n0 * (g - m)
        _write(row, 4, at, inside, advanced + n1 * (g - advanced), OUT, ALIGNED)
    elif RULE == "adam":  # n: keep, l2, beta1, 1 - beta1, beta2, 1 - beta2, and what divides
        g = _read(row, 1, at, inside, GRAD, ALIGNED) * scale + n1 * p
        v = _read_moment(row, 3, at, inside, SECOND, CODED, False, SHARE, ALIGNED)
        m, v = _advanced(m, v, g, n3, n4, n5)
        p = p * n0 - m / (tl.sqrt(v) * n6 + n7)
        _write_moment(row, 3, start, size, v, step, SECOND, CODED, False, SHARE, BLOCK, ALIGNED)
    elif RULE == "lion":  # keep, 1 - beta1, 1 - beta2, lr
        g = _read(row, 1, at, inside, GRAD, ALIGNED) * scale
        way = m + n1 * (g - m)
        p = p * n0 - n3 * tl.where(way > 0.0, 1.0, tl.where(way < 0.0, -1.0, 0.0))  # of NaN 0, as torch.sign
        m = m + n2 * (g - m)
    elif RULE == "lamb_moments":  # 1 - beta1, beta2, 1 - beta2, eps inside and outside of the root, decay
        g = _read(row, 1, at, inside, GRAD, ALIGNED) * scale
        v = _read_moment(row, 3, at, inside, SECOND, CODED, False, SHARE, ALIGNED)
        m, v = _advanced(m, v, g, n0, n1, n2)
        _keep_squares(beside, number, p, tl.where(inside, _lamb_direction(p, m, v, n3, n4, n5), 0.0))
        if not CODED:
            _write(row, 3, at, inside, v, SECOND, ALIGNED)
    elif RULE == "lamb_apply":  # as above, and the step size
        v = _read_moment(row, 3, at, inside, SECOND, CODED, False, SHARE, ALIGNED)
        if CODED:  # rounded once, after what was measured has been applied: so the moments advance here
            m, v = _advanced(m, v, _read(row, 1, at, inside, GRAD, ALIGNED) * scale, n0, n1, n2)
            _write_moment(row, 3, start, size, v, step, SECOND, CODED, False, SHARE, BLOCK, ALIGNED)
        p = p - n6 * tl.load(beside + tensor) * _lamb_direction(p, m, v, n3, n4, n5)
    elif RULE == "muon_apply":  # 1 - beta, lr, keep; the second column has updates, NaN where they were refused
        g = _read(row, 1, at, inside, GRAD, ALIGNED) * scale
        u = _read(row, 3, at, inside, SECOND, ALIGNED)
        p = p * n2 - n1 * tl.where(u != u, g, u)
        m = tl.where(u != u, m, m + n0 * (g - m))
    if RULE != "muon_direction" and (RULE != "lamb_apply" or CODED) and (RULE != "lamb_moments" or not CODED):
        _write_moment(row, 2, start, size, m, step, FIRST, CODED, True, SHARE, BLOCK, ALIGNED)
    if RULE != "lamb_moments" and RULE != "muon_direction":
        _write(row, 0, at, inside, p, PARAM, ALIGNED)
        if HAS_OUT:
            _write(row, 4, at, inside, p, OUT, ALIGNED)


@triton.jit
def trust_kernel(partial, places, coefficients, low, high, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """LAMB's coefficient of each tensor, from the sums of squares that its programs left."""
    tensor = tl.program_id(0)
    first = tl.load(places + 2 * tensor)
    count = (tl.load(places + 2 * tensor + 1) + BLOCK - 1) // BLOCK
    weights = tl.zeros((WIDTH,), tl.float32)
    updates = tl.zeros((WIDTH,), tl.float32)
    for begin in range(0, count, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        weights += tl.load(partial + 2 * (first + at), mask=at < count, other=0.0)
        updates += tl.load(partial + 2 * (first + at) + 1, mask=at < count, other=0.0)
    weight, update = tl.sqrt(tl.sum(weights)), tl.sqrt(tl.sum(updates))
    ratio = weight / update
    ratio = tl.where(ratio != ratio, ratio, tl.minimum(tl.maximum(ratio, low), high))  # a NaN is not clamped away
    tl.store(coefficients + tensor, tl.where((weight != 0.0) & (update != 0.0), ratio, 1.0))


@triton.jit
def decode(codes, SIGNED: tl.constexpr):
    """The values of codes under a scale of 1."""
    wide = codes.to(tl.int32)
    magnitude = wide
    lowest = 768  # (127 - 31) << 3
    if SIGNED:
        magnitude = wide & 0x7F
        lowest = 896  # (127 - 15) << 3
    values = tl.where(magnitude == 0, 0.0, ((magnitude + lowest) << 20).to(tl.float32, bitcast=True))
    if SIGNED:
        values = tl.where(wide >= 0x80, -values, values)
    return values


@triton.jit
def encode(values, inside, at, step, SIGNED: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr):
    """(codes, the scale of every SHARE elements), rounded up or down at random by the element's index and the step."""
    word = at.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x85EBCA77
    word = (word ^ (word >> 15)) * 0x7FEB352D
    magnitudes = tl.where(inside, tl.abs(values), 0.0)
    bits = tl.reshape(magnitudes.to(tl.int32, bitcast=True), (BLOCK // SHARE, SHARE))
    largest = tl.minimum(tl.max(bits, axis=1), 0x7F800000)  # of bits: a NaN is larger than anything
    # The largest code stands for 1.875 times the scale: what is above that has twice the scale.
    scales = ((largest + 0xFFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    inverse = tl.where(scales > 0, 1.0 / scales, 0.0)
    scaled = tl.reshape(magnitudes, (BLOCK // SHARE, SHARE)) * inverse[:, None]
    scaled = tl.reshape(scaled, (BLOCK,)).to(tl.int32, bitcast=True)
    if SIGNED:
        rounded = (scaled + (word >> 12).to(tl.int32)) >> 20
        code = (tl.maximum(rounded, 896) - 896) & 0x7F
        code = tl.where(values.to(tl.int32, bitcast=True) < 0, code | 0x80, code)
    else:
        rounded = (scaled + ((word >> 8) & 0xFFFFF).to(tl.int32)) >> 20
        code = (tl.maximum(rounded, 768 + tl.minimum(scaled, 1)) - 768) & 0xFF
    return code.to(tl.uint8), scales
