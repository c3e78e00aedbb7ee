// One token of each of a few texts through a whole model, on a CPU: what language_model.py, block.py and downsample.py
// define, with every matrix fetched once. Constants that are not defined here come from step.py.
//
// All workers walk through the model together. Each does its share of every part, and they wait for each other where
// one needs what all have done.

#include "mixing.h"

namespace {

struct Batch {  // the tokens that some layers read
    Int count;
    float* x;  // (tokens, width)
    Token* tokens;
    float* turns;  // (tokens, head width), cosines and sines of their places
};

struct Step {
    const Job& job;
    const Team team;
    const Model& model = *job.model;
    const Int width = model.width, inner = model.inner;
    Batch all, pooled;
    float *parts, *mixed, *made, *blocks;  // of all: queries, keys, values and gates; of heads; in the MLP; to pool
    float *normed, *ordered;               // of this worker
    Scratch room;

    Step(const Job& job, Team team, float* scratch) : job(job), team(team), room{scratch} {
        for (Batch* batch : {&all, &pooled}) {
            batch->x = room.take(job.rows * width);
            batch->turns = room.take(job.rows * width / model.heads);
            batch->tokens = reinterpret_cast<Token*>(room.take(job.rows * sizeof(Token) / sizeof(float)));
        }
        parts = room.take(job.rows * 4 * width), mixed = room.take(job.rows * width);
        made = room.take(job.rows * 2 * inner), blocks = room.take(job.rows * model.hourglass.factor * width);
        room.used += team.number * own_size();
        normed = room.take(job.rows * width), ordered = room.take(job.rows * widest_input());
    }

    Int widest_input() const { return std::max(std::max(inner, width), model.hourglass.factor * width); }

    Int own_size() const { return padded(job.rows * width) + padded(job.rows * widest_input()) + heads_size(); }

    Int heads_size() const {
        Int most = 0;
        for (Int i = 0; i < model.layers; i++) {
            const Attention& about = model.layer[i].attention;
            most = std::max(most, 3 * padded(about.features) + padded(about.window));
        }
        return most + 4 * padded(width / model.heads) + padded(2 * width / model.heads);
    }

    void run() {
        begin();
        if (model.hourglass.pooling) {
            through(0, model.hourglass.first, all);
            shorten();
            through(model.hourglass.first, model.hourglass.last, pooled);
            lengthen();
            through(model.hourglass.last, model.layers, all);
        } else {
            through(0, model.layers, all);
        }
        norm(model.norm, all);
        product(model.output, normed, width, all.count, job.logits);
    }

    // Each worker but the first finds these as the first leaves them
    void begin() {
        all.count = job.rows;
        pooled.count = 0;
        const Int factor = model.hourglass.factor;
        for (Int row = 0; row < job.rows; row++) pooled.count += model.hourglass.pooling && fills_a_block(row);
        if (team.number == 0) {
            Token* block = pooled.tokens;
            for (Int row = 0; row < job.rows; row++) {
                all.tokens[row] = {row, job.positions[row], false};
                const float* x = model.embedding + job.tokens[row] * width;
                for (Int i = 0; i < width; i++) all.x[row * width + i] = x[i] * model.embedded;
                if (model.hourglass.pooling && fills_a_block(row))
                    *block++ = {row, job.positions[row] / factor, job.positions[row] < factor};
            }
            if (model.turned) find_turns(all), find_turns(pooled);
        }
        team.wait();
    }

    bool fills_a_block(Int row) const {
        return job.positions[row] % model.hourglass.factor == model.hourglass.factor - 1;
    }

    void find_turns(const Batch& batch) {
        const Int half = width / model.heads / 2;
        for (Int t = 0; t < batch.count; t++)
            for (Int i = 0; i < half; i++) {  // as in positions.py
                const double angle = batch.tokens[t].position * std::pow(ROTARY_BASE, -double(i) / half);
                batch.turns[2 * half * t + i] = std::cos(angle), batch.turns[2 * half * t + half + i] = std::sin(angle);
            }
    }

    void through(Int first, Int last, const Batch& batch) {
        for (Int i = first; i < last && batch.count; i++) {
            const Layer& layer = model.layer[i];
            norm(layer.norm, batch);
            product(layer.project_in, normed, width, batch.count, parts);
            team.wait();
            mix(i, batch);
            team.wait();
            add_product(layer.project_out, mixed, width, batch);
            team.wait();
            norm(layer.inner_norm, batch);
            gate(layer.inner_in, batch.count);
            team.wait();
            add_product(layer.inner_out, made, 2 * inner, batch);
            team.wait();
        }
    }

    // Each worker norms all for itself, which takes less than to wait
    void norm(const float* gain, const Batch& batch) {
        for (Int t = 0; t < batch.count; t++) {
            const float* x = batch.x + t * width;
            const float factor = spread(x, width);
            for (Int i = 0; i < width; i++) normed[t * width + i] = x[i] * factor * gain[i];
        }
    }

    Range rows_of(Int outputs) const {
        const Range groups = team.share((outputs + ROWS - 1) / ROWS);
        return {groups.begin * ROWS, std::min(groups.end * ROWS, outputs)};
    }

    void product(const Matrix& matrix, const float* x, Int from, Int texts, float* y) {
        times(matrix, rows_of(matrix.outputs), x, from, texts, y, matrix.outputs, ordered);
    }

    void add_product(const Matrix& matrix, const float* x, Int from, const Batch& batch) {
        const Range rows = rows_of(width);
        times(matrix, rows, x, from, batch.count, normed, width, ordered);
        for (Int t = 0; t < batch.count; t++)
            for (Int r = rows.begin; r < rows.end; r++) batch.x[t * width + r] += normed[t * width + r];
    }

    void mix(Int number, const Batch& batch) {
        Head head(model, model.layer[number], job.before[number], job.after[number], room);
        const Range pairs = team.share(batch.count * model.heads);
        for (Int pair = pairs.begin; pair < pairs.end; pair++) {
            const Int t = pair / model.heads;
            const float* turns = batch.turns + t * width / model.heads;
            const float *own_parts = parts + t * 4 * width, *from = normed + t * width;
            head.mix(batch.tokens[t], pair % model.heads, own_parts, from, turns, mixed + t * width);
        }
    }

    // The gated inside of the MLP: a worker has the gate of each value that is its own
    void gate(const Matrix& matrix, Int texts) {
        const Range gates = rows_of(inner), values = {gates.begin + inner, gates.end + inner};
        for (const Range& rows : {gates, values}) times(matrix, rows, normed, width, texts, made, 2 * inner, ordered);
        for (Int t = 0; t < texts; t++) {
            float* gate = made + t * 2 * inner;
            for (Int i = gates.begin; i < gates.end; i++) gate[i] = gate[i] * sigmoid(gate[i]) * gate[inner + i];
        }
    }

    // Of each text the vectors so far of the block that this one is in, and what is pooled of those that are full
    void shorten() {
        const Int past = (model.hourglass.factor - 1) * width;
        if (team.number == 0) {
            Int block = 0;
            for (Int row = 0; row < job.rows; row++) {
                const float *tail = job.pooled_before + row * past, *x = all.x + row * width;
                if (fills_a_block(row)) pool(tail, x, block++);
                float* kept = job.pooled_after + row * past;
                std::copy_n(tail + width, past - width, kept), std::copy_n(x, width, kept + past - width);
            }
        }
        team.wait();
        if (model.hourglass.pooling == CONV && pooled.count) {
            product(model.hourglass.convolution, blocks, past + width, pooled.count, pooled.x);
            team.wait();
        }
    }

    void pool(const float* tail, const float* x, Int block) {
        const Int past = (model.hourglass.factor - 1) * width;
        if (model.hourglass.pooling == CONV) {
            float* whole = blocks + block * (past + width);
            std::copy_n(tail, past, whole), std::copy_n(x, width, whole + past);
            return;
        }
        float* into = pooled.x + block * width;
        std::copy_n(x, width, into);
        for (Int t = 0; t < past; t += width)
            for (Int i = 0; i < width; i++) {
                if (model.hourglass.pooling == MEAN)
                    into[i] += tail[t + i];
                else
                    into[i] = into[i] >= tail[t + i] || into[i] != into[i] ? into[i] : tail[t + i];  // no number remains none
            }
        if (model.hourglass.pooling == MEAN)
            for (Int i = 0; i < width; i++) into[i] /= model.hourglass.factor;
    }

    // What was made of the last full block of each text is added to its token
    void lengthen() {
        norm(model.hourglass.norm, pooled);
        product(model.hourglass.project_out, normed, width, pooled.count, mixed);
        team.wait();
        if (team.number == 0) {
            Int block = 0;
            for (Int row = 0; row < job.rows; row++) {
                const float* given = fills_a_block(row) ? mixed + block++ * width : job.given_before + row * width;
                std::copy_n(given, width, job.given_after + row * width);
                if (job.positions[row] >= model.hourglass.factor - 1)
                    for (Int i = 0; i < width; i++) all.x[row * width + i] += given[i];
            }
        }
        team.wait();
    }
};

}  // namespace

extern "C" {

void write_tokens(Job* job) {
    const Team team = job->meet ? Team{job->number(), job->count(), job->meet} : Team{0, 1, nullptr};
    Step(*job, team, job->scratch).run();
}

// What structures.py must have as well
Int bytes_of_structures() { return sizeof(Layer) + sizeof(Model) + sizeof(Job); }

// Numbers that so many workers need room for
Int scratch_size(Job* job, Int workers) {
    Step step(*job, Team{workers - 1, workers, nullptr}, nullptr);
    return step.room.used + step.heads_size();
}
}
