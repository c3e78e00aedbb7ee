// The arguments of a scan of linear attention or the delta rule, and access to the tokens of one head of one row, a chunk
// of TILE tokens at a time. Tensors are float32 or bfloat16; everything is computed in float32.
//
// H heads, F features, V value dim.

#pragma once

#include "numbers.h"
#include "shared.h"

namespace {

static_assert(PADDED_TO == TILE);

struct StridedTensor {  // (B, H, T, ...), the last dimension contiguous; `data` is null if the tensor is missing
    void* data;
    Int row, head, token;  // strides
    Int bfloat16;          // else float32
};

struct ScanJob {
    Int batch_heads, heads, time, head_dim, features, value_dim, feature_map;  // a batch head is one head of one row
    Int channel_decay;                                                   // log decays are (B, H, T, F)
    StridedTensor q, k, v, document_starts, log_decay, beta, y, denominators, dy, dq, dk, dv, dlog_decay, dbeta;
    // contiguous: `state_after` is an output of the forward pass, `dstate_before` of the backward
    float *state_before, *state_after;
    float *dstate_before, *dstate_after;
    // FAVOR+ only, padded: (H, F, K), (H, K, F), (H, 3); dscale (batch_heads,) is the gradient of the first constant
    const float *projection, *projection_T, *favor_constants;
    float* dscale;
    float* scratch;    // for all workers
    Int scratch_size;  // for one worker
    Int workers_begun, batch_heads_begun;
};

struct BatchHead {  // one head of one row
    const ScanJob& job;
    const Int index, row, head, F, V;  // F and V padded

    BatchHead(const ScanJob& job, Int index)
        : job(job), index(index), row(index / job.heads), head(index % job.heads), F(padded(job.features)),
          V(padded(job.value_dim)) {}

    // Load the rows of a chunk, padded with zeros, and prefetch the rows `ahead` tokens later
    void load(const StridedTensor& x, Int begin, Int width, float* rows, Int ahead = TILE) const;
    void store(const StridedTensor& x, Int begin, Int width, const float* rows) const;
    Int tokens(Int begin) const { return std::min(TILE, job.time - begin); }

    Int offset(const StridedTensor& x, Int token) const { return row * x.row + head * x.head + token * x.token; }

    template <typename T = float>
    T* pointer(const StridedTensor& x, Int token) const {
        return static_cast<T*>(x.data) + offset(x, token);
    }
};

void BatchHead::load(const StridedTensor& x, Int begin, Int width, float* rows, Int ahead) const {
    for (Int t = 0; t < TILE; t++, rows += padded(width)) {
        const Int valid = t < tokens(begin) ? width : 0;
        const Int at = offset(x, begin + t), later = at + ahead * x.token, size = x.bfloat16 ? 2 : 4;
        load_numbers(x.data, x.bfloat16, at, valid, rows);
        const char* data = static_cast<const char*>(x.data);
        for (Int i = 0; i < width * size; i += 64) __builtin_prefetch(data + later * size + i, 0, 2);
        std::fill(rows + valid, rows + padded(width), 0.0f);
    }
}

void BatchHead::store(const StridedTensor& x, Int begin, Int width, const float* rows) const {
    for (Int t = 0; t < tokens(begin); t++, rows += padded(width))
        store_numbers(rows, width, x.data, x.bfloat16, offset(x, begin + t));
}

// The floats of a state: S (F, V), followed by z (F) if the recurrence has it
Int state_size(const BatchHead& batch_head) { return batch_head.F * (batch_head.V + HAS_Z); }

// From (features, value_dim + HAS_Z)
void load_state(const BatchHead& batch_head, const float* from, float* state) {
    const Int features = batch_head.job.features, value_dim = batch_head.job.value_dim, width = value_dim + HAS_Z;
    std::fill_n(state, state_size(batch_head), 0.0f);
    from += batch_head.index * features * width;
    for (Int f = 0; f < features; f++, from += width) {
        std::copy_n(from, value_dim, state + f * batch_head.V);
        if (HAS_Z) state[batch_head.F * batch_head.V + f] = from[value_dim];
    }
}

void store_state(const BatchHead& batch_head, const float* state, float* into) {
    const Int features = batch_head.job.features, value_dim = batch_head.job.value_dim, width = value_dim + HAS_Z;
    into += batch_head.index * features * width;
    for (Int f = 0; f < features; f++, into += width) {
        std::copy_n(state + f * batch_head.V, value_dim, into);
        if (HAS_Z) into[value_dim] = state[batch_head.F * batch_head.V + f];
    }
}

template <typename Pass>
void run_batch_heads(ScanJob* job) {
    const Int worker = __atomic_fetch_add(&job->workers_begun, 1, __ATOMIC_RELAXED);
    each_batch_head(job, [&](Int index) {
        const BatchHead batch_head(*job, index);
        Scratch scratch{job->scratch + worker * job->scratch_size};
        Pass(batch_head, scratch).run();
    });
}

}  // namespace
