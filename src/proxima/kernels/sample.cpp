// One token per row from logits, without truncation, in three passes over the row while it is in the cache: the largest
// logit, sums of e^x by blocks, and the one block that the draw falls into. `sample.py` documents the arguments.

#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <vector>

constexpr long BLOCK = 512;

static inline Floats weights(const bf16 *logits, float largest, float temperature) {
    return exponential((load(logits) - largest) / temperature);
}

// The first token of a block whose cumulative weight, `before` it included, exceeds `point`; the last that can be drawn
// where rounding leaves none.
static long search(const bf16 *logits, long count, float largest, float temperature, double before, double point) {
    long last = 0;
    for (long i = 0; i < count; i += LANES) {
        const Floats weight = weights(logits + i, largest, temperature);
        for (long j = 0; j < LANES; j++) {
            if (weight[j] > 0) last = i + j;
            if ((before += weight[j]) > point) return i + j;
        }
    }
    return last;
}

extern "C" void sample(const bf16 *logits, const float *temperatures, const float *uniform, int64_t *tokens,
                       float *log_probs, long rows, long vocabulary, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long r = 0; r < rows; r++) {
        const bf16 *row = logits + r * vocabulary;
        const bool greedy = temperatures[r] == 0;
        const float temperature = greedy ? 1 : temperatures[r];
        Floats most = load(row);
        for (long i = LANES; i < vocabulary; i += LANES) most = load(row + i) > most ? load(row + i) : most;
        const float largest = maximum(most);
        std::vector<double> sums;
        double total = 0;
        for (long start = 0; start < vocabulary; start += BLOCK) {
            Floats block{};
            const long end = std::min(start + BLOCK, vocabulary);
            for (long i = start; i < end; i += LANES) block += weights(row + i, largest, temperature);
            sums.push_back(sum(block));
            total += sums.back();
        }
        long token = 0;
        if (greedy) {
            while (token + 1 < vocabulary && number(row[token]) != largest) token++;
        } else {
            const double point = uniform[r] * total;
            double before = 0;
            size_t block = 0, found = 0;  // the last block that can be drawn from, up to the first beyond the point
            for (double upto = 0; block < sums.size() && upto <= point; block++) {
                if (sums[block] > 0) found = block, before = upto;
                upto += sums[block];
            }
            const long start = found * BLOCK, count = std::min(BLOCK, vocabulary - start);
            token = start + search(row + start, count, largest, temperature, before, point);
        }
        tokens[r] = token;
        log_probs[r] = (number(row[token]) - largest) / temperature - (float)std::log(total);
    }
}
