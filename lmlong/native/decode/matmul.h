// Products of a weight matrix with one vector for each row of a batch. Fetching the matrix takes nearly all the time, so
// it is fetched once: each of its rows is used for the whole batch while it is in cache.

#pragma once

#include "job.h"

namespace {

typedef IntVec UnalignedIntVec __attribute__((aligned(1), may_alias));

constexpr Int PREFETCH_BYTES = 4096;  // minimum distance between the bytes prefetched and the bytes in use

// The dtypes of a matrix. PER_LANE: elements in one 32-bit lane. ROWS_TOGETHER: rows multiplied at once. add_products:
// multiply a vector's worth of elements. If PER_LANE > 1, x is reordered: the factors of every lane's first element
// come first.
struct Float32 {
    using Element = float;
    static constexpr Int PER_LANE = 1, ROWS_TOGETHER = 1;
    static float to_float(float element) { return element; }
    static void add_products(FloatVec& sum, const float* data, const float* x) { sum += lanes(data) * lanes(x); }
};

struct BFloat16 {
    using Element = uint16_t;
    static constexpr Int PER_LANE = 2, ROWS_TOGETHER = 4;
    static float to_float(uint16_t element) {
        const uint32_t bits = uint32_t(element) << 16;
        float x;
        __builtin_memcpy(&x, &bits, sizeof x);
        return x;
    }
    static void add_products(FloatVec& sum, const uint16_t* data, const float* x) {
        const IntVec pairs = *reinterpret_cast<const UnalignedIntVec*>(data);
        sum += (FloatVec)(pairs << 16) * lanes(x);
        sum += (FloatVec)(pairs & int32_t(0xffff0000)) * lanes(x + LANES);
    }
};

struct Int8 {
    using Element = int8_t;
    static constexpr Int PER_LANE = 4, ROWS_TOGETHER = 4;
    static float to_float(int8_t element) { return element; }
    static void add_products(FloatVec& sum, const int8_t* data, const float* x) {
        const IntVec fours = *reinterpret_cast<const UnalignedIntVec*>(data);
        UNROLL(i, 4) sum += __builtin_convertvector((fours << (24 - 8 * i)) >> 24, FloatVec) * lanes(x + i * LANES);
    }
};

template <Int PER_LANE>
void reorder(const float* x, Int size, float* into) {
    constexpr Int unit = PER_LANE * LANES;
    Int i = 0;
    for (; i + unit <= size; i += unit)
        for (Int j = 0; j < LANES; j++)
            for (Int k = 0; k < PER_LANE; k++) into[i + k * LANES + j] = x[i + j * PER_LANE + k];
    std::copy(x + i, x + size, into + i);
}

// Add up the lanes of R vectors, by halves, until lane j of the first vector holds only partial sums of vector j % R
template <Int R, Int ALL>
void sum_lanes(FloatVec (&sums)[ALL]) {
    if constexpr (R > 1) {
        constexpr auto order = std::make_integer_sequence<Int, LANES>();
        UNROLL(i, R / 2) {
            const FloatVec a = sums[i], b = sums[i + R / 2];
            sums[i] = interleave<0>(a, b, order) + interleave<LANES / 2>(a, b, order);
        }
        sum_lanes<R / 2>(sums);
    }
}

// The sum of all lanes, also added up by halves
float sum_of_lanes(const FloatVec& x) {
    float sums[LANES];
    UNROLL(i, LANES) sums[i] = x[i];
    for (Int half = LANES / 2; half; half /= 2)
        for (Int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

// The products of some rows with x, lane by lane. Memory is fastest when it is read in one stream. If converting to float
// takes longer than fetching, several rows share each load of x.
template <typename Dtype, Int TOGETHER>
void matvec_lanes(const typename Dtype::Element* rows, Int inputs, const float* x, FloatVec* sums) {
    constexpr Int unit = Dtype::PER_LANE * LANES, CHAINS = 4 / TOGETHER;  // independent sums, which hide add latency
    const Int ahead = std::max(TOGETHER * inputs * Int(sizeof *rows), PREFETCH_BYTES);
    const char* prefetched = reinterpret_cast<const char*>(rows) + ahead;
    FloatVec sum[TOGETHER][CHAINS] = {};
    Int i = 0;
    for (; i + CHAINS * unit <= inputs; i += CHAINS * unit) UNROLL(r, TOGETHER) UNROLL(c, CHAINS) {
        if (TOGETHER > 1) __builtin_prefetch(prefetched), prefetched += sizeof(FloatVec);
        Dtype::add_products(sum[r][c], rows + r * inputs + i + c * unit, x + i + c * unit);
    }
    UNROLL(r, TOGETHER) {
        for (Int j = i; j + unit <= inputs; j += unit) Dtype::add_products(sum[r][0], rows + r * inputs + j, x + j);
        for (Int j = inputs / unit * unit; j < inputs; j++)
            sum[r][0][j % LANES] += Dtype::to_float(rows[r * inputs + j]) * x[j];
        UNROLL(c, CHAINS - 1) sum[r][0] += sum[r][c + 1];
        sums[r] = sum[r][0];
    }
}

// y (R) = rows (R, inputs) x. In float32 bit-identical for any R
template <typename Dtype, Int R>
void matvec(const typename Dtype::Element* rows, Int inputs, const float* x, float* y) {
    constexpr Int together = R == 1 ? 1 : Dtype::ROWS_TOGETHER;
    FloatVec sums[R];
    for (Int r = 0; r < R; r += together) matvec_lanes<Dtype, together>(rows + r * inputs, inputs, x, sums + r);
    if constexpr (R == 1) {
        y[0] = sum_of_lanes(sums[0]);
        return;
    }
    sum_lanes<R>(sums);
    UNROLL(r, R) {
        y[r] = 0;
        for (Int j = r; j < LANES; j += R) y[r] += sums[0][j];
    }
}

struct Vectors {  // of each row of a batch
    const float* data;
    Int stride;
};

template <typename Dtype>
void matmul_as(const Matrix& matrix, Range outputs, Vectors x, Int batch, float* y, Int y_stride, float* reordered) {
    const auto* data = static_cast<const typename Dtype::Element*>(matrix.data);
    const Int inputs = matrix.inputs;
    if (Dtype::PER_LANE > 1) {
        for (Int b = 0; b < batch; b++) reorder<Dtype::PER_LANE>(x.data + b * x.stride, inputs, reordered + b * inputs);
        x = {reordered, inputs};
    }
    Int r = outputs.begin;
    for (; r + ROWS <= outputs.end; r += ROWS)
        for (Int b = 0; b < batch; b++)
            matvec<Dtype, ROWS>(data + r * inputs, inputs, x.data + b * x.stride, y + b * y_stride + r);
    for (; r < outputs.end; r++)
        for (Int b = 0; b < batch; b++)
            matvec<Dtype, 1>(data + r * inputs, inputs, x.data + b * x.stride, y + b * y_stride + r);
    if (matrix.scales)
        for (Int b = 0; b < batch; b++)
            for (r = outputs.begin; r < outputs.end; r++) y[b * y_stride + r] *= matrix.scales[r];
}

// A range of the outputs of y (batch, outputs) = x (batch, inputs) times the transposed matrix. `reordered` is scratch
// memory for a copy of x
void matmul(const Matrix& matrix, Range outputs, Vectors x, Int batch, float* y, Int y_stride, float* reordered) {
    if (matrix.dtype == FLOAT32) matmul_as<Float32>(matrix, outputs, x, batch, y, y_stride, reordered);
    if (matrix.dtype == BFLOAT16) matmul_as<BFloat16>(matrix, outputs, x, batch, y, y_stride, reordered);
    if (matrix.dtype == INT8) matmul_as<Int8>(matrix, outputs, x, batch, y, y_stride, reordered);
}

}  // namespace
