// AdamW's step on float32 weights, with clipping before it and the norms of the weights on the way: one pass over memory,
// and one more over the gradients for their norm. `adamw.py` documents the arguments. The weights and moments get the
// bits that torch's fused AdamW gives them: the same operations in the same order, none of them contracted. A sum has one
// order, whatever the number of threads.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {
constexpr long CHUNK = 1 << 14, AT_ONCE = 4 * LANES;  // numbers summed in float32; of them, in registers of their own

struct Tensors {  // of a weight
    float *weight, *gradient, *first, *second;
    int64_t size, step;
};

struct Chunk {
    const Tensors *of;
    long begin, end;
};

std::vector<Chunk> chunks(const Tensors *tensors, long count) {
    std::vector<Chunk> found;
    for (long i = 0; i < count; i++)
        for (long at = 0; at < tensors[i].size; at += CHUNK)
            found.push_back({tensors + i, at, std::min(at + CHUNK, (long)tensors[i].size)});
    return found;
}

double total(const std::vector<double> &parts) {
    double sum = 0;
    for (double part : parts) sum += part;
    return sum;
}

// Sixteen numbers, of which `count` are there.
Floats some(const float *at, long count) {
    Floats x = {};
    memcpy(&x, at, count * sizeof(float));
    return x;
}

Floats root(Floats x) {
#ifdef __AVX512F__
    return (Floats)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
    return x;
#endif
}

// a b + c, rounded once.
Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
#endif
}

struct Update {
    Floats keep, blend, decay, rest, correction, eps, rate;

    Update(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step)
        : keep(Floats{} + (float)(1 - lr * weight_decay)), blend(Floats{} + (float)(1 - beta1)),
          decay(Floats{} + (float)beta2), rest(Floats{} + (float)(1 - beta2)),
          correction(Floats{} + (float)std::sqrt(1 - std::pow(beta2, step))), eps(Floats{} + (float)eps),
          rate(Floats{} + (float)(-lr / (1 - std::pow(beta1, step)))) {}

    void operator()(Floats &weight, Floats gradient, Floats &first, Floats &second) const {
        weight *= keep;
        const Floats gap = gradient - first;
        first = blend[0] < 0.5f ? fused(blend, gap, first) : fused(blend - 1.0f, gap, gradient);
        second = fused(rest * gradient, gradient, second * decay);
        weight = weight + rate * first / (root(second) / correction + eps);
    }
};
}  // namespace

extern "C" {

// The sum of the squares of all gradients.
void squares(const Tensors *tensors, double *out, long count, int threads) {
    const std::vector<Chunk> all = chunks(tensors, count);
    std::vector<double> parts(all.size());
#pragma omp parallel for num_threads(threads)
    for (size_t i = 0; i < all.size(); i++) {
        const float *at = all[i].of->gradient;
        Floats sums[4] = {};
        long n = all[i].begin;
        for (; n + AT_ONCE <= all[i].end; n += AT_ONCE)
            for (int j = 0; j < 4; j++) sums[j] += load(at + n + j * LANES) * load(at + n + j * LANES);
        for (; n < all[i].end; n += LANES) {
            const Floats x = some(at + n, std::min<long>(LANES, all[i].end - n));
            sums[0] += x * x;
        }
        parts[i] = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    *out = total(parts);
}

// A step on `factor` times the gradients. `out` has the sums of the squares of the weights before and after.
void adamw(const Tensors *tensors, double *out, double lr, double beta1, double beta2, double eps, double weight_decay,
           float factor, long count, int threads) {
    const std::vector<Chunk> all = chunks(tensors, count);
    std::vector<double> before(all.size()), after(all.size());
#pragma omp parallel for num_threads(threads)
    for (size_t i = 0; i < all.size(); i++) {
        const Tensors &of = *all[i].of;
        const Update update(lr, beta1, beta2, eps, weight_decay, of.step);
        Floats old = {}, now = {};
        const auto step = [&](float *weight, const float *gradient, float *first, float *second) {
            Floats w = load(weight), m = load(first), v = load(second);
            old += w * w;
            update(w, load(gradient) * factor, m, v);
            now += w * w;
            store(weight, w), store(first, m), store(second, v);
        };
        long n = all[i].begin;
        for (; n + LANES <= all[i].end; n += LANES)
            step(of.weight + n, of.gradient + n, of.first + n, of.second + n);
        if (const size_t left = (all[i].end - n) * sizeof(float)) {
            float copy[4][LANES] = {}, *all_of[4] = {of.weight + n, of.gradient + n, of.first + n, of.second + n};
            for (int j = 0; j < 4; j++) memcpy(copy[j], all_of[j], left);
            step(copy[0], copy[1], copy[2], copy[3]);
            for (int j : {0, 2, 3}) memcpy(all_of[j], copy[j], left);
        }
        before[i] = sum(old), after[i] = sum(now);
    }
    out[0] = total(before), out[1] = total(after);
}
}
