// Softmax attention of one query over cached keys and values.

#pragma once

#include "mixer.h"

namespace {

struct KeyValues {  // of past tokens, as in softmax/state.py
    // (batch_heads, size, head_dim) and (batch_heads, size, value_dim); a batch head is one head of one row
    float *k, *v;
    bool* current;  // (rows, size) whether they belong to the current document
};

struct PastTokens {
    KeyValues cached;
    Int batch_head, size;
};

struct SoftmaxMean {
    const Int head_dim, value_dim;
    float *weights, *numerators;

    // For a query that attends to at most `max_tokens` tokens
    SoftmaxMean(const DecodeJob& job, const Layer& layer, Int max_tokens, Scratch& scratch)
        : head_dim(layer.head_dim), value_dim(job.model->value_dim), weights(scratch.take(max_tokens)),
          numerators(scratch.take(value_dim)) {}

    // y = the softmax-weighted mean of the document's values so far. Tokens of other documents are skipped instead of
    // masked, so that no bit depends on their number. Scales the query in place
    void operator()(const HeadInput& input, const PastTokens& older, const PastTokens& newer, float* y) const {
        const float scale = 1 / std::sqrt(float(head_dim));
        for (Int i = 0; i < head_dim; i++) input.q[i] *= scale;
        auto each_run = [&](auto call) {  // of tokens of the document
            if (input.token.starts_document) return;
            for (const PastTokens* past : {&older, &newer}) {
                const bool* current = past->cached.current + input.row * past->size;
                for (Int begin = 0, end; begin < past->size; begin = end + 1) {
                    for (end = begin; end < past->size && current[end];) end++;
                    if (begin < end) call(past->cached, past->batch_head * past->size + begin, end - begin);
                }
            }
        };
        Int count = 0;
        each_run([&](const KeyValues& cached, Int first, Int size) {
            const Matrix keys{cached.k + first * head_dim, nullptr, FLOAT32, size, head_dim};
            matmul(keys, {0, size}, {input.q, 0}, 1, weights + count, 0, nullptr);
            count += size;
        });
        matvec<Float32, 1>(input.k, head_dim, input.q, weights + count);
        exp_(weights, count + 1, max_of(weights, count + 1));
        std::fill_n(y, value_dim, 0.0f), std::fill_n(numerators, value_dim, 0.0f);
        Int added = 0;
        each_run([&](const KeyValues& cached, Int first, Int size) {
            add_values(cached.v + first * value_dim, size, weights + added, added, y);
            added += size;
        });
        const float inverse = 1 / sum_of(weights, count + 1);
        for (Int i = 0; i < value_dim; i++) y[i] = (y[i] + numerators[i] + weights[count] * input.v[i]) * inverse;
    }

    // Write the past tokens, without the `dropped` oldest, and the new token to the state `after`
    void append(const HeadInput& input, const PastTokens& past, Int dropped, const KeyValues& after) const {
        const Int kept = past.size - dropped;
        auto copy = [&](const float* from, const float* x, Int width, float* into) {
            from += (past.batch_head * past.size + dropped) * width, into += past.batch_head * (kept + 1) * width;
            std::copy_n(from, kept * width, into), std::copy_n(x, width, into + kept * width);
        };
        copy(past.cached.k, input.k, head_dim, after.k);
        copy(past.cached.v, input.v, value_dim, after.v);
        if (input.head) return;
        const bool* current = past.cached.current + input.row * past.size + dropped;
        bool* current_after = after.current + input.row * (kept + 1);
        for (Int t = 0; t < kept; t++) current_after[t] = current[t] && !input.token.starts_document;
        current_after[kept] = true;
    }

    // Add weighted values to the numerators, to which `added` values were added before. After every CHUNK values the
    // numerators move to y, since a small term would lose digits beside a large sum
    void add_values(const float* values, Int size, const float* weight, Int added, float* y) const {
        constexpr Int CHUNK = 256;
        for (Int t = 0, count; t < size; t += count) {
            count = std::min(CHUNK - (added + t) % CHUNK, size - t);
            const float* from = values + t * value_dim;
            Int i = 0;
            for (; i + 4 * LANES <= value_dim; i += 4 * LANES) add_channels<4>(from + i, count, weight + t, numerators + i);
            for (; i + LANES <= value_dim; i += LANES) add_channels<1>(from + i, count, weight + t, numerators + i);
            for (; i < value_dim; i++)
                for (Int j = 0; j < count; j++) numerators[i] += weight[t + j] * from[j * value_dim + i];
            if ((added + t + count) % CHUNK) continue;
            for (i = 0; i < value_dim; i++) y[i] += numerators[i], numerators[i] = 0;
        }
    }

    template <Int VECTORS>
    void add_channels(const float* values, Int count, const float* weight, float* into) const {
        FloatVec sums[VECTORS];
        UNROLL(j, VECTORS) sums[j] = lanes(into + j * LANES);
        for (Int t = 0; t < count; t++)
            UNROLL(j, VECTORS) sums[j] += weight[t] * lanes(values + t * value_dim + j * LANES);
        UNROLL(j, VECTORS) lanes(into + j * LANES) = sums[j];
    }
};

}  // namespace
