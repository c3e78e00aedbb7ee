// The delta rule over a span of tokens and its gradient: the formulas of delta/chunk.py, for one head of one row at a
// time, in chunks of TILE tokens that fit in the L1 cache. The triangular systems are solved token by token.
//
// As in linear/native/scan.cpp, a matrix x of a chunk is stored with one row per token, and xT is its transpose.

#include "backward.h"
#include "forward.h"

extern "C" {

void scan_forward(ScanJob* job) { run_batch_heads<Forward>(job); }

void scan_backward(ScanJob* job) { run_batch_heads<Backward>(job); }

// The floats of scratch memory that a worker needs: for the backward pass of a span, which needs more than the forward
Int scratch_size(const ScanJob* job) {
    const Int F = padded(job->features), V = padded(job->value_dim), chunks = padded(job->time) / TILE;
    return TILE * (10 * F + 6 * V) + F * V * (chunks + 2) + 2 * chunks * TILE * V;
}
}

#include "layout.h"
