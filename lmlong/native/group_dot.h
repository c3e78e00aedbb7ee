// Dot products of integers for the processor: four codes of a row in each lane, times four int8 of a vector, the same in
// all lanes. All forms compute the same integers.

#pragma once

#include <cstring>

#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__wasm__)
#include <wasm_simd128.h>
#endif

namespace {

// Int4Sums and Int8Sums add up the products of a group of 32 inputs: add(codes, x) takes bytes of 0 to 15, or of -127 to
// 127, and total(sum of x) returns the sums.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))

struct Int4Sums {
    IntVec sum = {};
#if defined(__AVX512VNNI__)
    void add(IntVec codes, IntVec x) { sum = (IntVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x); }
#else
    void add(IntVec codes, IntVec x) {
        sum = (IntVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
    }
#endif
    IntVec total(int32_t) const { return sum; }
};

struct Int8Sums {  // the instruction takes unsigned codes
    Int4Sums sums;
    void add(IntVec codes, IntVec x) { sums.add(codes ^ int32_t(0x80808080), x); }
    IntVec total(int32_t sum_of_x) const { return sums.sum - 128 * sum_of_x; }
};

#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))

#if defined(__AVX512BW__)
IntVec add_int16(IntVec a, IntVec b) { return (IntVec)_mm512_add_epi16((__m512i)a, (__m512i)b); }
IntVec add_pairs(IntVec a) { return (IntVec)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
IntVec multiply(IntVec codes, IntVec x) { return (IntVec)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x); }
IntVec magnitude(IntVec codes) { return (IntVec)_mm512_abs_epi8((__m512i)codes); }
IntVec with_sign(IntVec x, IntVec codes) {
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)codes);
    return (IntVec)_mm512_mask_sub_epi8((__m512i)x, negative, _mm512_setzero_si512(), (__m512i)x);
}
#else
IntVec add_int16(IntVec a, IntVec b) { return (IntVec)_mm256_add_epi16((__m256i)a, (__m256i)b); }
IntVec add_pairs(IntVec a) { return (IntVec)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
IntVec multiply(IntVec codes, IntVec x) { return (IntVec)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x); }
IntVec magnitude(IntVec codes) { return (IntVec)_mm256_abs_epi8((__m256i)codes); }
IntVec with_sign(IntVec x, IntVec codes) { return (IntVec)_mm256_sign_epi8((__m256i)x, (__m256i)codes); }
#endif

struct Int4Sums {  // 8 sums of pairs, each at most 2 * 15 * 127, fit in int16
    IntVec sum = {};
    void add(IntVec codes, IntVec x) { sum = add_int16(sum, multiply(codes, x)); }
    IntVec total(int32_t) const { return add_pairs(sum); }
};

struct Int8Sums {  // a sum of a pair, at most 2 * 127 * 127, fits in int16
    IntVec sum = {};
    void add(IntVec codes, IntVec x) { sum += add_pairs(multiply(magnitude(codes), with_sign(x, codes))); }
    IntVec total(int32_t) const { return sum; }
};

#elif defined(__ARM_FEATURE_DOTPROD)

struct Int8Sums {
    IntVec sum = {};
    void add(IntVec codes, IntVec x) { sum = (IntVec)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x); }
    IntVec total(int32_t) const { return sum; }
};

using Int4Sums = Int8Sums;

#elif defined(__aarch64__)

struct Int4Sums {  // 8 products, each at most 15 * 127, fit in int16
    int16x8_t low = {}, high = {};
    void add(IntVec codes, IntVec x) {
        low = vmlal_s8(low, vget_low_s8((int8x16_t)codes), vget_low_s8((int8x16_t)x));
        high = vmlal_high_s8(high, (int8x16_t)codes, (int8x16_t)x);
    }
    IntVec total(int32_t) const { return (IntVec)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)); }
};

struct Int8Sums {
    int32x4_t low = {}, high = {};
    void add(IntVec codes, IntVec x) {
        low = vpadalq_s16(low, vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8((int8x16_t)x)));
        high = vpadalq_s16(high, vmull_high_s8((int8x16_t)codes, (int8x16_t)x));
    }
    IntVec total(int32_t) const { return (IntVec)vpaddq_s32(low, high); }
};

#elif defined(__wasm__)

typedef int16_t PairVec __attribute__((vector_size(16)));  // of each lane, bytes 0 and 2 or bytes 1 and 3

inline IntVec add_pairs(IntVec sum, PairVec codes, PairVec x) {
    return sum + (IntVec)wasm_i32x4_dot_i16x8((v128_t)codes, (v128_t)x);
}

struct Int4Sums {
    IntVec sum = {};
    void add(IntVec codes, IntVec x) {
        sum = add_pairs(sum, (PairVec)(codes & 0x00ff00ff), (PairVec)x << 8 >> 8);
        sum = add_pairs(sum, (PairVec)(codes >> 8 & 0x00ff00ff), (PairVec)x >> 8);
    }
    IntVec total(int32_t) const { return sum; }
};

struct Int8Sums {
    IntVec sum = {};
    void add(IntVec codes, IntVec x) {
        sum = add_pairs(sum, (PairVec)codes << 8 >> 8, (PairVec)x << 8 >> 8);
        sum = add_pairs(sum, (PairVec)codes >> 8, (PairVec)x >> 8);
    }
    IntVec total(int32_t) const { return sum; }
};

#else

struct Int8Sums {
    IntVec sum = {};
    void add(IntVec codes, IntVec x) {
        UNROLL(i, 4) sum += ((codes << (24 - 8 * i)) >> 24) * ((x << (24 - 8 * i)) >> 24);
    }
    IntVec total(int32_t) const { return sum; }
};

using Int4Sums = Int8Sums;

#endif

// a * b + c, rounded once
FloatVec fused(FloatVec a, FloatVec b, FloatVec c) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (FloatVec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (FloatVec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__wasm__)  // by float64, in which products are exact; a sum is rounded to it first, which matters rarely
    const auto wide = [](FloatVec x) { return wasm_f64x2_promote_low_f32x4((v128_t)x); };
    const auto halves = [&](FloatVec x, FloatVec y, FloatVec z) {
        return wasm_f32x4_demote_f64x2_zero(wasm_f64x2_add(wasm_f64x2_mul(wide(x), wide(y)), wide(z)));
    };
    const auto upper = [](FloatVec x) { return __builtin_shufflevector(x, x, 2, 3, 2, 3); };
    return (FloatVec)wasm_i64x2_shuffle(halves(a, b, c), halves(upper(a), upper(b), upper(c)), 0, 2);
#else
    FloatVec sum;
    UNROLL(i, LANES) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#endif
}

// Round to the nearest integer, and halves to even
IntVec rounded(FloatVec x) {
#if defined(__AVX512F__)
    return (IntVec)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX__)
    return (IntVec)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
    return (IntVec)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (IntVec)vcvtnq_s32_f32((float32x4_t)x);
#elif defined(__wasm__)
    return (IntVec)wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest((v128_t)x));
#else
    IntVec result;
    UNROLL(i, LANES) result[i] = int32_t(__builtin_rintf(x[i]));
    return result;
#endif
}

// Numbers in float16
FloatVec from_float16(const uint16_t* halves) {
#if defined(__AVX512F__)
    return (FloatVec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#elif defined(__F16C__)
    return (FloatVec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
#elif defined(__aarch64__)
    return (FloatVec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves)));
#elif defined(__wasm__)  // finite ones
    const IntVec bits = (IntVec)wasm_i32x4_load16x4(halves);  // the exponents have other offsets
    return (FloatVec)(bits << 13 & int32_t(0x8fffe000)) * 0x1p112f;
#else
    IntVec bits;
    UNROLL(i, LANES) bits[i] = halves[i];
    const IntVec positive = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
    const IntVec finite = (IntVec)((FloatVec)positive * 0x1p112f);  // the exponents have other offsets
    return (FloatVec)((positive >= 0x0f800000 ? positive | 0x7f800000 : finite) | sign);
#endif
}

}  // namespace
