// Reading a span: its outputs, their denominators and the state after it.

#pragma once

#include "state.h"

namespace {

struct Reading {
    const Line& line;
    const Job& job = line.job;
    const Int F = line.F, E = line.E;
    Reach reach;
    float *q, *k, *v, *q_across, *y, *state;
    alignas(64) float weights[CHUNK * CHUNK], denominators[CHUNK];

    Reading(const Line& line, Scratch scratch) : line(line) {
        for (float** x : {&q, &k, &q_across}) *x = scratch.take(CHUNK * F);
        for (float** x : {&v, &y}) *x = scratch.take(CHUNK * E);
        state = scratch.take(state_size(line));
    }

    void run() {
        load_state(line, job.before, state);
        for (Int begin = 0; begin < job.time; begin += CHUNK) {
            load(begin);
            weigh();
            add_up();
            store(begin);
        }
        store_state(line, state, job.after);
    }

    void load(Int begin) {
        find_reach(line, begin, reach);
        line.load(job.q, begin, job.features, q), line.load(job.k, begin, job.features, k);
        line.load(job.v, begin, job.values, v);
        apply(Map(job.map), line.tokens(begin), job.features, q);
        apply(Map(job.map), line.tokens(begin), job.features, k);
        transpose(q, CHUNK, F, q_across);
    }

    void weigh() {
        std::fill_n(weights, CHUNK * CHUNK, 0.0f);
        add_product(weights, CHUNK, CHUNK, {k, F, 1}, q_across, F);
        keep_reached(reach, weights);

        const float* z = state + F * E;
        std::fill_n(denominators, CHUNK, 0.0f);
        for (Int f = 0; f < F; f++)
            for (Int t = 0; t < CHUNK; t++) denominators[t] += z[f] * q_across[f * CHUNK + t];
        for (Int t = 0; t < CHUNK; t++) denominators[t] *= reach.seen[t];
        for (Int s = 0; s < CHUNK; s++)
            for (Int t = 0; t < CHUNK; t++) denominators[t] += weights[s * CHUNK + t];
        for (float& x : denominators) x = x < SMALLEST ? SMALLEST : x;  // no number remains none
    }

    void add_up() {
        std::fill_n(y, CHUNK * E, 0.0f);
        add_product(y, CHUNK, E, {q, F, 1}, state, F);
        if (!reach.plain) scale(y, E, reach.seen), scale(k, F, reach.survives);
        add_product(y, CHUNK, E, {weights, 1, CHUNK}, v, CHUNK);
        advance(line, reach.kept, k, v, ONES, state);
    }

    void store(Int begin) {
        float inverse[CHUNK];
        for (Int t = 0; t < CHUNK; t++) inverse[t] = 1 / denominators[t];
        scale(y, E, inverse);
        line.store(job.y, begin, job.values, y);
        for (Int t = 0; t < line.tokens(begin); t++) *line.place(job.denominators, begin + t) = denominators[t];
    }
};

}  // namespace
