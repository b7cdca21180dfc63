// Moments in 8 bits: blockwise.py says what the codes are and why; this is the same arithmetic.
#pragma once

#include "formats.h"

namespace codes {

constexpr int block = 256;
constexpr int fraction = 20;  // bits of a float32 that a code has not
constexpr uint32_t infinity = 0x7F800000;

template <bool is_signed>
constexpr uint32_t base = (127 - (is_signed ? 15 : 31)) << 3;

// A word per element, of which both kinds of codes take some bits.
inline void make_noise(uint32_t* to, uint32_t first, uint32_t step, int n) {
    uint32_t word = first * 0x9E3779B1u + step * 0x85EBCA77u;
    for (int i = 0; i < n; i++, word += 0x9E3779B1u) to[i] = (word ^ (word >> 15)) * 0x7FEB352Du;
}

template <bool is_signed>
void decode_block(const uint8_t* __restrict from, float scale, float* __restrict to, int n) {
    for (int i = 0; i < n; i++) {
        const uint32_t code = is_signed ? uint32_t(int32_t(int8_t(from[i]))) : from[i];
        const uint32_t magnitude = is_signed ? code & 0x7F : code;
        const uint32_t word = magnitude ? (magnitude + base<is_signed>) << fraction : 0;
        to[i] = formats::from_bits(word | (is_signed ? code & 0x80000000 : 0)) * scale;
    }
}

template <bool is_signed>
void encode_block(const float* __restrict from, const uint32_t* __restrict noise, uint8_t* __restrict to,
                  float* __restrict scale, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++) {
        const uint32_t word = formats::bits(from[i]) & 0x7FFFFFFF;
        largest = word > largest ? word : largest;  // of bits: a NaN is larger than anything
    }
    largest = largest < infinity ? largest : infinity;
    const uint32_t power = (largest + (1u << fraction) - 1) & infinity;
    *scale = formats::from_bits(power);
    const float inverse = power ? 1.0f / *scale : 0.0f;
    for (int i = 0; i < n; i++) {
        const uint32_t word = formats::bits(from[i]);
        const uint32_t scaled = formats::bits(formats::from_bits(word & 0x7FFFFFFF) * inverse);
        const uint32_t added = is_signed ? noise[i] >> 12 : noise[i] >> 8 & 0xFFFFF;
        const uint32_t lowest = base<is_signed> + (is_signed ? 0 : scaled < 1 ? scaled : 1);
        const uint32_t rounded = (scaled + added) >> fraction;
        const uint32_t code = (rounded > lowest ? rounded : lowest) - base<is_signed>;
        to[i] = uint8_t(is_signed ? (code & 0x7F) | word >> 31 << 7 : code);
    }
}

}  // namespace codes
