// The causal scan over a span of tokens and its gradient: the formulas of chunk.py, for one head of one row at a time,
// in chunks of TILE tokens that fit in the L1 cache.
//
// A matrix x of a chunk is stored with one row per token; xT is its transpose, with one row per feature. With both,
// every matrix product multiplies numbers by vectors (`add_matmul`). All widths are padded with zeros to multiples of
// TILE. Constants and enumerations that are not defined here come from native_kernel.py, through shared.h.

#include "backward.h"

extern "C" {

void scan_forward(ScanJob* job) { run_batch_heads<Forward>(job); }

void scan_backward(ScanJob* job) { run_batch_heads<Backward>(job); }

// The floats of scratch memory that a worker needs: for the backward pass of a span, which needs more than the forward
Int scratch_size(const ScanJob* job) {
    const Int F = padded(job->features), V = padded(job->value_dim), time = padded(job->time);
    return ChunkDecay::scratch_size(F) + 2 * Features::scratch_size(*job) + TILE * (4 * F + 5 * V + std::max(V, F)) +
           F * (V + 1) * (time / TILE + 2) + (job->feature_map == FAVOR ? time * F : 0);
}
}

#include "layout.h"
