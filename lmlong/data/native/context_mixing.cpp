// The code length of a text by context mixing: each bit of a byte is predicted from what followed earlier occurrences of
// several contexts. The predictions are mixed with weights that are learned while the text is read.
//
// A context is a hash of the last bytes, of the current word, or of both. Its history of each bit is a state of one
// byte: the counts of 0 and 1, and the last bit. An adaptive table maps a history to a probability. Another prediction
// follows the longest earlier match of the last bytes. A mixer adds the logits of all predictions with weights that
// depend on the situation, and is trained online on the coding cost.
//
// Every prediction depends only on the text before and is strictly between 0 and 1, so the probabilities of all texts
// of one length sum to 1, and an arithmetic coder would need these bits and two more.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

using Byte = uint8_t;

// ---- bit histories -------------------------------------------------------------------------------------------------

constexpr int HISTORIES = 256;

// The largest count of one bit, by the count of the other. The rarer bit is never counted beyond 4.
constexpr int LARGEST[] = {40, 20, 11, 7, 5};

struct Counts {
    int n[2];  // zeros and ones
    int last;  // the last bit

    Counts after(int bit) const {
        Counts next = *this;
        int &same = next.n[bit], &other = next.n[1 - bit];
        same++;
        if (other > 2) other = (other + 3) / 2;  // this bit discounts the other's evidence
        int &less = same < other ? same : other, &more = same < other ? other : same;
        less = std::min(less, 4);
        more = std::min(more, LARGEST[less]);
        next.last = bit;
        return next;
    }

    bool operator==(const Counts& c) const { return n[0] == c.n[0] && n[1] == c.n[1] && last == c.last; }
};

struct Histories {
    Byte next[HISTORIES][2];
    float probability[HISTORIES];  // initial probability of a 1
    Byte total[HISTORIES];         // bits counted

    // All reachable counts, from an empty history on.
    Histories() {
        std::vector<Counts> states{{{0, 0}, 0}};
        for (size_t i = 0; i < states.size(); i++) {
            const Counts now = states[i];
            probability[i] = (now.n[1] + 0.4f) / (now.n[0] + now.n[1] + 0.8f);
            total[i] = Byte(now.n[0] + now.n[1]);
            for (int bit = 0; bit < 2; bit++) {
                const auto found = std::find(states.begin(), states.end(), now.after(bit));
                next[i][bit] = Byte(found - states.begin());
                if (found == states.end()) states.push_back(now.after(bit));
            }
        }
        if (states.size() > HISTORIES) std::abort();
        for (size_t i = states.size(); i < HISTORIES; i++) probability[i] = 0.5f;
    }
};

const Histories histories;

// ---- logits --------------------------------------------------------------------------------------------------------

constexpr float LARGEST_LOGIT = 12;

// Both functions as tables, with linear interpolation between entries of `squash`.
struct Tables {
    float logits[4097], squashed[4098];
    Tables() {
        for (int i = 0; i <= 4096; i++) {
            const float p = std::min(std::max(i / 4096.0f, 1.0f / 16384), 1 - 1.0f / 16384);
            logits[i] = std::log(p / (1 - p));
            squashed[i] = 1 / (1 + std::exp(-(i / 2048.0f - 1) * LARGEST_LOGIT));
        }
        squashed[4097] = squashed[4096];
    }
};

const Tables tables;

float squash(float x) {
    const float at = (x / LARGEST_LOGIT + 1) * 2048;
    const int low = int(at);
    return tables.squashed[low] + (at - low) * (tables.squashed[low + 1] - tables.squashed[low]);
}

float logit(float p) { return tables.logits[int(p * 4096 + 0.5f)]; }

// ---- what followed a context ---------------------------------------------------------------------------------------

// The histories of the four bits of half a byte, one for each prefix of these bits, after a check of the context.
struct Slot {
    Byte check;
    Byte nodes[15];
};

class Table {
  public:
    explicit Table(int bits) : mask((uint64_t(1) << bits) - 1), slots(mask + 1) {}

    uint64_t place(uint64_t hash) const { return (hash >> 20) & mask; }

    void prefetch(uint64_t hash) const { __builtin_prefetch(&slots[place(hash)]); }

    // The slot of a context, at one of two places. A new context replaces the rarer of the two.
    Slot* find(uint64_t hash) {
        const Byte check = Byte(hash >> 12) | 1;  // an empty slot has 0
        Slot* first = &slots[place(hash)];
        Slot* second = &slots[place(hash) ^ 1];
        if (first->check == check) return first;
        if (second->check == check) return second;
        Slot* worse = histories.total[first->nodes[0]] <= histories.total[second->nodes[0]] ? first : second;
        std::memset(worse, 0, sizeof(Slot));
        worse->check = check;
        return worse;
    }

  private:
    uint64_t mask;
    std::vector<Slot> slots;
};

// A probability for each history, learned as a mean of the bits that followed it, weighted to recent bits.
class HistoryMap {
  public:
    HistoryMap() {
        for (int i = 0; i < HISTORIES; i++) {
            probability[i] = histories.probability[i];
            seen[i] = 6;
        }
        for (int i = 0; i < HISTORIES; i++) logits[i] = logit(probability[i]);
    }
    void update(Byte history, int bit) {
        float& p = probability[history];
        p += (bit - p) * rates[seen[history]];
        if (seen[history] < 255) seen[history]++;
        logits[history] = logit(p);
    }
    float logits[HISTORIES];
    float probability[HISTORIES];

  private:
    Byte seen[HISTORIES];
    static const std::vector<float> rates;
};

const std::vector<float> HistoryMap::rates = [] {
    std::vector<float> found(256);
    for (int i = 0; i < 256; i++) found[i] = 1 / (i + 1.5f);
    return found;
}();

// ---- mixing --------------------------------------------------------------------------------------------------------

constexpr float RATE = 0.004f;  // of learning the weights

constexpr int CONTEXTS = 9, INPUTS = 24;  // two for each context, two for the match, one constant; padded

class Mixer {
  public:
    explicit Mixer(int sets) : weights(sets * INPUTS, 0.25f) {}

    float mix(const float* x, int set) {
        chosen = &weights[set * INPUTS];
        float sums[8] = {};
        for (int i = 0; i < INPUTS; i += 8)
            for (int lane = 0; lane < 8; lane++) sums[lane] += x[i + lane] * chosen[i + lane];
        const float sum = (sums[0] + sums[4]) + (sums[1] + sums[5]) + (sums[2] + sums[6]) + (sums[3] + sums[7]);
        output = std::min(std::max(sum, -LARGEST_LOGIT), LARGEST_LOGIT);
        return output;
    }

    void update(const float* x, int bit) {
        const float error = (bit - squash(output)) * RATE;
        for (int i = 0; i < INPUTS; i++) chosen[i] += error * x[i];
    }

  private:
    std::vector<float> weights;
    float* chosen = nullptr;
    float output = 0;
};

// A last correction: the observed probability for a logit in a context, interpolated between 33 points.
class Refinement {
  public:
    explicit Refinement(int contexts) : points(contexts * 33) {
        for (int i = 0; i < 33; i++) points[i] = squash((i - 16) / 16.0f * LARGEST_LOGIT);
        for (size_t i = 33; i < points.size(); i++) points[i] = points[i - 33];
    }
    float refine(float x, int context) {
        const float at = (x / LARGEST_LOGIT + 1) * 16;
        const int low = std::min(int(at), 31);
        share = at - low;
        lower = &points[context * 33 + low];
        return lower[0] * (1 - share) + lower[1] * share;
    }
    void update(int bit) {
        lower[0] += (bit - lower[0]) * 0.02f * (1 - share);
        lower[1] += (bit - lower[1]) * 0.02f * share;
    }

  private:
    std::vector<float> points;
    float* lower = nullptr;
    float share = 0;
};

// ---- the longest match ---------------------------------------------------------------------------------------------

class Match {
  public:
    Match(const Byte* text, int least, int bits)
        : text(text), least(least), last(size_t(1) << bits), mask((1 << bits) - 1) {
        for (int i = 0; i < 64; i++) right[i] = 1 - 1.0f / (i + 2);
    }
    // After the byte at `end - 1`.
    void advance(int64_t end) {
        if (length && text[at] == text[end - 1]) {
            at++;
            if (length < 65535) length++;
        } else
            length = 0;
        if (end < least) return;
        uint64_t hash = 0;
        for (int i = 1; i <= least; i++) hash = (hash + text[end - i] + 1) * 0x9E3779B97F4A7C15ull;
        uint32_t& newest = last[(hash >> 30) & mask];
        if (!length && newest) {
            at = newest;
            while (length < 400 && length < at && text[at - 1 - length] == text[end - 1 - length]) length++;
            if (length < least) length = 0;
        }
        newest = uint32_t(end);
    }
    // Whether a bit is predicted, given the byte's earlier bits after a leading 1.
    bool predicts(int partial, int bit_number) {
        if (!length) return false;
        const int byte = text[at] | 256;
        if (byte >> (8 - bit_number) != partial) {
            length = 0;
            return false;
        }
        expected = (byte >> (7 - bit_number)) & 1;
        bucket = std::min(63, length < 32 ? length : 24 + length / 4);
        return true;
    }
    float logit_of() const { return (expected ? 1 : -1) * logit(right[bucket]); }
    void update(int bit) {
        float& p = right[bucket];
        p += ((bit == expected) - p) * 0.004f;
        p = std::min(std::max(p, 0.01f), 1 - 1e-5f);
    }
    int length = 0, bucket = 0;

  private:
    const Byte* text;
    int least;
    std::vector<uint32_t> last;
    int mask;
    int64_t at = 0;
    int expected = 0;
    float right[64];
};

// ---- the model -----------------------------------------------------------------------------------------------------

uint64_t mixed(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * 0xD6E8FEB86659FD93ull;
    return hash ^ (hash >> 32);
}

class Predictor {
  public:
    Predictor(const Byte* text, int table_bits)
        : text(text),
          table(table_bits),
          match(text, 6, table_bits - 3),
          far(text, 20, table_bits - 3),
          by_match(7 * 8),
          by_partial(256),
          by_byte(256),
          fine(256),
          finer(1 << 16) {
        begin_byte(0);
    }

    // The probability of a 1 as the next bit.
    float predict() {
        int known = 0;
        for (int i = 0; i < CONTEXTS; i++) {
            const Byte history = slot[i]->nodes[node];
            inputs[2 * i] = history ? maps[i].logits[history] : 0;
            inputs[2 * i + 1] = history ? (maps[i].probability[history] - 0.5f) * 4 : 0;
            known += history && i < 6;
        }
        matched = match.predicts(partial, bit_number);
        inputs[2 * CONTEXTS] = matched ? match.logit_of() : 0;
        far_matched = far.predicts(partial, bit_number);
        inputs[2 * CONTEXTS + 1] = far_matched ? far.logit_of() : 0;
        inputs[2 * CONTEXTS + 2] = 0.3f;
        const int situation = known * 8 + (matched ? std::min(3, 1 + match.length / 16) : 0) * 2 + far_matched;
        const float a = by_match.mix(inputs, situation), b = by_partial.mix(inputs, partial);
        const float c = by_byte.mix(inputs, text_before);
        const float x = (a + b + c) / 3;
        const float refined = fine.refine(x, partial) + finer.refine(x, partial | text_before << 8);
        return std::min(std::max(squash(x) * 0.5f + refined * 0.25f, 1e-5f), 1 - 1e-5f);
    }

    void update(int bit) {
        for (int i = 0; i < CONTEXTS; i++) {
            Byte& history = slot[i]->nodes[node];
            if (history) maps[i].update(history, bit);
            history = histories.next[history][bit];
        }
        if (matched) match.update(bit);
        if (far_matched) far.update(bit);
        by_match.update(inputs, bit);
        by_partial.update(inputs, bit);
        by_byte.update(inputs, bit);
        fine.update(bit);
        finer.update(bit);
        partial = partial * 2 + bit;
        node = node * 2 + 1 + bit;
        bit_number++;
        if (bit_number == 4) begin_half(partial);
        if (bit_number == 8) begin_byte(end + 1);
    }

    // Update the contexts without predicting, which is enough for most of a long text.
    void read(Byte byte) {
        for (const int half : {byte >> 4, byte & 15}) {
            for (Slot* each : slot)
                for (int i = 3, node = 0; i >= 0; i--) {
                    const int bit = half >> i & 1;
                    each->nodes[node] = histories.next[each->nodes[node]][bit];
                    node = node * 2 + 1 + bit;
                }
            bit_number += 4;
            if (bit_number == 4)
                begin_half(16 | half);
            else
                begin_byte(end + 1);
        }
    }

  private:
    void begin_byte(int64_t now) {
        end = now;
        partial = 1;
        bit_number = 0;
        text_before = end ? text[end - 1] : 0;
        if (end) {
            match.advance(end);
            far.advance(end);
            const Byte c = text[end - 1];
            const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                                c == '_' || c >= 128;
            if (letter)
                word = mixed(word, c + 1);
            else if (word) {
                word_before = word;
                word = 0;
            }
        }
        uint64_t hash = 0;
        static constexpr int ORDERS[] = {1, 2, 3, 4, 5, 6, 8};
        int done = 0, i = 0;
        for (int order : ORDERS) {
            for (; done < order; done++) hash = mixed(hash, end > done ? text[end - 1 - done] + 1 : 0);
            context[i++] = mixed(hash, order);
        }
        context[i++] = mixed(mixed(word, text_before), 101);
        context[i++] = mixed(mixed(mixed(word, word_before), text_before), 102);
        begin_half(0);
    }

    void begin_half(int bits) {
        node = 0;
        uint64_t hash[CONTEXTS];
        for (int i = 0; i < CONTEXTS; i++) {
            hash[i] = mixed(context[i], 1000 + bits);
            table.prefetch(hash[i]);
        }
        for (int i = 0; i < CONTEXTS; i++) slot[i] = table.find(hash[i]);
    }

    const Byte* text;
    Table table;
    Match match, far;
    Mixer by_match, by_partial, by_byte;
    Refinement fine, finer;
    HistoryMap maps[CONTEXTS];
    Slot* slot[CONTEXTS];
    uint64_t context[CONTEXTS], word = 0, word_before = 0;
    float inputs[INPUTS] = {};
    int64_t end = 0;
    int partial = 1, node = 0, bit_number = 0, text_before = 0;
    bool matched = false, far_matched = false;
};

}  // namespace

extern "C" {

// Write the bits that each byte from `primed` on takes, given all bytes before it. The last `mixed_bytes` before `primed`
// are predicted, to learn the weights. The bytes before those are only read.
void code_lengths(const Byte* text, int64_t primed, int64_t size, int64_t table_bits, int64_t mixed_bytes, float* bits) {
    auto model = std::make_unique<Predictor>(text, int(table_bits));
    for (int64_t at = 0; at < size; at++) {
        if (at < primed - mixed_bytes) {
            model->read(text[at]);
            continue;
        }
        double cost = 0;
        for (int bit_number = 7; bit_number >= 0; bit_number--) {
            const int bit = text[at] >> bit_number & 1;
            const float p = model->predict();
            if (at >= primed) cost -= std::log2(bit ? p : 1 - p);
            model->update(bit);
        }
        if (at >= primed) bits[at - primed] = float(cost);
    }
}
}
