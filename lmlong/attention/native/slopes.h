// The gradient of a span: forwards through the states before each of its chunks, then back from the last chunk to the
// first. dX is the gradient of X; n are outputs times denominators, as in chunks.py.

#pragma once

#include "read.h"

namespace {

struct Slopes {
    const Line& line;
    const Job& job = line.job;
    const Map map = Map(line.job.map);
    const Int F = line.F, E = line.E, size = state_size(line), chunks = padded(job.time) / CHUNK;
    Reach reach;
    float *q, *k, *v, *y, *dn, *q_slope, *k_slope, *q_across, *k_across, *v_across, *dn_across, *dq_across, *dk_across;
    float *rows, *dstate, *borders;
    const float *before, *after;  // the states around the chunk
    alignas(64) float weights[CHUNK * CHUNK], dweights[CHUNK * CHUNK], dweights_across[CHUNK * CHUNK], dm[CHUNK];

    Slopes(const Line& line, Scratch scratch) : line(line) {
        for (float** x : {&q, &k, &q_slope, &k_slope, &q_across, &k_across, &dq_across, &dk_across})
            *x = scratch.take(CHUNK * F);
        for (float** x : {&v, &y, &dn, &v_across, &dn_across}) *x = scratch.take(CHUNK * E);
        rows = scratch.take(CHUNK * std::max(E, F));
        dstate = scratch.take(size);
        borders = scratch.take((chunks + 1) * size);
    }

    void run() {
        find_borders();
        load_state(line, job.dafter, dstate);
        for (Int begin = (chunks - 1) * CHUNK; begin >= 0; begin -= CHUNK) {
            before = borders + begin / CHUNK * size, after = before + size;
            load(begin);
            divide(begin);
            weigh();
            of_queries();
            of_keys();
            of_values(begin);
            if (job.dlog_decay.at) of_decays(begin);
            if (!reach.plain) scale(q, F, reach.seen);
            advance(line, reach.kept, q, dn, dm, dstate);
            store_features(job.dq, begin, dq_across, q_slope);
            store_features(job.dk, begin, dk_across, k_slope);
        }
        store_state(line, dstate, job.dbefore);
    }

    void find_borders() {
        float* state = borders;
        load_state(line, job.before, state);
        for (Int begin = 0; begin < job.time; begin += CHUNK, state += size) {
            std::copy_n(state, size, state + size);
            find_reach(line, begin, reach);
            line.load(job.k, begin, job.features, k), line.load(job.v, begin, job.values, v);
            apply(map, line.tokens(begin), job.features, k);
            if (!reach.plain) scale(k, F, reach.survives);
            advance(line, reach.kept, k, v, ONES, state + size);
        }
    }

    void load(Int begin) {
        find_reach(line, begin, reach);
        line.load(job.q, begin, job.features, q, -CHUNK), line.load(job.k, begin, job.features, k, -CHUNK);
        line.load(job.v, begin, job.values, v, -CHUNK), line.load(job.y, begin, job.values, y, -CHUNK);
        line.load(job.dy, begin, job.values, dn, -CHUNK);
        apply(map, line.tokens(begin), job.features, q, q_slope);
        apply(map, line.tokens(begin), job.features, k, k_slope);
    }

    // From the gradient of outputs to those of numerators and denominators
    void divide(Int begin) {
        alignas(64) float products[CHUNK * CHUNK] = {}, across[CHUNK * CHUNK], inverse[CHUNK] = {}, counts[CHUNK] = {};
        for (Int t = 0; t < line.tokens(begin); t++) {
            const float denominator = *line.place(job.denominators, begin + t);
            inverse[t] = 1 / denominator;
            counts[t] = denominator > SMALLEST ? 1 : 0;
        }
        scale(dn, E, inverse);
        for (Int t = 0; t < CHUNK; t++)
            for (Int e = t * E; e < (t + 1) * E; e += CHUNK)
                for (Int i = 0; i < CHUNK; i++) products[t * CHUNK + i] += dn[e + i] * y[e + i];
        transpose(products, CHUNK, CHUNK, across);
        std::fill_n(dm, CHUNK, 0.0f);
        for (Int i = 0; i < CHUNK; i++)
            for (Int t = 0; t < CHUNK; t++) dm[t] -= across[i * CHUNK + t];
        for (Int t = 0; t < CHUNK; t++) dm[t] = counts[t] > 0 ? dm[t] : 0.0f;
    }

    void weigh() {
        transpose(q, CHUNK, F, q_across), transpose(v, CHUNK, E, v_across), transpose(dn, CHUNK, E, dn_across);
        std::fill_n(weights, CHUNK * CHUNK, 0.0f);
        add_product(weights, CHUNK, CHUNK, {k, F, 1}, q_across, F);
        keep_reached(reach, weights);
        for (Int s = 0; s < CHUNK; s++) std::copy_n(dm, CHUNK, dweights + s * CHUNK);
        add_product(dweights, CHUNK, CHUNK, {v, E, 1}, dn_across, E);
        keep_reached(reach, dweights);
        transpose(dweights, CHUNK, CHUNK, dweights_across);
    }

    void of_queries() {
        const float* z = before + F * E;
        for (Int f = 0; f < F; f++)
            for (Int t = 0; t < CHUNK; t++) dq_across[f * CHUNK + t] = z[f] * dm[t];
        add_product(dq_across, F, CHUNK, {before, E, 1}, dn_across, E);
        if (!reach.plain) scale_across(dq_across, F, reach.seen);
        add_product(dq_across, F, CHUNK, {k, 1, F}, dweights, CHUNK);
    }

    void of_keys() {
        const float* dz = dstate + F * E;
        for (Int f = 0; f < F; f++) std::fill_n(dk_across + f * CHUNK, CHUNK, dz[f]);
        add_product(dk_across, F, CHUNK, {dstate, E, 1}, v_across, E);
        if (!reach.plain) scale_across(dk_across, F, reach.survives);
        add_product(dk_across, F, CHUNK, {q, 1, F}, dweights_across, CHUNK);
    }

    void of_values(Int begin) {
        std::fill_n(rows, CHUNK * E, 0.0f);
        add_product(rows, CHUNK, E, {k, F, 1}, dstate, F);
        if (!reach.plain) scale(rows, E, reach.survives);
        add_product(rows, CHUNK, E, {weights, CHUNK, 1}, dn, CHUNK);
        line.store(job.dv, begin, job.values, rows);
    }

    void of_decays(Int begin) {
        transpose(k, CHUNK, F, k_across);
        float pairs[CHUNK] = {}, sum = dot(after, dstate, size);
        for (Int i = 0; i < F * CHUNK; i += CHUNK)
            for (Int t = 0; t < CHUNK; t++)
                pairs[t] += q_across[i + t] * dq_across[i + t] - k_across[i + t] * dk_across[i + t];
        for (Int t = CHUNK - 1; t >= 0; t--) {
            sum += pairs[t];
            if (t < line.tokens(begin)) *line.place(job.dlog_decay, begin + t) = sum;
        }
    }

    void store_features(const Rows& into, Int begin, const float* across, const float* slope) {
        transpose(across, F, CHUNK, rows);
        if (map != GIVEN)
            for (Int i = 0; i < CHUNK * F; i++) rows[i] *= slope[i];
        line.store(into, begin, job.features, rows);
    }
};

}  // namespace
