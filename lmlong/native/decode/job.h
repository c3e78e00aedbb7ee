// The arguments of a decode step: a model, the next token of each row, and each row's state before and after it.

#pragma once

#include "shared.h"
#include "thread_team.h"

namespace {

struct Matrix {  // (outputs, inputs)
    const void* data;  // int8 and int4: panels of grouped.h
    Int dtype, outputs, inputs;
};

struct FeatureMapWeights {
    Int map, size, inner;                            // inner: size of the projection
    const float *query_projection, *key_projection;  // (heads, inner, head dim); null without a projection
    const float* constants;                          // of each head
};

struct Gate {
    const float *weight, *bias;  // (heads, width) and (heads); null if unused or without bias
};

struct Forgetting {          // the decay of a recurrence
    const float* log_decay;  // (heads), of a fixed decay
    Gate gate;               // of a learned decay
    const float* log_rate;   // (heads), which softplus of the gate is multiplied by; null if the gate is a sigmoid
    const float* gate_down;  // (rank, width), of a decay by channel; its gate has weights (heads, features, rank)
    Int rank;                // and biases (heads, features)
};

struct Layer {               // a mixer, and the MLP if it is the last mixer of its block
    Int kind;                // of its attention, a case in kinds.h
    const void* attention;   // its weights, a structure of its kind
    Int state;               // offset of the layer's state in the state of a row, in bytes
    Int heads;                             // of outputs
    Int query_heads, key_heads, kv_heads;  // of queries, keys and values, each shared by some heads; kv: of values
    Int head_dim, value_dim;  // the size of a head's queries and keys, 0 without them, and of its values
    Int conv_width, conv_silu;  // tokens seen by the convolution; whether silu follows it
    Int cos_sin;             // index of its first cosine among those of a token
    Int uses_rope, rotated;  // whether rope rotates all queries and keys; how many numbers of a head it rotates in any part
    Int output_gate;         // of OutputGate
    Int input_gated;         // whether a gate multiplies the values before the convolution
    Int grouped;             // whether its attention takes the heads of queries that share keys and values together
    Int norms_together;      // whether the norms of queries and keys are of all heads together
    Int norm_after, mlp_norm_after;  // whether norm follows the mixer, and mlp_norm the MLP
    const float *norm, *conv_weight, *query_norm, *key_norm, *head_norm, *mlp_norm;  // null without them
    Matrix in_proj, out_proj, mlp_in_proj, mlp_out_proj;  // mlp: without outputs if another mixer follows in the block
    float head_norm_epsilon;
};

struct Hourglass {
    Int pooling, factor, first_layer, end_layer;  // layers first_layer to end_layer - 1 are downsampled
    Int state;  // offset of its HourglassState in the state of a row, in bytes
    const float* norm;
    Matrix conv, out_proj;
};

struct NgramTables {
    Int count, rows, width;  // tables, their rows, and the size of a row
    const Int* orders;       // (count) n of each table
    Matrix table;            // (count * rows, width)
    Matrix projection;       // of a row of each table
};

struct Rotation {  // of the queries and keys of some layers
    Int pairs;
    const double* frequencies;  // (pairs) angles by which rope rotates each pair at a token
};

struct Model {
    Int layers, width, mlp_width;
    Int rotations, cos_sins;  // numbers of rotations, and of their cosines and sines for a token
    Int past_tokens;        // how many tokens before the current one its attentions and tables read
    Int state_size;         // of a row: the states of all layers and of the hourglass, in bytes
    float embedding_scale;  // multiplies the embeddings
    float norm_epsilon;
    const Rotation* rotation;
    const float* norm;
    const Layer* layer;
    Matrix embedding, output;
    Hourglass hourglass;
    NgramTables tables;
};

struct LayerState {  // followed by the state of the layer's attention
    float* tail;     // the last inputs of the convolution
};

struct HourglassState {  // as in hourglass.py
    float *tail, *upsampled;
};

struct DecodeJob {
    const Model* model;
    const char *states_before, *states_after;     // (rows, state_size)
    const Int *tokens, *positions, *last_tokens;  // last_tokens: (rows, past_tokens) before each token
    float *logits, *hidden, *scratch;             // hidden: (rows, width), normalized
    Int rows;
    Int consecutive;  // whether the rows are tokens of one text: each reads the state that the row before writes
    void (*barrier)();                      // OpenMP's functions; null with one thread
    int (*thread_num)(), (*num_threads)();
    mutable Int full;     // set if a state has no room for another token
    mutable Int invalid;  // set if a token or a position is out of range; nothing is computed then
};

}  // namespace
