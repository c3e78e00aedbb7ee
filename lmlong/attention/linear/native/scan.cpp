// The causal scan over a span of tokens and its gradient: the formulas of chunk.py, for one head of one row at a time,
// in chunks of TILE tokens that fit in the L1 cache.
//
// A matrix x of a chunk is stored with one row per token; xT is its transpose, with one row per feature. With both,
// every matrix product multiplies numbers by vectors (`add_matmul`). All widths are padded with zeros to multiples of
// TILE. Constants and enumerations that are not defined here come from native_kernel.py, through shared.h.

#include "backward.h"

#include "scan_exports.h"
