// The operations of a decode step between its matrix products, for one head size (HEAD_DIM) and group size (GROUP: query
// heads per key head). `step.py` documents the arguments. Values are bf16 in memory and float32 in registers. A row's
// arithmetic is a fixed order of operations on that row alone: neither other rows nor threads change its bits.

#include "vectors.h"

#include <cmath>
#include <vector>

// x += delta, and its root-mean-square norm.
static inline void norm_row(float *x, const bf16 *delta, const float *weight, float eps, bf16 *out, long width) {
    Floats squares{};
    for (long i = 0; i < width; i += LANES) {
        Floats v = load(x + i);
        if (delta) store(x + i, v += load(delta + i));
        squares += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (long i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

// One head: its norm, where it has one, then the rotary embedding. `turns` has (cos, sin) of each pair of neighbours.
static inline void rotate(const bf16 *in, const float *weight, float eps, const float *turns, bf16 *out) {
    float x[HEAD_DIM];
    Floats squares{};
    for (int i = 0; i < HEAD_DIM; i += LANES) {
        store(x + i, load(in + i));
        squares += load(x + i) * load(x + i);
    }
    if (weight) {
        const float scale = 1.0f / std::sqrt(sum(squares) / HEAD_DIM + eps);
        for (int i = 0; i < HEAD_DIM; i += LANES) store(x + i, load(x + i) * scale * load(weight + i));
    }
    for (int i = 0; i < HEAD_DIM; i += LANES) {
        const Floats own = load(x + i), turn = load(turns + i);
        const Floats cosine = __builtin_shufflevector(turn, turn, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14);
        const Floats sine = __builtin_shufflevector(turn, turn, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
        const Floats other =  // of a pair (a, b): (-b, a)
            __builtin_shufflevector(own, -own, 17, 0, 19, 2, 21, 4, 23, 6, 25, 8, 27, 10, 29, 12, 31, 14);
        store(out + i, own * cosine + other * sine);
    }
}

// scores[g][s] = queries[g] . keys[s] of positions [from, to), LANES at a time; as much is fetched of what is read `next`.
static inline void dot(const bf16 (*queries)[HEAD_DIM], const bf16 *keys, const bf16 *next, float *scores, long from,
                       long to, long room) {
    for (long s = from; s < to; s += LANES) {
        const bf16 *own = keys + s * HEAD_DIM;
        for (int i = 0; i < LANES * HEAD_DIM; i += PAIRS) _mm_prefetch(next + s * HEAD_DIM + i, _MM_HINT_T1);
        for (int g = 0; g < GROUP; g++) {
            Floats terms[LANES] = {};
            for (int i = 0; i < HEAD_DIM; i += PAIRS)
                for (int j = 0; j < LANES; j++)
                    terms[j] = products(terms[j], _mm512_loadu_si512(queries[g] + i),
                                        _mm512_loadu_si512(own + j * HEAD_DIM + i));
            for (int left = LANES / 2; left; left /= 2)
                for (int j = 0; j < left; j++) terms[j] = pairs(terms[2 * j], terms[2 * j + 1]);
            store(scores + g * room + s, terms[0]);
        }
    }
}

// Weights of scores, 0 from `length` on: the softmax without its division. Returns their sum.
static inline float weigh(float *scores, bf16 *weights, long length, long room, float scale) {
    for (long s = length; s < room; s++) scores[s] = -INFINITY;
    Floats most = load(scores), total{};
    for (long s = LANES; s < room; s += LANES) most = load(scores + s) > most ? load(scores + s) : most;
    const float largest = maximum(most);
    for (long s = 0; s < room; s += LANES) {
        const Floats weight = exponential((load(scores + s) - largest) * scale);
        store(weights + s, weight);
        total += weight;
    }
    return sum(total);
}

// Registers of a head that are summed at once, for all queries.
constexpr int at_once() {
    int registers = HEAD_DIM / PAIRS;
    while (registers > 1 && (2 * registers * GROUP > 16 || HEAD_DIM / PAIRS % registers)) registers--;
    return registers;
}

// out[g] = sum over s of weights[g][s] / totals[g] * values[s], two positions at a time, those before `shared` the
// leader's; `next` as above.
static inline void average(const bf16 *weights, const float *totals, const bf16 *leading, const bf16 *values,
                           const bf16 *next, bf16 *out, long shared, long length, long room) {
    constexpr int registers = at_once();
    for (int column = 0; column < HEAD_DIM; column += registers * PAIRS) {
        Floats sums[GROUP][registers][2] = {};
        for (long s = 0; s < length; s += 2)
            for (int i = 0; i < registers; i++) {
                const bf16 *at = (s < shared ? leading : values) + s * HEAD_DIM + column + i * PAIRS;
                const __m512i one = _mm512_loadu_si512(at);
                const __m512i other = s + 1 < length ? _mm512_loadu_si512(at + HEAD_DIM) : _mm512_setzero_si512();
                for (int j = 0; s >= shared && j < 2; j++)
                    _mm_prefetch(next + (s + j) * HEAD_DIM + column + i * PAIRS, _MM_HINT_T1);
                const __m512i low = _mm512_unpacklo_epi16(one, other), high = _mm512_unpackhi_epi16(one, other);
                for (int g = 0; g < GROUP; g++) {
                    int32_t both;
                    memcpy(&both, weights + g * room + s, sizeof both);
                    sums[g][i][0] = products(sums[g][i][0], low, _mm512_set1_epi32(both));
                    sums[g][i][1] = products(sums[g][i][1], high, _mm512_set1_epi32(both));
                }
            }
        for (int g = 0; g < GROUP; g++)
            for (int i = 0; i < registers; i++) {  // unpacking takes four columns of each eight
                const Floats low = sums[g][i][0] / totals[g], high = sums[g][i][1] / totals[g];
                bf16 *at = out + g * HEAD_DIM + column + i * PAIRS;
                store(at, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
                store(at + LANES,
                      __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
            }
    }
}

extern "C" {

void norm(float *x, const bf16 *delta, const float *weight, float eps, bf16 *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < rows; r++)
        norm_row(x + r * width, delta ? delta + r * width : nullptr, weight, eps, out + r * width, width);
}

void attend(const bf16 *qkv, const float *q_norm, const float *k_norm, float eps, const float *turns,
            const int64_t *position, const int64_t *leaders, const int64_t *common, bf16 *keys, bf16 *values, bf16 *out,
            float scale, long slots, long kv_heads, long capacity, int threads) {
    const long own = (GROUP + 2) * HEAD_DIM * kv_heads;  // numbers a row of qkv
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scores(GROUP * (capacity + LANES));
        std::vector<bf16> weights(scores.size());
#pragma omp for schedule(dynamic, 8)
        for (long item = 0; item < slots * kv_heads; item++) {
            const long r = item / kv_heads, h = item % kv_heads;
            const long held = item * capacity * HEAD_DIM, shared = common[r] / LANES * LANES;
            const long leading = (leaders[r] * kv_heads + h) * capacity * HEAD_DIM;
            bf16 *held_keys = keys + held, *held_values = values + held;
            const long at = position[r], length = at + 1, room = (length + LANES - 1) / LANES * LANES;
            const float *turn = turns + at * HEAD_DIM;
            const bf16 *query = qkv + r * own + h * GROUP * HEAD_DIM;
            const bf16 *key = qkv + r * own + (GROUP * kv_heads + h) * HEAD_DIM, *value = key + kv_heads * HEAD_DIM;
            rotate(key, k_norm, eps, turn, held_keys + at * HEAD_DIM);
            memcpy(held_values + at * HEAD_DIM, value, HEAD_DIM * sizeof(bf16));
            bf16 turned[GROUP][HEAD_DIM];
            for (int g = 0; g < GROUP; g++) rotate(query + g * HEAD_DIM, q_norm, eps, turn, turned[g]);
            dot(turned, keys + leading, values + leading, scores.data(), 0, shared, room);
            dot(turned, held_keys, held_values, scores.data(), shared, room, room);
            float totals[GROUP];
            for (int g = 0; g < GROUP; g++)
                totals[g] = weigh(scores.data() + g * room, weights.data() + g * room, length, room, scale);
            const bf16 *next = held_keys + capacity * HEAD_DIM;
            average(weights.data(), totals, values + leading, held_values, next,
                    out + (r * kv_heads + h) * GROUP * HEAD_DIM, shared, length, room);
        }
    }
}

// silu(gate) * up, each rounded as a tensor of its own would be.
void swiglu(const bf16 *gate_up, bf16 *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += LANES) {
            const Floats gate = load(gate_up + 2 * r * width + i), up = load(gate_up + (2 * r + 1) * width + i);
            const Floats e = exponential(gate < 0.0f ? gate : -gate);
            const Floats silu = gate * (gate < 0.0f ? e : Floats{} + 1.0f) / (e + 1.0f);
            store(out + r * width + i, rounded(silu) * up);
        }
}
}
