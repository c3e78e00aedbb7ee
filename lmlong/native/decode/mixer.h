// The mixer of one layer, for some heads of one row: short convolution, rope, attention, norm and output gate; and the
// gates of a head at a token, projected from the token's vector.

#pragma once

#include "features.h"

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

float gate_logit(const Gate& gate, Int head, const float* x, Int width) {
    float logit;
    project(gate.weight, 1, head, x, width, &logit);
    return gate.bias ? logit + gate.bias[head] : logit;
}

// The log decay of a head: fixed, learned, or 0 if it does not decay
float log_decay(const Forgetting& forgetting, Int head, const float* x, Int width) {
    if (forgetting.log_decay) return forgetting.log_decay[head];
    if (!forgetting.gate.weight) return 0;
    const float logit = gate_logit(forgetting.gate, head, x, width);
    const float small = std::log1p(std::exp(-std::abs(logit)));
    const float log_decay = forgetting.log_rate
                                ? -std::exp(forgetting.log_rate[head]) * (std::max(logit, 0.0f) + small)
                                : std::min(logit, 0.0f) - small;
    return log_decay < MIN_LOG_DECAY ? MIN_LOG_DECAY : log_decay;
}

struct Token {
    Int row, position;
    bool starts_document;  // ignores the state before it
};

// The input of an attention at a token, for one query head, or for several that share a head of keys and values
struct HeadInput {
    const Token& token;
    Int head, heads, kv_head;       // head: the first of `heads` query heads
    const float *x, *cos_sin;       // the vector from which q, k and v are projected; cosines and sines of rope
    float *q, *k;                   // q of each head, and k, padded with zeros; an attention may change them
    const float* v;
};

// A part of the state of a row, at an offset in it
template <typename State>
const State& state_at(const DecodeJob& job, const char* states, Int row, Int offset) {
    return *reinterpret_cast<const State*>(states + row * job.model->state_size + offset);
}

template <typename State>
const State& attention_state(const LayerState& state) {  // which has 8 bytes, also where pointers have 4
    return *reinterpret_cast<const State*>(reinterpret_cast<const char*>(&state) + sizeof(Int));
}

// Rotate pairs of the first `rotated` numbers of x, one from each half of these, by their angles. `cos_sin` holds all
// cosines, then all sines. Not inlined in every kind of attention: that would take a second to compile
[[gnu::noinline]] void rope(float* x, Int rotated, const float* cos_sin) {
    for (Int i = 0, half = rotated / 2; i < half; i++) {
        const float cos = cos_sin[i], sin = cos_sin[half + i], left = x[i], right = x[half + i];
        x[i] = left * cos - right * sin, x[half + i] = left * sin + right * cos;
    }
}

// Make room in the state after the next token of a page's text (page.h), and report whether there was enough memory. Kinds
// overload it whose states grow or fill up
template <typename Weights, typename State>
bool make_room(const Layer&, const Weights&, State&, State&) {
    return true;
}

// An Attention is a kind's struct in its decode.h. It has structs Weights and State, a constructor of (job, layer,
// weights, scratch), and step(input, state before, state after, y), which writes y of each head (value_dim, padded)
template <typename Attention>
struct Mixer {
    const DecodeJob& job;
    const Model& model = *job.model;
    const Layer& layer;
    const Int head_dim = layer.head_dim, value_dim = layer.value_dim;
    const Int gates = layer.output_gate ? layer.heads * value_dim : 0;
    const Int keys = layer.query_heads * head_dim, values = keys + layer.key_heads * head_dim;  // their first channels
    const Int channels = values + layer.kv_heads * value_dim;
    const Int sharing = layer.heads / layer.kv_heads;     // heads of queries that share a head of keys and values
    const Int together = layer.grouped ? sharing : 1;     // most heads in an input of the attention
    float *q, *k, *v, *y;
    Attention attention;

    Mixer(const DecodeJob& job, const Layer& layer, Scratch& scratch)
        : job(job), layer(layer), q(scratch.take(together * padded(head_dim))), k(scratch.take(head_dim)), v(scratch.take(value_dim)),
          y(scratch.take(together * padded(value_dim))),
          attention(job, layer, *static_cast<const typename Attention::Weights*>(layer.attention), scratch) {}

    // Write the part of `mixed` of `heads` heads from `first` on, which share a head of keys and values. `qkv_gate` holds
    // the queries, keys, values, input gates and output gates of all heads, projected from `normed`
    void forward(
        const Token& token, Int first, Int heads, const float* qkv_gate, const float* normed, const float* cos_sin,
        float* mixed) {
        const Int kv_head = first / sharing, q_stride = padded(head_dim), y_stride = padded(value_dim);
        const Int key_head = first / (layer.heads / layer.key_heads), heads_per_query = layer.heads / layer.query_heads;
        const auto& before = state_at<LayerState>(job, job.states_before, token.row, layer.state);
        const auto& after = state_at<LayerState>(job, job.states_after, token.row, layer.state);
        auto convolved = [&](Int channel, Int size, const float* x, float* into) {
            short_conv(token, before.tail, after.tail, channel, size, x, into);
        };
        for (Int i = 0; i < heads; i++) {
            const Int channel = (first + i) / heads_per_query * head_dim;
            convolved(channel, head_dim, qkv_gate + channel, q + i * q_stride);
            if (layer.query_norm) norm(layer.query_norm, qkv_gate, keys, channel, q + i * q_stride);
        }
        const Int key = keys + key_head * head_dim, value = values + kv_head * value_dim;
        convolved(key, head_dim, qkv_gate + key, k);  // heads that share a key write the same state
        if (layer.key_norm) norm(layer.key_norm, qkv_gate + keys, values - keys, key_head * head_dim, k);
        const float* inputs = qkv_gate + value;
        if (layer.input_gated) {
            const float* gate = qkv_gate + channels + kv_head * value_dim;
            for (Int i = 0; i < value_dim; i++) y[i] = inputs[i] * gate[i];
            inputs = y;
        }
        convolved(value, value_dim, inputs, v);
        if (layer.uses_rope) {
            for (Int i = 0; i < heads; i++) rope(q + i * q_stride, layer.rotated, cos_sin);
            rope(k, layer.rotated, cos_sin);
        }
        using State = typename Attention::State;
        attention.step(
            HeadInput{token, first, heads, kv_head, normed, cos_sin, q, k, v},
            attention_state<State>(before),
            attention_state<State>(after),
            y);
        for (Int i = 0; i < heads; i++) norm_and_gate(first + i, y + i * y_stride, qkv_gate, mixed);
    }

    // Scale a query or key x in place. Its head has channels from `channel` on among `size` channels of all heads
    void norm(const float* gain, const float* all, Int size, Int channel, float* x) const {
        const bool together = layer.norms_together;
        const float factor = rms_norm_scale(together ? all : x, together ? size : head_dim, model.norm_epsilon);
        if (together) gain += channel;
        for (Int i = 0; i < head_dim; i++) x[i] *= factor * gain[i];
    }

    void norm_and_gate(Int head, float* y, const float* qkv_gate, float* mixed) const {
        const Int channel = head * value_dim;
        if (layer.head_norm) {
            const float factor = rms_norm_scale(y, value_dim, layer.head_norm_epsilon);
            for (Int i = 0; i < value_dim; i++) y[i] *= factor * layer.head_norm[channel + i];
        }
        const float* gate = qkv_gate + layer.in_proj.outputs - gates + channel;
        const Int kind = layer.output_gate;
        for (Int i = 0; i < value_dim; i++) {
            const float opened = kind == NO_GATE ? 1 : kind == IDENTITY_GATE ? gate[i] : sigmoid(gate[i]);
            mixed[channel + i] = y[i] * (kind == SILU_GATE ? gate[i] * opened : opened);
        }
    }

    // Convolve this token's inputs x of `size` channels, from `channel` on. The tails hold the last tokens' inputs. Not
    // inlined, as rope
    [[gnu::noinline]] void short_conv(
        const Token& token, const float* tail, float* tail_after, Int channel, Int size, const float* x,
        float* into) const {
        std::copy_n(x, size, into);
        std::fill_n(into + size, padded(size) - size, 0.0f);
        if (!layer.conv_weight) return;
        const Int past = layer.conv_width - 1;
        tail += channel, tail_after += channel;
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
        if (!layer.conv_silu) return;
        for (Int i = 0; i < size; i++) into[i] *= sigmoid(into[i]);
    }
};

}  // namespace
