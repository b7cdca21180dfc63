// Adam for ARM, whose cores have little arithmetic beside their memory bandwidth.
//
// A square root and a division per element would keep the one unit that does both busy for longer than memory takes. So
// the division is a reciprocal refined twice (off by a unit or two in the last place), and each round begins the roots
// of the next one, so that nobody waits for them.
#pragma once

#include <arm_neon.h>

#include <cstring>

namespace neon {

constexpr int width = 16;  // elements of a round
constexpr int ahead = 1024;  // elements that are fetched ahead: what the processor fetches itself ends with a page

struct Numbers {
    float keep, l2, beta1, weight1, beta2, root2, inverse, eps, factor;  // root2 is the root of 1 - beta2
};

template <bool has_l2>
class Adam {
    using vec = float32x4_t;

  public:
    explicit Adam(const Numbers& x)
        : keep_(vdupq_n_f32(x.keep)),
          l2_(vdupq_n_f32(x.l2)),
          beta1_(vdupq_n_f32(x.beta1)),
          weight1_(vdupq_n_f32(has_l2 ? x.weight1 : x.weight1 * x.factor)),
          beta2_(vdupq_n_f32(x.beta2)),
          root2_(vdupq_n_f32(has_l2 ? x.root2 : x.root2 * x.factor)),
          inverse_(vdupq_n_f32(x.inverse)),
          eps_(vdupq_n_f32(x.eps)),
          factor_(vdupq_n_f32(x.factor)) {}

    // `n` is a multiple of `width`, and not 0.
    void run(float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict v, int n) const {
        vec roots[4], next[4];
        second(p, g, v, roots);
        int i = 0;
        for (; i + width < n; i += width) {
            __builtin_prefetch(g + i + ahead, 0, 0);
            __builtin_prefetch(v + i + ahead, 1, 0);
            __builtin_prefetch(m + i + ahead, 1, 0);
            __builtin_prefetch(p + i + ahead, 1, 0);
            second(p + i + width, g + i + width, v + i + width, next);
            first(p + i, g + i, m + i, roots);
            for (int k = 0; k < 4; k++) roots[k] = next[k];
        }
        first(p + i, g + i, m + i, roots);
    }

    // What is left of a tile, in room of whole rounds: the same arithmetic for every element.
    void run_rest(float* p, const float* g, float* m, float* v, int n) const {
        float room[4][width] = {};
        float* const from[4] = {p, const_cast<float*>(g), m, v};
        for (int each = 0; each < 4; each++) std::memcpy(room[each], from[each], n * sizeof(float));
        run(room[0], room[1], room[2], room[3], width);
        for (int each : {0, 2, 3}) std::memcpy(from[each], room[each], n * sizeof(float));
    }

  private:
    vec gradient(const float* p, const float* g) const {
        const vec read = vld1q_f32(g);
        return has_l2 ? vfmaq_f32(vmulq_f32(read, factor_), l2_, vld1q_f32(p)) : read;
    }

    void second(const float* p, const float* g, float* v, vec* roots) const {
        for (int k = 0; k < 4; k++) {
            const vec part = vmulq_f32(gradient(p + 4 * k, g + 4 * k), root2_);
            const vec moment = vfmaq_f32(vmulq_f32(vld1q_f32(v + 4 * k), beta2_), part, part);
            vst1q_f32(v + 4 * k, moment);
            roots[k] = vsqrtq_f32(moment);
        }
    }

    void first(float* p, const float* g, float* m, const vec* roots) const {
        for (int k = 0; k < 4; k++) {
            const vec grad = gradient(p + 4 * k, g + 4 * k);
            const vec moment = vfmaq_f32(vmulq_f32(vld1q_f32(m + 4 * k), beta1_), weight1_, grad);
            vst1q_f32(m + 4 * k, moment);
            const vec divisor = vfmaq_f32(eps_, roots[k], inverse_);
            vec reciprocal = vrecpeq_f32(divisor);
            reciprocal = vmulq_f32(reciprocal, vrecpsq_f32(divisor, reciprocal));
            const vec correction = vrecpsq_f32(divisor, reciprocal);
            const vec kept = vmulq_f32(vld1q_f32(p + 4 * k), keep_);
            vst1q_f32(p + 4 * k, vfmsq_f32(kept, vmulq_f32(moment, reciprocal), correction));
        }
    }

    vec keep_, l2_, beta1_, weight1_, beta2_, root2_, inverse_, eps_, factor_;
};

}  // namespace neon
