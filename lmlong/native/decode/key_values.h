// Softmax attention of the query heads that share keys and values, over cached keys and values.

#pragma once

#include "cache_products.h"
#include "mixer.h"

namespace {

struct KeyValues {  // of past tokens, as in softmax/state.py
    // (kv_heads, size, head_dim) and (kv_heads, size, value_dim)
    void *k, *v;
    bool* current;  // (size) whether they belong to the current document
    Int dtype;      // FLOAT32 or BFLOAT16
};

struct PastTokens {
    KeyValues cached;
    Int head, size;  // the head of keys and values
};

struct Sink {  // a value that is attended to like a token's
    const float *logits, *value;  // the logit of each head, and the value; null if only tokens are attended to
};

struct SoftmaxMean {
    static constexpr Int CHUNK = 256, STRIP = 64;  // tokens, see `add_weighted`; a strip of values fits in the L1 cache

    const Int head_dim, value_dim, q_stride, y_stride, weight_stride;
    float *queries, *weights, *numerators, *totals, *new_k, *new_v;

    // For queries that attend to at most `max_tokens` tokens, of which up to `heads` share keys and values
    SoftmaxMean(const DecodeJob& job, const Layer& layer, Int max_tokens, Int heads, Scratch& scratch)
        : head_dim(layer.head_dim), value_dim(layer.value_dim), q_stride(padded(head_dim)),
          y_stride(padded(value_dim)), weight_stride(padded(max_tokens)), queries(scratch.take(heads * q_stride)),
          weights(scratch.take(heads * weight_stride)), numerators(scratch.take(heads * y_stride)),
          totals(scratch.take(heads * y_stride)), new_k(scratch.take(head_dim)), new_v(scratch.take(value_dim)) {}

    // y of each head = the softmax-weighted mean of the document's values so far. Tokens of other documents are skipped
    // instead of masked, so that no bit depends on their number. The new key and value are first rounded to the format
    // of the cache, as later tokens will read them
    void operator()(
        const HeadInput& input, const PastTokens& older, const PastTokens& newer, float* y, Sink sink = {}) const {
        with_format(newer.cached.dtype, [&](auto format) { mean<decltype(format)>(input, older, newer, sink, y); });
    }

    // Write the past tokens, without the `dropped` oldest, and the token of the last mean to the state `after`
    void append(const HeadInput& input, const PastTokens& past, Int dropped, const KeyValues& after) const {
        const Int kept = past.size - dropped, element = after.dtype == BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
        auto copy = [&](const void* cached, const float* token, Int width, void* all_after) {
            const Int bytes = width * element;
            const char* from = static_cast<const char*>(cached) + (past.head * past.size + dropped) * bytes;
            char* into = static_cast<char*>(all_after) + past.head * (kept + 1) * bytes;
            std::copy_n(from, kept * bytes, into);
            std::copy_n(reinterpret_cast<const char*>(token), bytes, into + kept * bytes);
        };
        copy(past.cached.k, new_k, head_dim, after.k);
        copy(past.cached.v, new_v, value_dim, after.v);
        if (input.head) return;
        const bool* current = past.cached.current + dropped;
        for (Int t = 0; t < kept; t++) after.current[t] = current[t] && !input.token.starts_document;
        after.current[kept] = true;
    }

    template <typename Format>
    void mean(
        const HeadInput& input, const PastTokens& older, const PastTokens& newer, const Sink& sink, float* y) const {
        using Element = typename Format::Element;
        round<Format>(input.k, head_dim, new_k), round<Format>(input.v, value_dim, new_v);
        const float scale = 1 / std::sqrt(float(head_dim));
        for (Int head = 0; head < input.heads; head++)
            for (Int i = 0; i < q_stride; i++)  // with its padding
                queries[head * q_stride + position_of<Format>(i, head_dim)] = input.q[head * q_stride + i] * scale;
        auto each_run = [&](auto call) {  // of tokens of the document, the new one last
            for (const PastTokens* past : {&older, &newer}) {
                if (input.token.starts_document) break;
                const bool* current = past->cached.current;
                for (Int begin = 0, end; begin < past->size; begin = end + 1) {
                    for (end = begin; end < past->size && current[end];) end++;
                    const Int first = past->head * past->size + begin;
                    if (begin < end)
                        call(static_cast<const Element*>(past->cached.k) + first * head_dim,
                             static_cast<const Element*>(past->cached.v) + first * value_dim, end - begin);
                }
            }
            call(reinterpret_cast<const Element*>(new_k), reinterpret_cast<const Element*>(new_v), 1);
        };
        Int count = 0;
        each_run([&](const Element* keys, const Element*, Int size) {
            add_logits<Format>(input.heads, keys, size, count);
            count += size;
        });
        if (sink.value)
            for (Int head = 0; head < input.heads; head++) weights[head * weight_stride + count] = sink.logits[head];
        const Int tokens = count;
        count += sink.value != nullptr;
        for (Int head = 0; head < input.heads; head++)
            exp_(weights + head * weight_stride, count, max_of(weights + head * weight_stride, count));
        std::fill_n(numerators, input.heads * y_stride, 0.0f), std::fill_n(totals, input.heads * y_stride, 0.0f);
        Int added = 0;
        each_run([&](const Element*, const Element* values, Int size) {
            add_weighted<Format>(input.heads, values, size, added);
            added += size;
        });
        for (Int head = 0; head < input.heads; head++) {
            const float inverse = 1 / sum_of(weights + head * weight_stride, count);
            for (Int i = 0; i < value_dim; i++) {
                const Int sum = head * y_stride + position_of<Format>(i, value_dim);
                const float of_sink = sink.value ? weights[head * weight_stride + tokens] * sink.value[i] : 0;
                y[head * y_stride + i] = (totals[sum] + numerators[sum] + of_sink) * inverse;
            }
        }
    }

    template <typename Format>
    void round(const float* x, Int size, float* into) const {
        auto* elements = reinterpret_cast<typename Format::Element*>(into);
        for (Int i = 0; i < size; i++) elements[i] = Format::from_float(x[i]);
    }

    // The logits of a run of keys, whose first is token `begin`
    template <typename Format>
    void add_logits(Int heads, const typename Format::Element* keys, Int size, Int begin) const {
        for (Int t = 0, count; t < size; t += count) {
            count = size - t < KEYS_TOGETHER ? 1 : KEYS_TOGETHER;
            each_group(heads, [&](Int head, auto group) {
                const Vectors factors{queries + head * q_stride, q_stride};
                const Sums logits{weights + head * weight_stride + begin + t, weight_stride};
                if (count == 1)
                    multiply_keys<Format, group, 1>(keys + t * head_dim, head_dim, factors, logits);
                else
                    multiply_keys<Format, group, KEYS_TOGETHER>(keys + t * head_dim, head_dim, factors, logits);
            });
        }
    }

    // Add weighted values to the numerators, to which `added` values were added before. After every CHUNK values the
    // numerators move to the totals, since a small term would lose digits beside a large sum
    template <typename Format>
    void add_weighted(Int heads, const typename Format::Element* values, Int size, Int added) const {
        for (Int t = 0, count; t < size; t += count, added += count) {
            count = std::min(STRIP - added % STRIP, size - t);
            each_group(heads, [&](Int head, auto group) {
                const Vectors factors{weights + head * weight_stride + added, weight_stride};
                const Sums sums{numerators + head * y_stride, y_stride};
                add_values<Format, group>(values + t * value_dim, count, value_dim, factors, sums);
            });
            if ((added + count) % CHUNK) continue;
            for (Int i = 0; i < heads * y_stride; i++) totals[i] += numerators[i], numerators[i] = 0;
        }
    }
};

}  // namespace
