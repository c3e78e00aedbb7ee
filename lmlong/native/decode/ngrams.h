// The last tokens of a document, and the trained vectors of its last n-grams, as in model/ngram_embedding.py.

#pragma once

#include "matmul.h"
#include "ngram.h"

namespace {

// The token that is `back` tokens before the current one of a row; -1 before the start of its document
inline Int token_before(const DecodeJob& job, Int row, Int back) {
    if (job.positions[row] < back) return -1;
    return back ? job.last_tokens[(row + 1) * job.model->past_tokens - back] : job.tokens[row];
}

// The vectors (count, width) of a row's last n tokens, one for each n; 0 if its document has fewer tokens
inline void look_up(const DecodeJob& job, Int row, float* vectors) {
    const NgramTables& tables = job.model->tables;
    for (Int i = 0; i < tables.count; i++) {
        const Int n = tables.orders[i];
        Int tokens[MAX_NGRAM];
        for (Int j = 0; j < n; j++) tokens[j] = token_before(job, row, n - 1 - j);
        const Int hash = hash_ngram(tokens, n);
        float* into = vectors + i * tables.width;
        if (hash == NO_NGRAM) {
            std::fill_n(into, tables.width, 0.0f);
        } else {
            const Int found = i * tables.rows + row_of(hash, tables.rows);
            read_row(tables.table, found, into);
        }
    }
}

}  // namespace
