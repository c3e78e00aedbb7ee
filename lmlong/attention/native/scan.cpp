// The causal scan over a span of tokens and its gradient: the mathematics of chunks.py, one head of one row at a time,
// in chunks so small that all of it stays in the nearest cache.
//
// An X of a chunk lies in rows, one of a token, or across, one of a feature; all widths are filled up with zeros to
// whole chunks. With both at hand every product is one of single numbers with vectors: `add_product`. Constants that are
// not defined here come from library.py.

#include "slopes.h"

namespace {

// Done by several workers at once: each takes line after line
template <typename Work>
void work(Job* job) {
    const Int worker = __atomic_fetch_add(&job->worker, 1, __ATOMIC_RELAXED);
    while (true) {
        const Int number = __atomic_fetch_add(&job->line, 1, __ATOMIC_RELAXED);
        if (number >= job->lines) return;
        const Line line(*job, number);
        Work(line, Scratch{job->scratch + worker * job->scratch_size}).run();
    }
}

}  // namespace

extern "C" {

void read_lines(Job* job) { work<Reading>(job); }

void find_slopes_of_lines(Job* job) { work<Slopes>(job); }

// Numbers that a worker has to keep in finding the gradient of a span, which are more than in reading it
Int scratch_size(Int time, Int features, Int values) {
    const Int F = padded(features), E = padded(values);
    return CHUNK * (8 * F + 5 * E + std::max(E, F)) + F * (E + 1) * (padded(time) / CHUNK + 2);
}
}
