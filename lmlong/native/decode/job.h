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

struct Attention {
    Int kind, uses_rope, gated, window;  // gated: whether a gate multiplies what it puts out
    Int window_uses_rope;                // where a window is beside a recurrence
    Int feature_map, features, inner;                // inner: size of what a feature map projects
    const float *query_projection, *key_projection;  // (heads, inner, head dim); null where it projects nothing
    const float* favor_constants;                    // (heads, 3)
    const float* log_decay;                          // (heads), of a fixed decay
    const float *gate_weight, *gate_bias;            // (heads, width) and (heads), of a learned decay or a read gate
    const float* gate_down;                          // (gate rank, width), of a decay by channel, whose other weights
    Int gate_rank;                                   // are (heads, features, gate rank) and (heads, features)
    const float *beta_weight, *beta_bias;            // the same of the delta rule's beta
    const float *share_weight, *share_bias;          // and of the share of a window beside the recurrence
    Int rows;                                        // of the table of an n-gram head
    const Int* sizes;                                // (heads) n of each
    const float *number_weight, *raw_smoothing;      // (heads, heads) and (heads)
};

struct Layer {
    Attention attention;
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
    Int heads, kv_heads, head_dim, value_dim;  // heads of queries, and of keys and values; the size of a head's queries and keys, and of its values
    Int any_rope;           // whether any layer uses rope
    Int past_tokens;        // how many tokens before the current one its attentions ask for
    float embedding_scale;  // multiplies the embeddings
    float norm_epsilon;
    const double* frequencies;  // (head_dim / 2) by what angle rope turns each pair at a token
    const float *embedding, *norm;
    const Layer* layer;
    Matrix output;
    Hourglass hourglass;
};

struct LayerState {
    void *S, *z;           // of linear attention, S of the delta rule too
    float *keys, *values;  // of window attention, and the recent ones of softmax attention
    bool* current;         // which of these keys are of the current document
    Int recent;            // how many there are of softmax attention
    float *settled_keys, *settled_values;  // of softmax attention, those before, which are not written to
    bool* settled_current;
    Int settled;
    int32_t* number;       // of n-gram attention, whose S this is too: the table, which is not written to,
    Int* ngram;
    Int* waiting_ngram;  // the values that are not in it yet and that are not written to either,
    float* waiting_v;
    Int* recent_ngram;  // and those after them
    float* recent_v;
    float* tail;           // the last inputs of the convolution
    Int float64;           // whether S and z are float64
};

struct DecodeJob {
    const Model* model;
    const LayerState *states_before, *states_after;  // of each layer; (rows, layers) where each row has its own
    float *tail_before, *tail_after, *upsampled_before, *upsampled_after;  // HourglassState, in hourglass.py
    const Int *tokens, *positions;
    Int *last_tokens_before, *last_tokens_after;  // (rows, past_tokens)
    float *logits, *scratch;
    Int rows, separate;  // separate: whether each row has a state of its own, elsewhere in memory
    void (*barrier)();                      // OpenMP's functions; null where there is one thread
    int (*thread_num)(), (*num_threads)();
    mutable Int full;     // set where a list of recent values has no room for one more
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
