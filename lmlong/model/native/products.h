// Products of a learned matrix with one vector of each text. Nearly all time goes into fetching the matrix, so it comes
// once, and each of its rows is used for all texts while it is near.

#pragma once

#include "job.h"

namespace {

typedef Wholes WholesAnywhere __attribute__((aligned(1), may_alias));

constexpr Int AHEAD = 4096;  // bytes between what is fetched and what is used, at least

// Each way to keep numbers: how many lie in one lane, how many rows are taken together, a single number, and products
// with as many others as fill all lanes. Where several lie in one lane, x begins with all that belong to the first ones.
struct AsFloats {
    using Number = float;
    static constexpr Int IN_LANE = 1, TOGETHER = 1;
    static float one(float number) { return number; }
    static void add(Floats& sum, const float* numbers, const float* x) { sum += lanes(numbers) * lanes(x); }
};

struct AsHalves {
    using Number = uint16_t;
    static constexpr Int IN_LANE = 2, TOGETHER = 4;
    static float one(uint16_t number) {
        const uint32_t bits = uint32_t(number) << 16;
        float whole;
        __builtin_memcpy(&whole, &bits, sizeof whole);
        return whole;
    }
    static void add(Floats& sum, const uint16_t* numbers, const float* x) {
        const Wholes pairs = *reinterpret_cast<const WholesAnywhere*>(numbers);
        sum += (Floats)(pairs << 16) * lanes(x);
        sum += (Floats)(pairs & int32_t(0xffff0000)) * lanes(x + LANES);
    }
};

struct AsBytes {
    using Number = int8_t;
    static constexpr Int IN_LANE = 4, TOGETHER = 4;
    static float one(int8_t number) { return number; }
    static void add(Floats& sum, const int8_t* numbers, const float* x) {
        const Wholes fours = *reinterpret_cast<const WholesAnywhere*>(numbers);
        EACH(i, 4) sum += __builtin_convertvector((fours << (24 - 8 * i)) >> 24, Floats) * lanes(x + i * LANES);
    }
};

template <Int IN_LANE>
void part(const float* x, Int size, float* into) {
    constexpr Int unit = IN_LANE * LANES;
    Int i = 0;
    for (; i + unit <= size; i += unit)
        for (Int j = 0; j < LANES; j++)
            for (Int k = 0; k < IN_LANE; k++) into[i + k * LANES + j] = x[i + j * IN_LANE + k];
    std::copy(x + i, x + size, into + i);
}

// Sums of all lanes of each: halves come together, until a lane holds parts of one row alone, that of its number
template <Int R, Int ALL>
void fold(Floats (&sums)[ALL]) {
    if constexpr (R > 1) {
        constexpr auto order = std::make_integer_sequence<Int, LANES>();
        EACH(i, R / 2) {
            const Floats a = sums[i], b = sums[i + R / 2];
            sums[i] = interleaved<0>(a, b, order) + interleaved<LANES / 2>(a, b, order);
        }
        fold<R / 2>(sums);
    }
}

// The products of some rows with x, lane by lane. Memory likes best to be walked through in one line; where it takes
// longer to make floats of numbers than to fetch them, rows share what they are multiplied with.
template <typename As, Int TOGETHER>
void multiply_lanes(const typename As::Number* rows, Int inputs, const float* x, Floats* sums) {
    constexpr Int unit = As::IN_LANE * LANES, CHAINS = 4 / TOGETHER;  // of sums: one would wait for itself
    const char* ahead = reinterpret_cast<const char*>(rows) + std::max(TOGETHER * inputs * Int(sizeof *rows), AHEAD);
    Floats sum[TOGETHER][CHAINS] = {};
    Int i = 0;
    for (; i + CHAINS * unit <= inputs; i += CHAINS * unit) EACH(r, TOGETHER) EACH(c, CHAINS) {
        if (TOGETHER > 1) __builtin_prefetch(ahead), ahead += sizeof(Floats);
        As::add(sum[r][c], rows + r * inputs + i + c * unit, x + i + c * unit);
    }
    EACH(r, TOGETHER) {
        for (Int j = i; j + unit <= inputs; j += unit) As::add(sum[r][0], rows + r * inputs + j, x + j);
        for (Int j = inputs / unit * unit; j < inputs; j++)
            sum[r][0][j % LANES] += As::one(rows[r * inputs + j]) * x[j];
        EACH(c, CHAINS - 1) sum[r][0] += sum[r][c + 1];
        sums[r] = sum[r][0];
    }
}

template <typename As, Int R>
void multiply_rows(const typename As::Number* rows, Int inputs, const float* x, float* y) {
    constexpr Int together = R == 1 ? 1 : As::TOGETHER;
    Floats sums[R];
    for (Int r = 0; r < R; r += together) multiply_lanes<As, together>(rows + r * inputs, inputs, x, sums + r);
    fold<R>(sums);
    EACH(r, R) {
        y[r] = 0;
        for (Int j = r; j < LANES; j += R) y[r] += sums[0][j];
    }
}

template <typename As>
void multiply(const Matrix& matrix, Range rows, const float* x, Int from, Int texts, float* y, Int to) {
    const auto* numbers = static_cast<const typename As::Number*>(matrix.numbers);
    Int r = rows.begin;
    for (; r + ROWS <= rows.end; r += ROWS)
        for (Int t = 0; t < texts; t++)
            multiply_rows<As, ROWS>(numbers + r * matrix.inputs, matrix.inputs, x + t * from, y + t * to + r);
    for (; r < rows.end; r++)
        for (Int t = 0; t < texts; t++)
            multiply_rows<As, 1>(numbers + r * matrix.inputs, matrix.inputs, x + t * from, y + t * to + r);
}

// Some rows of y (texts, outputs) = x (texts, inputs) times the matrix; in both the texts lie so far apart. `own` is
// room for x in another order.
template <typename As>
void times_kept(const Matrix& matrix, Range rows, const float* x, Int from, Int texts, float* y, Int to, float* own) {
    if (As::IN_LANE > 1) {
        for (Int t = 0; t < texts; t++) part<As::IN_LANE>(x + t * from, matrix.inputs, own + t * matrix.inputs);
        x = own, from = matrix.inputs;
    }
    multiply<As>(matrix, rows, x, from, texts, y, to);
    if (matrix.steps)
        for (Int t = 0; t < texts; t++)
            for (Int r = rows.begin; r < rows.end; r++) y[t * to + r] *= matrix.steps[r];
}

void times(const Matrix& matrix, Range rows, const float* x, Int from, Int texts, float* y, Int to, float* own) {
    if (matrix.kept == FLOATS) times_kept<AsFloats>(matrix, rows, x, from, texts, y, to, own);
    if (matrix.kept == HALVES) times_kept<AsHalves>(matrix, rows, x, from, texts, y, to, own);
    if (matrix.kept == BYTES) times_kept<AsBytes>(matrix, rows, x, from, texts, y, to, own);
}

}  // namespace
