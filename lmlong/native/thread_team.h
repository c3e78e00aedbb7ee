// The threads that run a job together.

#pragma once

#include "simd.h"

namespace {

struct Range {
    Int begin, end;
};

struct ThreadTeam {
    Int thread_num, num_threads;
    void (*barrier)();

    Range share(Int total) const { return {total * thread_num / num_threads, total * (thread_num + 1) / num_threads}; }
    void wait() const {
        if (num_threads > 1) barrier();
    }
};

// The team of a job with OpenMP's functions (`give_barrier`, in threads.py); one thread if they are null
template <typename Job>
ThreadTeam team_of(const Job& job) {
    return job.barrier ? ThreadTeam{job.thread_num(), job.num_threads(), job.barrier} : ThreadTeam{0, 1, nullptr};
}

}  // namespace
