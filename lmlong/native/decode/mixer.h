// The mixer of one layer, for one head of one row: short convolution, rope, attention, norm and output gate.

#pragma once

#include "features.h"
#include "ngram.h"

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

struct Token {
    Int row, position;
    bool starts_document;  // the state before it does not count
};

// What a head of n-gram attention finds of an n-gram: its row of the table, and values that followed it and are not in
// the table: the current one, and those of both lists from a place on, as far as this n-gram has had the row
struct Found {
    Int written, read;
    Int row = -1, waiting = WAITING, recent = RECENT, listed = 0;
    bool now = false;
    Int number = 0;  // of all values
};

struct KeyValues {  // of a run of past tokens
    const float *keys, *values;  // (lines, size, head_dim) and (lines, size, value_dim)
    const bool* current;         // (size) which of them are of the document that goes on
    Int line, size;
};

// The state of a layer that holds a row of the batch
const LayerState& state_of(const DecodeJob& job, const LayerState* states, Int row, Int layer) {
    return states[(job.separate ? row * job.model->layers : 0) + layer];
}

// How many keys a query meets at most
Int attended(const DecodeJob& job, Int layer) {
    const Attention& attention = job.model->layer[layer].attention;
    if (attention.kind != SOFTMAX_ATTENTION) return attention.window;
    Int most = 0;
    for (Int row = 0; row < (job.separate ? job.rows : 1); row++) {
        const LayerState& state = state_of(job, job.states_before, row, layer);
        most = std::max(most, state.settled + state.recent + 1);
    }
    return most;
}

struct Head {
    const DecodeJob& job;
    const Model& model = *job.model;
    const Int number;  // of the layer
    const Layer& layer = model.layer[number];
    LayerState before, after;  // that hold the row of the current token,
    Int row = 0;               // and where they do
    const Attention& attention = layer.attention;
    const Int width = model.width, head_dim = model.head_dim, value_dim = model.value_dim;
    const Int gates = attention.gated ? model.heads * value_dim : 0;
    const Int channels = layer.in_proj.outputs - gates;  // of queries, keys and values, or of values alone
    const bool has_keys = attention.kind != NGRAM;
    const Int sharing = has_keys ? model.heads / model.kv_heads : 1;  // heads of queries with the same keys and values
    float *q, *k, *v, *fq, *fk, *y, *inner, *weights, *numerators;
    float *kept_q, *kept_k, *near;  // of a window beside a recurrence: what the other reads, and what it has found
    float *lowered, *forgotten;  // of a decay by channel: the row of the batch projected to its rank, a head's gates
    Int lowered_row = -1;
    Found* found_by;  // each head of a row of the batch
    Int found_row = -1;

    Head(const DecodeJob& job, Int number, Scratch& scratch)
        : job(job), number(number), before(job.states_before[number]), after(job.states_after[number]) {
        for (float** x : {&q, &k}) *x = scratch.take(head_dim);
        for (float** x : {&v, &y}) *x = scratch.take(value_dim);
        for (float** x : {&kept_q, &kept_k, &near}) *x = scratch.take(attention.share_weight ? std::max(head_dim, value_dim) : 0);
        numerators = scratch.take(2 * value_dim);  // may be float64
        for (float** x : {&fq, &fk, &inner, &forgotten}) *x = scratch.take(attention.features);
        lowered = scratch.take(attention.gate_rank);
        weights = scratch.take(attended(job, number));
        found_by = reinterpret_cast<Found*>(scratch.take(model.heads * sizeof(Found) / sizeof(float)));
    }

    // Write this head's part of `mixed`, from the queries, keys, values and gates of all heads and the vector `normed`
    // that these were projected from
    void forward(
        const Token& token, Int head, const float* qkv_gate, const float* normed, const float* cos_sin, float* mixed) {
        const Int channel = head * value_dim, kv_head = head / sharing;
        const Int keys = has_keys ? model.heads * head_dim : 0;  // where they begin, after all queries
        const Int values = has_keys ? keys + model.kv_heads * head_dim : 0;
        if (job.separate) {
            before = state_of(job, job.states_before, token.row, number);
            after = state_of(job, job.states_after, token.row, number);
        } else {
            row = token.row;
        }
        if (has_keys) {  // heads that share a key write the same numbers of it to the state
            short_conv(token, head * head_dim, head_dim, qkv_gate, q);
            short_conv(token, keys + kv_head * head_dim, head_dim, qkv_gate, k);
        }
        short_conv(token, values + kv_head * value_dim, value_dim, qkv_gate, v);
        if (attention.uses_rope) rope(q, cos_sin), rope(k, cos_sin);
        const Int line = row * model.heads + head;
        if (attention.share_weight) look_nearby(token, line, head, cos_sin);
        if (attention.kind == WINDOW)
            window_attention(token, line, head);
        else if (attention.kind == SOFTMAX_ATTENTION)
            softmax_attention(token, head, kv_head);
        else if (attention.kind == NGRAM)
            ngram_attention(token, line, head, normed);
        else if (attention.kind == DELTA && before.float64)
            delta_rule<double>(token, line, head, normed);
        else if (attention.kind == DELTA)
            delta_rule<float>(token, line, head, normed);
        else if (before.float64)
            linear_attention<double>(token, line, head, normed);
        else
            linear_attention<float>(token, line, head, normed);
        if (attention.share_weight) {
            const float share = sigmoid(gate_logit(attention.share_weight, attention.share_bias, head, normed));
            for (Int i = 0; i < value_dim; i++) y[i] = share * near[i] + (1 - share) * y[i];
        }
        if (layer.head_norm) {
            const float factor = rms_norm_scale(y, value_dim, model.norm_epsilon);
            for (Int i = 0; i < value_dim; i++) y[i] *= factor * layer.head_norm[channel + i];
        }
        const float* gate = qkv_gate + channels + channel;
        for (Int i = 0; i < value_dim; i++) mixed[channel + i] = y[i] * (attention.gated ? gate[i] * sigmoid(gate[i]) : 1);
    }

    // So many channels from one on, of all inputs of this token; the state holds those of the last tokens
    void short_conv(const Token& token, Int channel, Int size, const float* inputs, float* into) {
        const float* x = inputs + channel;
        std::copy_n(x, size, into);
        std::fill_n(into + size, padded(size) - size, 0.0f);
        if (!layer.conv_weight) return;
        const Int past = model.conv_width - 1;
        const float* tail = before.tail + row * past * channels + channel;
        float* tail_after = after.tail + row * past * channels + channel;
        const float* weight = layer.conv_weight + channel;
        for (Int i = 0; i < size; i++) into[i] *= weight[past * channels + i];
        for (Int t = 0; t < past; t++, tail += channels, weight += channels) {
            if (!token.starts_document)
                for (Int i = 0; i < size; i++) into[i] += tail[i] * weight[i];
            if (!t) continue;
            if (token.starts_document)
                std::fill_n(tail_after, size, 0.0f);
            else
                std::copy_n(tail, size, tail_after);
            tail_after += channels;
        }
        if (past) std::copy_n(x, size, tail_after);
    }

    // Rotate pairs of numbers, one of each half of x, by their angles; `cos_sin` holds all cosines, then all sines
    void rope(float* x, const float* cos_sin) {
        for (Int i = 0, half = head_dim / 2; i < half; i++) {
            const float cos = cos_sin[i], sin = cos_sin[half + i], left = x[i], right = x[half + i];
            x[i] = left * cos - right * sin, x[half + i] = left * sin + right * cos;
        }
    }

    // The recurrence of linear attention, in one pass over S
    template <typename Float>
    void linear_attention(const Token& token, Int line, Int head, const float* normed) {
        const Int F = attention.features, V = value_dim;
        apply_feature_map(attention, head, false, q, head_dim, fq, inner);
        apply_feature_map(attention, head, true, k, head_dim, fk, inner);
        const Float* S = static_cast<const Float*>(before.S) + line * F * V;
        const Float* z = static_cast<const Float*>(before.z) + line * F;
        Float* S_after = static_cast<Float*>(after.S) + line * F * V;
        Float* z_after = static_cast<Float*>(after.z) + line * F;
        if (token.starts_document) {
            std::fill_n(S_after, F * V, Float(0)), std::fill_n(z_after, F, Float(0));
            S = S_after, z = z_after;
        }
        Float decay = 0;
        if (attention.gate_down)
            compute_gates(token, head, normed);
        else
            decay = std::exp(Float(log_decay(head, normed)));
        Float *numerator = reinterpret_cast<Float*>(numerators), denominator = 0;
        std::fill_n(numerator, V, Float(0));
        for (Int f = 0; f < F; f++, S += V, S_after += V) {
            const Float query = fq[f], key = fk[f];
            if (attention.gate_down) decay = channel_decay<Float>(forgotten[f]);
            z_after[f] = z[f] * decay + key;
            denominator += query * z_after[f];
#pragma GCC ivdep
            for (Int i = 0; i < V; i++) {
                S_after[i] = S[i] * decay + key * v[i];
                numerator[i] += query * S_after[i];
            }
        }
        denominator = denominator < MIN_DENOMINATOR ? Float(MIN_DENOMINATOR) : denominator;
        for (Int i = 0; i < V; i++) y[i] = numerator[i] / denominator;
    }

    // The delta rule, in two passes over S: what the key has stored, then the change of it and the output
    template <typename Float>
    void delta_rule(const Token& token, Int line, Int head, const float* normed) {
        const Int F = attention.features, V = value_dim;
        apply_feature_map(attention, head, false, q, head_dim, fq, inner);
        apply_feature_map(attention, head, true, k, head_dim, fk, inner);
        scale_to_unit(fq, F), scale_to_unit(fk, F);
        const Float* S = static_cast<const Float*>(before.S) + line * F * V;
        Float* S_after = static_cast<Float*>(after.S) + line * F * V;
        const Float decay = token.starts_document ? 0 : std::exp(Float(log_decay(head, normed)));
        const Float beta = sigmoid(gate_logit(attention.beta_weight, attention.beta_bias, head, normed));
        Float* change = reinterpret_cast<Float*>(numerators);
        std::fill_n(change, V, Float(0));
        if (!token.starts_document)
            for (Int f = 0; f < F; f++) {
                const Float key = decay * fk[f];
#pragma GCC ivdep
                for (Int i = 0; i < V; i++) change[i] += key * S[f * V + i];
            }
        for (Int i = 0; i < V; i++) change[i] = beta * (v[i] - change[i]), y[i] = 0;
        for (Int f = 0; f < F; f++, S += V, S_after += V) {
            const Float query = fq[f], key = fk[f];
#pragma GCC ivdep
            for (Int i = 0; i < V; i++) {
                S_after[i] = (token.starts_document ? 0 : decay * S[i]) + key * change[i];
                y[i] += query * S_after[i];
            }
        }
    }

    // The gates of the channels of a head, each as the share e below one half that it keeps, or as -e where it keeps 1 - e:
    // what is left of long memories hangs on digits of e that 1 - e would round away
    void compute_gates(const Token& token, Int head, const float* normed) {
        const Int F = attention.features, rank = attention.gate_rank;
        if (token.row != lowered_row) project(attention.gate_down, rank, 0, normed, width, lowered);
        lowered_row = token.row;
        project(attention.gate_weight, F, head, lowered, rank, forgotten);
        for (Int f = 0; f < F; f++) forgotten[f] += attention.gate_bias[head * F + f];
        for (Int f = 0; f < F; f += LANES) {
            const FloatVec x = lanes(forgotten + f), zero = {}, least = simd_exp(zero + MIN_LOG_DECAY);
            const FloatVec small = lesser_sigmoid(x);
            lanes(forgotten + f) = x < zero ? (small < least ? least : small) : -small;
        }
    }

    template <typename Float>
    static Float channel_decay(float gate) {
        return std::signbit(gate) ? 1 + Float(gate) : Float(gate);
    }

    float log_decay(Int head, const float* normed) const {
        if (attention.log_decay) return attention.log_decay[head];
        if (!attention.gate_weight) return 0;
        const float logit = gate_logit(attention.gate_weight, attention.gate_bias, head, normed);
        const float log_sigmoid = std::min(logit, 0.0f) - std::log1p(std::exp(-std::abs(logit)));
        return log_sigmoid < MIN_LOG_DECAY ? MIN_LOG_DECAY : log_sigmoid;
    }

    float gate_logit(const float* weight, const float* bias, Int head, const float* normed) const {
        float logit;
        project(weight, 1, head, normed, width, &logit);
        return logit + bias[head];
    }

    // The mean of the values that followed the last n tokens, weighed by a gate that sees how many every head has found
    void ngram_attention(const Token& token, Int line, Int head, const float* normed) {
        if (token.row != found_row) {  // heads of one row come one after the other
            for (Int other = 0; other < model.heads; other++) found_by[other] = find(token, line - head + other, other);
            found_row = token.row;
        }
        float logit = gate_logit(attention.gate_weight, attention.gate_bias, head, normed);
        for (Int other = 0; other < model.heads; other++)
            logit += attention.number_weight[head * model.heads + other] * std::log1p(float(found_by[other].number));
        sum_values(found_by[head], line);
        append_value(found_by[head].written, line);
        const float smoothed = found_by[head].number + std::exp(attention.raw_smoothing[head]);
        for (Int i = 0; i < value_dim; i++) y[i] *= sigmoid(logit) / smoothed;
    }

    Found find(const Token& token, Int line, Int head) const {
        const Int n = attention.sizes[head], past = model.past_tokens, rows = attention.rows;
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
        const Int begin = first_hash(row, attention.rows), end = first_hash(row + 1, attention.rows);
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

    void sum_values(const Found& found, Int line) {
        std::fill_n(y, value_dim, 0.0f);
        auto add = [&](const float* x) {
            for (Int i = 0; i < value_dim; i++) y[i] += x[i];
        };
        auto add_listed = [&](const Int* ngrams, const float* values, Int first, Int size) {
            for (Int i = first; i < size; i++)
                if (ngrams[line * size + i] == found.read) add(values + (line * size + i) * value_dim);
        };
        if (found.row >= 0) add(static_cast<const float*>(before.S) + (line * attention.rows + found.row) * value_dim);
        if (found.listed) {
            add_listed(before.waiting_ngram, before.waiting_v, found.waiting, WAITING);
            add_listed(before.recent_ngram, before.recent_v, found.recent, RECENT);
        }
        if (found.now) add(v);
    }

    void append_value(Int written, Int line) {
        const bool writes = written != NO_NGRAM;  // else the list stays as it is
        const Int kept = RECENT - writes;
        Int* ngrams = after.recent_ngram + line * RECENT;
        float* into = after.recent_v + line * RECENT * value_dim;
        std::copy_n(before.recent_ngram + line * RECENT + writes, kept, ngrams);
        std::copy_n(before.recent_v + (line * RECENT + writes) * value_dim, kept * value_dim, into);
        if (writes) ngrams[kept] = written, std::copy_n(v, value_dim, into + kept * value_dim);
        if (ngrams[0] != NO_NGRAM) __atomic_store_n(&job.full, 1, __ATOMIC_RELAXED);
    }

    // Softmax attention over the last tokens
    void window_attention(const Token& token, Int line, Int head) {
        const Int past = attention.window - 1;
        const bool* current = before.current + row * past;
        attend(token, {before.keys, before.values, current, line, past}, {});
        if (!past) return;
        shift_window(before.keys, after.keys, line * past, past, k, head_dim);
        shift_window(before.values, after.values, line * past, past, v, value_dim);
        if (head) return;
        bool* current_after = after.current + row * past;
        for (Int t = 0; t < past; t++) current_after[t] = t + 1 == past || (current[t + 1] && !token.starts_document);
    }

    // What a window beside a recurrence finds; this changes its queries and keys
    void look_nearby(const Token& token, Int line, Int head, const float* cos_sin) {
        std::copy_n(q, head_dim, kept_q), std::copy_n(k, head_dim, kept_k);
        if (attention.window_uses_rope && !attention.uses_rope) rope(q, cos_sin), rope(k, cos_sin);
        window_attention(token, line, head);
        std::copy_n(kept_q, head_dim, q), std::copy_n(kept_k, head_dim, k), std::copy_n(y, value_dim, near);
    }

    // Softmax attention over all tokens of the document
    void softmax_attention(const Token& token, Int head, Int kv_head) {
        const Int settled = before.settled, recent = before.recent, line = row * model.kv_heads + kv_head;
        const bool *settled_current = before.settled_current + row * settled,
                   *current = before.current + row * recent;
        attend(
            token,
            {before.settled_keys, before.settled_values, settled_current, line, settled},
            {before.keys, before.values, current, line, recent});
        if (head % sharing) return;  // another head of the same keys and values has appended them
        append(before.keys, after.keys, line, recent, k, head_dim);
        append(before.values, after.values, line, recent, v, value_dim);
        if (head) return;
        bool* current_after = after.current + row * (recent + 1);
        for (Int t = 0; t <= recent; t++) current_after[t] = t == recent || (current[t] && !token.starts_document);
        if (token.starts_document) std::fill_n(after.settled_current + row * settled, settled, false);
    }

    // y = the mean of the values of the document so far, weighed by softmax. Tokens of other documents are left out
    // rather than masked, so that no bit depends on how many there are
    void attend(const Token& token, const KeyValues& older, const KeyValues& newer) {
        const float scale = 1 / std::sqrt(float(head_dim));
        for (Int i = 0; i < head_dim; i++) q[i] *= scale;
        auto each_run = [&](auto call) {
            for (const KeyValues* cached : {&older, &newer})
                for (Int begin = 0, end; !token.starts_document && begin < cached->size; begin = end + 1) {
                    for (end = begin; end < cached->size && cached->current[end];) end++;
                    if (begin < end) call(*cached, cached->line * cached->size + begin, end - begin);
                }
        };
        Int count = 0;
        each_run([&](const KeyValues& cached, Int first, Int size) {
            const Matrix keys{cached.keys + first * head_dim, nullptr, FLOAT32, size, head_dim};
            matmul(keys, {0, size}, q, 0, 1, weights + count, 0, nullptr);
            count += size;
        });
        matvec<Float32, 1>(k, head_dim, q, weights + count);
        exp_(weights, count + 1, max_of(weights, count + 1));
        std::fill_n(y, value_dim, 0.0f), std::fill_n(numerators, value_dim, 0.0f);
        Int added = 0;
        each_run([&](const KeyValues& cached, Int first, Int size) {
            add_values(cached.values + first * value_dim, size, weights + added, added);
            added += size;
        });
        const float inverse = 1 / sum_of(weights, count + 1);
        for (Int i = 0; i < value_dim; i++) y[i] = (y[i] + numerators[i] + weights[count] * v[i]) * inverse;
    }

    // Add values to the numerators after `added` others. Each time that these are the sum of many, they are added to y:
    // a small term would lose digits beside a large sum
    void add_values(const float* values, Int size, const float* weight, Int added) {
        constexpr Int MANY = 256;
        for (Int t = 0, count; t < size; t += count) {
            count = std::min(MANY - (added + t) % MANY, size - t);
            const float* from = values + t * value_dim;
            Int i = 0;
            for (; i + 4 * LANES <= value_dim; i += 4 * LANES) add_channels<4>(from + i, count, weight + t, numerators + i);
            for (; i + LANES <= value_dim; i += LANES) add_channels<1>(from + i, count, weight + t, numerators + i);
            for (; i < value_dim; i++)
                for (Int j = 0; j < count; j++) numerators[i] += weight[t + j] * from[j * value_dim + i];
            if ((added + t + count) % MANY) continue;
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

    // The cached keys or values with the new one
    static void append(const float* from, float* into, Int line, Int past, const float* x, Int size) {
        std::copy_n(from + line * past * size, past * size, into + line * (past + 1) * size);
        std::copy_n(x, size, into + (line * (past + 1) + past) * size);
    }

    // The cached keys or values without the oldest, and with the new one
    void shift_window(const float* from, float* into, Int first, Int past, const float* x, Int size) {
        const float* cached = from + first * size;
        float* shifted = into + first * size;
        std::copy_n(cached + size, (past - 1) * size, shifted);
        std::copy_n(x, size, shifted + (past - 1) * size);
    }
};

}  // namespace
