// Optimizer steps over tensors in host memory, in one pass: gradient times a factor, update, copy for the device.
//
// A tensor is cut into tiles that stay in the first cache. Numbers that are not float32 are widened into room on the
// stack, the rule runs on float32, and results are rounded to where they belong. An element's result depends on nothing
// but its inputs: not on threads, nor on where tensors are cut.

#include <algorithm>

#include "ahead.h"
#include "codes.h"
#include "formats.h"
#include "pool.h"

#if defined(__aarch64__)
#include "adam_neon.h"
#endif

// A rule's loop becomes part of the loop over lines, with its number of elements known.
#define ALWAYS_INLINE __attribute__((always_inline)) inline

using formats::Format;

namespace {

constexpr int tile = 1024;
constexpr int64_t share = 32;  // tiles for which another thread is worth its while
constexpr int64_t most = 256;  // tiles that a thread takes at a time: long runs, for what processors fetch ahead
constexpr int64_t soon = 256;  // elements after which float32 is needed that is fetched now

static_assert(tile % codes::block == 0, "a tile has whole blocks");

#if defined(__FMA__) || defined(__aarch64__)
inline float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float fma_(float a, float b, float c) { return a * b + c; }
#endif

// a + weight * (b - a), exact at both ends
inline float lerp(float a, float b, float weight) {
    return weight < 0.5f ? fma_(weight, b - a, a) : fma_(weight - 1.0f, b - a, b);
}

}  // namespace

extern "C" {

// What a call gets: host_kernels.py has the same structure.
struct Call {
    int64_t count;
    const int64_t* numel;
    void* const* params;
    void* const* grads;
    void* const* moments[2];
    float* const* scales[2];
    void* const* outs;
    int32_t param_format, grad_format, moment_format, out_format;
    int32_t threads;
    uint32_t step;
    float factor;
    float numbers[8];  // the rule's own
};
}

namespace {

// keep: what decoupled decay leaves of a parameter; l2: what is added of it to its gradient. The learning rate is in
// `inverse` and `eps`: both are divided by it.
struct Adam {
    static constexpr int moments = 2;
    static constexpr bool is_signed[2] = {true, false};
    float keep, l2, beta1, weight1, beta2, weight2, inverse, eps;

    explicit Adam(const float* x)
        : keep(x[0]), l2(x[1]), beta1(x[2]), weight1(x[3]), beta2(x[4]), weight2(x[5]), inverse(x[6]), eps(x[7]) {}

#if defined(__aarch64__)
    void operator()(float* p, const float* g, float* m, float* v, float factor, int n) const {
        const neon::Numbers x{keep, l2, beta1, weight1, beta2, __builtin_sqrtf(weight2), inverse, eps, factor};
        l2 == 0 ? run(neon::Adam<false>(x), p, g, m, v, n) : run(neon::Adam<true>(x), p, g, m, v, n);
    }

    template <class Kernel>
    static void run(const Kernel& kernel, float* p, const float* g, float* m, float* v, int n) {
        const int whole = n - n % neon::width;
        if (whole) kernel.run(p, g, m, v, whole);
        if (whole < n) kernel.run_rest(p + whole, g + whole, m + whole, v + whole, n - whole);
    }
#else
    ALWAYS_INLINE void operator()(float* __restrict p, const float* __restrict g, float* __restrict m,
                                  float* __restrict v, float factor, int n) const {
        for (int i = 0; i < n; i++) {
            const float gradient = fma_(l2, p[i], g[i] * factor);
            m[i] = fma_(weight1, gradient, beta1 * m[i]);
            v[i] = fma_(weight2 * gradient, gradient, beta2 * v[i]);
            p[i] = p[i] * keep - m[i] / fma_(__builtin_sqrtf(v[i]), inverse, eps);
        }
    }
#endif
};

struct Lion {
    static constexpr int moments = 1;
    static constexpr bool is_signed[2] = {true, true};
    float keep, weight1, weight2, rate;

    explicit Lion(const float* x) : keep(x[0]), weight1(x[1]), weight2(x[2]), rate(x[3]) {}

    ALWAYS_INLINE void operator()(float* __restrict p, const float* __restrict g, float* __restrict m, float*,
                                  float factor, int n) const {
        for (int i = 0; i < n; i++) {
            const float gradient = g[i] * factor, mixed = lerp(m[i], gradient, weight1);
            p[i] = p[i] * keep - rate * float((mixed > 0) - (mixed < 0));
            m[i] = lerp(m[i], gradient, weight2);
        }
    }
};

struct Adagrad {
    static constexpr int moments = 1;
    static constexpr bool is_signed[2] = {false, false};
    float l2, rate, eps;

    explicit Adagrad(const float* x) : l2(x[0]), rate(x[1]), eps(x[2]) {}

    ALWAYS_INLINE void operator()(float* __restrict p, const float* __restrict g, float* __restrict v, float*,
                                  float factor, int n) const {
        for (int i = 0; i < n; i++) {
            const float gradient = fma_(l2, p[i], g[i] * factor);
            v[i] = fma_(gradient, gradient, v[i]);
            p[i] = p[i] - rate * gradient / (__builtin_sqrtf(v[i]) + eps);
        }
    }
};

template <class Rule>
class Update final : public pool::Job {
  public:
    explicit Update(const Call& call) : call_(call), rule_(call.numbers), starts_(new int64_t[call.count + 1]) {
        starts_[0] = 0;
        for (int64_t i = 0; i < call.count; i++) starts_[i + 1] = starts_[i] + (call.numel[i] + tile - 1) / tile;
        threads = int(std::min<int64_t>(call.threads, (tiles() + share - 1) / share));
        claim_ = std::clamp<int64_t>(tiles() / (8 * std::max(threads, 1)), 1, most);  // the last ones end together
    }
    ~Update() { delete[] starts_; }

    int64_t tiles() const { return starts_[call_.count]; }

    int threads;  // that should work

    void work() override {
        for (;;) {
            const int64_t first = next_.fetch_add(claim_, std::memory_order_relaxed);
            if (first >= tiles()) return;
            const int64_t last = std::min(first + claim_, tiles());
            int64_t tensor = std::upper_bound(starts_, starts_ + call_.count + 1, first) - starts_ - 1;
            for (int64_t each = first; each < last; each++) {
                while (starts_[tensor + 1] <= each) tensor++;  // an empty tensor has no tile
                const int64_t begin = (each - starts_[tensor]) * tile;
                update(tensor, begin, int(std::min<int64_t>(tile, call_.numel[tensor] - begin)));
            }
        }
    }

  private:
    void update(int64_t tensor, int64_t begin, int n) const {
        alignas(64) float room[4][tile];
        alignas(64) uint32_t noise[tile];
        const Format moment = Format(call_.moment_format), param = Format(call_.param_format);
        float* p = formats::read(param, call_.params[tensor], begin, n, room[0]);
        const float* g = formats::read(Format(call_.grad_format), call_.grads[tensor], begin, n, room[1]);
        float* moments[2] = {room[2], room[3]};
        for (int i = 0; i < Rule::moments; i++) {
            void* base = call_.moments[i][tensor];
            if (moment == formats::code8)
                decode(i, tensor, begin, n, moments[i]);
            else
                moments[i] = formats::read(moment, base, begin, n, room[2 + i]);
        }
        apply(tensor, begin, p, g, moments[0], moments[1], n);
        if (moment == formats::code8) codes::make_noise(noise, uint32_t(begin), call_.step, n);
        for (int i = 0; i < Rule::moments; i++) {
            if (moment == formats::code8)
                encode(i, tensor, begin, n, moments[i], noise);
            else
                formats::write(moment, call_.moments[i][tensor], begin, n, moments[i]);
        }
        formats::write(param, call_.params[tensor], begin, n, p);
        if (call_.out_format == formats::none) return;
        // What is copied is the parameter as it is held.
        p = formats::read(param, call_.params[tensor], begin, n, room[0]);
        formats::write(Format(call_.out_format), call_.outs[tensor], begin, n, p);
    }

#if defined(__aarch64__)
    void apply(int64_t, int64_t, float* p, const float* g, float* m, float* v, int n) const {
        rule_(p, g, m, v, call_.factor, n);
    }
#else
    void apply(int64_t tensor, int64_t begin, float* p, const float* g, float* m, float* v, int n) const {
        const ahead::Streams streams = next_streams(tensor, begin);
        const Rule rule = rule_;
        const float factor = call_.factor;
        int i = 0;
        for (; i + ahead::line <= n; i += ahead::line) {
            streams.fetch(i);
            rule(p + i, g + i, m + i, v + i, factor, ahead::line);
        }
        if (i < n) rule(p + i, g + i, m + i, v + i, factor, n - i);
    }

    // Where the elements lie that are needed after these. What is widened is needed a tile at a time.
    ahead::Streams next_streams(int64_t tensor, int64_t begin) const {
        ahead::Streams streams;
        const auto add = [&](int32_t format, const void* base) {
            const int64_t bytes = formats::size(Format(format));
            const int64_t first = begin + (format == formats::f32 ? soon : tile);
            streams.add(static_cast<const char*>(base) + first * bytes, bytes);
        };
        add(call_.param_format, call_.params[tensor]);
        add(call_.grad_format, call_.grads[tensor]);
        for (int i = 0; i < Rule::moments; i++) add(call_.moment_format, call_.moments[i][tensor]);
        if (call_.out_format != formats::none) add(call_.out_format, call_.outs[tensor]);
        return streams;
    }
#endif

    void decode(int place, int64_t tensor, int64_t begin, int n, float* values) const {
        const uint8_t* codes = static_cast<const uint8_t*>(call_.moments[place][tensor]) + begin;
        const float* scales = call_.scales[place][tensor] + begin / codes::block;
        for (int i = 0; i < n; i += codes::block, scales++) {
            const int size = std::min(codes::block, n - i);
            if (Rule::is_signed[place])
                codes::decode_block<true>(codes + i, *scales, values + i, size);
            else
                codes::decode_block<false>(codes + i, *scales, values + i, size);
        }
    }

    void encode(int place, int64_t tensor, int64_t begin, int n, const float* values, const uint32_t* noise) const {
        uint8_t* codes = static_cast<uint8_t*>(call_.moments[place][tensor]) + begin;
        float* scales = call_.scales[place][tensor] + begin / codes::block;
        for (int i = 0; i < n; i += codes::block, scales++) {
            const int size = std::min(codes::block, n - i);
            if (Rule::is_signed[place])
                codes::encode_block<true>(values + i, noise + i, codes + i, scales, size);
            else
                codes::encode_block<false>(values + i, noise + i, codes + i, scales, size);
        }
    }

    const Call& call_;
    const Rule rule_;
    int64_t* starts_;
    int64_t claim_;
    std::atomic<int64_t> next_{0};
};

template <class Rule>
void run(const Call* call) {
    Update<Rule> update(*call);
    pool::run(&update, update.threads);
}

}  // namespace

extern "C" {
void host_adam(const Call* call) { run<Adam>(call); }
void host_lion(const Call* call) { run<Lion>(call); }
void host_adagrad(const Call* call) { run<Adagrad>(call); }
}
