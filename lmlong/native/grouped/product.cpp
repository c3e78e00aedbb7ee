// Products of vectors with a matrix in groups, by all threads.

#include "grouped.h"
#include "shared.h"

namespace {

struct ProductJob {
    const void* matrix;  // panels of (outputs, inputs)
    const float* x;      // (vectors, inputs)
    float* y;            // (vectors, outputs)
    void* scratch;       // vectors * groups Activations
    Int int4, outputs, inputs, vectors;
    void (*barrier)();  // OpenMP's functions; null with one thread
    int (*thread_num)(), (*num_threads)();
};

}  // namespace

extern "C" {

void multiply(const ProductJob* job) {
    const ThreadTeam team = team_of(*job);
    const Int groups = groups_of(job->inputs);
    auto* x = static_cast<Activations*>(job->scratch);
    const Range vectors = team.share(job->vectors), panels = team.share((job->outputs + PANEL - 1) / PANEL);
    for (Int v = vectors.begin; v < vectors.end; v++)
        round_activations(job->x + v * job->inputs, job->inputs, x + v * groups);
    team.wait();
    const Range outputs = {panels.begin * PANEL, std::min(panels.end * PANEL, job->outputs)};
    const auto multiply_as = job->int4 ? multiply_groups<Int4Groups> : multiply_groups<Int8Groups>;
    multiply_as(job->matrix, outputs, groups, x, job->vectors, job->y, job->outputs);
}

// The size of the scratch memory, in bytes
Int scratch_size(const ProductJob* job) { return job->vectors * groups_of(job->inputs) * sizeof(Activations); }
}

#include "layout.h"
