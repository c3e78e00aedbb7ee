// The functions of a scan's library, given its Forward and Backward passes over one batch head. Included last.

#pragma once

extern "C" {

void scan_forward(ScanJob* job) { run_batch_heads<Forward>(job); }

void scan_backward(ScanJob* job) { run_batch_heads<Backward>(job); }

// The floats of scratch memory that a worker needs: those of the backward pass, which takes more than the forward
Int scratch_size(const ScanJob* job) {
    Scratch scratch{nullptr};
    const BatchHead batch_head(*job, 0);
    Backward(batch_head, scratch);
    return scratch.used;
}
}

#include "layout.h"
