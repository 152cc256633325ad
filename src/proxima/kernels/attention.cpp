// Attention of packed segments for one head dimension (HEAD_DIM), with the norm and the rotation of queries and keys.
// `train_pass.py` compiles it, and documents the arguments. A task is a prompt, its responses, and a key head; scores are
// kept transposed, keys in rows and queries in lanes, so that softmax needs no sum within a vector. Products are bf16
// with float32 sums, by AMX where the processor has it. No result depends on the number of threads.

#include <algorithm>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {
constexpr long D = HEAD_DIM, HALF = D / 2, BLOCK = 64, STEP = 32;  // queries at once; rows and columns of a product
constexpr float INF = std::numeric_limits<float>::infinity();

long padded(long n) { return (n + STEP - 1) / STEP * STEP; }

// The left side of a product: the 32 columns of `block` of row i are at data + i * row + block * next.
struct Left {
    const bf16 *data;
    long row, next;
};

#ifdef __AMX_BF16__
struct Tiles {  // of 16 x 64 bytes
    Tiles() {
        alignas(64) uint8_t config[64] = {1};
        for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
        asm volatile("" ::"r"(config) : "memory");  // GCC believes that the load reads 8 bytes
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};
#else
struct Tiles {};

Floats pair_product(Floats sums, uint32_t a, Words b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(a), (__m512bh)b);
#else
    const Words both = Words{} + (int32_t)a;
    sums += (Floats)(both << 16) * (Floats)(b << 16);
    return sums + (Floats)(both & ~0xffff) * (Floats)(b & ~0xffff);
#endif
}
#endif

// c [m, n] (+)= a [m, k] b [k, n], all multiples of 32. `b` holds pairs along k: [n / 16][k / 2][16], `b_next` words
// from one n / 16 to the next.
void product(Left a, const uint32_t *b, long b_next, float *c, long c_row, long m, long n, long k, bool add) {
#ifdef __AMX_BF16__
    asm volatile("" ::: "memory");  // GCC's loads of tiles do not say that they read memory
#endif
    for (long i = 0; i < m; i += 32)
        for (long j = 0; j < n; j += 32) {
            const uint32_t *left = b + j / 16 * b_next, *right = left + b_next;
            float *at = c + i * c_row + j;
#ifdef __AMX_BF16__
            const long stride = c_row * 4;
            float *below = at + 16 * c_row;
            if (add) {
                _tile_loadd(0, at, stride); _tile_loadd(1, at + 16, stride);
                _tile_loadd(2, below, stride); _tile_loadd(3, below + 16, stride);
            } else {
                _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            }
            for (long block = 0; block < k / 32; block++) {
                const bf16 *upper = a.data + i * a.row + block * a.next;
                _tile_loadd(4, upper, a.row * 2); _tile_loadd(5, upper + 16 * a.row, a.row * 2);
                _tile_loadd(6, left + block * 256, 64); _tile_loadd(7, right + block * 256, 64);
                _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, at, stride); _tile_stored(1, at + 16, stride);
            _tile_stored(2, below, stride); _tile_stored(3, below + 16, stride);
#else
            for (long row = 0; row < 32; row += 8) {
                Floats sums[8][2];
                for (int r = 0; r < 8; r++)
                    for (int s = 0; s < 2; s++) sums[r][s] = add ? load(at + (row + r) * c_row + s * 16) : Floats{};
                for (long block = 0; block < k / 32; block++) {
                    const bf16 *upper = a.data + (i + row) * a.row + block * a.next;
                    for (long pair = 0; pair < 16; pair++) {
                        Words first, second;
                        memcpy(&first, left + block * 256 + pair * 16, 64);
                        memcpy(&second, right + block * 256 + pair * 16, 64);
                        for (int r = 0; r < 8; r++) {
                            uint32_t both;
                            memcpy(&both, upper + r * a.row + 2 * pair, 4);
                            sums[r][0] = pair_product(sums[r][0], both, first);
                            sums[r][1] = pair_product(sums[r][1], both, second);
                        }
                    }
                }
                for (int r = 0; r < 8; r++)
                    for (int s = 0; s < 2; s++) store(at + (row + r) * c_row + s * 16, sums[r][s]);
            }
#endif
        }
}

// Rows [n, D] as the right side of a product over D.
void pairs_of_columns(const bf16 *rows, uint32_t *out, long n) {
    for (long i = 0; i < n; i += 16)
        for (long j = 0; j < HALF; j += 16) {
            Words block[16];
            for (long r = 0; r < 16; r++) memcpy(block + r, rows + (i + r) * D + 2 * j, 64);
            transpose(block);
            memcpy(out + (i / 16 * HALF + j) * 16, block, sizeof block);
        }
}

// Rows [n, D] as the right side of a product over n; `next` as `b_next`.
void pairs_of_rows(const bf16 *rows, uint32_t *out, long n, long next) {
    for (long i = 0; i < n; i += 2)
        for (long j = 0; j < D; j += 16)
            store_pairs(out + j / 16 * next + i * 8, load(rows + i * D + j), load(rows + (i + 1) * D + j));
}

// 32 rows [32, D] as [D, 32].
void columns(const bf16 *rows, bf16 *out) {
    for (long i = 0; i < 32; i += LANES)
        for (long j = 0; j < D; j += LANES) {
            Floats block[LANES];
            for (long r = 0; r < LANES; r++) block[r] = load(rows + (i + r) * D + j);
            transpose(block);
            for (long c = 0; c < LANES; c++) {
                const Halves upper = __builtin_convertvector((Words)block[c] >> 16, Halves);
                memcpy(out + (j + c) * 32 + i, &upper, sizeof upper);
            }
        }
}

struct Turn {  // of the head of a token: its norm if there is one, and the rotary embedding
    const float *cosine, *sine, *weight;
    float eps;

    float scale(const bf16 *x) const {
        Floats squares = {};
        for (long i = 0; i < D; i += LANES) squares += load(x + i) * load(x + i);
        return 1 / std::sqrt(sum(squares) / D + eps);
    }

    void apply(const bf16 *x, long token, bf16 *out) const {
        const float factor = weight ? scale(x) : 1;
        for (long i = 0; i < HALF; i += LANES) {
            Floats a = load(x + i), b = load(x + HALF + i);
            if (weight) a *= load(weight + i) * factor, b *= load(weight + HALF + i) * factor;
            const Floats c = load(cosine + token * HALF + i), s = load(sine + token * HALF + i);
            store(out + i, a * c - b * s), store(out + HALF + i, b * c + a * s);
        }
    }

    // The gradient of x from that of the result; that of the weight is added.
    void backward(const float *grad, const bf16 *x, long token, bf16 *out, float *grad_weight) const {
        Floats g[D / LANES], along = {};
        const float factor = weight ? scale(x) : 1;
        for (long i = 0; i < HALF / LANES; i++) {
            const Floats a = load(grad + i * LANES), b = load(grad + HALF + i * LANES);
            const Floats c = load(cosine + token * HALF + i * LANES), s = load(sine + token * HALF + i * LANES);
            g[i] = a * c + b * s, g[i + HALF / LANES] = b * c - a * s;
        }
        for (long i = 0; weight && i < D / LANES; i++) {
            const Floats normed = load(x + i * LANES) * factor;
            store(grad_weight + i * LANES, load(grad_weight + i * LANES) + g[i] * normed);
            g[i] *= load(weight + i * LANES);
            along += g[i] * normed;
        }
        const float mean = sum(along) / D;
        for (long i = 0; i < D / LANES; i++)
            store(out + i * LANES, weight ? factor * (g[i] - load(x + i * LANES) * factor * mean) : g[i]);
    }
};

struct Batch {  // qkv [length, heads + 2 kv_heads, D]
    const bf16 *qkv;
    Turn query, key;
    float scale;
    long heads, kv_heads;

    long repeat() const { return heads / kv_heads; }
    long row() const { return (heads + 2 * kv_heads) * D; }
    long query_at(long token, long head) const { return token * row() + head * D; }
    long key_at(long token, long kv) const { return query_at(token, heads + kv); }
    long value_at(long token, long kv) const { return query_at(token, heads + kv_heads + kv); }
};

// Memory of a thread, which it keeps.
struct Scratch {
    std::vector<bf16> keys, values, key_columns, value_columns, queries, grads, weights, scores_grad;
    std::vector<uint32_t> query_pairs, grad_pairs, query_rows, grad_rows, weight_pairs;
    std::vector<float> scores, grad_weights, sums, grad_keys, grad_values;

    template <typename T>
    static T *of(std::vector<T> &memory, long size) {
        if ((long)memory.size() < size + 32) memory.resize(size + 32);
        const auto at = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<T *>((at + 63) / 64 * 64);
    }
};
thread_local Scratch scratch;

// The keys that a segment sees: `seen` of its parent, padded, then its own.
struct Keys {
    const Batch &batch;
    long kv, seen, start, capacity;
    bf16 *keys, *values;

    Keys(const Batch &batch, long kv, long capacity)
        : batch(batch), kv(kv), seen(0), start(0), capacity(capacity),
          keys(Scratch::of(scratch.keys, capacity * D)), values(Scratch::of(scratch.values, capacity * D)) {}

    // Write the keys and values of tokens [begin, end) from `at` on, zeros up to a multiple of 32.
    void put(long at, long begin, long end, bf16 *key_columns, bf16 *value_columns) const {
        const long size = padded(end - begin);
        for (long i = 0; i < size; i++) {
            bf16 *key = keys + (at + i) * D, *value = values + (at + i) * D;
            if (i < end - begin) {
                batch.key.apply(batch.qkv + batch.key_at(begin + i, kv), begin + i, key);
                memcpy(value, batch.qkv + batch.value_at(begin + i, kv), D * sizeof(bf16));
            } else {
                memset(key, 0, D * sizeof(bf16)), memset(value, 0, D * sizeof(bf16));
            }
        }
        for (long i = at; i < at + size; i += 32) {
            if (key_columns) columns(keys + i * D, key_columns + i * D);
            if (value_columns) columns(values + i * D, value_columns + i * D);
        }
    }
};

// A block of queries: rows of (token, head of the group), `count` of which are there.
struct Queries {
    long first, count, size, reach;  // rows of the segment; the keys that any of them sees, padded
    long own_at;                     // where the segment's own keys begin
    Words position[BLOCK / LANES];   // of the row's token in the segment

    Queries(long first, long rows, long repeat, long seen)
        : first(first), count(std::min(BLOCK, rows - first)), size(padded(count)), own_at(padded(seen)) {
        for (long i = 0; i < size; i++) position[i / LANES][i % LANES] = (first + i) / repeat;
        reach = own_at + padded((first + count - 1) / repeat + 1);
    }

    // Registers of lanes with a query in them; what the others hold goes nowhere.
    long lanes() const { return (count + LANES - 1) / LANES; }

    // Neither key n nor the next one is there: they fill the parent's up to a multiple of STEP.
    bool gap(long n, long seen) const { return n >= seen && n + 1 < own_at; }

    // All bits set in the lanes whose query sees key n.
    Words sees(long n, long seen, long lane) const {
        if (n < own_at) return Words{} - (n < seen);
        return (Words)(position[lane] >= (int32_t)(n - own_at));
    }
};

struct Groups {  // each prompt, and the responses that continue it
    std::vector<std::vector<long>> members;
    std::vector<long> tasks;

    Groups(const int64_t *edges, const int64_t *parents, long segments, long kv_heads) : members(segments) {
        for (long g = 0; g < segments; g++) {
            if (parents[g] >= 0) members[parents[g]].push_back(g);
            for (long kv = 0; parents[g] < 0 && kv < kv_heads; kv++) tasks.push_back(g * kv_heads + kv);
        }
    }

    long capacity(const int64_t *edges, long root) const {
        long most = 0;
        for (long g : members[root]) most = std::max(most, edges[g + 1] - edges[g]);
        return padded(edges[root + 1] - edges[root]) + padded(most);
    }
};

void attend(const Batch &batch, Keys &keys, const bf16 *value_columns, long begin, long end, bf16 *out, float *log_sum) {
    const long repeat = batch.repeat(), rows = (end - begin) * repeat;
    bf16 *rows_of = Scratch::of(scratch.queries, BLOCK * D);
    uint32_t *pairs = Scratch::of(scratch.query_pairs, BLOCK * HALF);
    float *scores = Scratch::of(scratch.scores, keys.capacity * BLOCK), *sums = Scratch::of(scratch.sums, D * BLOCK);
    uint32_t *weights = Scratch::of(scratch.weight_pairs, keys.capacity / 2 * BLOCK);
    for (long first = 0; first < rows; first += BLOCK) {
        const Queries block(first, rows, repeat, keys.seen);
        const long size = block.size, reach = block.reach;
        for (long i = 0; i < size; i++) {
            const long token = begin + (first + i) / repeat, head = keys.kv * repeat + (first + i) % repeat;
            if (i < block.count) batch.query.apply(batch.qkv + batch.query_at(token, head), token, rows_of + i * D);
            else memset(rows_of + i * D, 0, D * sizeof(bf16));
        }
        pairs_of_columns(rows_of, pairs, size);
        product({keys.keys, D, 32}, pairs, HALF * 16, scores, size, reach, size, D, false);
        for (long lane = 0; lane < block.lanes(); lane++) {
            Floats most = Floats{} - INF, total = {};
            for (long n = 0; n < reach; n++) {
                if (block.gap(n, keys.seen)) continue;
                const Floats s = load(scores + n * size + lane * LANES);
                most = larger(block.sees(n, keys.seen, lane) ? s : Floats{} - INF, most);
            }
            for (long n = 0; n < reach; n += 2) {
                Floats both[2] = {};
                for (int i = 0; i < 2 && !block.gap(n, keys.seen); i++) {
                    const Floats s = load(scores + (n + i) * size + lane * LANES);
                    const Floats weight = exponential((s - most) * batch.scale);
                    total += both[i] = block.sees(n + i, keys.seen, lane) ? weight : Floats{};
                }
                store_pairs(weights + lane * (reach / 2 * 16) + n / 2 * 16, both[0], both[1]);
            }
            for (long i = lane * LANES; i < std::min((lane + 1) * LANES, block.count); i++) {
                const long token = begin + (first + i) / repeat, head = keys.kv * repeat + (first + i) % repeat;
                log_sum[token * batch.heads + head] = most[i % LANES] * batch.scale + std::log(total[i % LANES]);
            }
            store(scores + lane * LANES, Floats{} + 1.0f / total);  // no score is read again
        }
        product({value_columns, 32, D * 32}, weights, reach / 2 * 16, sums, size, D, size, reach, false);
        for (long lane = 0; lane < block.lanes(); lane++)
            for (long d = 0; d < D; d += LANES) {
                Floats part[LANES];
                for (long i = 0; i < LANES; i++)
                    part[i] = load(sums + (d + i) * size + lane * LANES) * load(scores + lane * LANES);
                transpose(part);
                for (long i = lane * LANES; i < std::min((lane + 1) * LANES, block.count); i++) {
                    const long token = begin + (first + i) / repeat, head = keys.kv * repeat + (first + i) % repeat;
                    store(out + (token * batch.heads + head) * D + d, part[i % LANES]);
                }
            }
    }
}

struct Gradient {
    const bf16 *out, *grad;
    const float *log_sum;
    bf16 *grad_qkv;
    float *grad_norms;  // of a task: of the query's norm [D] and of the key's, or null
};

void attend_backward(const Batch &batch, Keys &keys, const bf16 *key_columns, long begin, long end,
                     const Gradient &gradient, float *grad_keys, float *grad_values) {
    const long repeat = batch.repeat(), rows = (end - begin) * repeat, capacity = keys.capacity;
    bf16 *queries = Scratch::of(scratch.queries, BLOCK * D), *grads = Scratch::of(scratch.grads, BLOCK * D);
    uint32_t *query_pairs = Scratch::of(scratch.query_pairs, BLOCK * HALF);
    uint32_t *grad_pairs = Scratch::of(scratch.grad_pairs, BLOCK * HALF);
    uint32_t *query_rows = Scratch::of(scratch.query_rows, BLOCK * HALF);
    uint32_t *grad_rows = Scratch::of(scratch.grad_rows, BLOCK * HALF);
    float *scores = Scratch::of(scratch.scores, STEP * BLOCK), *sums = Scratch::of(scratch.sums, D * BLOCK);
    float *grad_weights = Scratch::of(scratch.grad_weights, STEP * BLOCK);
    bf16 *weights = Scratch::of(scratch.weights, capacity * BLOCK);
    bf16 *scores_grad = Scratch::of(scratch.scores_grad, capacity * BLOCK);
    uint32_t *score_pairs = Scratch::of(scratch.weight_pairs, capacity / 2 * BLOCK);
    for (long first = 0; first < rows; first += BLOCK) {
        const Queries block(first, rows, repeat, keys.seen);
        const long size = block.size, reach = block.reach;
        float log_sum[BLOCK], along[BLOCK];
        for (long i = 0; i < size; i++) {
            const long token = begin + (first + i) / repeat, head = keys.kv * repeat + (first + i) % repeat;
            const long at = (token * batch.heads + head) * D;
            if (i < block.count) {
                batch.query.apply(batch.qkv + batch.query_at(token, head), token, queries + i * D);
                memcpy(grads + i * D, gradient.grad + at, D * sizeof(bf16));
                Floats products = {};
                for (long d = 0; d < D; d += LANES) products += load(gradient.grad + at + d) * load(gradient.out + at + d);
                log_sum[i] = gradient.log_sum[token * batch.heads + head], along[i] = sum(products);
            } else {
                memset(queries + i * D, 0, D * sizeof(bf16)), memset(grads + i * D, 0, D * sizeof(bf16));
                log_sum[i] = INF, along[i] = 0;
            }
        }
        pairs_of_columns(queries, query_pairs, size), pairs_of_columns(grads, grad_pairs, size);
        pairs_of_rows(queries, query_rows, size, size / 2 * 16), pairs_of_rows(grads, grad_rows, size, size / 2 * 16);
        for (long at = 0; at < reach; at += STEP) {
            product({keys.keys + at * D, D, 32}, query_pairs, HALF * 16, scores, size, STEP, size, D, false);
            product({keys.values + at * D, D, 32}, grad_pairs, HALF * 16, grad_weights, size, STEP, size, D, false);
            for (long n = at; n < at + STEP; n += 2)
                for (long lane = 0; lane < size / LANES; lane++) {
                    const bool filled = lane < block.lanes() && !block.gap(n, keys.seen);
                    Floats both[2] = {};
                    for (int i = 0; i < 2; i++) {
                        const long here = (n + i - at) * size + lane * LANES, there = (n + i) * size + lane * LANES;
                        Floats weight = {};
                        if (filled) {
                            weight = exponential(load(scores + here) * batch.scale - load(log_sum + lane * LANES));
                            weight = block.sees(n + i, keys.seen, lane) ? weight : Floats{};
                            both[i] = weight * (load(grad_weights + here) - load(along + lane * LANES)) * batch.scale;
                        }
                        store(weights + there, weight), store(scores_grad + there, both[i]);
                    }
                    store_pairs(score_pairs + lane * (reach / 2 * 16) + n / 2 * 16, both[0], both[1]);
                }
        }
        product({weights, size, 32}, grad_rows, size / 2 * 16, grad_values, D, reach, D, size, true);
        product({scores_grad, size, 32}, query_rows, size / 2 * 16, grad_keys, D, reach, D, size, true);
        product({key_columns, 32, D * 32}, score_pairs, reach / 2 * 16, sums, size, D, size, reach, false);
        for (long lane = 0; lane < block.lanes(); lane++) {
            float rows_of[LANES][D];
            for (long d = 0; d < D; d += LANES) {
                Floats part[LANES];
                for (long i = 0; i < LANES; i++) part[i] = load(sums + (d + i) * size + lane * LANES);
                transpose(part);
                for (long i = 0; i < LANES; i++) store(rows_of[i] + d, part[i]);
            }
            for (long i = lane * LANES; i < std::min((lane + 1) * LANES, block.count); i++) {
                const long token = begin + (first + i) / repeat, head = keys.kv * repeat + (first + i) % repeat;
                const long at = batch.query_at(token, head);
                batch.query.backward(rows_of[i % LANES], batch.qkv + at, token, gradient.grad_qkv + at, gradient.grad_norms);
            }
        }
    }
}

void write_keys(const Batch &batch, long kv, long at, long begin, long end, const Gradient &gradient,
                const float *grad_keys, const float *grad_values) {
    float *of_norm = gradient.grad_norms ? gradient.grad_norms + D : nullptr;
    for (long i = 0; i < end - begin; i++) {
        const long place = batch.key_at(begin + i, kv), value_place = batch.value_at(begin + i, kv);
        batch.key.backward(grad_keys + (at + i) * D, batch.qkv + place, begin + i, gradient.grad_qkv + place, of_norm);
        for (long d = 0; d < D; d += LANES) store(gradient.grad_qkv + value_place + d, load(grad_values + (at + i) * D + d));
    }
}

// work(task, its key head, where its prompt begins and ends, its responses) for all tasks, by as many threads.
template <typename Work>
void each_task(const Batch &batch, const int64_t *edges, const int64_t *parents, long segments, int threads, Work work) {
    const Groups groups(edges, parents, segments, batch.kv_heads);
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const Tiles tiles;
#pragma omp for schedule(dynamic, 1)
        for (size_t task = 0; task < groups.tasks.size(); task++) {
            const long root = groups.tasks[task] / batch.kv_heads;
            Keys keys(batch, groups.tasks[task] % batch.kv_heads, groups.capacity(edges, root));
            work(task, keys, edges[root], edges[root + 1], groups.members[root]);
        }
    }
}
}  // namespace

extern "C" {

void attention(const bf16 *qkv, const float *cosine, const float *sine, const float *query_norm, const float *key_norm,
               float eps, const int64_t *edges, const int64_t *parents, bf16 *out, float *log_sum, float scale,
               long segments, long heads, long kv_heads, int threads) {
    const Batch batch{qkv, {cosine, sine, query_norm, eps}, {cosine, sine, key_norm, eps}, scale, heads, kv_heads};
    each_task(batch, edges, parents, segments, threads,
              [&](size_t, Keys &keys, long begin, long end, const std::vector<long> &members) {
        bf16 *values = Scratch::of(scratch.value_columns, keys.capacity * D);
        keys.put(0, begin, end, nullptr, values);
        attend(batch, keys, values, begin, end, out, log_sum);
        keys.seen = end - begin;
        for (long g : members) {
            keys.put(padded(keys.seen), edges[g], edges[g + 1], nullptr, values);
            attend(batch, keys, values, edges[g], edges[g + 1], out, log_sum);
        }
    });
}

void attention_backward(const bf16 *qkv, const float *cosine, const float *sine, const float *query_norm,
                        const float *key_norm, float eps, const int64_t *edges, const int64_t *parents, const bf16 *out,
                        const float *log_sum, const bf16 *grad, bf16 *grad_qkv, float *grad_norms, float scale,
                        long segments, long heads, long kv_heads, int threads) {
    const Batch batch{qkv, {cosine, sine, query_norm, eps}, {cosine, sine, key_norm, eps}, scale, heads, kv_heads};
    each_task(batch, edges, parents, segments, threads,
              [&](size_t task, Keys &keys, long begin, long end, const std::vector<long> &members) {
        const long own = padded(end - begin), capacity = keys.capacity;
        bf16 *columns_of = Scratch::of(scratch.key_columns, capacity * D);
        float *grad_keys = Scratch::of(scratch.grad_keys, capacity * D);
        float *grad_values = Scratch::of(scratch.grad_values, capacity * D);
        std::fill(grad_keys, grad_keys + own * D, 0.0f), std::fill(grad_values, grad_values + own * D, 0.0f);
        const Gradient gradient{out, grad, log_sum, grad_qkv, grad_norms ? grad_norms + task * 2 * D : nullptr};
        keys.put(0, begin, end, columns_of, nullptr);
        attend_backward(batch, keys, columns_of, begin, end, gradient, grad_keys, grad_values);
        keys.seen = end - begin;
        for (long g : members) {
            const long first = edges[g], last = edges[g + 1], size = padded(last - first);
            keys.put(own, first, last, columns_of, nullptr);
            std::fill(grad_keys + own * D, grad_keys + (own + size) * D, 0.0f);
            std::fill(grad_values + own * D, grad_values + (own + size) * D, 0.0f);
            attend_backward(batch, keys, columns_of, first, last, gradient, grad_keys, grad_values);
            write_keys(batch, keys.kv, own, first, last, gradient, grad_keys, grad_values);
        }
        write_keys(batch, keys.kv, 0, begin, end, gradient, grad_keys, grad_values);
    });
}
}
