// Products of a weight matrix with one vector for each row of a batch. Fetching the matrix takes nearly all the time, so
// it is fetched once: each of its rows is used for the whole batch while it is in cache.

#pragma once

#include "grouped.h"
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

struct Vectors {  // of each row of a batch, or of each query of a head of keys and values
    const float* data;
    Int stride;
};

// The sum with the products of the last elements of a row. Not inlined: compilers fuse multiplications with additions as
// they like, so that rounding would depend on the caller
template <typename Dtype>
[[gnu::noinline]] FloatVec add_rest(FloatVec sum, const typename Dtype::Element* row, Int size, const float* x) {
    constexpr Int unit = Dtype::PER_LANE * LANES;
    Int i = 0;
    for (; i + unit <= size; i += unit) Dtype::add_products(sum, row + i, x + i);
    for (Int j = i; j < size; j++) sum[(j - i) % LANES] += Dtype::to_float(row[j]) * x[j];
    return sum;
}

// The products of some rows with each of some vectors, lane by lane. Memory is fastest when it is read in one stream. If
// converting to float takes longer than fetching, several rows share each load of x. `sums` has `stride` for each vector
template <typename Dtype, Int TOGETHER, Int BATCH>
void matvec_lanes(const typename Dtype::Element* rows, Int inputs, Vectors x, FloatVec* sums, Int stride) {
    constexpr Int unit = Dtype::PER_LANE * LANES, CHAINS = 4 / TOGETHER;  // independent sums, which hide add latency
    const Int ahead = std::max(TOGETHER * inputs * Int(sizeof *rows), PREFETCH_BYTES);
    const char* prefetched = reinterpret_cast<const char*>(rows) + ahead;
    FloatVec sum[BATCH][TOGETHER][CHAINS] = {};
    Int i = 0;
    for (; i + CHAINS * unit <= inputs; i += CHAINS * unit) UNROLL(r, TOGETHER) UNROLL(c, CHAINS) {
        if (TOGETHER > 1) __builtin_prefetch(prefetched), prefetched += sizeof(FloatVec);
        const Int at = i + c * unit;
        UNROLL(b, BATCH) Dtype::add_products(sum[b][r][c], rows + r * inputs + at, x.data + b * x.stride + at);
    }
    UNROLL(b, BATCH) UNROLL(r, TOGETHER) {
        FloatVec(&chains)[CHAINS] = sum[b][r];
        if (i < inputs) chains[0] = add_rest<Dtype>(chains[0], rows + r * inputs + i, inputs - i, x.data + b * x.stride + i);
        UNROLL(c, CHAINS - 1) chains[0] += chains[c + 1];
        sums[b * stride + r] = chains[0];
    }
}

// y (BATCH, R) = x (BATCH, inputs) times rows (R, inputs) transposed. Bit-identical for any BATCH, in float32 for any R
template <typename Dtype, Int R, Int BATCH>
void matvecs(const typename Dtype::Element* rows, Int inputs, Vectors x, float* y, Int y_stride) {
    constexpr Int together = R == 1 ? 1 : Dtype::ROWS_TOGETHER;
    FloatVec sums[BATCH][R];
    for (Int r = 0; r < R; r += together)
        matvec_lanes<Dtype, together, BATCH>(rows + r * inputs, inputs, x, sums[0] + r, R);
    UNROLL(b, BATCH) {
        float* into = y + b * y_stride;
        if constexpr (R == 1) {
            into[0] = sum_of_lanes(sums[b][0]);
        } else {
            sum_lanes<R>(sums[b]);
            UNROLL(r, R) {
                into[r] = 0;
                for (Int j = r; j < LANES; j += R) into[r] += sums[b][0][j];
            }
        }
    }
}

template <typename Dtype>
void matmul_as(const Matrix& matrix, Range outputs, Vectors x, Int batch, float* y, Int y_stride, float* reordered) {
    const auto* data = static_cast<const typename Dtype::Element*>(matrix.data);
    const Int inputs = matrix.inputs;
    if (Dtype::PER_LANE > 1) {
        for (Int b = 0; b < batch; b++) reorder<Dtype::PER_LANE>(x.data + b * x.stride, inputs, reordered + b * inputs);
        x = {reordered, inputs};
    }
    constexpr Int PAIR = 2;  // vectors that share each load of the matrix
    auto from = [&](Int b) { return Vectors{x.data + b * x.stride, x.stride}; };
    Int r = outputs.begin;
    for (; r + ROWS <= outputs.end; r += ROWS) {
        Int b = 0;
        for (; b + PAIR <= batch; b += PAIR)
            matvecs<Dtype, ROWS, PAIR>(data + r * inputs, inputs, from(b), y + b * y_stride + r, y_stride);
        if (b < batch) matvecs<Dtype, ROWS, 1>(data + r * inputs, inputs, from(b), y + b * y_stride + r, y_stride);
    }
    for (; r < outputs.end; r++)
        for (Int b = 0; b < batch; b++)
            matvecs<Dtype, 1, 1>(data + r * inputs, inputs, from(b), y + b * y_stride + r, y_stride);
}

template <typename Format>
void matmul_groups(const Matrix& matrix, Range outputs, Vectors x, Int batch, float* y, Int y_stride, float* rounded) {
    auto* activations = reinterpret_cast<Activations*>(rounded);
    const Int groups = groups_of(matrix.inputs);
    for (Int b = 0; b < batch; b++) round_activations(x.data + b * x.stride, matrix.inputs, activations + b * groups);
    multiply_groups<Format>(matrix.data, outputs, groups, activations, batch, y, y_stride);
}

// A range of the outputs of y (batch, outputs) = x (batch, inputs) times the transposed matrix. `reordered` is scratch
// memory for a copy of x of padded(inputs) floats for each row
void matmul(const Matrix& matrix, Range outputs, Vectors x, Int batch, float* y, Int y_stride, float* reordered) {
    if (matrix.dtype == FLOAT32) matmul_as<Float32>(matrix, outputs, x, batch, y, y_stride, reordered);
    if (matrix.dtype == BFLOAT16) matmul_as<BFloat16>(matrix, outputs, x, batch, y, y_stride, reordered);
    if (matrix.dtype == INT8) matmul_groups<Int8Groups>(matrix, outputs, x, batch, y, y_stride, reordered);
    if (matrix.dtype == INT4) matmul_groups<Int4Groups>(matrix, outputs, x, batch, y, y_stride, reordered);
}

// A row of a matrix in float32, which is a table of vectors
inline void read_row(const Matrix& matrix, Int row, float* into) {
    const Int width = matrix.inputs;
    if (matrix.dtype == INT8) return read_groups<Int8Groups>(matrix.data, row, width, into);
    if (matrix.dtype == INT4) return read_groups<Int4Groups>(matrix.data, row, width, into);
    std::copy_n(static_cast<const float*>(matrix.data) + row * width, width, into);
}

}  // namespace
