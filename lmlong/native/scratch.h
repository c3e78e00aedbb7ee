// Memory for intermediate results, taken piece by piece from what Python allocated.

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
