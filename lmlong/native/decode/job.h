// The arguments of a decode step: a model, the state of each row of a batch, and the token that each continues with.

#pragma once

#include "scratch.h"
#include "shared.h"

namespace {

struct Matrix {  // (outputs, inputs)
    const void* data;
    const float* scales;  // (outputs), of int8
    Int dtype, outputs, inputs;
};

struct Features {  // a feature map, in the weights of an attention that has one
    Int map, size, inner;                            // inner: size of what the map projects
    const float *query_projection, *key_projection;  // (heads, inner, head dim); null where it projects nothing
    const float* constants;                          // of each head
};

struct Gate {
    const float *weight, *bias;  // (heads, width) and (heads); null if unused
};

struct Forgetting {          // the decay of a recurrence
    const float* log_decay;  // (heads), of a fixed decay
    Gate gate;               // of a learned decay
    const float* gate_down;  // (rank, width), of a decay by channel, whose gate has (heads, features, rank) weights
    Int rank;                // and (heads, features) biases
};

struct Layer {
    Int kind;                // of its attention, a case in kinds.h
    const void* attention;   // the weights of that kind
    Int state;               // offset of its state in the state of a row, in bytes
    Int kv_heads, head_dim;  // heads of keys and values; the size of queries and keys, 0 where it has none
    Int uses_rope, rotates;  // whether queries and keys have positions by rope, or some part of the attention adds them
    Int gated;               // whether a gate multiplies the output
    const float *norm, *conv_weight, *head_norm, *mlp_norm;  // conv_weight (conv width, channels); null without them
    Matrix in_proj, out_proj, mlp_in_proj, mlp_out_proj;
};

struct Hourglass {
    Int pooling, factor, first_layer, end_layer;  // the downsampled layers are those from the first to before the end
    const float* norm;
    Matrix conv, out_proj;
};

struct Model {
    Int layers, width, mlp_width, conv_width;
    Int heads, head_dim, value_dim;  // heads of queries; the size of a head's queries and keys, and of its values
    Int any_rope;           // whether any layer uses rope
    Int past_tokens;        // how many tokens before the current one its attentions ask for
    Int state_size;         // of the states of all layers, in bytes
    float embedding_scale;  // multiplies the embeddings
    float norm_epsilon;
    const double* frequencies;  // (head_dim / 2) by what angle rope turns each pair at a token
    const float *embedding, *norm;
    const Layer* layer;
    Matrix output;
    Hourglass hourglass;
};

struct LayerState {  // followed by the state of the layer's attention
    float* tail;     // the last inputs of the convolution
};

struct DecodeJob {
    const Model* model;
    const char *states_before, *states_after;  // of all layers, (rows, state_size) where each row has its own
    float *tail_before, *tail_after, *upsampled_before, *upsampled_after;  // HourglassState, in hourglass.py
    const Int *tokens, *positions;
    Int *last_tokens_before, *last_tokens_after;  // (rows, past_tokens)
    float *logits, *scratch;
    Int rows, separate;  // separate: whether each row has a state of its own, elsewhere in memory
    void (*barrier)();                      // OpenMP's functions; null where there is one thread
    int (*thread_num)(), (*num_threads)();
    mutable Int full;     // set where a state has no room for another token
    mutable Int invalid;  // set where nothing is computed, since a token or a position is out of range
};

struct Range {
    Int begin, end;
};

struct ThreadTeam {
    Int thread_num, num_threads;
    void (*barrier)();

    Range share(Int total) const { return {total * thread_num / num_threads, total * (thread_num + 1) / num_threads}; }
    void wait() const {
        if (num_threads > 1) barrier();
    }
};

}  // namespace
