// The operations of a training pass between its matrix products: norms, SwiGLU, log-probs, transposes. `train_pass.py`
// compiles it and documents the arguments. Values are bf16 in memory and float32 in registers, weights and their gradients
// float32. No result depends on the number of threads.

#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr long PARTS = 16;  // of the rows, whose sums are added one after the other

extern "C" {

// sum = x + delta, out = weight * sum / rms(sum); `scale` is 1 / rms.
void norm(const float *x, const bf16 *delta, const float *weight, float eps, float *sum_out, bf16 *out, float *scale,
          long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const long at = row * width;
        Floats squares = {};
        for (long i = 0; i < width; i += LANES) {
            Floats value = load(x + at + i);
            if (delta) {
                value += load(delta + at + i);
                store(sum_out + at + i, value);
            }
            squares += value * value;
        }
        const float *values = delta ? sum_out : x;
        const float factor = scale[row] = 1 / std::sqrt(sum(squares) / width + eps);
        for (long i = 0; i < width; i += LANES) store(out + at + i, load(values + at + i) * factor * load(weight + i));
    }
}

// The gradient of `x` from those of `out` and of `sum`, once in float32 and once in bf16; that of the weight in PARTS.
void norm_backward(const bf16 *grad, const float *grad_sum, const float *x, const float *weight, const float *scale,
                   float *grad_x, bf16 *grad_delta, float *grad_weight, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long part = 0; part < PARTS; part++) {
        float *of_weight = grad_weight + part * width;
        std::fill(of_weight, of_weight + width, 0.0f);
        for (long row = part * rows / PARTS; row < (part + 1) * rows / PARTS; row++) {
            const long at = row * width;
            const float factor = scale[row];
            Floats products = {};
            for (long i = 0; i < width; i += LANES)
                products += load(grad + at + i) * load(weight + i) * load(x + at + i);
            const float along = sum(products) * factor * factor / width;
            for (long i = 0; i < width; i += LANES) {
                const Floats g = load(grad + at + i), value = load(x + at + i);
                Floats result = factor * (g * load(weight + i) - value * along);
                if (grad_sum) result += load(grad_sum + at + i);
                store(grad_x + at + i, result);
                if (grad_delta) store(grad_delta + at + i, result);
                store(of_weight + i, load(of_weight + i) + g * value * factor);
            }
        }
    }
}

// silu(gate) * up of rows [gate, up].
void swiglu(const bf16 *gate_up, bf16 *out, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += LANES) {
            const Floats gate = load(gate_up + row * 2 * width + i);
            store(out + row * width + i, gate * sigmoid(gate) * load(gate_up + row * 2 * width + width + i));
        }
}

void swiglu_backward(const bf16 *gate_up, const bf16 *grad, bf16 *grad_gate_up, bf16 *out, long rows, long width,
                     int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += LANES) {
            const long gate_at = row * 2 * width + i, up_at = gate_at + width, at = row * width + i;
            const Floats gate = load(gate_up + gate_at), up = load(gate_up + up_at), g = load(grad + at);
            const Floats s = sigmoid(gate), silu = gate * s;
            store(out + at, silu * up);
            store(grad_gate_up + gate_at, g * up * (s + silu * (1.0f - s)));
            store(grad_gate_up + up_at, g * silu);
        }
}

// Of rows of logits, divided by the temperature: log Z, the log-prob of the target, and the entropy if it is wanted.
void log_prob(const bf16 *logits, const float *temperature, const int64_t *target, float *log_z, float *out,
              float *entropy, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        const bf16 *at = logits + row * width;
        const float inverse = 1 / temperature[row];
        Floats most = load(at);
        for (long i = LANES; i < width; i += LANES) most = larger(load(at + i), most);
        const float top = maximum(most) * inverse;
        Floats total = {}, weighted = {};
        for (long i = 0; i < width; i += LANES) {
            const Floats gap = load(at + i) * inverse - top, e = exponential(gap);
            total += e;
            if (entropy) weighted += e == 0.0f ? Floats{} : e * gap;
        }
        const float mass = sum(total), log_mass = std::log(mass);
        const uint32_t chosen = (uint32_t)at[target[row]] << 16;
        float value;
        memcpy(&value, &chosen, sizeof value);
        log_z[row] = top + log_mass;
        out[row] = (value * inverse - top) - log_mass;  // not - log_z: that is rounded at the size of top
        if (entropy) entropy[row] = log_mass - sum(weighted) / mass;
    }
}

// The logits, of tokens from `first` on, become their gradient: (1[target] g - p g - p (log p + H) g_H) / temperature.
void log_prob_backward(bf16 *logits, const float *temperature, const int64_t *target, const float *log_z,
                       const float *grad, const float *entropy, const float *grad_entropy, long first, long rows,
                       long width, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long row = 0; row < rows; row++) {
        bf16 *at = logits + row * width;
        const float inverse = 1 / temperature[row], g = grad[row], of_entropy = entropy ? grad_entropy[row] : 0.0f;
        const long y = target[row] - first;
        for (long i = 0; i < width; i += LANES) {
            const Floats log_p = load(at + i) * inverse - log_z[row], p = exponential(log_p);
            Floats result = p * -g;
            if (entropy) result -= p == 0.0f ? Floats{} : p * (log_p + entropy[row]) * of_entropy;
            if (i <= y && y < i + LANES) result[y - i] += g;
            store(at + i, result * inverse);
        }
    }
}

// [rows, width] bf16 -> [width, rows]: to `out` in bf16, or to `exact` in float32.
void transposed(const bf16 *x, bf16 *out, float *exact, long rows, long width, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) nowait
        for (long left = 0; left < width; left += LANES)
            for (long top = 0; top < rows; top += LANES) {
                Floats block[LANES];
                const long height = std::min<long>(LANES, rows - top);
                for (long i = 0; i < LANES; i++) block[i] = i < height ? load(x + (top + i) * width + left) : Floats{};
                transpose(block);
                for (long i = 0; i < LANES; i++) {
                    const long at = (left + i) * rows + top;
                    if (height < LANES)
                        for (long j = 0; j < height; j++)
                            if (exact) exact[at + j] = block[i][j];
                            else out[at + j] = (bf16)(((Words)block[i])[j] >> 16);
                    else if (exact) store_past_cache(exact + at, block[i]);
                    else store(out + at, block[i]);
                }
            }
        past_cache_end();
    }
}
}
