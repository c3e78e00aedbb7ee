// Hashes of n-grams, as in attention/ngram/hashing.py.

#pragma once

#include "shared.h"
#include "simd.h"

namespace {

constexpr uint64_t HASH_MASK = (uint64_t(1) << HASH_BITS) - 1;

// The hash of n tokens, oldest first; NO_NGRAM where one of them is of another document
inline Int hash_ngram(const Int* tokens, Int n) {
    uint64_t hash = 0;
    for (Int i = 0; i < n; i++) {
        if (tokens[i] < 0) return NO_NGRAM;
        hash = (hash * HASH_MULTIPLIER + uint64_t(tokens[i]) + 1) & HASH_MASK;
    }
    return Int(hash * HASH_GOLDEN & HASH_MASK);
}

// By numbers of 32 bits, which vectors multiply fast
inline Int row_of(Int hash, Int rows) {
    return Int(uint64_t(uint32_t(hash >> (HASH_BITS / 2))) * uint32_t(rows) >> (HASH_BITS / 2));
}

}  // namespace
