// Vectors of the native width, by GCC's vector extension: one source for AVX-512, AVX2, SSE2 and NEON.
//
// vf, vi, vl and vb hold WIDTH floats, 32-bit integers, 64-bit integers and booleans. Instructions that the extension
// has no word for (bfloat16 products, conversions, wide multiplies) are inline assembly, which needs no intrinsics
// header: those headers cost more to compile than the kernels.
#pragma once
#include <stdint.h>

#if !defined(__GNUC__) || __GNUC__ < 12
#error "the CPU backend is written for GCC 12 or later"
#endif

#define FOCI_INLINE inline __attribute__((always_inline))
#define FOCI_UNROLL _Pragma("GCC unroll 32")

namespace foci {

#if defined(FOCI_WIDTH)
constexpr int WIDTH = FOCI_WIDTH;
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FOCI_AVX512 1
constexpr int WIDTH = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vf __attribute__((vector_size(4 * WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vs __attribute__((vector_size(2 * WIDTH)));        // WIDTH 16-bit words, half a register
typedef int64_t half_l __attribute__((vector_size(4 * WIDTH)));     // WIDTH / 2 64-bit integers, one register
typedef float half_f __attribute__((vector_size(2 * WIDTH)));
typedef int32_t half_i __attribute__((vector_size(2 * WIDTH)));

struct vl { half_l lo, hi; };  // a vector wider than the register would be scalarised
struct vb { vi bits; };        // lanes 0 or -1

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class V> FOCI_INLINE V load(const void* at) { V v; __builtin_memcpy(&v, at, sizeof v); return v; }
template <class V> FOCI_INLINE void store(void* at, V v) { __builtin_memcpy(at, &v, sizeof v); }

FOCI_INLINE vf as_float(vi x) { return (vf)x; }
FOCI_INLINE vi as_int(vf x) { return (vi)x; }
FOCI_INLINE vf splat(float x) { return x - vf{}; }  // 0 + x is not x when x is -0, and costs an addition
FOCI_INLINE vi splat(int32_t x) { return vi{} + x; }
FOCI_INLINE vu splat(uint32_t x) { return vu{} + x; }
FOCI_INLINE vl splat(int64_t x) { return {half_l{} + x, half_l{} + x}; }
FOCI_INLINE vb splat(bool x) { return {vi{} - (int)x}; }

FOCI_INLINE vi iota() {
  vi v;
  FOCI_UNROLL for (int i = 0; i < WIDTH; ++i) v[i] = i;
  return v;
}

FOCI_INLINE vf select(vb c, vf a, vf b) { return c.bits ? a : b; }
// The value, rounded: what follows is not contracted with what came before.
FOCI_INLINE vf in_order(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#else
  asm("" : "+w"(x));
#endif
  return x;
}
// Pairwise, and so the same sum at every optimisation level.
FOCI_INLINE float reduce_sum(vf x) {
  FOCI_UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x += __builtin_shuffle(x, iota() ^ step);
  return x[0];
}
FOCI_INLINE vf maximum(vf a, vf b) { return a > b ? a : b; }  // NaN in b survives, NaN in a does not
FOCI_INLINE vf minimum(vf a, vf b) { return a < b ? a : b; }
// x within bounds; NaN stays. The compiler would turn a comparison with a constant that it sees around, and need two instructions.
FOCI_INLINE vf at_least(float low, vf x) { return maximum(in_order(splat(low)), x); }
FOCI_INLINE vf at_most(float high, vf x) { return minimum(in_order(splat(high)), x); }
FOCI_INLINE float reduce_max(vf x) {
  FOCI_UNROLL for (int step = WIDTH / 2; step > 0; step /= 2) x = maximum(x, __builtin_shuffle(x, iota() ^ step));
  return x[0];
}

// ---- storage formats ------------------------------------------------------------------------------------------------

FOCI_INLINE float widen(float x) { return x; }
FOCI_INLINE float widen(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
FOCI_INLINE float widen(f16 x) {
  uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff, u;
  if (rest >= 0x7c00) {
    u = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    u = sign | ((rest << 13) + 0x38000000);
  } else {
    const float tiny = (float)(int)rest * 0x1p-24f;
    return sign ? -tiny : tiny;
  }
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

FOCI_INLINE void narrow(float* to, float x) { *to = x; }
FOCI_INLINE void narrow(bf16* to, float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  to->bits = x != x ? 0x7fc0 : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline void narrow(f16* to, float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  const float magnitude = __builtin_fabsf(x);
  uint32_t bits;
  if (x != x) {
    bits = 0x7e00;
  } else if (magnitude >= 65520.0f) {
    bits = 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = magnitude + 0.5f;
    __builtin_memcpy(&bits, &shifted, 4);
    bits -= 0x3f000000;
  } else {
    u &= 0x7fffffff;
    bits = (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
  }
  to->bits = (uint16_t)(sign | bits);
}

FOCI_INLINE vf widen(const float* at) { return load<vf>(at); }
FOCI_INLINE vf widen(const bf16* at) { return (vf)(__builtin_convertvector(load<vs>(at), vu) << 16); }
FOCI_INLINE vf widen(const f16* at) {
#if defined(__F16C__) || defined(__AVX512F__)
  vf wide;
  vs narrow_ = load<vs>(at);
  asm("vcvtph2ps %1, %0" : "=v"(wide) : "v"(narrow_));
  return wide;
#else
  vf wide;
  for (int i = 0; i < WIDTH; ++i) wide[i] = widen(at[i]);
  return wide;
#endif
}
FOCI_INLINE vu rounded_bits(vf x) {  // bfloat16 in the low half of each lane, ties to even
  const vu u = (vu)x;
  const vu r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  return x != x ? splat(0x7fc0u) : r;
}
FOCI_INLINE void narrow(float* to, vf x) { store(to, x); }
FOCI_INLINE void narrow(bf16* to, vf x) { store(to, __builtin_convertvector(rounded_bits(x), vs)); }
FOCI_INLINE void narrow(f16* to, vf x) {
#if defined(__F16C__) || defined(__AVX512F__)
  vs half;
  asm("vcvtps2ph $0, %1, %0" : "=v"(half) : "v"(x));
  store(to, half);
#else
  for (int i = 0; i < WIDTH; ++i) narrow(to + i, x[i]);
#endif
}

// ---- what a product multiplies: 32-bit words, each one float or a pair of bfloat16 --------------------------------------

struct Single {
  typedef float word;
  typedef vf vector;
  static constexpr int PAIR = 1;
  static FOCI_INLINE vf multiply_add(vf acc, vf a, vf b) { return acc + a * b; }
};

#if defined(__AVX512BF16__) && !defined(FOCI_WIDTH)
#define FOCI_PAIRS 1
struct Pair {
  typedef uint32_t word;
  typedef vu vector;
  static constexpr int PAIR = 2;
  static FOCI_INLINE vf multiply_add(vf acc, vu a, vu b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
};

typedef uint16_t vs2 __attribute__((vector_size(4 * WIDTH)));

// (low, high) rounded to bfloat16, one after the other.
FOCI_INLINE vs2 round_both(vf low, vf high) {
  vs2 both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(high), "v"(low));
  return both;
}
// (low, high) rounded and interleaved: lane i holds the pair (low[i], high[i]).
FOCI_INLINE vu round_pairs(vf low, vf high) {
  vs2 order;
  FOCI_UNROLL for (int i = 0; i < 2 * WIDTH; ++i) order[i] = (uint16_t)(i / 2 + (i & 1) * WIDTH);
  return (vu)__builtin_shuffle(round_both(low, high), order);
}
template <class T> struct Computed { typedef Single type; };
template <> struct Computed<bf16> { typedef Pair type; };
#else
template <class T> struct Computed { typedef Single type; };  // half types are widened while they are packed
#endif

}  // namespace foci
