// y = x W^T + b on the tiles of AMX: bf16 in, float32 sums, bf16 out. `linear.py` packs W. A row's sums have one order,
// whatever the number of rows or threads. A tile is a register of 16 rows of 64 bytes.

#include <algorithm>

#include "vectors.h"

constexpr long SIDE = 16, DEPTH = 32;  // most rows, or outputs, of a tile of sums; inputs that one product sums
constexpr long TILE = SIDE * DEPTH, CHUNK = 512;  // numbers in a tile of W; rows of x that stay in the cache
constexpr long AHEAD = 8 * TILE;  // numbers of W that are on their way: the processor itself stops at the end of a page

// Tiles 0-3: sums, of two blocks of rows (0 1, 2 3) times two of outputs; 4-5: x; 6-7: W.
static void configure(long rows) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, zero[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } tiles;
    const long first = std::min(rows, SIDE), second = std::max(rows - SIDE, 1L);
    for (int tile = 0; tile < 8; tile++) {
        tiles.bytes[tile] = 64;
        tiles.rows[tile] = tile >= 6 ? SIDE : tile < 2 || tile == 4 ? first : second;
    }
    asm volatile("" ::"r"(&tiles) : "memory");  // GCC believes that the load reads 8 bytes
    _tile_loadconfig(&tiles);
}

static inline void write(const float *sums, const float *bias, bf16 *out, long rows, long height) {
    const __m512 added = bias ? _mm512_loadu_ps(bias) : _mm512_setzero_ps();
    for (long r = 0; r < rows; r++) {
        const __m512 y = _mm512_add_ps(_mm512_loadu_ps(sums + r * SIDE), added);
        _mm256_storeu_si256((__m256i *)(out + r * height), (__m256i)_mm512_cvtneps_pbh(y));
    }
}

// Up to 32 rows times 32 outputs; the first of such rows meet W in memory.
static void block(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, long rows, long width, long height,
                  bool first) {
    const long stride = width * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < width; k += DEPTH, weight += 2 * TILE) {
        for (long i = 0; first && i < 2 * TILE; i += PAIRS) _mm_prefetch(weight + AHEAD + i, _MM_HINT_T0);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > SIDE) {
            _tile_loadd(5, x + SIDE * width + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    alignas(64) float sums[4][SIDE * SIDE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    write(sums[0], bias, out, std::min(rows, SIDE), height);
    write(sums[1], bias ? bias + SIDE : nullptr, out + SIDE, std::min(rows, SIDE), height);
    if (rows > SIDE) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        write(sums[2], bias, out + SIDE * height, rows - SIDE, height);
        write(sums[3], bias ? bias + SIDE : nullptr, out + SIDE * height + SIDE, rows - SIDE, height);
    }
}

extern "C" {

// Rows of W float32, as they are or in this order, as `linear` reads them: rounded, and each tile of 16 outputs turned, so
// that a row of it has two inputs of each. Written past the cache: all of a model's weights come before any is read.
void pack(const float *weight, const int64_t *order, bf16 *out, long height, long width, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for nowait
        for (long c = 0; c < height; c += SIDE)
            for (long k = 0; k < width; k += DEPTH) {
                Words tile[SIDE];
                for (long r = 0; r < SIDE; r++) {
                    const float *at = weight + (order ? order[c + r] : c + r) * width + k;
                    tile[r] = (Words)_mm512_cvtne2ps_pbh((__m512)load(at + LANES), (__m512)load(at));
                }
                transpose(tile);
                bf16 *to = out + (c - c % (2 * SIDE)) * width + (2 * k / DEPTH + c / SIDE % 2) * TILE;
                for (long r = 0; r < SIDE; r++) _mm512_stream_si512((__m512i *)(to + r * DEPTH), (__m512i)tile[r]);
            }
        past_cache_end();
    }
}

void linear(const bf16 *x, const bf16 *weight, const float *bias, bf16 *out, long rows, long width,
                       long height, int threads) {
#pragma omp parallel num_threads(threads)
    {
        long configured = 0;
#pragma omp for collapse(2) schedule(static)
        for (long start = 0; start < rows; start += CHUNK)
            for (long c = 0; c < height; c += 2 * SIDE)
                for (long r = start; r < std::min(rows, start + CHUNK); r += 2 * SIDE) {
                    const long own = std::min(rows - r, 2 * SIDE);
                    if (own != configured) configure(configured = own);
                    block(x + r * width, weight + c * width, bias ? bias + c : nullptr, out + r * height + c, own,
                          width, height, r == start);
                }
        _tile_release();
    }
}
}
