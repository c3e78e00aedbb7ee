// n-gram attention over many tokens and its gradient: one row of the state is written and one read for each token.
//
// H heads, T time, V value dim, R rows. Constants that are not defined here come from kernel.py, by shared.h.

#include <algorithm>
#include <cstdint>

#include "ngram.h"
#include "shared.h"

namespace {

struct NgramJob {
    Int batch_heads, heads, time, value_dim, rows;  // a batch head is one head of one row
    const Int* hashes;                        // (B, H, T, 2) of the n-grams before each token and ending with it
    const bool* document_starts;              // (B, T), null if no document starts
    const float* v;                           // (B, T, H, V)
    float *sums, *numbers;                    // (B, T, H, V) and (B, H, T) of the row that is read
    bool* cleared;                            // (B, H, T) whether the written row belonged to another n-gram
    const float* S_before;                    // (B, H, R, V); null if the state before is empty
    const int32_t* number_before;             // (B, H, R)
    const Int* ngram_before;                  // (B, H, R)
    float* S_after;                           // the state after is empty at the beginning
    int32_t* number_after;
    Int* ngram_after;
    const float* dsums;
    float *dv, *dS;  // dS (B, H, R, V): of the state after at the beginning, of the state before at the end
    Int is_scratch;  // whether the state after or dS is memory for each worker (workers, R, ...), empty before and after
    Int workers_begun, batch_heads_begun;
    Int invalid;  // set if a hash is neither NO_NGRAM nor in range, so that it has no row
};

struct NgramHead {
    const NgramJob& job;
    const Int index, row, head, V;
    const Int first;  // row of its tables that are written

    NgramHead(const NgramJob& job, Int index, Int worker)
        : job(job), index(index), row(index / job.heads), head(index % job.heads), V(job.value_dim),
          first((job.is_scratch ? worker : index) * job.rows) {}

    Int written(Int t) const { return job.hashes[2 * (index * job.time + t)]; }
    Int read(Int t) const { return job.hashes[2 * (index * job.time + t) + 1]; }
    bool starts_document(Int t) const { return job.document_starts && job.document_starts[row * job.time + t]; }
    Int token(Int t) const { return ((row * job.time + t) * job.heads + head) * V; }
    Int table_row(Int hash) const { return first + row_of(hash, job.rows); }

    // Whether each hash has a row; hashes may come from a file
    bool has_rows() const {
        const Int* hashes = job.hashes + 2 * index * job.time;
        bool valid = true;
        for (Int i = 0; i < 2 * job.time; i++) valid &= hashes[i] == NO_NGRAM || is_hash(hashes[i]);
        return valid;
    }

    void forward() const {
        copy_state();
        for (Int t = 0; t < job.time; t++) {
            prefetch(job.S_after, t);
            if (starts_document(t)) clear_state();
            const float* v = job.v + token(t);
            bool& cleared = job.cleared[index * job.time + t] = false;
            if (const Int ngram = written(t); ngram != NO_NGRAM) {
                const Int at = table_row(ngram);
                float* S = job.S_after + at * V;
                cleared = job.ngram_after[at] != ngram;
                if (cleared) {
                    std::copy_n(v, V, S);
                    job.ngram_after[at] = ngram, job.number_after[at] = 1;
                } else {
                    for (Int i = 0; i < V; i++) S[i] += v[i];
                    job.number_after[at] += job.number_after[at] < INT32_MAX;
                }
            }
            const Int ngram = read(t), at = ngram == NO_NGRAM ? 0 : table_row(ngram);
            const bool matches = ngram != NO_NGRAM && job.ngram_after[at] == ngram;
            float* sums = job.sums + token(t);
            job.numbers[index * job.time + t] = matches ? job.number_after[at] : 0;
            if (matches)
                std::copy_n(job.S_after + at * V, V, sums);
            else
                std::fill_n(sums, V, 0.0f);
        }
        if (job.is_scratch) each_touched(0, [&](Int at) { job.ngram_after[at] = NO_NGRAM, job.number_after[at] = 0; });
    }

    void backward() const {
        bool begun = false;
        const auto clear = [&](Int at) { std::fill_n(job.dS + at * V, V, 0.0f); };
        for (Int t = job.time - 1; t >= 0; t--) {
            if (t) prefetch(job.dS, t - 1);
            if (job.numbers[index * job.time + t] > 0) {
                const float* dsums = job.dsums + token(t);
                float* dS = job.dS + table_row(read(t)) * V;
                for (Int i = 0; i < V; i++) dS[i] += dsums[i];
            }
            float* dv = job.dv + token(t);
            if (const Int ngram = written(t); ngram == NO_NGRAM) {
                std::fill_n(dv, V, 0.0f);
            } else {
                float* dS = job.dS + table_row(ngram) * V;
                std::copy_n(dS, V, dv);
                if (job.cleared[index * job.time + t]) std::fill_n(dS, V, 0.0f);
            }
            // clear the remaining gradients: they are of empty rows, or of values before the document
            if (starts_document(t) && !begun) {
                begun = true;
                if (job.is_scratch)
                    each_touched(t, clear);
                else
                    std::fill_n(job.dS + first * V, job.rows * V, 0.0f);
            }
        }
        if (job.is_scratch) each_touched(0, clear);
    }

    // Call a function with each row of a table that a token from `begin` on reads or writes
    template <typename Function>
    void each_touched(Int begin, Function function) const {
        for (Int t = begin; t < job.time; t++)
            for (const Int ngram : {read(t), written(t)})
                if (ngram != NO_NGRAM) function(table_row(ngram));
    }

    // Copy only rows that are in use: pages of memory that are never touched cost nothing
    void copy_state() const {
        if (!job.S_before) return;
        for (Int at = first, from = index * job.rows; at < first + job.rows; at++, from++)
            if ((job.number_after[at] = job.number_before[from])) {
                std::copy_n(job.S_before + from * V, V, job.S_after + at * V);
                job.ngram_after[at] = job.ngram_before[from];
            }
    }

    void clear_state() const {
        for (Int at = first; at < first + job.rows; at++)
            if (job.number_after[at]) {
                std::fill_n(job.S_after + at * V, V, 0.0f);
                job.ngram_after[at] = NO_NGRAM, job.number_after[at] = 0;
            }
    }

    void prefetch(const float* table, Int t) const {
        if (t + AHEAD < job.time && read(t + AHEAD) != NO_NGRAM)
            __builtin_prefetch(table + table_row(read(t + AHEAD)) * V, 1, 2);
    }

    static constexpr Int AHEAD = 8;
};

void run_heads(NgramJob* job, void (NgramHead::*pass)() const) {
    const Int worker = __atomic_fetch_add(&job->workers_begun, 1, __ATOMIC_RELAXED);
    each_batch_head(job, [&](Int index) {
        const NgramHead head(*job, index, worker);
        if (head.has_rows())
            (head.*pass)();
        else
            __atomic_store_n(&job->invalid, 1, __ATOMIC_RELAXED);
    });
}

}  // namespace

extern "C" {

void ngram_forward(NgramJob* job) { run_heads(job, &NgramHead::forward); }

void ngram_backward(NgramJob* job) { run_heads(job, &NgramHead::backward); }
}

#include "layout.h"
