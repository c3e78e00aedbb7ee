// The features of a chunk's queries or keys, and its decay masks, from document starts and log decays by head.

#pragma once

#include "feature_maps.h"
#include "scan_job.h"

namespace {

// Map the rows of queries or keys to their features, in place. If `derivative` is not null, fill it with the feature
// map's derivative
void apply_feature_map(FeatureMap feature_map, Int tokens, Int width, float* rows, float* derivative = nullptr) {
    if (feature_map == IDENTITY) return;
    for (Int t = 0; t < TILE; t++, rows += padded(width), derivative += derivative ? padded(width) : 0) {
        for (Int i = 0; i < padded(width); i += LANES) {
            const FloatVec x = lanes(rows + i);
            FloatVec dx;
            lanes(rows + i) = feature_map == ELU    ? elu_plus_one(x, dx)
                              : feature_map == RELU ? relu(x, dx)
                                                    : silu(x, dx);
            if (derivative) lanes(derivative + i) = dx;
        }
        std::fill(rows + (t < tokens ? width : 0), rows + padded(width), 0.0f);
    }
}

struct Decay {  // the letters are chunk.py's names
    alignas(64) float mask[TILE * TILE];               // W, [s][t]
    alignas(64) float from_state[TILE], to_end[TILE];  // a, u
    float chunk;                                       // r
    bool none = false;                                 // nothing decays and no document starts
};

void decay_masks(const BatchHead& batch_head, Int begin, Decay& decay) {
    const ScanJob& job = batch_head.job;
    const bool by_head = job.log_decay.data && !job.channel_decay;
    alignas(64) float total[TILE], document[TILE];
    float log2_decay = 0, documents = 0;
    for (Int t = 0; t < TILE; t++) {
        const bool valid = t < batch_head.tokens(begin);
        if (valid && job.document_starts.data) documents += *batch_head.pointer<bool>(job.document_starts, begin + t);
        if (valid && by_head) log2_decay += *batch_head.pointer(job.log_decay, begin + t) * LOG2_E;
        total[t] = log2_decay, document[t] = documents;
    }
    const bool none = !by_head && documents == 0;
    if (none && decay.none) return;
    decay.none = none;
    // clamped before the power: differences to the future are positive and could overflow
    auto clamped_exp2 = [](FloatVec exponent) {
        const FloatVec zero = {}, least = zero + MIN_LOG2_DECAY;
        return simd_exp2(exponent > zero ? zero : exponent < least ? least : exponent);
    };
    for (Int i = 0; i < TILE; i += LANES) {
        const FloatVec total_t = lanes(total + i), document_t = lanes(document + i), zero = {};
        FloatVec t;
        UNROLL(j, LANES) t[j] = i + j;
        UNROLL(s, TILE) {
            const FloatVec weight = document_t == document[s] ? clamped_exp2(total_t - total[s]) : zero;
            lanes(decay.mask + s * TILE + i) = t >= float(s) ? weight : zero;
        }
        lanes(decay.from_state + i) = document_t == 0.0f ? clamped_exp2(total_t) : zero;
        lanes(decay.to_end + i) = document_t == documents ? clamped_exp2(log2_decay - total_t) : zero;
    }
    decay.chunk = decay.from_state[TILE - 1];
}

// The gradients of the log decays by head: sums of `pairs` from the last token on, beginning with `sum`
void store_log_decay_grads(const BatchHead& batch_head, Int begin, const float* pairs, float sum) {
    for (Int t = TILE - 1; t >= 0; t--) {
        sum += pairs[t];
        if (t < batch_head.tokens(begin)) *batch_head.pointer(batch_head.job.dlog_decay, begin + t) = sum;
    }
}

// Masked weights become 0 even if they are not finite
void apply_mask(const Decay& decay, float* weights) {
    for (Int i = 0; i < TILE * TILE; i += LANES) {
        const FloatVec mask = lanes(decay.mask + i);
        lanes(weights + i) = mask > 0.0f ? lanes(weights + i) * mask : mask;
    }
}

}  // namespace
