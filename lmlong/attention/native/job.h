// What is asked for, and the tokens of one head of one row in pieces of a chunk. Numbers are read as they are kept,
// float32 or bfloat16, and computed with in float32.

#pragma once

#include "arithmetic.h"

namespace {

typedef uint32_t Bits __attribute__((may_alias));

struct Rows {  // (B, H, T, ...), the last dimension in one piece; `at` is null where there are none
    void* at;
    Int row, head, token;  // from one to the next
    Int halves;            // bfloat16
};

struct Job {
    Int lines, heads, time, features, values, map;
    Rows q, k, v, starts, log_decay, y, denominators, dy, dq, dk, dv, dlog_decay;
    float *before, *after;  // states (lines, F, E + 1), z last; what is computed is `after`, and of gradients `before`
    float *dbefore, *dafter;
    float* scratch;  // of all workers
    Int scratch_size, worker, line;  // the last two count up while workers come and lines are begun
};

enum Map { GIVEN, ELU, RELU };

struct Line {  // one head of one row
    const Job& job;
    const Int number, row, head, F, E;  // F and E filled up

    Line(const Job& job, Int number)
        : job(job), number(number), row(number / job.heads), head(number % job.heads), F(padded(job.features)),
          E(padded(job.values)) {}

    // Rows of a chunk; those so far ahead are fetched meanwhile
    void load(const Rows& x, Int begin, Int width, float* rows, Int ahead = CHUNK) const;
    void store(const Rows& x, Int begin, Int width, const float* rows) const;
    Int tokens(Int begin) const { return std::min(CHUNK, job.time - begin); }

    template <typename T = float>
    T* place(const Rows& x, Int token) const {
        return static_cast<T*>(x.at) + row * x.row + head * x.head + token * x.token;
    }
};

struct Scratch {  // one worker's memory
    float* free;

    float* take(Int size) {
        float* piece = free;
        free += size;
        return piece;
    }
};

template <typename T>
void prefetch(const T* from, Int width) {
    for (Int i = 0; i < width; i += 64 / sizeof(T)) __builtin_prefetch(from + i, 0, 2);
}

void Line::load(const Rows& x, Int begin, Int width, float* rows, Int ahead) const {
    for (Int t = 0; t < CHUNK; t++, rows += padded(width)) {
        const Int real = t < tokens(begin) ? width : 0;
        if (x.halves) {
            const uint16_t* from = place<uint16_t>(x, begin + t);
            for (Int i = 0; i < real; i++) reinterpret_cast<Bits*>(rows)[i] = Bits(from[i]) << 16;
            prefetch(from + ahead * x.token, width);
        } else {
            const float* from = place(x, begin + t);
            std::copy_n(from, real, rows);
            prefetch(from + ahead * x.token, width);
        }
        std::fill(rows + real, rows + padded(width), 0.0f);
    }
}

void Line::store(const Rows& x, Int begin, Int width, const float* rows) const {
    for (Int t = 0; t < tokens(begin); t++, rows += padded(width)) {
        if (x.halves) {
            uint16_t* into = place<uint16_t>(x, begin + t);
            const Bits* from = reinterpret_cast<const Bits*>(rows);
            for (Int i = 0; i < width; i++) {
                const uint32_t even = (from[i] + 0x7fff + ((from[i] >> 16) & 1)) >> 16;
                into[i] = rows[i] == rows[i] ? even : 0x7fc0;
            }
        } else {
            std::copy_n(rows, width, place(x, begin + t));
        }
    }
}

}  // namespace
