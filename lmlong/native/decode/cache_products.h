// Products of a few queries with cached keys, and of their weights with cached values. Fetching the cache takes most of
// the time, so all queries that share it are multiplied with each key and each value while it is in a register.

#pragma once

#include "matmul.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace {

// a * b + sum, rounded once if the processor can. Compilers choose that anew for each loop, but a result must not depend
// on the number of queries or keys
inline FloatVec multiply_add(FloatVec a, FloatVec b, FloatVec sum) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, sum);
#else
    return a * b + sum;
#endif
}

// The formats of keys and values. `load` reads PER_LANE vectors' worth of elements: the first vector holds the first
// element of each lane, the second vector the second
struct CachedFloat32 : Float32 {
    static float from_float(float x) { return x; }
    static void load(const float* from, FloatVec (&into)[1]) { into[0] = lanes(from); }
};

struct CachedBFloat16 : BFloat16 {
    static uint16_t from_float(float x) {  // to the nearest, ties to even, as torch
        uint32_t bits;
        __builtin_memcpy(&bits, &x, sizeof bits);
        return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
    }
    static void load(const uint16_t* from, FloatVec (&into)[2]) {
        IntVec pairs;
        __builtin_memcpy(&pairs, from, sizeof pairs);
        into[0] = (FloatVec)(pairs << 16), into[1] = (FloatVec)(pairs & int32_t(0xffff0000));
    }
};

inline FloatVec broadcast(float x) { return x - FloatVec{}; }

template <typename Call>
void with_format(Int dtype, Call call) {
    if (dtype == BFLOAT16)
        call(CachedBFloat16{});
    else
        call(CachedFloat32{});
}

// The position in a vector of sums, or of factors, of each element of a key or value (size): the elements that `load`
// reads into one vector are beside each other
template <typename Format>
Int position_of(Int element, Int size) {
    constexpr Int unit = Format::PER_LANE * LANES;
    const Int begin = element / unit * unit, offset = element - begin;
    return begin + unit > size ? element : begin + offset % Format::PER_LANE * LANES + offset / Format::PER_LANE;
}

// In each group of four lanes: runs of RUN lanes of a and b in turn, from lane FROM of each
template <Int RUN, Int FROM, Int... I>
FloatVec zip_fours(FloatVec a, FloatVec b, std::integer_sequence<Int, I...>) {
#define SOURCE (I / 4 * 4 + FROM + I % 4 / (2 * RUN) * RUN + I % RUN + I % 4 / RUN % 2 * LANES)
#if defined(__clang__)
    return __builtin_shufflevector(a, b, SOURCE...);
#else
    return __builtin_shuffle(a, b, IntVec{int32_t(SOURCE)...});
#endif
#undef SOURCE
}

typedef float FourFloats __attribute__((vector_size(16)));

// The sum of the lanes of each of four vectors
FourFloats sums_of_lanes(FloatVec a, FloatVec b, FloatVec c, FloatVec d) {
    constexpr auto order = std::make_integer_sequence<Int, LANES>();
    const FloatVec ab = zip_fours<1, 0>(a, b, order) + zip_fours<1, 2>(a, b, order);
    const FloatVec cd = zip_fours<1, 0>(c, d, order) + zip_fours<1, 2>(c, d, order);
    const FloatVec abcd = zip_fours<2, 0>(ab, cd, order) + zip_fours<2, 2>(ab, cd, order);
    FourFloats fours[LANES / 4], sum;
    __builtin_memcpy(fours, &abcd, sizeof abcd);
    sum = fours[0];
    UNROLL(i, LANES / 4 - 1) sum += fours[i + 1];
    return sum;
}

struct Sums {
    float* data;
    Int stride;
};

// The next LANES elements of the last ones, which fill no vector, in their order; zeros after the end
template <typename Format>
FloatVec load_rest(const typename Format::Element* from, Int size) {
    FloatVec rest = {};
    for (Int i = 0; i < std::min(size, LANES); i++) rest[i] = Format::to_float(from[i]);
    return rest;
}

constexpr Int KEYS_TOGETHER = 4;

// logits (QUERIES, KEYS) = the products of queries, padded with zeros, with up to four keys (KEYS, size). The same to the
// bit for any number of keys and queries
template <typename Format, Int QUERIES, Int KEYS>
void multiply_keys(const typename Format::Element* keys, Int size, Vectors queries, Sums logits) {
    constexpr Int unit = Format::PER_LANE * LANES;
    FloatVec sums[QUERIES][KEYS_TOGETHER] = {};
    Int i = 0;
    for (; i + unit <= size; i += unit) UNROLL(key, KEYS) {
        FloatVec x[Format::PER_LANE];
        Format::load(keys + key * size + i, x);
        UNROLL(part, Format::PER_LANE) UNROLL(query, QUERIES)
            sums[query][key] = multiply_add(
                x[part], lanes(queries.data + query * queries.stride + i + part * LANES), sums[query][key]);
    }
    for (; i < size; i += LANES) UNROLL(key, KEYS) {
        const FloatVec x = load_rest<Format>(keys + key * size + i, size - i);
        UNROLL(query, QUERIES)
            sums[query][key] = multiply_add(x, lanes(queries.data + query * queries.stride + i), sums[query][key]);
    }
    UNROLL(query, QUERIES) {
        const auto& sum = sums[query];
        const FourFloats totals = sums_of_lanes(sum[0], sum[1], sum[2], sum[3]);
        __builtin_memcpy(logits.data + query * logits.stride, &totals, KEYS * sizeof(float));
    }
}

// Add `count` values (count, size), from element `begin` of each, times the weights of each query. VECTORS of elements
// are added at once
template <typename Format, Int QUERIES, Int VECTORS>
void add_vectors(
    const typename Format::Element* values, Int count, Int size, Int begin, Vectors weights, Sums into) {
    FloatVec sums[QUERIES][VECTORS];
    UNROLL(query, QUERIES) UNROLL(i, VECTORS) sums[query][i] = lanes(into.data + query * into.stride + begin + i * LANES);
    for (Int t = 0; t < count; t++) UNROLL(i, VECTORS / Format::PER_LANE) {
        FloatVec x[Format::PER_LANE];
        Format::load(values + t * size + begin + i * Format::PER_LANE * LANES, x);
        UNROLL(query, QUERIES) {
            const FloatVec weight = broadcast(weights.data[query * weights.stride + t]);
            UNROLL(part, Format::PER_LANE) {
                FloatVec& sum = sums[query][i * Format::PER_LANE + part];
                sum = multiply_add(weight, x[part], sum);
            }
        }
    }
    UNROLL(query, QUERIES) UNROLL(i, VECTORS) lanes(into.data + query * into.stride + begin + i * LANES) = sums[query][i];
}

template <typename Format, Int QUERIES>
void add_values(const typename Format::Element* values, Int count, Int size, Vectors weights, Sums into) {
    constexpr Int WIDE = QUERIES == 1 ? 8 : 4, NARROW = Format::PER_LANE;
    Int i = 0;
    for (; i + WIDE * LANES <= size; i += WIDE * LANES)
        add_vectors<Format, QUERIES, WIDE>(values, count, size, i, weights, into);
    for (; i + NARROW * LANES <= size; i += NARROW * LANES)
        add_vectors<Format, QUERIES, NARROW>(values, count, size, i, weights, into);
    for (; i < size; i += LANES)
        for (Int t = 0; t < count; t++) {
            const FloatVec x = load_rest<Format>(values + t * size + i, size - i);
            UNROLL(query, QUERIES) {
                const FloatVec weight = broadcast(weights.data[query * weights.stride + t]);
                float* sum = into.data + query * into.stride + i;
                lanes(sum) = multiply_add(weight, x, lanes(sum));
            }
        }
}

template <Int COUNT>
using Count = std::integral_constant<Int, COUNT>;

// Call with the first of some queries and their number, in groups of up to three: more need too many registers
template <typename Call>
void each_group(Int queries, Call call) {
    for (Int first = 0, groups = (queries + 2) / 3, count; groups; groups--, first += count) {
        count = (queries - first + groups - 1) / groups;
        if (count == 1) call(first, Count<1>{});
        if (count == 2) call(first, Count<2>{});
        if (count == 3) call(first, Count<3>{});
    }
}

}  // namespace
