// A decode step of softmax attention over all tokens of the document.

#pragma once

#include <cstdlib>

#include "key_values.h"

namespace {

struct SoftmaxAttention {
    struct Weights {};

    struct State {
        KeyValues settled, recent;  // `settled` is read-only, except `current`
        Int settled_size, recent_size;
    };

    const Int sharing;
    const SoftmaxMean mean;

    SoftmaxAttention(const DecodeJob& job, const Layer& layer, const Weights&, Scratch& scratch)
        : sharing(layer.heads / layer.kv_heads),
          mean(job, layer, most_tokens(job, layer), sharing, scratch) {}

    static Int most_tokens(const DecodeJob& job, const Layer& layer) {
        Int most = 0;
        for (Int row = 0; row < job.rows; row++) {
            const State& state = attention_state<State>(state_at<LayerState>(job, job.states_before, row, layer.state));
            most = std::max(most, state.settled_size + state.recent_size + 1);
        }
        return most;
    }

    void step(const HeadInput& input, const State& before, const State& after, float* y) const {
        const PastTokens recent{before.recent, input.kv_head, before.recent_size};
        mean(input, {before.settled, input.kv_head, before.settled_size}, recent, y);
        if (input.head % sharing) return;  // another thread has the first head of the group, which appends
        mean.append(input, recent, 0, after.recent);
        if (input.token.starts_document && !input.head)
            std::fill_n(after.settled.current, before.settled_size, false);
    }
};

// As `with_room` in state.py, in place: recent tokens are settled when they fill a block
inline bool make_room(
    const Layer& layer, const SoftmaxAttention::Weights&, SoftmaxAttention::State& before,
    SoftmaxAttention::State& after) {
    auto enlarge = [](auto*& data, Int bytes) {
        void* larger = std::realloc(data, bytes);
        if (larger) data = static_cast<std::decay_t<decltype(data)>>(larger);
        return larger != nullptr;
    };
    const Int element = before.recent.dtype == BFLOAT16 ? sizeof(uint16_t) : sizeof(float);
    const Int settled = before.settled_size, heads = layer.kv_heads;
    const bool settles = before.recent_size == CACHE_BLOCK;
    auto settle = [&](auto*& all, const auto* recent, Int heads, Int token) {
        if (!enlarge(all, heads * (settled + CACHE_BLOCK) * token)) return false;
        auto* bytes = reinterpret_cast<char*>(all);
        for (Int head = heads - 1; head >= 0; head--) {  // from the last one on, to where no other has to move
            char* into = bytes + head * (settled + CACHE_BLOCK) * token;
            std::memmove(into, bytes + head * settled * token, settled * token);
            std::memcpy(into + settled * token, recent + head * CACHE_BLOCK * token, CACHE_BLOCK * token);
        }
        return true;
    };
    for (KeyValues* cached : {&before.recent, &after.recent})
        if (!cached->k && !(enlarge(cached->k, heads * CACHE_BLOCK * layer.head_dim * element) &&
                            enlarge(cached->v, heads * CACHE_BLOCK * layer.value_dim * element) &&
                            enlarge(cached->current, CACHE_BLOCK)))
            return false;
    if (settles) {
        const KeyValues& recent = before.recent;
        if (!settle(before.settled.k, static_cast<const char*>(recent.k), heads, layer.head_dim * element) ||
            !settle(before.settled.v, static_cast<const char*>(recent.v), heads, layer.value_dim * element) ||
            !settle(before.settled.current, recent.current, 1, sizeof(bool)))
            return false;
        before.settled_size += CACHE_BLOCK, before.recent_size = 0;
    }
    after.settled = before.settled, after.settled_size = before.settled_size;
    after.recent_size = before.recent_size + 1;
    return true;
}

}  // namespace
