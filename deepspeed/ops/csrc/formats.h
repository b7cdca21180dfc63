// What numbers are held in, to float32 and back, a run of them at a time. The loops are written for the vectoriser.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace formats {

enum Format : int32_t { none = 0, f32 = 1, bf16 = 2, f16 = 3, code8 = 4 };  // as host_kernels.py numbers them

// Bytes of a number.
inline int64_t size(Format format) { return format == f32 ? 4 : format == code8 ? 1 : 2; }

inline uint32_t bits(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word;
}

inline float from_bits(uint32_t word) {
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline void widen_bf16(const uint16_t* __restrict from, float* __restrict to, int n) {
    for (int i = 0; i < n; i++) to[i] = from_bits(uint32_t(from[i]) << 16);
}

// To nearest, ties to even, as torch rounds.
inline void narrow_bf16(const float* __restrict from, uint16_t* __restrict to, int n) {
    int i = 0;
#if defined(__aarch64__)
    for (; i + 8 <= n; i += 8) {
        uint32x4_t word[2], number[2], rounding[2];
        for (int k = 0; k < 2; k++) {
            const float32x4_t value = vld1q_f32(from + i + 4 * k);
            word[k] = vreinterpretq_u32_f32(value);
            number[k] = vceqq_f32(value, value);
            rounding[k] = vaddq_u32(vandq_u32(vshrq_n_u32(word[k], 16), vdupq_n_u32(1)), vdupq_n_u32(0x7FFF));
        }
        const uint16x8_t high = vaddhn_high_u32(vaddhn_u32(word[0], rounding[0]), word[1], rounding[1]);
        const uint16x8_t valid = vuzp1q_u16(vreinterpretq_u16_u32(number[0]), vreinterpretq_u16_u32(number[1]));
        vst1q_u16(to + i, vbslq_u16(valid, high, vdupq_n_u16(0x7FC0)));
    }
#endif
    for (; i < n; i++) {
        const uint32_t word = bits(from[i]);
        const uint32_t rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16;
        to[i] = uint16_t((word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

#if defined(__aarch64__)

inline void widen_f16(const uint16_t* __restrict from, float* __restrict to, int n) {
    const __fp16* half = reinterpret_cast<const __fp16*>(from);
    for (int i = 0; i < n; i++) to[i] = float(half[i]);
}

inline void narrow_f16(const float* __restrict from, uint16_t* __restrict to, int n) {
    __fp16* half = reinterpret_cast<__fp16*>(to);
    int i = 0;
    for (; i + 4 <= n; i += 4) vst1_f16(half + i, vcvt_f16_f32(vld1q_f32(from + i)));
    for (; i < n; i++) half[i] = __fp16(from[i]);
}

#else

inline float widen_one_f16(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    // The exponent is rebased by a multiplication, which makes normal numbers of subnormal ones too.
    return from_bits(sign | bits(from_bits(rest << 13) * 0x1p112f));
}

inline uint16_t narrow_one_f16(float value) {
    const uint32_t word = bits(value), sign = (word >> 16) & 0x8000, rest = word & 0x7FFFFFFF;
    if (rest > 0x7F800000) return uint16_t(sign | 0x7E00);
    if (rest >= 0x477FF000) return uint16_t(sign | 0x7C00);  // rounds to more than the largest
    if (rest < 0x38800000)  // subnormal: the addition rounds where the last bit will be
        return uint16_t(sign | (bits(from_bits(rest) + 0.5f) - bits(0.5f)));
    return uint16_t(sign | ((rest + 0xFFF + ((rest >> 13) & 1)) - 0x38000000) >> 13);
}

inline void widen_f16(const uint16_t* __restrict from, float* __restrict to, int n) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
    for (; i < n; i++) to[i] = widen_one_f16(from[i]);
}

inline void narrow_f16(const float* __restrict from, uint16_t* __restrict to, int n) {
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++) to[i] = narrow_one_f16(from[i]);
}

#endif

// The values of `n` numbers from `begin` on: float32 where they lie, others in `room`.
inline float* read(Format format, void* base, int64_t begin, int n, float* room) {
    if (format == f32) return static_cast<float*>(base) + begin;
    const uint16_t* half = static_cast<const uint16_t*>(base) + begin;
    format == bf16 ? widen_bf16(half, room, n) : widen_f16(half, room, n);
    return room;
}

// Put `n` values to where they belong; float32 that was updated where it lies is there already.
inline void write(Format format, void* base, int64_t begin, int n, const float* values) {
    if (format == f32) {
        float* place = static_cast<float*>(base) + begin;
        if (place != values) std::memcpy(place, values, n * sizeof(float));
        return;
    }
    uint16_t* half = static_cast<uint16_t*>(base) + begin;
    format == bf16 ? narrow_bf16(values, half, n) : narrow_f16(values, half, n);
}

}  // namespace formats
