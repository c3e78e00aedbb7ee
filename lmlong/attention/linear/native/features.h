// The features of the queries or keys of a chunk, and their backward pass.
//
// FAVOR+ (favor.py) maps a query to exp(u - max u) and a key to exp(u + (length^2 - |x|^2) / 2 - offset), for u = W x
// and x = c n, where n has a mean square of 1 and c is the scale of a head. As in favor.py, gradients treat the max,
// the length and the offset as constants.
//
// K key dim, F features.

#pragma once

#include <cmath>

#include "chunk.h"

namespace {

struct Features {
    const BatchHead& batch_head;
    const bool of_keys, with_gradient;
    const ScanJob& job = batch_head.job;
    const FeatureMap feature_map = FeatureMap(batch_head.job.feature_map);
    const Int F = batch_head.F, K = padded(batch_head.job.head_dim);
    float *rows, *grads;  // (TILE, F); before the gradient is known, `grads` holds the derivative of an elementwise map
    float *n, *dx;        // (TILE, K), for FAVOR+
    alignas(64) float factors[TILE], squares[TILE];  // the factors that normalize n, and |n|^2
    float dscale = 0;

    Features(const BatchHead& batch_head, bool of_keys, bool with_gradient, Scratch& scratch)
        : batch_head(batch_head), of_keys(of_keys), with_gradient(with_gradient) {
        for (float** each : {&rows, &grads}) *each = scratch.take(TILE * F);
        for (float** each : {&n, &dx}) *each = scratch.take(TILE * K);
    }

    // Load a chunk and compute its features, or copy the `computed` ones; prefetch the chunk `ahead`
    void load(Int begin, Int ahead = TILE, const float* computed = nullptr) {
        const StridedTensor& from = of_keys ? job.k : job.q;
        if (feature_map != FAVOR) {
            batch_head.load(from, begin, job.features, rows, ahead);
            float* derivative = with_gradient ? grads : nullptr;
            apply_feature_map(feature_map, batch_head.tokens(begin), job.features, rows, derivative);
            return;
        }
        batch_head.load(from, begin, job.head_dim, n, ahead);
        normalize();
        if (computed)
            std::copy_n(computed, TILE * F, rows);
        else
            exponentials(batch_head.tokens(begin));
    }

    // Store the gradient of queries or keys, given the gradient of their unscaled features (F, TILE)
    void backward(Int begin, const float* gradT, float* temporary) {
        const StridedTensor& into = of_keys ? job.dk : job.dq;
        transpose(gradT, F, TILE, temporary);
        const float* factor = feature_map == FAVOR ? rows : grads;
        if (feature_map != IDENTITY)
            for (Int i = 0; i < TILE * F; i += LANES) lanes(temporary + i) *= lanes(factor + i);
        if (feature_map == FAVOR)
            backward_exponents(temporary), batch_head.store(into, begin, job.head_dim, dx);
        else
            batch_head.store(into, begin, job.features, temporary);
    }

private:
    const float* constants() const { return job.favor_constants + 3 * batch_head.head; }

    void normalize() {
        for (Int t = 0; t < TILE; t++) {
            const float square = dot(n + t * K, n + t * K, K), size = job.head_dim;
            factors[t] = 1 / std::sqrt(square / size + FAVOR_EPS);
            squares[t] = square * factors[t] * factors[t];
        }
        scale_rows(n, K, factors);
    }

    void exponentials(Int tokens) {
        const float scale = constants()[0], half_square = constants()[1], offset = constants()[2];
        std::fill_n(rows, TILE * F, 0.0f);
        add_matmul(rows, TILE, F, {n, K, 1}, job.projection_T + batch_head.head * K * F, K);
        for (Int t = 0; t < TILE; t++) {
            float* row = rows + t * F;
            std::fill(row + (t < tokens ? job.features : 0), row + F, -INFINITY);  // exp gives 0
            const float shift = of_keys ? scale * scale * squares[t] / 2 - half_square + offset : scale * max_of(row);
            for (Int f = 0; f < F; f += LANES) lanes(row + f) = simd_exp(lanes(row + f) * scale - shift);
        }
    }

    float sum_of(const float* row) const {
        FloatVec sums = {};
        for (Int f = 0; f < F; f += LANES) sums += lanes(row + f);
        float sum = 0;
        UNROLL(j, LANES) sum += sums[j];
        return sum;
    }

    float max_of(const float* row) const {
        FloatVec most = lanes(row);
        for (Int f = LANES; f < F; f += LANES) most = lanes(row + f) > most ? lanes(row + f) : most;
        float max = most[0];
        UNROLL(j, LANES) max = most[j] > max ? most[j] : max;
        return std::isinf(max) ? 0 : max;  // infinite for padded tokens
    }

    // dx = W^T du, for keys minus x sum du; then the gradients of the scale c and of the input
    void backward_exponents(const float* du) {
        const float scale = constants()[0];
        std::fill_n(dx, TILE * K, 0.0f);
        add_matmul(dx, TILE, K, {du, F, 1}, job.projection + batch_head.head * F * K, F);
        for (Int t = 0; t < TILE; t++) {
            float *grad = dx + t * K, *normed = n + t * K;
            const float of_length = of_keys ? scale * sum_of(du + t * F) : 0, factor = factors[t] * scale;
            const float along = dot(grad, normed, K) - of_length * squares[t], share = along / job.head_dim + of_length;
            dscale += along;
            for (Int i = 0; i < K; i++) grad[i] = factor * (grad[i] - share * normed[i]);
        }
    }
};

}  // namespace
