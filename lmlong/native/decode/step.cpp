// The next token of each row through a whole model, on a CPU. The model is defined in language_model.py, block.py
// and hourglass.py; here every matrix is fetched once. Python generates shared.h, with constants and enumerations, and
// kinds.h, which includes each kind's decode.h.
//
// All threads walk through the model together. Each computes its share of every part. They wait for each other before a
// part that reads other threads' results.

#include "kinds.h"
#include "ngrams.h"

namespace {

struct Batch {  // the input tokens of a range of layers
    Int count;
    float* x;  // (tokens, width)
    Token* tokens;
    float* cos_sin;  // (tokens, cos_sins), cosines and sines of the angles of each rotation
};

struct Step {
    const DecodeJob& job;
    const ThreadTeam team;
    const Model& model = *job.model;
    const Int width = model.width, mlp_width = model.mlp_width;
    Batch all, downsampled;
    float *qkv_gate, *mixed, *mlp_hidden, *pool_blocks;  // shared by all threads
    float *normed, *reordered;                           // of this thread
    Scratch scratch;

    Step(const DecodeJob& job, ThreadTeam team, float* memory) : job(job), team(team), scratch{memory} {
        for (Batch* batch : {&all, &downsampled}) {
            batch->x = scratch.take(job.rows * width);
            batch->cos_sin = scratch.take(job.rows * model.cos_sins);
            batch->tokens = reinterpret_cast<Token*>(scratch.take(job.rows * sizeof(Token) / sizeof(float)));
        }
        const Int projected = most([](const Layer& layer) { return layer.in_proj.outputs; });
        qkv_gate = scratch.take(job.rows * std::max(projected, width));  // or the outputs that a norm follows
        mixed = scratch.take(job.rows * std::max({most_mixed(), width, model.tables.projection.inputs}));
        mlp_hidden = scratch.take(job.rows * 2 * mlp_width);
        pool_blocks = scratch.take(job.rows * model.hourglass.factor * width);
        scratch.used += team.thread_num * thread_scratch_size();
        normed = scratch.take(job.rows * width), reordered = scratch.take(job.rows * padded(max_inputs()));
    }

    template <typename Size>
    Int most(Size size) const {  // of all layers
        Int most = 0;
        for (Int i = 0; i < model.layers; i++) most = std::max(most, size(model.layer[i]));
        return most;
    }

    Int most_mixed() const {
        return most([](const Layer& layer) { return layer.out_proj.inputs; });
    }

    Int max_inputs() const {
        return std::max({mlp_width, width, most_mixed(), model.hourglass.factor * width, model.tables.projection.inputs});
    }

    Int thread_scratch_size() const {
        return padded(job.rows * width) + job.rows * padded(max_inputs()) + head_scratch_size();
    }

    Int head_scratch_size() const {
        return most([&](const Layer& layer) {
            Scratch taken{nullptr};
            with_kind(layer.kind, [&](auto kind) { Mixer<typename decltype(kind)::Attention>(job, layer, taken); });
            return taken.used;
        });
    }

    void run() {
        embed();
        if (model.tables.count) {  // rows that the first thread has looked up
            add_linear(model.tables.projection, mixed, model.tables.projection.inputs, all);
            team.wait();
        }
        if (model.hourglass.pooling) {
            run_layers(0, model.hourglass.first_layer, all);
            downsample();
            run_layers(model.hourglass.first_layer, model.hourglass.end_layer, downsampled);
            upsample();
            run_layers(model.hourglass.end_layer, model.layers, all);
        } else {
            run_layers(0, model.layers, all);
        }
        rms_norm(model.norm, all);
        if (team.thread_num == 0) std::copy_n(normed, all.count * width, job.hidden);
        linear(model.output, normed, width, all.count, job.logits);
    }

    // The first thread computes the batch; every thread computes the counts
    void embed() {
        all.count = job.rows;
        downsampled.count = 0;
        const Int factor = model.hourglass.factor;
        for (Int row = 0; row < job.rows; row++) downsampled.count += model.hourglass.pooling && completes_block(row);
        if (team.thread_num == 0) {
            Token* block = downsampled.tokens;
            for (Int row = 0; row < job.rows; row++) {
                all.tokens[row] = {row, job.positions[row], false};
                float* x = all.x + row * width;
                read_row(model.embedding, job.tokens[row], x);
                for (Int i = 0; i < width; i++) x[i] *= model.embedding_scale;
                look_up(job, row, mixed + row * model.tables.projection.inputs);
                if (model.hourglass.pooling && completes_block(row))
                    *block++ = {row, job.positions[row] / factor, job.positions[row] < factor};
            }
            compute_cos_sin(all), compute_cos_sin(downsampled);
        }
        team.wait();
    }

    bool completes_block(Int row) const {
        return job.positions[row] % model.hourglass.factor == model.hourglass.factor - 1;
    }

    void compute_cos_sin(const Batch& batch) {
        float* cos_sin = batch.cos_sin;
        for (Int t = 0; t < batch.count; t++)
            for (Int rotation = 0; rotation < model.rotations; rotation++) {
                const auto& [pairs, frequencies] = model.rotation[rotation];
                for (Int i = 0; i < pairs; i++) {  // as in rope.py
                    const double angle = batch.tokens[t].position * frequencies[i];
                    cos_sin[i] = std::cos(angle), cos_sin[pairs + i] = std::sin(angle);
                }
                cos_sin += 2 * pairs;
            }
    }

    void run_layers(Int first, Int end, const Batch& batch) {
        for (Int i = first; i < end && batch.count; i++) {
            const Layer& layer = model.layer[i];
            normed_input(layer.norm_after, layer.norm, batch);
            linear(layer.in_proj, normed, width, batch.count, qkv_gate);
            team.wait();
            with_kind(layer.kind, [&](auto kind) { mix<typename decltype(kind)::Attention>(layer, batch); });
            team.wait();
            add_output(layer.norm_after, layer.out_proj, layer.norm, mixed, layer.out_proj.inputs, batch);
            team.wait();
            if (!layer.mlp_in_proj.outputs) continue;
            normed_input(layer.mlp_norm_after, layer.mlp_norm, batch);
            swiglu(layer.mlp_in_proj, batch.count);
            team.wait();
            add_output(layer.mlp_norm_after, layer.mlp_out_proj, layer.mlp_norm, mlp_hidden, 2 * mlp_width, batch);
            team.wait();
        }
    }

    void normed_input(bool norm_after, const float* gain, const Batch& batch) {
        if (norm_after)
            std::copy_n(batch.x, batch.count * width, normed);
        else
            rms_norm(gain, batch);
    }

    // Add the output of a mixer or an MLP to the residual stream, after its norm if that follows it
    void add_output(
        bool norm_after, const Matrix& matrix, const float* gain, const float* x, Int x_stride, const Batch& batch) {
        if (!norm_after) return add_linear(matrix, x, x_stride, batch);
        linear(matrix, x, x_stride, batch.count, qkv_gate);
        team.wait();
        const Range outputs = share_of(width);
        for (Int t = 0; t < batch.count; t++) {
            const float* y = qkv_gate + t * width;
            const float factor = rms_norm_scale(y, width, model.norm_epsilon);
            for (Int i = outputs.begin; i < outputs.end; i++) batch.x[t * width + i] += y[i] * factor * gain[i];
        }
    }

    // Each thread computes the norm of the whole batch for itself, which is faster than waiting
    void rms_norm(const float* gain, const Batch& batch) {
        for (Int t = 0; t < batch.count; t++) {
            const float* x = batch.x + t * width;
            const float factor = rms_norm_scale(x, width, model.norm_epsilon);
            for (Int i = 0; i < width; i++) normed[t * width + i] = x[i] * factor * gain[i];
        }
    }

    // This thread's share of the outputs of a matrix
    Range share_of(Int outputs) const {
        const Range groups = team.share((outputs + PANEL - 1) / PANEL);
        return {groups.begin * PANEL, std::min(groups.end * PANEL, outputs)};
    }

    void linear(const Matrix& matrix, const float* x, Int x_stride, Int batch, float* y) {
        matmul(matrix, share_of(matrix.outputs), {x, x_stride}, batch, y, matrix.outputs, reordered);
    }

    // Add to the residual stream
    void add_linear(const Matrix& matrix, const float* x, Int x_stride, const Batch& batch) {
        const Range outputs = share_of(width);
        matmul(matrix, outputs, {x, x_stride}, batch.count, normed, width, reordered);
        for (Int t = 0; t < batch.count; t++)
            for (Int i = outputs.begin; i < outputs.end; i++) batch.x[t * width + i] += normed[t * width + i];
    }

    template <typename Attention>
    void mix(const Layer& layer, const Batch& batch) {
        Scratch of_heads = scratch;  // a copy: the next layer reuses the memory
        Mixer<Attention> mixer(job, layer, of_heads);
        const Int outputs = layer.in_proj.outputs, values = layer.out_proj.inputs;
        const Int together = job.consecutive ? 1 : batch.count;  // tokens that do not read each other's states
        for (Int first = 0; first < batch.count; first += together) {
            if (first) team.wait();
            const Range heads = team.share(together * layer.heads);  // of these tokens
            for (Int i = heads.begin, count; i < heads.end; i += count) {
                const Int t = first + i / layer.heads, head = i % layer.heads;
                count = std::min(mixer.together - head % mixer.together, heads.end - i);
                const float* cos_sin = batch.cos_sin + t * model.cos_sins + layer.cos_sin;
                const float *qkv_gate_t = qkv_gate + t * outputs, *normed_t = normed + t * width;
                mixer.forward(batch.tokens[t], head, count, qkv_gate_t, normed_t, cos_sin, mixed + t * values);
            }
        }
    }

    // The hidden layer of the MLP. The thread that computes a value also computes its gate
    void swiglu(const Matrix& matrix, Int batch) {
        const Range gates = share_of(mlp_width), values = {gates.begin + mlp_width, gates.end + mlp_width};
        for (const Range& outputs : {gates, values})
            matmul(matrix, outputs, {normed, width}, batch, mlp_hidden, 2 * mlp_width, reordered);
        for (Int t = 0; t < batch; t++) {
            float* gate = mlp_hidden + t * 2 * mlp_width;
            for (Int i = gates.begin; i < gates.end; i++) gate[i] = gate[i] * sigmoid(gate[i]) * gate[mlp_width + i];
        }
    }

    const HourglassState& hourglass_state(const char* states, Int row) const {
        return state_at<HourglassState>(job, states, row, model.hourglass.state);
    }

    // Pool the blocks that this token completes. Update the tail: the last vectors of each row
    void downsample() {
        const Int past = (model.hourglass.factor - 1) * width;
        if (team.thread_num == 0) {
            Int block = 0;
            for (Int row = 0; row < job.rows; row++) {
                const float *tail = hourglass_state(job.states_before, row).tail, *x = all.x + row * width;
                if (completes_block(row)) pool(tail, x, block++);
                float* tail_after = hourglass_state(job.states_after, row).tail;
                std::copy_n(tail + width, past - width, tail_after);
                std::copy_n(x, width, tail_after + past - width);
            }
        }
        team.wait();
        if (model.hourglass.pooling == CONV && downsampled.count) {
            linear(model.hourglass.conv, pool_blocks, past + width, downsampled.count, downsampled.x);
            team.wait();
        }
    }

    void pool(const float* tail, const float* x, Int block) {
        const Int past = (model.hourglass.factor - 1) * width;
        if (model.hourglass.pooling == CONV) {
            float* into = pool_blocks + block * (past + width);
            std::copy_n(tail, past, into), std::copy_n(x, width, into + past);
            return;
        }
        float* into = downsampled.x + block * width;
        std::copy_n(x, width, into);
        for (Int t = 0; t < past; t += width)
            for (Int i = 0; i < width; i++) {
                if (model.hourglass.pooling == MEAN)
                    into[i] += tail[t + i];
                else
                    into[i] = into[i] >= tail[t + i] || into[i] != into[i] ? into[i] : tail[t + i];  // NaN stays NaN
            }
        if (model.hourglass.pooling == MEAN)
            for (Int i = 0; i < width; i++) into[i] /= model.hourglass.factor;
    }

    // Add the upsampled vector of the last complete block of each row
    void upsample() {
        rms_norm(model.hourglass.norm, downsampled);
        linear(model.hourglass.out_proj, normed, width, downsampled.count, mixed);
        team.wait();
        if (team.thread_num == 0) {
            Int block = 0;
            for (Int row = 0; row < job.rows; row++) {
                const float* last = hourglass_state(job.states_before, row).upsampled;
                const float* upsampled = completes_block(row) ? mixed + block++ * width : last;
                std::copy_n(upsampled, width, hourglass_state(job.states_after, row).upsampled);
                if (job.positions[row] >= model.hourglass.factor - 1)
                    for (Int i = 0; i < width; i++) all.x[row * width + i] += upsampled[i];
            }
        }
        team.wait();
    }
};

}  // namespace

extern "C" {

void decode_step(DecodeJob* job) {
    for (Int row = 0; row < job->rows; row++)  // on every thread, so that either all return here or none
        if (job->tokens[row] < 0 || job->tokens[row] >= job->model->output.outputs || job->positions[row] < 0) {
            __atomic_store_n(&job->invalid, 1, __ATOMIC_RELAXED);
            return;
        }
    Step(*job, team_of(*job), job->scratch).run();
}

// The size of the scratch memory, in floats
Int scratch_size(DecodeJob* job, Int threads) {
    Step step(*job, ThreadTeam{threads - 1, threads, nullptr}, nullptr);
    return step.scratch.used + step.head_scratch_size();
}
}

#if defined(__wasm__)
#include "page.h"
#endif
#include "layout.h"
