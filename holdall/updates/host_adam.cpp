// One step of Adam or AdamW over a list of arrays, in one pass over memory: reads the gradient, the fp32 weight and its two
// moments; writes the weight and the moments and, if `out` is set, the weight in low precision. With bf16 in and out that is
// 28 bytes per parameter, and memory is the limit from a few cores on. Writing only the low-precision weight takes 16.
//
// The order of operations is that of torch's own CPU kernel (ATen/native/cpu/FusedAdamKernel.cpp), so that the bits agree. That
// kernel leaves it to its compiler which products are fused with the following sum (without rounding in between). It has two
// loops, one over whole vectors and a scalar one over the tensor's tail, and its compiler may choose differently in each. FUSE is
// the choice in the first loop; `Rounding` holds the choice in the second, and the number of elements per vector:
//
//     0  nothing is fused          2  all, in exp_avg_sq the product exp_avg_sq * beta2
//     1  only the first moment     3  all, in exp_avg_sq the product with the gradient
//                                  4  all, in exp_avg_sq neither
//
// Compile with -ffp-contract=off: every fused product is then one written `fma` here. No header but the standard library's.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__SSE__)
#include <immintrin.h>
#endif

#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0  // then nothing is fused, whatever FUSE says
#endif
#ifndef FUSE
#define FUSE 2
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace {

enum Kind : int32_t { kNone = 0, kFloat = 1, kBfloat16 = 2, kHalf = 3 };

struct Array {  // the same fields in the same order as in host_native.py
  const float* param;
  const float* exp_avg;
  const float* exp_avg_sq;
  float* new_param;  // destination of the new values; may be the old ones' memory, since an element is read before it is
                     // written; null: write only `out`
  float* new_exp_avg;
  float* new_exp_avg_sq;
  const void* grad;
  void* out;  // null: none; may be `grad`, since an element is read before it is written
  int64_t size;
  double step;
  int32_t grad_kind;
  int32_t out_kind;
};

struct Rule {  // likewise
  double lr, beta1, beta2, eps, weight_decay, scale;
  int32_t decoupled, maximize;
};

struct Rounding {  // likewise
  int32_t tail;   // fusion in the elements after a tensor's last whole vector
  int64_t width;  // elements per vector; larger than a tensor: all of it is tail
};

struct Coefficients {
  float scale, shrink, decay, lerp, beta2, rest2, root2, eps, step_size;
};

struct Piece {
  int64_t array, begin, end;
};

constexpr int64_t kTile = 256;       // elements: three tiles stay in a core's first cache, and their lines are prefetched together
constexpr int64_t kPiece = 1 << 16;  // elements: small enough to distribute evenly, long enough for the hardware to prefetch

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

struct None {
  using type = char;
  static void write(type*, int64_t, float) {}
};

struct Float {
  using type = float;
  static float read(float value) { return value; }
};

struct Bfloat16 {
  using type = uint16_t;
  static float read(uint16_t value) { return from_bits(uint32_t(value) << 16); }
  static void write(uint16_t* out, int64_t i, float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    out[i] = uint16_t(value != value ? 0x7fc0u : rounded);                   // rounding could carry a NaN to infinity
  }
};

struct Half {  // by integers and normal floats alone: subnormal floats are slow on some CPUs, subnormal half gradients common
  using type = uint16_t;
  static float read(uint16_t value) {
    const uint32_t magnitude = uint32_t(value & 0x7fffu) << 13;
    const uint32_t rebiased = magnitude + (112u << 23);
    const uint32_t subnormal = to_bits(from_bits(magnitude + (113u << 23)) - 0x1p-14f);
    uint32_t bits = magnitude < (1u << 23) ? subnormal : rebiased;
    bits = magnitude >= (31u << 23) ? magnitude + (224u << 23) : bits;  // infinity and NaN
    return from_bits(bits | uint32_t(value & 0x8000u) << 16);
  }
  static void write(uint16_t* out, int64_t i, float value) {
    const uint32_t bits = to_bits(value);
    const uint32_t doubled = bits + bits;  // without the sign
    // Adding a power of two that leaves ten bits below it rounds to nearest even; what exceeds half's range became infinite.
    const float clamped = std::fabs(value) * 0x1p112f * 0x1p-110f;
    const uint32_t exponent = std::max(doubled & 0xff000000u, 0x71000000u);
    const uint32_t sum = to_bits(from_bits((exponent >> 1) + 0x07800000u) + clamped);
    const uint32_t rounded = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    out[i] = uint16_t((bits >> 16 & 0x8000u) | (doubled > 0xff000000u ? 0x7e00u : rounded));
  }
};

inline float multiply_add(bool fuses, float a, float b, float c) {
  return HAS_FMA && fuses ? __builtin_fmaf(a, b, c) : a * b + c;
}

inline float second_moment(int32_t fuse, float before, float beta2, float part, float grad) {
  if (HAS_FMA && fuse == 2) return __builtin_fmaf(before, beta2, part * grad);
  if (HAS_FMA && fuse == 3) return __builtin_fmaf(part, grad, before * beta2);
  return before * beta2 + part * grad;
}

// All arithmetic in float, as torch's; the coefficients are computed in double and rounded once.
Coefficients coefficients(const Rule& rule, double step, int32_t fuse) {
  Coefficients c;
  c.scale = rule.maximize ? -float(rule.scale) : float(rule.scale);
  const bool fuses = HAS_FMA && fuse >= 2;
  const double shrink = fuses ? std::fma(-rule.lr, rule.weight_decay, 1.0) : 1 - rule.lr * rule.weight_decay;
  c.shrink = rule.decoupled ? float(shrink) : 1.0f;
  c.decay = rule.decoupled ? 0.0f : float(rule.weight_decay);
  c.lerp = float(1 - rule.beta1);
  c.beta2 = float(rule.beta2);
  c.rest2 = float(1 - rule.beta2);
  c.root2 = float(std::sqrt(1 - std::pow(rule.beta2, step)));
  c.eps = float(rule.eps);
  c.step_size = float(-(rule.lr / (1 - std::pow(rule.beta1, step))));
  return c;
}

struct Element {
  float param, exp_avg, exp_avg_sq;
};

inline Element updated(Element e, float g, const Coefficients& c, bool is_near, bool is_coupled, int32_t fuse) {
  if (is_coupled) {
    g = multiply_add(fuse >= 2, e.param, c.decay, g);
  } else {
    e.param = e.param * c.shrink;
  }
  const float weight = is_near ? c.lerp : c.lerp - 1.0f;  // a lerp starts from the nearer end
  e.exp_avg = multiply_add(fuse >= 1, weight, g - e.exp_avg, is_near ? e.exp_avg : g);
  e.exp_avg_sq = second_moment(fuse, e.exp_avg_sq, c.beta2, c.rest2 * g, g);
  const float denominator = std::sqrt(e.exp_avg_sq) / c.root2 + c.eps;
  e.param = e.param + c.step_size * e.exp_avg / denominator;
  return e;
}

// Whole vectors: FUSE.
template <class Grad, class Out, bool kCoupled, bool kKeeps>
void walk(const Array& array, const Coefficients c, int64_t begin, int64_t end) {
  const float* param = array.param;
  const float* exp_avg = array.exp_avg;
  const float* exp_avg_sq = array.exp_avg_sq;
  float* new_param = array.new_param;
  float* new_exp_avg = array.new_exp_avg;
  float* new_exp_avg_sq = array.new_exp_avg_sq;
  const auto* grad = static_cast<const typename Grad::type*>(array.grad);
  auto* out = static_cast<typename Out::type*>(array.out);
  const bool is_near = std::fabs(c.lerp) < 0.5f;
  INDEPENDENT
  for (int64_t i = begin; i < end; ++i) {
    const float g = Grad::read(grad[i]) * c.scale;
    const Element e = updated({param[i], exp_avg[i], exp_avg_sq[i]}, g, c, is_near, kCoupled, FUSE);
    if (kKeeps) {
      new_exp_avg[i] = e.exp_avg;
      new_exp_avg_sq[i] = e.exp_avg_sq;
      new_param[i] = e.param;
    }
    Out::write(out, i, e.param);
  }
}

// The tail.
void walk_tail(const Array& array, const Coefficients& c, int32_t fuse, int64_t begin, int64_t end) {
  const auto* grad16 = static_cast<const uint16_t*>(array.grad);
  auto* out = static_cast<uint16_t*>(array.out);
  const bool is_near = std::fabs(c.lerp) < 0.5f;
  for (int64_t i = begin; i < end; ++i) {
    const float g = array.grad_kind == kBfloat16 ? Bfloat16::read(grad16[i])
                    : array.grad_kind == kHalf   ? Half::read(grad16[i])
                                                 : static_cast<const float*>(array.grad)[i];
    const Element before{array.param[i], array.exp_avg[i], array.exp_avg_sq[i]};
    const Element e = updated(before, g * c.scale, c, is_near, c.decay != 0.0f, fuse);
    if (array.new_param != nullptr) {
      array.new_exp_avg[i] = e.exp_avg;
      array.new_exp_avg_sq[i] = e.exp_avg_sq;
      array.new_param[i] = e.param;
    }
    if (array.out_kind == kBfloat16) Bfloat16::write(out, i, e.param);
    if (array.out_kind == kHalf) Half::write(out, i, e.param);
  }
}

template <class Grad, class Out>
void walk_either(const Array& array, const Coefficients& c, int64_t begin, int64_t end) {
  const bool keeps = array.new_param != nullptr;
  if (c.decay != 0.0f) {
    (keeps ? walk<Grad, Out, true, true> : walk<Grad, Out, true, false>)(array, c, begin, end);
  } else {
    (keeps ? walk<Grad, Out, false, true> : walk<Grad, Out, false, false>)(array, c, begin, end);
  }
}

template <class Grad>
void walk_grad(const Array& array, const Coefficients& c, int64_t begin, int64_t end) {
  switch (array.out_kind) {
    case kBfloat16: return walk_either<Grad, Bfloat16>(array, c, begin, end);
    case kHalf: return walk_either<Grad, Half>(array, c, begin, end);
    default: return walk_either<Grad, None>(array, c, begin, end);
  }
}

void walk_any(const Array& array, const Coefficients& c, int64_t begin, int64_t end) {
  switch (array.grad_kind) {
    case kBfloat16: return walk_grad<Bfloat16>(array, c, begin, end);
    case kHalf: return walk_grad<Half>(array, c, begin, end);
    default: return walk_grad<Float>(array, c, begin, end);
  }
}

// Non-temporal stores: write-only memory need not be read first, which would cost 12 more bytes per parameter.
void write_past(void* to, const void* from, int64_t nbytes) {
#if defined(__SSE__)
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    const int64_t whole = nbytes / 16;
    auto* there = static_cast<__m128i*>(to);
    const auto* here = static_cast<const __m128i*>(from);
    for (int64_t i = 0; i < whole; ++i) _mm_stream_si128(there + i, _mm_load_si128(here + i));
    std::memcpy(there + whole, here + whole, size_t(nbytes % 16));
    return;
  }
#endif
  std::memcpy(to, from, size_t(nbytes));
}

char* moved(const void* pointer, int32_t kind, int64_t elements) {
  if (pointer == nullptr) return nullptr;
  return static_cast<char*>(const_cast<void*>(pointer)) + elements * (kind == kFloat ? 4 : 2);
}

// Software prefetch: the hardware's prefetching stops at every page of 4 KiB. On a Xeon with 12 and 15 threads it gained
// 9 to 19 %; one ARM CPU seemed slower with it.
void fetch_ahead(const Array& array, int64_t begin) {
#if defined(__x86_64__)
  const int64_t from = std::min(begin + 2 * kTile, array.size), to = std::min(from + kTile, array.size);
  auto fetch = [&](const void* memory, int64_t width) {
    const char* last = static_cast<const char*>(memory) + to * width;
    for (const char* at = static_cast<const char*>(memory) + from * width; at < last; at += 64) __builtin_prefetch(at);
  };
  fetch(array.param, 4);
  fetch(array.exp_avg, 4);
  fetch(array.exp_avg_sq, 4);
  fetch(array.grad, array.grad_kind == kFloat ? 4 : 2);
#else
  (void)array, (void)begin;
#endif
}

void walk_in_place(const Array& array, const Coefficients& c, int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += kTile) {
    fetch_ahead(array, at);
    walk_any(array, c, at, std::min(at + kTile, end));
  }
}

// The new values go elsewhere than the old ones, or only the low-precision weight goes anywhere: a tile at a time, through the
// cache.
void walk_aside(const Array& array, const Coefficients& c, int64_t begin, int64_t end) {
  alignas(64) float param[kTile], exp_avg[kTile], exp_avg_sq[kTile];
  alignas(64) uint16_t out[kTile];
  const bool keeps = array.new_param != nullptr;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t count = std::min(kTile, end - at);
    fetch_ahead(array, at);
    Array tile = array;
    tile.param += at, tile.exp_avg += at, tile.exp_avg_sq += at;
    tile.grad = moved(array.grad, array.grad_kind, at);
    tile.out = keeps ? moved(array.out, array.out_kind, at) : reinterpret_cast<char*>(out);
    if (keeps) tile.new_param = param, tile.new_exp_avg = exp_avg, tile.new_exp_avg_sq = exp_avg_sq;
    walk_any(tile, c, 0, count);
    if (keeps) {
      write_past(array.new_param + at, param, count * 4);
      write_past(array.new_exp_avg + at, exp_avg, count * 4);
      write_past(array.new_exp_avg_sq + at, exp_avg_sq, count * 4);
    } else {
      write_past(moved(array.out, array.out_kind, at), out, count * 2);
    }
  }
#if defined(__SSE__)
  _mm_sfence();
#endif
}

}  // namespace

// Returns how many threads took part, the caller's included. They live for this call: starting one costs some microseconds,
// a call some milliseconds, and nothing is left behind that a fork or torch's own pool could meet.
extern "C" int32_t holdall_adam(
    const Array* arrays, int64_t count, const Rule* rule, const Rounding* rounding, int32_t threads) {
  std::vector<Coefficients> coefs;  // of the body and of the tail of every array
  std::vector<Piece> pieces;
  for (int64_t a = 0; a < count; ++a) {
    coefs.push_back(coefficients(*rule, arrays[a].step, FUSE));
    coefs.push_back(coefficients(*rule, arrays[a].step, rounding->tail));
    for (int64_t begin = 0; begin < arrays[a].size; begin += kPiece) {
      pieces.push_back({a, begin, std::min(begin + kPiece, arrays[a].size)});
    }
  }
  std::atomic<size_t> next{0};  // pieces are taken as threads get free: cores are not equally fast beside other work
  auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
      const Piece& piece = pieces[i];
      const Array& array = arrays[piece.array];
      const bool in_place = array.new_param == array.param;
      const int64_t tail = array.size - array.size % rounding->width;
      const int64_t middle = std::min(std::max(tail, piece.begin), piece.end);
      (in_place ? walk_in_place : walk_aside)(array, coefs[2 * piece.array], piece.begin, middle);
      walk_tail(array, coefs[2 * piece.array + 1], rounding->tail, middle, piece.end);
    }
  };
  std::vector<std::thread> others;
  try {
    while (int32_t(others.size()) + 1 < threads && others.size() + 1 < pieces.size()) others.emplace_back(work);
  } catch (const std::system_error&) {
    // no more threads to be had: those that started do the work
  }
  work();
  for (auto& other : others) other.join();
  return int32_t(others.size()) + 1;
}
