// Learning while reading, of one document: one pass over the rows of the output layer for each block of positions. For
// a few rows at a time, it updates D with the errors of the previous block and multiplies W with the hidden states of this
// block and D with their keys, so that both matrices are fetched once. If the keys are the hidden states themselves, it
// multiplies W + D. The positions of a block are the lanes of vectors.
//
// V vocabulary, w width, r rank, L positions. Constants that are not defined here come from kernel.py, by shared.h.

#include <cmath>

#include "shared.h"
#include "thread_team.h"

namespace {

struct ReadJob {
    Int vocabulary, width, rank, positions;
    const float* weight;  // W (V, w)
    float *D, *bias;      // (V, r) and (V), updated in place
    const float *hidden, *keys;  // (L, w) and (L, r), which may be the same
    const Int* targets;   // (L) the tokens to learn, or NOT_LEARNED
    const Int* scored;    // (L) the tokens to score, or IGNORED; null if none is scored
    float *nll, *scratch;         // nll (L): zeros at the beginning
    float *squares, *scale, *slopes;  // (V), (2) and (1), updated in place; see `Delta` in state.py
    float rate, bias_rate, prior, scale_rate;
    void (*barrier)();            // OpenMP's functions; null with one thread
    int (*thread_num)(), (*num_threads)();
    mutable Int invalid;  // set if a token is out of range; nothing is computed then
};

struct ChangeJob {
    Int vocabulary, rank;
    const float *D, *bias, *scale, *key;
    float* logits;
};

constexpr Int PREFETCHED = 1024;  // floats ahead of the one that is used
constexpr Int COLUMNS = 64;       // of W and D that are used at once
constexpr Int SUMMED_ROWS = 256;  // rows whose probabilities are added in float32

struct Total {  // over the rows of one thread
    float max[BLOCK];   // of the logits at each position of a block
    double sum[BLOCK];  // of e^(logit - max)
    double slope;       // of the loss of the previous block, by the scale
};

struct Inputs {  // hidden states or keys, of this block and of the one before
    const float* all;  // (L, width)
    Int width, stride = (width + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
    float *now, *before, *transposed;  // (BLOCK, stride) twice, and (stride, BLOCK)

    void take(Scratch& scratch) {
        for (float** x : {&now, &before, &transposed}) *x = scratch.take(BLOCK * stride);
    }

    void load(Int first, Int count) {
        std::swap(now, before);
        std::fill_n(now, BLOCK * stride, 0.0f);
        for (Int t = 0; t < count; t++) std::copy_n(all + (first + t) * width, width, now + t * stride);
        transpose(now, BLOCK, stride, transposed);
    }
};

struct Reader {
    const ReadJob& job;
    const ThreadTeam team;
    const bool projects = job.keys != job.hidden;
    Inputs hidden{job.hidden, job.width}, keys{job.keys, projects ? job.rank : 0};
    Range rows;  // of this thread
    Scratch scratch;
    float* logits;               // (V, BLOCK), which become e^(logit - max)
    Total* totals;               // (2, threads): a thread may begin the next block while another reads these

    Reader(const ReadJob& job, ThreadTeam team, float* memory) : job(job), team(team), scratch{memory} {
        const Range tiles = team.share((job.vocabulary + TILE - 1) / TILE);
        rows = {tiles.begin * TILE, std::min(tiles.end * TILE, job.vocabulary)};
        logits = scratch.take(padded(job.vocabulary) * BLOCK);
        totals = reinterpret_cast<Total*>(scratch.take(2 * team.num_threads * sizeof(Total) / sizeof(float)));
        scratch.used += team.thread_num * 3 * BLOCK * (hidden.stride + keys.stride);
        hidden.take(scratch), keys.take(scratch);
    }

    void run() {
        const Int learned = (job.positions - 1) / BLOCK;
        float scale = job.scale[0], next_scale = job.scale[1];
        double slopes = *job.slopes;
        float factors[BLOCK];  // that turn e^(logit - max) of the previous block into probabilities
        for (Int block = 0; block <= learned; block++) {
            const Int first = block * BLOCK, count = std::min(BLOCK, job.positions - first);
            const bool predicts = block < learned || any_scored(first, count);
            Total* of_threads = totals + block % 2 * team.num_threads;
            double& slope = of_threads[team.thread_num].slope = 0;
            if (block) scale = next_scale;
            hidden.load(first, count), keys.load(first, count);
            for (Int row = rows.begin; row < rows.end; row += TILE) {
                const Int in_tile = std::min(TILE, rows.end - row);
                float errors[TILE * BLOCK], shares[TILE];
                if (block) {
                    compute_errors(row, in_tile, first - BLOCK, factors, errors);
                    slope += update_bias(row, in_tile, errors, shares);
                }
                for (Int r = 0; predicts && r < in_tile; r++)
                    std::fill_n(logits + (row + r) * BLOCK, BLOCK, scale * job.bias[row + r]);
                for (Int r = 0; r < in_tile; r += ROWS) {
                    const float* of_rows = block ? errors + r * BLOCK : nullptr;
                    slope += pass_rows(row + r, std::min(ROWS, in_tile - r), of_rows, shares + r, scale, predicts);
                }
            }
            if (predicts)
                normalize(first, count, of_threads, factors);
            else
                team.wait();
            if (block) next_scale = scale_after(of_threads, scale, slopes);
        }
        if (team.thread_num == 0 && learned)
            job.scale[0] = scale, job.scale[1] = next_scale, *job.slopes = slopes;
    }

    // The scale of the block after next, once all threads have added up their slopes
    float scale_after(const Total* of_threads, float scale, double& slopes) const {
        double slope = 0;
        for (Int i = 0; i < team.num_threads; i++) slope += of_threads[i].slope;
        slopes += slope * slope;
        return std::min(1.0, std::max(0.0, scale - job.scale_rate * slope / std::sqrt(slopes)));
    }

    bool any_scored(Int first, Int count) const {
        return job.scored && std::any_of(job.scored + first, job.scored + first + count, [](Int x) { return x >= 0; });
    }

    // errors (TILE, BLOCK) = the probabilities of some rows in a block - 1 for its targets
    void compute_errors(Int row, Int count, Int first, const float* factors, float* errors) const {
        std::fill_n(errors + count * BLOCK, (TILE - count) * BLOCK, 0.0f);
        for (Int i = 0; i < count * BLOCK; i++) errors[i] = logits[row * BLOCK + i] * factors[i % BLOCK];
        for (Int t = 0; t < BLOCK; t++)
            if (const Int r = job.targets[first + t] - row; r >= 0 && r < count) errors[r * BLOCK + t] -= 1;
    }

    // Update the bias and the squares of some rows, set their shares of the rates, and return their slope
    double update_bias(Int row, Int count, const float* errors, float* shares) const {
        float errors_T[BLOCK * TILE], sums[TILE] = {}, squares[TILE] = {};
        transpose(errors, TILE, BLOCK, errors_T);
        for (Int i = 0; i < BLOCK * TILE; i++) sums[i % TILE] += errors_T[i], squares[i % TILE] += errors_T[i] * errors_T[i];
        double slope = 0;
        std::fill_n(shares, TILE, 0.0f);
        for (Int r = 0; r < count; r++) {
            slope += job.bias[row + r] * sums[r];
            shares[r] = 1 / std::sqrt(1 + (job.squares[row + r] += squares[r]) / job.prior);
            job.bias[row + r] -= job.bias_rate * shares[r] * sums[r];
        }
        return slope;
    }

    // Update rows of D if there are errors, then add the products of W and scale D to the logits; return the slope of D
    double pass_rows(
        Int row, Int count, const float* errors, const float* shares, float scale, bool predicts) const {
        float* out = predicts ? logits + row * BLOCK : nullptr;
        const float* W = job.weight + row * job.width;
        if (!projects) return pass(W, job.D + row * job.width, hidden, count, errors, shares, scale, out);
        pass(W, nullptr, hidden, count, errors, shares, scale, out);
        return pass(nullptr, job.D + row * job.rank, keys, count, errors, shares, scale, out);
    }

    // The same for rows of W, of D, or of both, which have the same inputs then. The logits are null if they are not
    // needed. Parts of vectors are copied, since writing a whole vector would overwrite the next row
    double pass(
        const float* W, float* D, const Inputs& inputs, Int count, const float* errors, const float* shares,
        float scale, float* out) const {
        const Int width = inputs.width, stride = inputs.stride;
        double slope = 0;
        for (Int c = 0; c < width; c += COLUMNS) {
            const Int columns = std::min(COLUMNS, stride - c), used = std::min(COLUMNS, width - c);
            const float *of_W = W ? W + c : nullptr, *x = inputs.before + c;
            float *of_D = D ? D + c : nullptr, sums[ROWS * COLUMNS];
            if (count == ROWS && used == columns) {
                slope += add_D(of_W, of_D, width, errors, shares, scale, x, stride, columns, sums);
            } else {
                float padded_W[ROWS * COLUMNS] = {}, padded_D[ROWS * COLUMNS] = {};
                for (Int r = 0; r < count; r++) {
                    if (W) std::copy_n(of_W + r * width, used, padded_W + r * COLUMNS);
                    if (D) std::copy_n(of_D + r * width, used, padded_D + r * COLUMNS);
                }
                float* copied_D = D ? padded_D : nullptr;
                slope += add_D(padded_W, copied_D, COLUMNS, errors, shares, scale, x, stride, columns, sums);
                for (Int r = 0; D && r < count; r++) std::copy_n(padded_D + r * COLUMNS, used, of_D + r * width);
            }
            if (out)
                add_matmul_block<ROWS, BLOCK / LANES>(
                    out, BLOCK, {sums, COLUMNS, 1}, inputs.transposed + c * BLOCK, BLOCK, columns);
        }
        return slope;
    }

    // sums (ROWS, COLUMNS) = W + scale D, after D -= rate share errors x; return the slope of D. The errors are null if
    // nothing is learned yet
    double add_D(
        const float* W, float* D, Int row, const float* errors, const float* shares, float scale, const float* inputs,
        Int stride, Int columns, float* sums) const {
        FloatVec slopes = {};
        for (Int c = 0; c < columns; c += 2 * LANES) {
            FloatVec gradient[ROWS][2] = {};
            for (Int t = 0; D && errors && t < BLOCK; t++) {
                FloatVec x[2];
                UNROLL(v, 2) x[v] = lanes(inputs + t * stride + c + v * LANES);
                UNROLL(r, ROWS) UNROLL(v, 2) gradient[r][v] += errors[r * BLOCK + t] * x[v];
            }
            UNROLL(r, ROWS) UNROLL(v, 2) {
                const Int i = r * row + c + v * LANES, next = i + ROWS * row;
                FloatVec sum = {};
                if (W) {
                    sum = lanes(W + i);
                    __builtin_prefetch(W + next);
                }
                if (D) {
                    __builtin_prefetch(D + next, 1);
                    FloatVec d = lanes(D + i);
                    if (errors) {
                        slopes += d * gradient[r][v];
                        lanes(D + i) = d = d - job.rate * shares[r] * gradient[r][v];
                    }
                    sum += scale * d;
                }
                lanes(sums + r * COLUMNS + c + v * LANES) = sum;
            }
        }
        double slope = 0;
        UNROLL(i, LANES) slope += slopes[i];
        return slope;
    }

    // Turn the logits of a block into e^(logit - max), set the factors that turn them into probabilities, and score
    void normalize(Int first, Int count, Total* of_threads, float* factors) const {
        Total& own = of_threads[team.thread_num];
        std::fill_n(own.max, BLOCK, -INFINITY), std::fill_n(own.sum, BLOCK, 0.0);
        for (Int i = rows.begin * BLOCK; i < rows.end * BLOCK; i += LANES) {
            UnalignedFloatVec& max = lanes(own.max + i % BLOCK);
            max = lanes(logits + i) > max ? lanes(logits + i) : max;
        }
        float chosen[BLOCK];  // logits
        for (Int t = 0; t < count; t++)
            if (is_own(first + t)) chosen[t] = logits[job.scored[first + t] * BLOCK + t];
        for (Int begin = rows.begin, end; begin < rows.end; begin = end) {
            end = std::min(begin + SUMMED_ROWS, rows.end);
            float sum[BLOCK] = {};
            for (Int i = begin * BLOCK; i < end * BLOCK; i += LANES) {
                lanes(logits + i) = simd_exp(lanes(logits + i) - lanes(own.max + i % BLOCK));
                lanes(sum + i % BLOCK) += lanes(logits + i);
            }
            for (Int t = 0; t < BLOCK; t++) own.sum[t] += sum[t];
        }
        team.wait();
        for (Int t = 0; t < BLOCK; t++) {
            float max = -INFINITY;
            double sum = 0;
            for (Int i = 0; i < team.num_threads; i++) max = std::max(max, of_threads[i].max[t]);
            for (Int i = 0; i < team.num_threads; i++)
                sum += of_threads[i].sum[t] * std::exp(double(of_threads[i].max[t]) - max);
            const bool is_learned = t < count && job.targets[first + t] >= 0;
            factors[t] = is_learned ? std::exp(double(own.max[t]) - max) / sum : 0;
            if (t < count && is_own(first + t)) job.nll[first + t] = std::log(sum) + (double(max) - chosen[t]);
        }
    }

    // Whether a token is scored from a row of this thread
    bool is_own(Int position) const {
        return job.scored && job.scored[position] >= rows.begin && job.scored[position] < rows.end;
    }
};

bool is_valid(const Int* tokens, const ReadJob& job, Int ignored) {
    return !tokens || std::all_of(tokens, tokens + job.positions, [&](Int token) {
        return token == ignored || (token >= 0 && token < job.vocabulary);
    });
}

}  // namespace

extern "C" {

void read_blocks(ReadJob* job) {
    if (!is_valid(job->targets, *job, NOT_LEARNED) || !is_valid(job->scored, *job, IGNORED)) {  // on every thread
        __atomic_store_n(&job->invalid, 1, __ATOMIC_RELAXED);
        return;
    }
    Reader(*job, team_of(*job), job->scratch).run();
}

// Add scale (D k + bias) to the logits (V) for one key (r). D is read in one stream, which memory is fastest at
void add_change(const ChangeJob* job) {
    const Int rank = job->rank, whole = rank / (4 * LANES) * (4 * LANES);
    for (Int v = 0; v < job->vocabulary; v++) {
        const float* row = job->D + v * rank;
        FloatVec sums[4] = {};
        for (Int i = 0; i < whole; i += 4 * LANES) UNROLL(j, 4) {
            __builtin_prefetch(row + i + j * LANES + PREFETCHED);
            sums[j] += lanes(row + i + j * LANES) * lanes(job->key + i + j * LANES);
        }
        const FloatVec sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float total = job->bias[v];
        for (Int i = whole; i < rank; i++) total += row[i] * job->key[i];
        UNROLL(j, LANES) total += sum[j];
        job->logits[v] += *job->scale * total;
    }
}

// The size of the scratch memory, in floats
Int scratch_size(ReadJob* job, Int threads) {
    return Reader(*job, ThreadTeam{threads - 1, threads, nullptr}, nullptr).scratch.used;
}
}

#include "layout.h"
