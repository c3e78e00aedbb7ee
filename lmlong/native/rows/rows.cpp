// What a training step does between matrix products, each reading and writing memory once: RMS norms with gains and SiLU
// gates, gated MLPs, short convolutions, and the loss of logits, with their gradients. Tensors are float32 or bfloat16,
// and everything is computed in float32.

#include <cmath>
#include <vector>

#include "numbers.h"
#include "shared.h"

namespace {

struct Rows {  // contiguous rows of numbers, `stride` apart; `data` is null if the tensor is missing
    void* data;
    Int stride, bfloat16;
};

struct RowsJob {
    Int rows, groups, width;  // of x: a row has groups * width numbers
    Rows x, gate, y, dx, dgate;  // in a backward pass, y is the gradient of the outputs
    const float* gain;           // (groups, width); of a convolution, the weights (taps, width), the oldest first
    float* dgain;                // (blocks of rows, ...)
    // of a convolution: rows are `time` tokens of a text, one text after another; the tail is `taps` - 1 tokens before
    Int time, taps;
    Rows tail, dtail;
    const Int* positions;        // (rows,) earlier tokens of the document; null if none begins in the texts
    const Int* targets;          // (rows,)
    float* nll;                  // (rows,)
    Int graded;                  // whether the loss writes dx
    float epsilon;
    Int blocks_begun;
};

// Numbers of a row from `first` on
void load(const Rows& from, Int row, Int first, Int width, float* into) {
    load_numbers(from.data, from.bfloat16, row * from.stride + first, width, into);
}

void store(const Rows& into, Int row, Int first, Int width, const float* from) {
    store_numbers(from, width, into.data, into.bfloat16, row * into.stride + first);
}

FloatVec sigmoid(FloatVec x) { return 1.0f / (1.0f + simd_exp(-x)); }

FloatVec silu(FloatVec x) { return x * sigmoid(x); }

// The derivative of SiLU, given the sigmoid of x
FloatVec silu_slope(FloatVec x, FloatVec sigmoid) { return sigmoid * (1.0f + x * (1.0f - sigmoid)); }

// The memory of a worker for some rows of a width, with zeros after each
struct Buffers {
    const Int width;
    std::vector<float> memory;

    Buffers(Int width, Int count) : width(padded(width)), memory(this->width * (count + 1)) {}
    float* operator[](Int index) { return memory.data() + index * width; }
};

// Run by several workers at once: each takes the next block of rows that is left. Sums over the rows of a block do not
// depend on the workers.
template <typename Run>
void each_block(RowsJob* job, Run run) {
    while (true) {
        const Int block = __atomic_fetch_add(&job->blocks_begun, 1, __ATOMIC_RELAXED), begin = block * BLOCK_ROWS;
        if (begin >= job->rows) return;
        run(block, begin, std::min(begin + BLOCK_ROWS, job->rows));
    }
}

// Compute a number of each group, from the mean over the group of x y, and write it for all numbers of the group
template <typename Function>
void by_group(const RowsJob& job, const float* x, const float* y, float* into, Function function) {
    const Int width = job.width, whole = width / LANES * LANES;
    IntVec rest;
    UNROLL(j, LANES) rest[j] = whole + j < width;
    for (Int first = 0; first < job.groups * width; first += width) {
        FloatVec sums = rest ? lanes(x + first + whole) * lanes(y + first + whole) : FloatVec{};
        for (Int i = first; i < first + whole; i += LANES) sums += lanes(x + i) * lanes(y + i);
        float sum = 0;
        UNROLL(j, LANES) sum += sums[j];
        std::fill_n(into + first, width, function(sum / width));
    }
}

// y = x / rms(x) gain [silu(gate)], for each group of a row
void norm(RowsJob* job) {
    const Int width = job->groups * job->width;
    Buffers buffers(width, 4);
    float *gain = buffers[0], *x = buffers[1], *gate = buffers[2], *inverse = buffers[3];
    std::copy_n(job->gain, width, gain);
    each_block(job, [&](Int, Int begin, Int end) {
        for (Int row = begin; row < end; row++) {
            load(job->x, row, 0, width, x);
            by_group(*job, x, x, inverse, [&](float mean) { return 1 / std::sqrt(mean + job->epsilon); });
            for (Int i = 0; i < width; i += LANES) lanes(x + i) = lanes(x + i) * lanes(inverse + i) * lanes(gain + i);
            if (job->gate.data) {
                load(job->gate, row, 0, width, gate);
                for (Int i = 0; i < width; i += LANES) lanes(x + i) *= silu(lanes(gate + i));
            }
            store(job->y, row, 0, width, x);
        }
    });
}

// With n = x / rms(x) and e = dy gain silu(gate): dx = (e - n mean(e n)) / rms(x)
void norm_backward(RowsJob* job) {
    const Int width = job->groups * job->width;
    Buffers buffers(width, 7);
    float *gain = buffers[0], *dgain = buffers[1], *x = buffers[2], *dy = buffers[3], *gate = buffers[4];
    float *inverse = buffers[5], *means = buffers[6];
    std::copy_n(job->gain, width, gain);
    each_block(job, [&](Int block, Int begin, Int end) {
        std::fill_n(dgain, padded(width), 0.0f);
        for (Int row = begin; row < end; row++) {
            load(job->x, row, 0, width, x), load(job->y, row, 0, width, dy);
            by_group(*job, x, x, inverse, [&](float mean) { return 1 / std::sqrt(mean + job->epsilon); });
            for (Int i = 0; i < width; i += LANES) lanes(x + i) *= lanes(inverse + i);
            if (job->gate.data) {
                load(job->gate, row, 0, width, gate);
                for (Int i = 0; i < width; i += LANES) {
                    const FloatVec g = lanes(gate + i), s = sigmoid(g), slope = lanes(dy + i);
                    lanes(gate + i) = slope * lanes(x + i) * lanes(gain + i) * silu_slope(g, s);
                    lanes(dy + i) = slope * g * s;
                }
                store(job->dgate, row, 0, width, gate);
            }
            for (Int i = 0; i < width; i += LANES) {
                lanes(dgain + i) += lanes(dy + i) * lanes(x + i);
                lanes(dy + i) *= lanes(gain + i);
            }
            by_group(*job, dy, x, means, [](float mean) { return mean; });
            for (Int i = 0; i < width; i += LANES)
                lanes(dy + i) = lanes(inverse + i) * (lanes(dy + i) - lanes(means + i) * lanes(x + i));
            store(job->dx, row, 0, width, dy);
        }
        std::copy_n(dgain, width, job->dgain + block * width);
    });
}

// y = silu(gate) value, for x = [gate, value]
void swiglu(RowsJob* job) {
    const Int width = job->width;
    Buffers buffers(width, 2);
    float *gate = buffers[0], *value = buffers[1];
    each_block(job, [&](Int, Int begin, Int end) {
        for (Int row = begin; row < end; row++) {
            load(job->x, row, 0, width, gate), load(job->x, row, width, width, value);
            for (Int i = 0; i < width; i += LANES) lanes(value + i) *= silu(lanes(gate + i));
            store(job->y, row, 0, width, value);
        }
    });
}

void swiglu_backward(RowsJob* job) {
    const Int width = job->width;
    Buffers buffers(width, 3);
    float *gate = buffers[0], *value = buffers[1], *dy = buffers[2];
    each_block(job, [&](Int, Int begin, Int end) {
        for (Int row = begin; row < end; row++) {
            load(job->x, row, 0, width, gate), load(job->x, row, width, width, value);
            load(job->y, row, 0, width, dy);
            for (Int i = 0; i < width; i += LANES) {
                const FloatVec g = lanes(gate + i), s = sigmoid(g), slope = lanes(dy + i);
                lanes(gate + i) = slope * lanes(value + i) * silu_slope(g, s);
                lanes(value + i) = slope * g * s;
            }
            store(job->dx, row, 0, width, gate), store(job->dx, row, width, width, value);
        }
    });
}

// y_t = sum_i w_i x_(t - i), over earlier tokens of the same document
struct Convolution {
    const RowsJob& job;
    const Int width = job.width, last = job.taps - 1;

    bool sees(Int row, Int back) const { return !job.positions || job.positions[row] >= back; }

    const float* weight(Int back) const { return job.gain + (last - back) * width; }

    // The input `back` tokens before a row
    void load_input(Int row, Int back, float* into) const {
        const Int text = row / job.time, token = row % job.time - back;
        if (token >= 0)
            load(job.x, row - back, 0, width, into);
        else
            load(job.tail, text * last + last + token, 0, width, into);
    }

    // The gradient of the input of a token of a text; those of the tail are below 0
    void input_gradient(Int text, Int token, float* dy, float* sum) const {
        std::fill_n(sum, width, 0.0f);
        for (Int ahead = std::max(Int(0), -token); ahead <= last && token + ahead < job.time; ahead++) {
            const Int row = text * job.time + token + ahead;
            if (!sees(row, ahead)) continue;
            load(job.y, row, 0, width, dy);
            add(sum, weight(ahead), dy);
        }
    }

    void add(float* sum, const float* x, const float* y) const {
        for (Int i = 0; i < width; i++) sum[i] += x[i] * y[i];
    }
};

void convolution(RowsJob* job) {
    const Convolution c{*job};
    Buffers buffers(c.width, 2);
    float *x = buffers[0], *sum = buffers[1];
    each_block(job, [&](Int, Int begin, Int end) {
        for (Int row = begin; row < end; row++) {
            std::fill_n(sum, c.width, 0.0f);
            for (Int back = 0; back <= c.last && c.sees(row, back); back++)
                c.load_input(row, back, x), c.add(sum, c.weight(back), x);
            store(job->y, row, 0, c.width, sum);
        }
    });
}

void convolution_backward(RowsJob* job) {
    const Convolution c{*job};
    Buffers buffers(c.width, 3);
    float *x = buffers[0], *dy = buffers[1], *sum = buffers[2];
    each_block(job, [&](Int block, Int begin, Int end) {
        float* dweight = job->dgain + block * job->taps * c.width;
        std::fill_n(dweight, job->taps * c.width, 0.0f);
        for (Int row = begin; row < end; row++) {
            const Int text = row / job->time, token = row % job->time;
            load(job->y, row, 0, c.width, dy);
            for (Int back = 0; back <= c.last && c.sees(row, back); back++)
                c.load_input(row, back, x), c.add(dweight + (c.last - back) * c.width, dy, x);
            c.input_gradient(text, token, dy, sum);
            store(job->dx, row, 0, c.width, sum);
            for (Int i = 0; token == 0 && i < c.last; i++) {
                c.input_gradient(text, i - c.last, dy, sum);
                store(job->dtail, text * c.last + i, 0, c.width, sum);
            }
        }
    });
}

// nll = log(sum exp x) - x[target], and dx = softmax(x) - [target]; both are 0 if the target is ignored
void loss(RowsJob* job) {
    const Int width = job->width;
    Buffers buffers(width, 1);
    float* x = buffers[0];
    each_block(job, [&](Int, Int begin, Int end) {
        for (Int row = begin; row < end; row++) {
            const Int target = job->targets[row];
            const bool scored = target >= 0 && target < width;
            if (!scored) {
                job->nll[row] = target == IGNORED ? 0 : NAN;
                std::fill_n(x, width, job->nll[row]);
                if (job->graded) store(job->dx, row, 0, width, x);
                continue;
            }
            load(job->x, row, 0, width, x);
            std::fill(x + width, x + padded(width), -INFINITY);  // exp gives 0
            FloatVec most = lanes(x), total = {};
            for (Int i = LANES; i < width; i += LANES) most = lanes(x + i) > most ? lanes(x + i) : most;
            float largest = most[0], sum = 0;
            UNROLL(j, LANES) largest = most[j] > largest ? most[j] : largest;
            const float chosen = x[target];
            for (Int i = 0; i < width; i += LANES) total += lanes(x + i) = simd_exp(lanes(x + i) - largest);
            UNROLL(j, LANES) sum += total[j];
            job->nll[row] = std::log(sum) + largest - chosen;
            if (!job->graded) continue;
            const float share = 1 / sum;
            for (Int i = 0; i < width; i += LANES) lanes(x + i) *= share;
            x[target] -= 1;
            store(job->dx, row, 0, width, x);
        }
    });
}

}  // namespace

extern "C" {

void rows_norm(RowsJob* job) { norm(job); }

void rows_norm_backward(RowsJob* job) { norm_backward(job); }

void rows_swiglu(RowsJob* job) { swiglu(job); }

void rows_swiglu_backward(RowsJob* job) { swiglu_backward(job); }

void rows_convolution(RowsJob* job) { convolution(job); }

void rows_convolution_backward(RowsJob* job) { convolution_backward(job); }

void rows_loss(RowsJob* job) { loss(job); }
}

#include "layout.h"
