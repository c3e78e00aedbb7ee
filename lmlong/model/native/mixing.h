// What one head of one text makes of queries, keys and values: convolution, turns, attention, norm and gate.

#pragma once

#include "features.h"

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

struct Token {  // of one text
    Int row, position;
    bool fresh;  // nothing came before that counts
};

struct Head {
    const Model& model;
    const Layer& layer;
    const Memory &before, &after;
    const Attention& about = layer.attention;
    const Int width = model.width, size = model.width / model.heads;  // of the model, and of one head
    float *q, *k, *v, *fq, *fk, *y, *own, *weights, *numerators;

    Head(const Model& model, const Layer& layer, const Memory& before, const Memory& after, Scratch room)
        : model(model), layer(layer), before(before), after(after) {
        for (float** x : {&q, &k, &v, &y}) *x = room.take(size);
        numerators = room.take(2 * size);  // float64, it may be
        for (float** x : {&fq, &fk, &own}) *x = room.take(about.features);
        weights = room.take(about.window);
    }

    // Queries, keys, values and gates of all heads, and what they come from, to this head's part of `mixed`
    void mix(const Token& token, Int head, const float* parts, const float* normed, const float* turns, float* mixed) {
        const Int begin = head * size;
        float* three[] = {q, k, v};
        for (Int part = 0; part < 3; part++) {
            std::fill_n(three[part] + size, padded(size) - size, 0.0f);
            convolve(token, part * width + begin, parts + part * width + begin, three[part]);
        }
        if (about.rotary) turn(q, turns), turn(k, turns);
        const Int line = token.row * model.heads + head;
        if (about.kind == WINDOW)
            look(token, line, head);
        else if (before.precise)
            recall<double>(token, line, head, normed);
        else
            recall<float>(token, line, head, normed);
        const float factor = spread(y, size);
        const float *gain = layer.head_norm + begin, *gate = parts + 3 * width + begin;
        for (Int i = 0; i < size; i++) mixed[begin + i] = y[i] * factor * gain[i] * gate[i] * sigmoid(gate[i]);
    }

    // The channels of one head, of tokens of which the last are remembered
    void convolve(const Token& token, Int channel, const float* x, float* into) {
        std::copy_n(x, size, into);
        if (!layer.taps) return;
        const Int channels = 3 * width, past = model.seen - 1;
        const float* tail = before.tail + token.row * past * channels + channel;
        float* kept = after.tail + token.row * past * channels + channel;
        const float* taps = layer.taps + channel;
        for (Int i = 0; i < size; i++) into[i] *= taps[past * channels + i];
        for (Int t = 0; t < past; t++, tail += channels, taps += channels) {
            if (!token.fresh)
                for (Int i = 0; i < size; i++) into[i] += tail[i] * taps[i];
            if (!t) continue;
            if (token.fresh)
                std::fill_n(kept, size, 0.0f);
            else
                std::copy_n(tail, size, kept);
            kept += channels;
        }
        if (past) std::copy_n(x, size, kept);
    }

    // Pairs of both halves by their angles, of which `turns` holds all cosines, then all sines
    void turn(float* x, const float* turns) {
        for (Int i = 0, half = size / 2; i < half; i++) {
            const float cos = turns[i], sin = turns[half + i], left = x[i], right = x[half + i];
            x[i] = left * cos - right * sin, x[half + i] = left * sin + right * cos;
        }
    }

    // The recurrence of linear attention, in one walk through S
    template <typename Sum>
    void recall(const Token& token, Int line, Int head, const float* normed) {
        const Int F = about.features, E = size;
        expand(about, head, false, q, size, fq, own), expand(about, head, true, k, size, fk, own);
        const Sum* S = static_cast<const Sum*>(before.first) + line * F * E;
        const Sum* z = static_cast<const Sum*>(before.second) + line * F;
        Sum* S_after = static_cast<Sum*>(after.first) + line * F * E;
        Sum* z_after = static_cast<Sum*>(after.second) + line * F;
        if (token.fresh) {
            std::fill_n(S_after, F * E, Sum(0)), std::fill_n(z_after, F, Sum(0));
            S = S_after, z = z_after;
        }
        const Sum keep = std::exp(Sum(log_decay(head, normed)));
        Sum *numerator = reinterpret_cast<Sum*>(numerators), denominator = 0;
        std::fill_n(numerator, E, Sum(0));
        for (Int f = 0; f < F; f++, S += E, S_after += E) {
            const Sum query = fq[f], key = fk[f];
            z_after[f] = z[f] * keep + key;
            denominator += query * z_after[f];
#pragma GCC ivdep
            for (Int e = 0; e < E; e++) {
                S_after[e] = S[e] * keep + key * v[e];
                numerator[e] += query * S_after[e];
            }
        }
        denominator = denominator < SMALLEST ? Sum(SMALLEST) : denominator;
        for (Int e = 0; e < E; e++) y[e] = numerator[e] / denominator;
    }

    float log_decay(Int head, const float* normed) const {
        if (about.log_decay) return about.log_decay[head];
        if (!about.forget) return 0;
        float score;
        project(about.forget, 1, head, normed, width, &score);
        score += about.bias[head];
        const float faded = std::min(score, 0.0f) - std::log1p(std::exp(-std::abs(score)));
        return faded < -FASTEST_DECAY ? -FASTEST_DECAY : faded;
    }

    // Exact attention over the last tokens, the new one at the end
    void look(const Token& token, Int line, Int head) {
        const Int past = about.window - 1;
        const float factor = 1 / std::sqrt(float(size));
        const bool* current = before.current + token.row * past;
        auto counts = [&](Int t) { return t == past || (current[t] && !token.fresh); };
        auto at = [&](const void* kept, const float* now, Int t) {
            return t == past ? now : static_cast<const float*>(kept) + (line * past + t) * size;
        };
        for (Int t = 0; t <= past; t++) {
            float product = 0;
            if (counts(t)) multiply_rows<AsFloats, 1>(at(before.first, k, t), size, q, &product);
            weights[t] = counts(t) ? product * factor : -INFINITY;
        }
        raise(weights, past + 1, largest(weights, past + 1));
        const float sum = 1 / total(weights, past + 1);
        std::fill_n(y, size, 0.0f);
        for (Int t = 0; t <= past; t++)
            if (counts(t))
                for (Int i = 0; i < size; i++) y[i] += weights[t] * sum * at(before.second, v, t)[i];
        if (!past) return;
        shift(before.first, after.first, line * past, past, k);
        shift(before.second, after.second, line * past, past, v);
        if (head) return;
        for (Int t = 0; t < past; t++) after.current[token.row * past + t] = counts(t + 1);
    }

    // The last keys or values without the oldest, and with the new one
    void shift(const void* from, void* into, Int first, Int past, const float* x) {
        const float* old = static_cast<const float*>(from) + first * size;
        float* kept = static_cast<float*>(into) + first * size;
        std::copy_n(old + size, (past - 1) * size, kept);
        std::copy_n(x, size, kept + (past - 1) * size);
    }
};

}  // namespace
