// Numbers in memory, float32 or bfloat16, which are computed with in float32.

#pragma once

#include "simd.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"

namespace {

typedef uint32_t Bits __attribute__((may_alias));

void load_numbers(const void* data, bool bfloat16, Int begin, Int width, float* into) {
    if (bfloat16) {
        const uint16_t* from = static_cast<const uint16_t*>(data) + begin;
        for (Int i = 0; i < width; i++) reinterpret_cast<Bits*>(into)[i] = Bits(from[i]) << 16;
    } else {
        std::copy_n(static_cast<const float*>(data) + begin, width, into);
    }
}

void store_numbers(const float* from, Int width, void* data, bool bfloat16, Int begin) {
    if (!bfloat16) {
        std::copy_n(from, width, static_cast<float*>(data) + begin);
        return;
    }
    uint16_t* into = static_cast<uint16_t*>(data) + begin;
    const Bits* bits = reinterpret_cast<const Bits*>(from);
    for (Int i = 0; i < width; i++) {
        const uint32_t nearest_even = (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
        into[i] = from[i] == from[i] ? nearest_even : 0x7fc0;  // NaN stays NaN
    }
}

}  // namespace

#pragma GCC diagnostic pop
