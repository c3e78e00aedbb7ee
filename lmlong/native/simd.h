// SIMD vectors of the processor's width, their exponentials, products of matrices that fit in the L1 cache, and memory
// for intermediate results.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"  // not every library uses all of these

namespace {

using Int = int64_t;

// LANES of a vector; rows of the register block of a matrix product
#if defined(__AVX512F__)
constexpr Int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr Int LANES = 8, ROWS = 4;
#else
constexpr Int LANES = 4, ROWS = 4;
#endif
constexpr Int TILE = 16;  // the dimensions of all matrices are padded to multiples of this

typedef float FloatVec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef FloatVec UnalignedFloatVec __attribute__((aligned(4), may_alias));  // in memory

#define UNROLL(i, count) _Pragma("GCC unroll 16") for (Int i = 0; i < (count); i++)

Int padded(Int size) { return (size + TILE - 1) / TILE * TILE; }

UnalignedFloatVec& lanes(float* x) { return *reinterpret_cast<UnalignedFloatVec*>(x); }

const UnalignedFloatVec& lanes(const float* x) { return *reinterpret_cast<const UnalignedFloatVec*>(x); }

struct StridedMatrix {  // read one element at a time
    const float* data;
    Int row, column;  // strides
};

// One register block of `add_matmul`: R rows of VECTORS vectors
template <Int R, Int VECTORS>
inline void add_matmul_block(float* sum, Int width, StridedMatrix left, const float* right, Int stride, Int depth) {
    FloatVec total[R][VECTORS] = {};  // added to `sum` at the end: small terms would lose digits beside a large sum
    for (Int i = 0; i < depth; i++) {
        FloatVec x[VECTORS];
        UNROLL(v, VECTORS) x[v] = lanes(right + i * stride + v * LANES);
        UNROLL(r, R) {
            const float factor = left.data[r * left.row + i * left.column];
            UNROLL(v, VECTORS) total[r][v] += factor * x[v];
        }
    }
    UNROLL(r, R) UNROLL(v, VECTORS) lanes(sum + r * width + v * LANES) += total[r][v];
}

// sum (rows, width) += left (rows, depth) right (depth, width); `sum` and `right` are contiguous
void add_matmul(float* sum, Int rows, Int width, StridedMatrix left, const float* right, Int depth) {
    for (Int r = 0; r < rows; r += ROWS, left.data += ROWS * left.row, sum += ROWS * width) {
        Int c = 0;
        for (; c + 2 * LANES <= width; c += 2 * LANES)
            add_matmul_block<ROWS, 2>(sum + c, width, left, right + c, width, depth);
        if (c < width) add_matmul_block<ROWS, 1>(sum + c, width, left, right + c, width, depth);
    }
}

// Interleave a and b, from lane FROM of each
template <Int FROM, Int... I>
FloatVec interleave(FloatVec a, FloatVec b, std::integer_sequence<Int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (FROM + I / 2 + I % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, IntVec{int32_t(FROM + I / 2 + I % 2 * LANES)...});
#endif
}

// (rows, width) -> (width, rows), in squares of LANES; each round of interleaving rotates the bits of the index (row,
// column) by one
void transpose(const float* from, Int rows, Int width, float* into) {
    constexpr auto order = std::make_integer_sequence<Int, LANES>();
    for (Int r = 0; r < rows; r += LANES) {
        for (Int c = 0; c < width; c += LANES) {
            FloatVec x[LANES], interleaved[LANES];
            UNROLL(i, LANES) x[i] = lanes(from + (r + i) * width + c);
            UNROLL(round, __builtin_ctz(LANES)) {
                UNROLL(i, LANES / 2) {
                    interleaved[2 * i] = interleave<0>(x[i], x[i + LANES / 2], order);
                    interleaved[2 * i + 1] = interleave<LANES / 2>(x[i], x[i + LANES / 2], order);
                }
                UNROLL(i, LANES) x[i] = interleaved[i];
            }
            UNROLL(i, LANES) lanes(into + (c + i) * rows + r) = x[i];
        }
    }
}

constexpr float LOG2_E = 1.44269504f;

// 2^x for x from -126 to 126, within 2 ulp
FloatVec simd_exp2(FloatVec x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: a float of this size has no fraction bits, so adding it rounds x
    const FloatVec shifted = x + shift, fraction = x - (shifted - shift);
    const float coefficients[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    FloatVec sum = fraction * 1.5252734e-5f + 1.5403530e-4f;
    UNROLL(i, 6) sum = sum * fraction + coefficients[i];
    return sum * (FloatVec)(((IntVec)shifted << 23) + (127 << 23));
}

// e^x; 0 if it is below 2^-126
FloatVec simd_exp(FloatVec x) {
    const FloatVec exponent = x * LOG2_E, zero = {};
    const FloatVec at_least = exponent < -126.0f ? zero - 126.0f : exponent;
    const FloatVec power = simd_exp2(at_least > 127.0f ? zero + 127.0f : at_least);
    return exponent < -126.0f ? zero : power;
}

// Multiply each row of x (TILE, width) by its factor
void scale_rows(float* x, Int width, const float* factors) {
    for (Int t = 0; t < TILE; t++)
        for (Int i = 0; i < width; i++) x[t * width + i] *= factors[t];
}

// Multiply each column of xT (width, TILE) by its factor
void scale_columns(float* xT, Int width, const float* factors) {
    for (Int i = 0; i < width; i++)
        for (Int t = 0; t < TILE; t++) xT[i * TILE + t] *= factors[t];
}

struct Scratch {  // slices of a buffer that Python allocated
    float* begin;
    Int used = 0;

    float* take(Int size) {
        float* taken = begin + used;
        used += padded(size);
        return taken;
    }
};

// Run by several workers at once: each takes the next head of a row that is left
template <typename Job, typename Run>
void each_batch_head(Job* job, Run run) {
    while (true) {
        const Int index = __atomic_fetch_add(&job->batch_heads_begun, 1, __ATOMIC_RELAXED);
        if (index >= job->batch_heads) return;
        run(index);
    }
}

float dot(const float* x, const float* y, Int size) {
    FloatVec sums[4] = {};
    for (Int i = 0; i < size; i += 4 * LANES) UNROLL(j, std::min(Int(4), (size - i) / LANES))
        sums[j] += lanes(x + i + j * LANES) * lanes(y + i + j * LANES);
    const FloatVec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float total = 0;
    UNROLL(j, LANES) total += sum[j];
    return total;
}

}  // namespace

#pragma GCC diagnostic pop
