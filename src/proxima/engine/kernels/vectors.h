// Registers of 16 float32 or 32 bf16 numbers, and what all kernels need of them. GCC's vectors: + - * / < by lane.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

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

static inline void store(float *at, Floats x) { memcpy(at, &x, sizeof x); }

// To the nearest, ties to even; NaN stays NaN.
static inline void store(bf16 *at, Floats x) {
    const Words bits = (Words)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Halves upper = __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, Halves);
    memcpy(at, &upper, sizeof upper);
}

static inline Floats rounded(Floats x) {
    bf16 held[LANES];
    store(held, x);
    return load(held);
}

// Sums of neighbours: first those of a, then those of b.
static inline Floats pairs(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

static inline float sum(Floats x) {
    for (int i = 0; i < 4; i++) x = pairs(x, x);
    return x[0];
}

// sums + products of 32 numbers, two neighbours a lane.
static inline Floats products(Floats sums, __m512i a, __m512i b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}

// e^x for x <= 0, to a few units in the last place: 2^n by the exponent's bits, the rest by Cephes' polynomial.
static inline Floats exponential(Floats x) {
    const Floats shifted = (x < -87.0f ? Floats{} - 87.0f : x) * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p *= (Floats)((__builtin_convertvector(n, Words) + 127) << 23);
    return x < -87.0f ? Floats{} : p;  // NaN stays NaN
}

static inline float maximum(Floats x) {
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

static inline float number(bf16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}
