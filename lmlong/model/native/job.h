// What is asked for: a model, what it remembers of each text, and the token that each goes on with.

#pragma once

#include "arithmetic.h"

namespace {

enum Kept { FLOATS, HALVES, BYTES };

struct Matrix {  // (outputs, inputs)
    const void* numbers;
    const float* steps;  // of each row, where its numbers are whole
    Int kept, outputs, inputs;
};

enum Kind { LINEAR, WINDOW };
enum Map { ELU, RELU, COSINE, SOFTMAX, TAYLOR, FAVOR };

struct Attention {
    Int kind, rotary, window;
    Int map, features, drawn;  // drawn: rows that queries and keys are multiplied with by the map
    const float *of_queries, *of_keys;  // these rows (heads, drawn, head width)
    const float* constants;             // (heads, 3) of favor
    const float* log_decay;             // (heads), of a fixed decay
    const float *forget, *bias;         // (heads, width) and (heads), of a learned one
};

struct Layer {
    Attention attention;
    const float *norm, *taps, *head_norm, *inner_norm;  // taps (tokens seen, 3 width), null without a convolution
    Matrix project_in, project_out, inner_in, inner_out;
};

enum Pooling { NONE, MEAN, MAX, CONV };

struct Hourglass {
    Int pooling, factor, first, last;  // the layers inside, from the first to before the last
    const float* norm;
    Matrix convolution, project_out;
};

struct Model {
    Int layers, width, heads, inner, seen;  // inner: width of the MLP; seen: tokens of a convolution
    Int turned;                             // whether any layer has rotary positions
    float embedded;                         // what embeddings are multiplied with
    const float *embedding, *norm;
    const Layer* layer;
    Matrix output;
    Hourglass hourglass;
};

struct Memory {  // of one layer: S and z of linear attention, keys, values and which of them count of a window
    void *first, *second;
    bool* current;
    float* tail;
    Int precise;  // S and z are float64
};

struct Job {
    const Model* model;
    const Memory *before, *after;  // of each layer
    float *pooled_before, *pooled_after, *given_before, *given_after;  // HourglassState, in downsample.py
    const Int *tokens, *positions;
    float *logits, *scratch;
    Int rows;
    void (*meet)();  // where workers wait for each other; null where there is one
    int (*number)(), (*count)();  // of the worker that asks, and of all there are
};

struct Range {
    Int begin, end;
};

struct Team {
    Int number, count;
    void (*meet)();

    Range share(Int total) const { return {total * number / count, total * (number + 1) / count}; }
    void wait() const {
        if (count > 1) meet();
    }
};

struct Scratch {
    float* begin;
    Int used = 0;

    float* take(Int size) {
        float* piece = begin + used;
        used += padded(size);
        return piece;
    }
};

}  // namespace
