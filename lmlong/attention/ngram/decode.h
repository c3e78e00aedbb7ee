// A decode step of n-gram attention: the mean of the values that followed the last n tokens, times a gate that depends
// on the counts of all heads.

#pragma once

#include "mixer.h"
#include "ngrams.h"

namespace {

struct NgramAttention {
    struct Weights {
        Int rows;          // rows in the table of a head
        const Int* sizes;  // (heads) n of each head
        Gate read_gate;
        const float *number_weight, *raw_smoothing;  // (heads, heads) and (heads)
    };

    struct State {
        float* S;        // the table, read-only
        int32_t* number;
        Int* ngram;
        Int* waiting_ngram;  // the waiting values, which are not in the table yet, read-only
        float* waiting_v;
        Int* recent_ngram;  // the recent values, which follow the waiting ones
        float* recent_v;
    };

    // The values of an n-gram in one head: its row of the table, matching values in both lists from an index on (the
    // n-gram has owned its row since then), and the current value
    struct Match {
        Int written, read;
        Int row = -1, waiting = WAITING, recent = RECENT, listed = 0;
        bool now = false;
        Int number = 0;  // number of all these values
    };

    const DecodeJob& job;
    const Weights& weights;
    const Int heads, width, value_dim;
    Match* matches;  // one for each head of a row of the batch
    Int matched_row = -1;

    NgramAttention(const DecodeJob& job, const Layer& layer, const Weights& weights, Scratch& scratch)
        : job(job), weights(weights), heads(layer.heads), width(job.model->width), value_dim(layer.value_dim),
          matches(reinterpret_cast<Match*>(scratch.take(heads * sizeof(Match) / sizeof(float)))) {}

    void step(const HeadInput& input, const State& before, const State& after, float* y) {
        const Int head = input.head;
        if (input.token.row != matched_row) {  // the heads of a row are computed consecutively
            for (Int h = 0; h < heads; h++) matches[h] = find(input.token, before, h);
            matched_row = input.token.row;
        }
        float logit = gate_logit(weights.read_gate, head, input.x, width);
        for (Int h = 0; h < heads; h++)
            logit += weights.number_weight[head * heads + h] * std::log1p(float(matches[h].number));
        sum_values(matches[head], before, head, input.v, y);
        append_value(matches[head].written, before, after, head, input.v);
        const float smoothed = matches[head].number + std::exp(weights.raw_smoothing[head]);
        for (Int i = 0; i < value_dim; i++) y[i] *= sigmoid(logit) / smoothed;
    }

    Match find(const Token& token, const State& before, Int head) const {
        const Int n = weights.sizes[head], rows = weights.rows;
        Int tokens[MAX_NGRAM + 1];  // the last n + 1 tokens of the document
        for (Int i = 0; i <= n; i++) tokens[i] = token_before(job, token.row, n - i);
        Match match{hash_ngram(tokens, n), hash_ngram(tokens + 1, n)};
        if (match.read == NO_NGRAM) return match;
        const Int row = row_of(match.read, rows);
        if (match.written != NO_NGRAM && match.written != match.read && row_of(match.written, rows) == row) return match;
        match.now = match.written == match.read;
        match.recent = count_back(before.recent_ngram + head * RECENT, RECENT, match, row);
        if (match.recent == 0)
            match.waiting = count_back(before.waiting_ngram + head * WAITING, WAITING, match, row);
        match.number = match.listed + match.now;
        if (match.waiting == 0 && before.ngram[head * rows + row] == match.read)
            match.row = row, match.number += before.number[head * rows + row];
        return match;
    }

    // Count the values of an n-gram in a list, from the newest back to the last value of another n-gram in its row.
    // Return the index after that value.
    Int count_back(const Int* ngrams, Int size, Match& match, Int row) const {
        const Int begin = first_hash(row, weights.rows), end = first_hash(row + 1, weights.rows);
        auto has_row = [&](Int ngram) { return (ngram >= begin) & (ngram < end); };  // false for NO_NGRAM
        constexpr Int BLOCK = 16;                                                    // for vector instructions
        static_assert(RECENT % BLOCK == 0 && WAITING % BLOCK == 0);
        Int first = size;
        for (; first; first -= BLOCK) {
            const Int* block = ngrams + first - BLOCK;
            Int same = 0, of_row = 0;
            for (Int i = 0; i < BLOCK; i++) same += block[i] == match.read, of_row += has_row(block[i]);
            if (of_row > same) break;
            match.listed += same;
        }
        for (; first && (ngrams[first - 1] == match.read || !has_row(ngrams[first - 1])); first--)
            match.listed += ngrams[first - 1] == match.read;
        return first;
    }

    void sum_values(const Match& match, const State& before, Int head, const float* v, float* y) const {
        std::fill_n(y, value_dim, 0.0f);
        auto add = [&](const float* x) {
            for (Int i = 0; i < value_dim; i++) y[i] += x[i];
        };
        auto add_listed = [&](const Int* ngrams, const float* values, Int first, Int size) {
            for (Int i = first; i < size; i++)
                if (ngrams[head * size + i] == match.read) add(values + (head * size + i) * value_dim);
        };
        if (match.row >= 0) add(before.S + (head * weights.rows + match.row) * value_dim);
        if (match.listed) {
            add_listed(before.waiting_ngram, before.waiting_v, match.waiting, WAITING);
            add_listed(before.recent_ngram, before.recent_v, match.recent, RECENT);
        }
        if (match.now) add(v);
    }

    void append_value(Int written, const State& before, const State& after, Int head, const float* v) const {
        const bool writes = written != NO_NGRAM;  // otherwise the list is unchanged
        const Int kept = RECENT - writes;
        Int* ngrams = after.recent_ngram + head * RECENT;
        float* into = after.recent_v + head * RECENT * value_dim;
        std::copy_n(before.recent_ngram + head * RECENT + writes, kept, ngrams);
        std::copy_n(before.recent_v + (head * RECENT + writes) * value_dim, kept * value_dim, into);
        if (writes) ngrams[kept] = written, std::copy_n(v, value_dim, into + kept * value_dim);
        if (ngrams[0] != NO_NGRAM) __atomic_store_n(&job.full, 1, __ATOMIC_RELAXED);
    }
};

// As `make_room` in step.py, in place
inline bool make_room(
    const Layer& layer, const NgramAttention::Weights& weights, NgramAttention::State& state, NgramAttention::State&) {
    const Int V = layer.value_dim;
    bool full = false, waiting_full = false;
    for (Int head = 0; head < layer.heads; head++) {
        full |= state.recent_ngram[head * RECENT] != NO_NGRAM;
        for (Int i = 0; i < RECENT; i++) waiting_full |= state.waiting_ngram[head * WAITING + i] != NO_NGRAM;
    }
    for (Int head = 0; full && head < layer.heads; head++) {
        Int *waiting = state.waiting_ngram + head * WAITING, *recent = state.recent_ngram + head * RECENT;
        float *waiting_v = state.waiting_v + head * WAITING * V, *recent_v = state.recent_v + head * RECENT * V;
        auto write = [&](const Int* ngrams, const float* values, Int size) {
            for (Int i = 0; i < size; i++, values += V) {
                if (ngrams[i] == NO_NGRAM) continue;
                const Int row = head * weights.rows + row_of(ngrams[i], weights.rows);
                const bool is_new = state.ngram[row] != ngrams[i];
                for (Int j = 0; j < V; j++) state.S[row * V + j] = (is_new ? 0 : state.S[row * V + j]) + values[j];
                state.number[row] = is_new ? 1 : state.number[row] + (state.number[row] < INT32_MAX);
                state.ngram[row] = ngrams[i];
            }
        };
        if (waiting_full) {
            write(waiting, waiting_v, WAITING), write(recent, recent_v, RECENT);
            std::fill_n(waiting, WAITING, NO_NGRAM);
        } else {
            std::copy(waiting + RECENT, waiting + WAITING, waiting);
            std::copy(waiting_v + RECENT * V, waiting_v + WAITING * V, waiting_v);
            std::copy_n(recent, RECENT, waiting + WAITING - RECENT);
            std::copy_n(recent_v, RECENT * V, waiting_v + (WAITING - RECENT) * V);
        }
        std::fill_n(recent, RECENT, NO_NGRAM);
    }
    return true;
}

}  // namespace
