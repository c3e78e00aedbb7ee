// One text in the memory of a web page: a token is read, and then the text moves on to the state after it. Both states
// belong to the page alone, so they are changed in place.

#pragma once

#include <cstdlib>

namespace {

// Make room in the state after the next token
inline bool make_room(const DecodeJob& job) {
    bool enough = true;
    for (Int i = 0; i < job.model->layers; i++) {
        const Layer& layer = job.model->layer[i];
        with_kind(layer.kind, [&](auto kind) {
            using Attention = typename decltype(kind)::Attention;
            auto state = [&](const char* states) {
                const auto& part = state_at<LayerState>(job, states, 0, layer.state);
                return const_cast<typename Attention::State*>(&attention_state<typename Attention::State>(part));
            };
            const auto& weights = *static_cast<const typename Attention::Weights*>(layer.attention);
            enough &= make_room(layer, weights, *state(job.states_before), *state(job.states_after));
        });
    }
    return enough;
}

}  // namespace

extern "C" {

void* allocate(size_t size) { return std::aligned_alloc(64, (size + 63) / 64 * 64); }

// Read the next token of the text, which stays where it is. Return whether there was enough memory
bool read_token(DecodeJob* job, int32_t token) {
    static Int room = 0;
    if (!make_room(*job)) return false;
    if (const Int needed = scratch_size(job, 1); needed > room) {
        std::free(job->scratch);
        room = needed + needed / 4;
        job->scratch = static_cast<float*>(allocate(room * sizeof(float)));
        if (!job->scratch) return room = 0;
    }
    const_cast<Int*>(job->tokens)[0] = token;
    decode_step(job);
    return true;
}

// Move on to the state after the token. Downsampled layers have read it only if it ends a block
void advance(DecodeJob* job) {
    const Model& model = *job->model;
    const Hourglass& hourglass = model.hourglass;
    auto *before = const_cast<char*>(job->states_before), *after = const_cast<char*>(job->states_after);
    if (hourglass.pooling && job->positions[0] % hourglass.factor != hourglass.factor - 1) {
        auto offset = [&](Int layer) { return layer < model.layers ? model.layer[layer].state : hourglass.state; };
        std::swap_ranges(before + offset(hourglass.first_layer), before + offset(hourglass.end_layer),
                         after + offset(hourglass.first_layer));
    }
    std::swap(job->states_before, job->states_after);
    const_cast<Int*>(job->positions)[0]++;
    if (!model.past_tokens) return;
    auto* last = const_cast<Int*>(job->last_tokens);
    std::copy(last + 1, last + model.past_tokens, last);
    last[model.past_tokens - 1] = job->tokens[0];
}
}
