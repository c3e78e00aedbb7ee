// Memory for intermediate results: slices of a buffer that Python allocated.

#pragma once

#include "simd.h"

namespace {

struct Scratch {
    float* begin;
    Int used = 0;

    float* take(Int size) {
        float* taken = begin + used;
        used += padded(size);
        return taken;
    }
};

}  // namespace
