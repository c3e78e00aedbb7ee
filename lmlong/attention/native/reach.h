// How much of each token reaches each later one of its chunk: gates, and starts of documents.

#pragma once

#include "job.h"

namespace {

struct Reach {  // what is left of what, as in chunks.py
    alignas(64) float within[CHUNK * CHUNK];  // W, [s][t]
    alignas(64) float seen[CHUNK], survives[CHUNK];  // a and u
    float kept;  // r
    bool plain = false;  // all is seen, and nothing fades
};

void find_reach(const Line& line, Int begin, Reach& reach) {
    const Job& job = line.job;
    alignas(64) float total[CHUNK], document[CHUNK];
    float faded = 0, begun = 0;
    for (Int t = 0; t < CHUNK; t++) {
        const bool real = t < line.tokens(begin);
        if (real && job.starts.at) begun += *line.place<bool>(job.starts, begin + t);
        if (real && job.log_decay.at) faded += *line.place(job.log_decay, begin + t) * PER_LN2;
        total[t] = faded, document[t] = begun;
    }
    const bool plain = !job.log_decay.at && begun == 0;
    if (plain && reach.plain) return;
    reach.plain = plain;
    auto left = [](Floats exponent) {
        const Floats none = {}, least = none + FAINTEST;
        return power_of_2(exponent > none ? none : exponent < least ? least : exponent);
    };
    for (Int i = 0; i < CHUNK; i += LANES) {
        const Floats to = lanes(total + i), where = lanes(document + i), none = {};
        Floats place;
        EACH(j, LANES) place[j] = i + j;
        EACH(s, CHUNK) {
            const Floats weight = where == document[s] ? left(to - total[s]) : none;
            lanes(reach.within + s * CHUNK + i) = place >= float(s) ? weight : none;
        }
        lanes(reach.seen + i) = where == 0.0f ? left(to) : none;
        lanes(reach.survives + i) = where == begun ? left(faded - to) : none;
    }
    reach.kept = reach.seen[CHUNK - 1];
}

void keep_reached(const Reach& reach, float* weights) {
    for (Int i = 0; i < CHUNK * CHUNK; i += LANES) {
        const Floats within = lanes(reach.within + i);
        lanes(weights + i) = within > 0.0f ? lanes(weights + i) * within : within;
    }
}

}  // namespace
