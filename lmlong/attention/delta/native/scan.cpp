// The delta rule over a span of tokens and its gradient: the formulas of delta/chunk.py, one head of one row at a time,
// in chunks so small that everything stays in the nearest cache, and the triangular systems are solved token by token.
//
// As in linear/native/scan.cpp, an x of a chunk lies in rows, one per token, and xT is its transpose.

#include "backward.h"
#include "forward.h"

extern "C" {

void scan_forward(ScanJob* job) { run_lines<Forward>(job); }

void scan_backward(ScanJob* job) { run_lines<Backward>(job); }

// The floats of scratch memory that a worker needs for the backward pass of a span, which are more than for the forward
Int scratch_size(const ScanJob* job) {
    const Int F = padded(job->features), V = padded(job->value_dim), chunks = padded(job->time) / TILE;
    return TILE * (10 * F + 6 * V) + F * V * (chunks + 2) + 2 * chunks * TILE * V;
}
}

#include "layout.h"
