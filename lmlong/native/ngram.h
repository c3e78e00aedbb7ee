// Hashes of n-grams, as in attention/ngram/hashing.py.

#pragma once

#include "shared.h"
#include "simd.h"

namespace {

constexpr uint64_t HASH_MASK = (uint64_t(1) << HASH_BITS) - 1;

// The hash of n tokens, oldest first; NO_NGRAM if one of them belongs to another document
inline Int hash_ngram(const Int* tokens, Int n) {
    uint64_t hash = 0;
    for (Int i = 0; i < n; i++) {
        if (tokens[i] < 0) return NO_NGRAM;
        hash = (hash * HASH_MULTIPLIER + uint64_t(tokens[i]) + 1) & HASH_MASK;
    }
    return Int(hash * HASH_GOLDEN & HASH_MASK);
}

inline bool is_hash(Int x) { return x >= 0 && uint64_t(x) <= HASH_MASK; }

inline Int row_of(Int hash, Int rows) { return (hash >> (HASH_BITS / 2)) * rows >> (HASH_BITS / 2); }

// The lowest hash of a row: its hashes end before the next row's lowest
inline Int first_hash(Int row, Int rows) {
    return ((row << (HASH_BITS / 2)) + rows - 1) / rows << (HASH_BITS / 2);
}

}  // namespace
