// Products of matrices in groups of int4 or int8 with vectors that are rounded to int8, group by group.
//
// Of an output: sum = 0; for each group: sum = fma(scale of x, fma(scale, dot, minimum * sum of x), sum), in float32, with
// dot and the sum of x in integers; without minimums, scale * dot stands for the inner fma. Every processor computes the
// same bits, for any number of vectors and threads.
//
// PANEL outputs are stored together, as weight_panels.py packs them: of each group of inputs the scales, the minimums and
// then the codes, four inputs of every output after four others. In int4, a byte holds inputs i and i + 4.

#pragma once

#include <cmath>

#include "group_dot.h"
#include "thread_team.h"

namespace {

constexpr Int PANEL = 16, GROUP = 32, PARTS = PANEL / LANES;
constexpr Int VECTORS_TOGETHER = 4;     // which share each unpacked code
constexpr Int VECTORS_IN_CACHE = 128;   // which a panel is multiplied by before the next
constexpr Int GROUP_PREFETCH = 4096;    // bytes between those prefetched and those in use

typedef IntVec UnalignedCodes __attribute__((aligned(1), may_alias));

struct Activations {  // a group of a vector: about scale * codes
    float scale;
    int32_t sum;  // of the codes
    int8_t codes[GROUP];
};

Int groups_of(Int inputs) { return (inputs + GROUP - 1) / GROUP; }

// Round a vector. A group that holds NaN or infinity becomes NaN
void round_activations(const float* x, Int inputs, Activations* into) {
    for (Int first = 0; first < inputs; first += GROUP, into++) {
        alignas(64) float group[GROUP] = {};
        std::memcpy(group, x + first, std::min(GROUP, inputs - first) * sizeof *x);
        IntVec largest_bits = {};  // floats without a sign compare like integers, and NaN is above all
        for (Int i = 0; i < GROUP; i += LANES) {
            const IntVec bits = (IntVec)lanes(group + i) & 0x7fffffff;
            largest_bits = bits > largest_bits ? bits : largest_bits;
        }
        int32_t most = 0;
        UNROLL(i, LANES) most = std::max(most, int32_t(largest_bits[i]));
        float largest;
        std::memcpy(&largest, &most, sizeof largest);
        const float per_step = 127.0f / largest;
        const bool finite = most < 0x7f800000, rounds = finite && per_step < INFINITY;
        into->scale = rounds ? largest / 127.0f : finite ? 0.0f : NAN;
        IntVec sums = {};
        for (Int i = 0; i < GROUP; i += LANES) {
            const IntVec codes = rounds ? rounded(lanes(group + i) * per_step) : IntVec{};
            sums += codes;
            UNROLL(j, LANES) into->codes[i + j] = int8_t(codes[j]);
        }
        into->sum = 0;
        UNROLL(i, LANES) into->sum += sums[i];
    }
}

struct Int4Groups {
    using Sums = Int4Sums;
    static constexpr Int BYTES = PANEL * (2 + 2 + GROUP / 2), CODES = PANEL * 4;
    static IntVec codes(const uint8_t* record, Int word, Int part) {
        const uint8_t* bytes = record + CODES + (word / 2 * PANEL + part * LANES) * 4;
        const IntVec pairs = *reinterpret_cast<const UnalignedCodes*>(bytes);
        return (word % 2 ? pairs >> 4 : pairs) & 0x0f0f0f0f;
    }
    static FloatVec products(const uint8_t* record, Int part, IntVec dot, float sum_of_x) {
        const auto* scales = reinterpret_cast<const uint16_t*>(record) + part * LANES;
        const FloatVec offset = from_float16(scales + PANEL) * sum_of_x;
        return fused(from_float16(scales), __builtin_convertvector(dot, FloatVec), offset);
    }
    static float weight(const uint8_t* record, Int output, Int input) {
        const auto* scales = reinterpret_cast<const uint16_t*>(record) + output;
        const uint8_t pair = record[CODES + (input / 8 * PANEL + output) * 4 + input % 4];
        return float(input / 4 % 2 ? pair >> 4 : pair & 15) * from_float16(scales)[0] + from_float16(scales + PANEL)[0];
    }
};

struct Int8Groups {
    using Sums = Int8Sums;
    static constexpr Int BYTES = PANEL * (2 + GROUP), CODES = PANEL * 2;
    static IntVec codes(const uint8_t* record, Int word, Int part) {
        return *reinterpret_cast<const UnalignedCodes*>(record + CODES + (word * PANEL + part * LANES) * 4);
    }
    static FloatVec products(const uint8_t* record, Int part, IntVec dot, float) {
        const auto* scales = reinterpret_cast<const uint16_t*>(record) + part * LANES;
        return from_float16(scales) * __builtin_convertvector(dot, FloatVec);
    }
    static float weight(const uint8_t* record, Int output, Int input) {
        const auto* codes = reinterpret_cast<const int8_t*>(record + CODES);
        return float(codes[(input / 4 * PANEL + output) * 4 + input % 4]) *
               from_float16(reinterpret_cast<const uint16_t*>(record) + output)[0];
    }
};

// A row of a matrix, which is a table of vectors of some width
template <typename Format>
void read_groups(const void* matrix, Int row, Int width, float* into) {
    const auto* panels = static_cast<const uint8_t*>(matrix) + row / PANEL * groups_of(width) * Format::BYTES;
    for (Int i = 0; i < width; i++) into[i] = Format::weight(panels + i / GROUP * Format::BYTES, row % PANEL, i % GROUP);
}

// The products of a panel with VECTORS vectors, each of `groups` groups
template <typename Format, Int VECTORS>
void multiply_panel(const uint8_t* record, Int groups, const Activations* x, float (*y)[PANEL]) {
    FloatVec totals[VECTORS][PARTS] = {};
    for (Int g = 0; g < groups; g++, record += Format::BYTES) {
        for (Int i = 0; i < Format::BYTES; i += 64) __builtin_prefetch(record + GROUP_PREFETCH + i);
        typename Format::Sums sums[VECTORS][PARTS];
        UNROLL(word, GROUP / 4) {
            IntVec codes[PARTS];
            UNROLL(part, PARTS) codes[part] = Format::codes(record, word, part);
            UNROLL(v, VECTORS) {
                int32_t four;
                std::memcpy(&four, x[v * groups + g].codes + 4 * word, sizeof four);
                UNROLL(part, PARTS) sums[v][part].add(codes[part], IntVec{} + four);
            }
        }
        UNROLL(v, VECTORS) UNROLL(part, PARTS) {
            const Activations& group = x[v * groups + g];
            const FloatVec products = Format::products(record, part, sums[v][part].total(group.sum), float(group.sum));
            totals[v][part] = fused(FloatVec{} + group.scale, products, totals[v][part]);
        }
    }
    UNROLL(v, VECTORS) UNROLL(part, PARTS) lanes(y[v] + part * LANES) = totals[v][part];
}

template <typename Format>
void multiply_panel(const uint8_t* record, Int groups, const Activations* x, Int vectors, float (*y)[PANEL]) {
    if (vectors == 1) multiply_panel<Format, 1>(record, groups, x, y);
    if (vectors == 2) multiply_panel<Format, 2>(record, groups, x, y);
    if (vectors == 3) multiply_panel<Format, 3>(record, groups, x, y);
    if (vectors == 4) multiply_panel<Format, 4>(record, groups, x, y);
}

// A range of the outputs of y (vectors, outputs) = x (vectors, groups) times the transposed matrix
template <typename Format>
void multiply_groups(
    const void* matrix, Range outputs, Int groups, const Activations* x, Int vectors, float* y, Int y_stride) {
    const auto* panels = static_cast<const uint8_t*>(matrix);
    for (Int first = 0; first < vectors; first += VECTORS_IN_CACHE) {
        const Int end = std::min(first + VECTORS_IN_CACHE, vectors);
        for (Int row = outputs.begin / PANEL * PANEL; row < outputs.end; row += PANEL) {
            const uint8_t* panel = panels + row / PANEL * groups * Format::BYTES;
            const Range rows = {std::max(row, outputs.begin), std::min(row + PANEL, outputs.end)};
            for (Int v = first; v < end; v += VECTORS_TOGETHER) {
                const Int together = std::min(VECTORS_TOGETHER, end - v);
                float products[VECTORS_TOGETHER][PANEL];
                multiply_panel<Format>(panel, groups, x + v * groups, together, products);
                for (Int i = 0; i < together; i++)
                    std::copy(
                        products[i] + rows.begin - row, products[i] + rows.end - row, y + (v + i) * y_stride + rows.begin);
            }
        }
    }
}

}  // namespace
