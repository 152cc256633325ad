// Sixteen float32 lanes by GCC's vectors, bf16 in memory. Any processor has them; AVX-512 has them in one register.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
constexpr int LANES = 16, PAIRS = 32;  // numbers a register: float32, bf16

static inline Floats load(const float *at) {
    Floats x;
    memcpy(&x, at, sizeof x);
    return x;
}

static inline Floats load(const bf16 *at) {
    Halves upper;
    memcpy(&upper, at, sizeof upper);
    return (Floats)(__builtin_convertvector(upper, Words) << 16);
}

// To the nearest bf16, ties to even, in the upper half of each lane; NaN stays NaN.
static inline Words upper_half(Floats x) {
    const Words bits = (Words)x, even = bits + 0x7fff + ((bits >> 16) & 1);
    return x == x ? even : bits | 0x400000;
}

static inline void store(float *at, Floats x) { memcpy(at, &x, sizeof x); }

#ifdef __AVX512BF16__
static inline void store(bf16 *at, Floats x) {
    const __m256bh upper = _mm512_cvtneps_pbh((__m512)x);
    memcpy(at, &upper, sizeof upper);
}

// Two bf16 a lane, as products of bf16 take them: the first in the lower half.
static inline void store_pairs(uint32_t *at, Floats first, Floats second) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    const Words lanes = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                         0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    const __m512i mixed = _mm512_permutexvar_epi16((__m512i)lanes, (__m512i)both);
    memcpy(at, &mixed, sizeof mixed);
}
#else
static inline void store(bf16 *at, Floats x) {
    const Halves upper = __builtin_convertvector(upper_half(x) >> 16, Halves);
    memcpy(at, &upper, sizeof upper);
}

static inline void store_pairs(uint32_t *at, Floats first, Floats second) {
    const Words both = (Words)((upper_half(first) >> 16) & 0xffff) | (upper_half(second) & ~0xffff);
    memcpy(at, &both, sizeof both);
}
#endif

// Past the cache, where it fills a line: for much that is not read soon. `past_cache_end` comes before a thread is done.
static inline void store_past_cache(float *at, Floats x) {
#ifdef __AVX512F__
    if ((uintptr_t)at % sizeof x == 0) return _mm512_stream_ps(at, (__m512)x);
#endif
    store(at, x);
}

static inline void past_cache_end() { __builtin_ia32_sfence(); }

static inline Floats rounded(Floats x) {
    bf16 held[LANES];
    store(held, x);
    return load(held);
}

static inline float number(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

// Sums of neighbours: first those of a, then those of b.
static inline Floats pairs(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

#ifdef __AVX512BF16__
// sums + products of 32 numbers, two neighbours a lane.
static inline Floats products(Floats sums, __m512i a, __m512i b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
#endif

static inline float sum(Floats x) {
    float total = 0;
    for (int i = 0; i < LANES / 2; i++) total += x[i] + x[i + LANES / 2];
    return total;
}

static inline float maximum(Floats x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

static inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x below 88, to a few units in the last place near 0: 2^n 2^r by Cephes' polynomial; below -87 about 0.
static inline Floats exponential(Floats x) {
#ifdef __AVX512F__
    const Floats t = x * 1.44269504f, n = (Floats)_mm512_roundscale_ps((__m512)t, 8), r = t - n;
#else
    const Floats t = (x < -87.0f ? Floats{} - 87.0f : x) * 1.44269504f, n = (t + 12582912.0f) - 12582912.0f, r = t - n;
#endif
    Floats p = r * 1.535336188e-4f + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);  // of a NaN and -infinity it is 0
#else
    p *= (Floats)((__builtin_convertvector(n, Words) + 127) << 23);
    return x < -87.0f ? Floats{} : p;  // NaN stays NaN
#endif
}

// 1 / (1 + e^-x)
static inline Floats sigmoid(Floats x) {
    const Floats e = exponential(x < 0.0f ? x : -x), one = Floats{} + 1.0f;
    return (x < 0.0f ? e : one) / (one + e);
}

// The transpose of 16 x 16 words, by four perfect shuffles.
template <typename Lanes>
static inline void transpose(Lanes *rows) {
    for (int round = 0; round < 4; round++) {
        Lanes shuffled[LANES];
        for (int i = 0; i < 8; i++) {
            shuffled[2 * i] = __builtin_shufflevector(
                rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            shuffled[2 * i + 1] = __builtin_shufflevector(
                rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        memcpy(rows, shuffled, sizeof shuffled);
    }
}
