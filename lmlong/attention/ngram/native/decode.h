// A decode step of n-gram attention: the mean of the values that followed the last n tokens, weighed by a gate that sees
// how many every head has found.

#pragma once

#include "mixer.h"
#include "ngram.h"

namespace {

struct NgramAttention {
    struct Weights {
        Int rows;          // of the table of a head
        const Int* sizes;  // (heads) n of each
        Gate read_gate;
        const float *number_weight, *raw_smoothing;  // (heads, heads) and (heads)
    };

    struct State {
        float* S;        // the table, which is not written to,
        int32_t* number;
        Int* ngram;
        Int* waiting_ngram;  // the values that are not in it yet and that are not written to either,
        float* waiting_v;
        Int* recent_ngram;  // and those after them
        float* recent_v;
    };

    // What a head finds of an n-gram: its row of the table, and values that followed it and are not in the table: the
    // current one, and those of both lists from an index on, as far as this n-gram has had the row
    struct Found {
        Int written, read;
        Int row = -1, waiting = WAITING, recent = RECENT, listed = 0;
        bool now = false;
        Int number = 0;  // of all values
    };

    const DecodeJob& job;
    const Weights& weights;
    const Int heads = job.model->heads, width = job.model->width, value_dim = job.model->value_dim;
    Found* found_by;  // each head of a row of the batch
    Int found_row = -1;

    NgramAttention(const DecodeJob& job, const Layer&, const Weights& weights, Scratch& scratch)
        : job(job), weights(weights),
          found_by(reinterpret_cast<Found*>(scratch.take(heads * sizeof(Found) / sizeof(float)))) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) {
        const Int head = input.head, line = input.row * heads + head;
        if (input.token.row != found_row) {  // heads of one row come one after the other
            for (Int other = 0; other < heads; other++)
                found_by[other] = find(input.token, before, line - head + other, other);
            found_row = input.token.row;
        }
        float logit = gate_logit(weights.read_gate, head, input.x, width);
        for (Int other = 0; other < heads; other++)
            logit += weights.number_weight[head * heads + other] * std::log1p(float(found_by[other].number));
        sum_values(found_by[head], before, line, input.v, y);
        append_value(found_by[head].written, before, after, line, input.v);
        const float smoothed = found_by[head].number + std::exp(weights.raw_smoothing[head]);
        for (Int i = 0; i < value_dim; i++) y[i] *= sigmoid(logit) / smoothed;
    }

    Found find(const Token& token, const State& before, Int line, Int head) const {
        const Int n = weights.sizes[head], past = job.model->past_tokens, rows = weights.rows;
        Int tokens[MAX_NGRAM + 1];  // the last n + 1 of the document
        for (Int i = 0; i <= n; i++)
            tokens[i] = i == n                    ? job.tokens[token.row]
                        : token.position < n - i ? -1
                                                 : job.last_tokens_before[(token.row + 1) * past - n + i];
        Found found{hash_ngram(tokens, n), hash_ngram(tokens + 1, n)};
        if (found.read == NO_NGRAM) return found;
        const Int row = row_of(found.read, rows);
        if (found.written != NO_NGRAM && found.written != found.read && row_of(found.written, rows) == row) return found;
        found.now = found.written == found.read;
        found.recent = count_back(before.recent_ngram + line * RECENT, RECENT, found, row);
        if (found.recent == 0) found.waiting = count_back(before.waiting_ngram + line * WAITING, WAITING, found, row);
        found.number = found.listed + found.now;
        if (found.waiting == 0 && before.ngram[line * rows + row] == found.read)
            found.row = row, found.number += before.number[line * rows + row];
        return found;
    }

    // Count the values of an n-gram in a list from the newest on, as far as it has had the row; return where that begins
    Int count_back(const Int* ngrams, Int size, Found& found, Int row) const {
        const Int begin = first_hash(row, weights.rows), end = first_hash(row + 1, weights.rows);
        auto has_row = [&](Int ngram) { return (ngram >= begin) & (ngram < end); };  // which NO_NGRAM never has
        constexpr Int BLOCK = 16;                                                    // by vectors
        static_assert(RECENT % BLOCK == 0 && WAITING % BLOCK == 0);
        Int first = size;
        for (; first; first -= BLOCK) {
            const Int* block = ngrams + first - BLOCK;
            Int same = 0, of_row = 0;
            for (Int i = 0; i < BLOCK; i++) same += block[i] == found.read, of_row += has_row(block[i]);
            if (of_row > same) break;
            found.listed += same;
        }
        for (; first && (ngrams[first - 1] == found.read || !has_row(ngrams[first - 1])); first--)
            found.listed += ngrams[first - 1] == found.read;
        return first;
    }

    void sum_values(const Found& found, const State& before, Int line, const float* v, float* y) const {
        std::fill_n(y, value_dim, 0.0f);
        auto add = [&](const float* x) {
            for (Int i = 0; i < value_dim; i++) y[i] += x[i];
        };
        auto add_listed = [&](const Int* ngrams, const float* values, Int first, Int size) {
            for (Int i = first; i < size; i++)
                if (ngrams[line * size + i] == found.read) add(values + (line * size + i) * value_dim);
        };
        if (found.row >= 0) add(before.S + (line * weights.rows + found.row) * value_dim);
        if (found.listed) {
            add_listed(before.waiting_ngram, before.waiting_v, found.waiting, WAITING);
            add_listed(before.recent_ngram, before.recent_v, found.recent, RECENT);
        }
        if (found.now) add(v);
    }

    void append_value(Int written, const State& before, const State& after, Int line, const float* v) const {
        const bool writes = written != NO_NGRAM;  // else the list stays as it is
        const Int kept = RECENT - writes;
        Int* ngrams = after.recent_ngram + line * RECENT;
        float* into = after.recent_v + line * RECENT * value_dim;
        std::copy_n(before.recent_ngram + line * RECENT + writes, kept, ngrams);
        std::copy_n(before.recent_v + (line * RECENT + writes) * value_dim, kept * value_dim, into);
        if (writes) ngrams[kept] = written, std::copy_n(v, value_dim, into + kept * value_dim);
        if (ngrams[0] != NO_NGRAM) __atomic_store_n(&job.full, 1, __ATOMIC_RELAXED);
    }
};

}  // namespace
