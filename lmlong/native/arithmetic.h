// Vectors of as many lanes as the processor has, exponentials of them, and products of matrices so small that they stay
// in the nearest cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace {

using Int = int64_t;

#if defined(__AVX512F__)
constexpr Int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr Int LANES = 8, ROWS = 4;
#else
constexpr Int LANES = 4, ROWS = 4;
#endif
constexpr Int CHUNK = 16;  // what all sizes of matrices are filled up to multiples of

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Wholes __attribute__((vector_size(4 * LANES)));
typedef Floats Anywhere __attribute__((aligned(4), may_alias));  // in memory

#define EACH(i, count) _Pragma("GCC unroll 16") for (Int i = 0; i < (count); i++)

Int padded(Int width) { return (width + CHUNK - 1) / CHUNK * CHUNK; }

Anywhere& lanes(float* x) { return *reinterpret_cast<Anywhere*>(x); }

const Anywhere& lanes(const float* x) { return *reinterpret_cast<const Anywhere*>(x); }

struct Numbers {  // a matrix that is taken number by number
    const float* at;
    Int row, depth;  // from one to the next
};

template <Int R, Int V>
inline void add_tile(float* sum, Int width, Numbers left, const float* right, Int stride, Int depth) {
    Floats total[R][V] = {};  // of its own, since few numbers lose less when they are added before a large one
    for (Int i = 0; i < depth; i++) {
        Floats x[V];
        EACH(v, V) x[v] = lanes(right + i * stride + v * LANES);
        EACH(r, R) {
            const float factor = left.at[r * left.row + i * left.depth];
            EACH(v, V) total[r][v] += factor * x[v];
        }
    }
    EACH(r, R) EACH(v, V) lanes(sum + r * width + v * LANES) += total[r][v];
}

// sum (rows, width) += left (rows, depth) right (depth, width), whose rows lie `width` apart
void add_product(float* sum, Int rows, Int width, Numbers left, const float* right, Int depth) {
    for (Int r = 0; r < rows; r += ROWS, left.at += ROWS * left.row, sum += ROWS * width) {
        Int c = 0;
        for (; c + 2 * LANES <= width; c += 2 * LANES) add_tile<ROWS, 2>(sum + c, width, left, right + c, width, depth);
        if (c < width) add_tile<ROWS, 1>(sum + c, width, left, right + c, width, depth);
    }
}

template <Int FROM, Int... I>
Floats interleaved(Floats a, Floats b, std::integer_sequence<Int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (FROM + I / 2 + I % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, Wholes{int32_t(FROM + I / 2 + I % 2 * LANES)...});
#endif
}

// (CHUNK, width) -> (width, CHUNK), in squares; each round turns the binary places of row and column by one
void transpose(const float* from, Int rows, Int width, float* into) {
    constexpr auto order = std::make_integer_sequence<Int, LANES>();
    for (Int r = 0; r < rows; r += LANES) {
        for (Int c = 0; c < width; c += LANES) {
            Floats x[LANES], turned[LANES];
            EACH(i, LANES) x[i] = lanes(from + (r + i) * width + c);
            EACH(round, __builtin_ctz(LANES)) {
                EACH(i, LANES / 2) {
                    turned[2 * i] = interleaved<0>(x[i], x[i + LANES / 2], order);
                    turned[2 * i + 1] = interleaved<LANES / 2>(x[i], x[i + LANES / 2], order);
                }
                EACH(i, LANES) x[i] = turned[i];
            }
            EACH(i, LANES) lanes(into + (c + i) * rows + r) = x[i];
        }
    }
}

constexpr float PER_LN2 = 1.44269504f;

// 2^x for x from -126 to 126, within 2 units of the last place
Floats power_of_2(Floats x) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: beside it, a float has no places after the point
    const Floats moved = x + shift, part = x - (moved - shift);
    const float series[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f};
    Floats sum = part * 1.5252734e-5f + 1.5403530e-4f;
    EACH(i, 6) sum = sum * part + series[i];
    return sum * (Floats)(((Wholes)moved << 23) + (127 << 23));
}

// e^x, and 0 for the least of numbers
Floats exponential(Floats x) {
    const Floats exponent = x * PER_LN2, zero = {};
    const Floats above = exponent < -126.0f ? zero - 126.0f : exponent;
    const Floats power = power_of_2(above > 127.0f ? zero + 127.0f : above);
    return exponent < -126.0f ? zero : power;
}

void scale(float* rows, Int width, const float* factors) {
    for (Int t = 0; t < CHUNK; t++)
        for (Int i = 0; i < width; i++) rows[t * width + i] *= factors[t];
}

void scale_across(float* across, Int width, const float* factors) {
    for (Int i = 0; i < width; i++)
        for (Int t = 0; t < CHUNK; t++) across[i * CHUNK + t] *= factors[t];
}

float dot(const float* x, const float* y, Int size) {
    Floats sums[4] = {};
    for (Int i = 0; i < size; i += 4 * LANES) EACH(j, std::min(Int(4), (size - i) / LANES))
        sums[j] += lanes(x + i + j * LANES) * lanes(y + i + j * LANES);
    const Floats sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float total = 0;
    EACH(j, LANES) total += sum[j];
    return total;
}

}  // namespace
