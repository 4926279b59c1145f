// The operations of the expression language, each on scalars and on vectors.
#pragma once
#include "vector.h"

extern "C" {
double pow(double, double) noexcept;
}

namespace foci {

// A function that the vector extension lacks runs lane by lane.
#define FOCI_LANES1(name, scalar) \
  FOCI_INLINE float name(float x) { return scalar(x); } \
  inline vf name(vf x) { for (int i = 0; i < WIDTH; ++i) x[i] = scalar(x[i]); return x; }
#define FOCI_LANES2(name, scalar) \
  FOCI_INLINE float name(float x, float y) { return scalar(x, y); } \
  inline vf name(vf x, vf y) { for (int i = 0; i < WIDTH; ++i) x[i] = scalar(x[i], y[i]); return x; }

// ---- exponentials -----------------------------------------------------------------------------------------------------

// Round to the nearest integer by adding 1.5 * 2^23; `whole` then also holds it in its low bits.
FOCI_INLINE vf power_of_two(vi n) { return as_float((n + 127) << 23); }

// exp2 for x <= 0 as the softmax needs it, to 2e-7: exactly 0 at -inf and exactly 1 at 0, NaN stays NaN. Polynomials with p(0) = 1,
// minimax in the relative error: on [0, 1) where one instruction takes the whole part off and another scales by it, else on [-1/2, 1/2].
FOCI_INLINE vf exp2_negative(vf x) {
#if defined(__AVX512DQ__)
  if constexpr (WIDTH == 16) {
    vf f, y;
    asm("vreduceps $9, %1, %0" : "=v"(f) : "v"(x));  // x - floor(x); 0 at -inf
    vf p = splat(1.8671317e-3f);
    p = p * f + 9.017027e-3f;
    p = p * f + 5.5799916e-2f;
    p = p * f + 2.4016445e-1f;
    p = p * f + 6.931513e-1f;
    p = p * f + 1.0f;
    asm("vscalefps %2, %1, %0" : "=v"(y) : "v"(p), "v"(x));  // through the subnormals to 0
    return y;
  }
#endif
  const vf y = at_least(-127.0f, x);
  const vf whole = y + 12582912.0f, f = y - (whole - 12582912.0f);
  vf p = splat(1.326472725e-3f);
  p = p * f + 9.671512786e-3f;
  p = p * f + 5.550733744e-2f;
  p = p * f + 2.402224208e-1f;
  p = p * f + 6.931469776e-1f;
  p = p * f + 1.0f;
  const vf scaled = as_float(as_int(p) + (as_int(whole) << 23));
  return y < -126.0f ? vf{} : scaled;
}

// No more than 0: a score less its row's logsumexp, but for the rounding of both, which is large where they are. NaN stays.
FOCI_INLINE vf at_most_zero(vf x) { return at_most(0.0f, x); }

// exp for x <= 0, likewise.
FOCI_INLINE vf exp_negative(vf x) { return exp2_negative(x * 1.44269504088896341f); }

// The softmax's exponential and the unit of what it is taken of. Weights that are rounded to bfloat16, to 2e-3, need no scores whose
// rounding precedes their change of base.
template <class T> struct Exponential {
  static constexpr float UNIT = 1.0f;
  static FOCI_INLINE vf of(vf x) { return exp_negative(x); }
};
template <> struct Exponential<bf16> {
  static constexpr float UNIT = 1.44269504088896341f;
  static FOCI_INLINE vf of(vf x) { return exp2_negative(x); }
};

// exp2 for any x, to about one unit in the last place; overflows to inf, underflows through the subnormals.
FOCI_INLINE vf exp2(vf x) {
  const vf z = at_most(129.0f, at_least(-152.0f, x));
  const vf whole = z + 12582912.0f, f = z - (whole - 12582912.0f);
  vf p = splat(1.535336206e-4f);
  p = p * f + 1.339887456e-3f;
  p = p * f + 9.618437358e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.0f;
  const vi n = as_int(whole) - 0x4b400000, half = n >> 1;
  return x != x ? x : p * power_of_two(half) * power_of_two(n - half);
}
FOCI_INLINE float exp2(float x) { return __builtin_exp2f(x); }

FOCI_INLINE float exp(float x) { return __builtin_expf(x); }
FOCI_INLINE vf exp(vf x) {  // x = n ln 2 + r with ln 2 in two parts, then the polynomial of exp on r (Cephes)
  const vf z = at_most(89.0f, at_least(-104.0f, x));
  const vf whole = z * 1.44269504f + 12582912.0f, n = whole - 12582912.0f;
  const vf r = (z - n * 0.693359375f) - n * -2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi m = as_int(whole) - 0x4b400000, half = m >> 1;
  return x != x ? x : p * power_of_two(half) * power_of_two(m - half);
}

FOCI_LANES1(expm1, __builtin_expm1f)
FOCI_INLINE float tanh(float x) { return __builtin_tanhf(x); }
// An odd rational function of degree 9 over 8, minimax in the relative error up to 8.2, where tanh rounds to 1: 8e-9, and
// 3e-7 with the rounding of float32.
FOCI_INLINE vf tanh(vf x) {
  const vf y = at_most(8.2f, at_least(-8.2f, x)), z = y * y;
  vf p = splat(1.4840540372702659e-8f), q = splat(8.370596829384186e-7f);
  p = p * z + 2.1637262147857647e-5f, q = q * z + 3.386439844601848e-4f;
  p = p * z + 3.556685548590819e-3f, q = q * z + 2.6108295580260202e-2f;
  p = p * z + 0.13432122284740303f, q = q * z + 0.46765448024560324f;
  p = p * z + 0.9999999917408087f, q = q * z + 1.0f;
  return at_most(1.0f, at_least(-1.0f, y * p / q));  // rounding may pass 1
}
FOCI_INLINE float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
FOCI_INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

FOCI_INLINE float log(float x) { return __builtin_logf(x); }
FOCI_INLINE vf log(vf x) {  // Cephes; subnormals are scaled up first
  const vf scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;
  vi e = (as_int(scaled) >> 23) - 126;
  vf m = as_float((as_int(scaled) & 0x7fffff) | 0x3f000000);
  const vi low = m < 0.707106781f;
  e = e + low - (x < 1.17549435e-38f ? vi{} + 23 : vi{});
  m = (low ? m + m : m) - 1.0f;
  const vf z = m * m, n = __builtin_convertvector(e, vf);
  vf p = splat(7.0376836292e-2f);
  p = p * m + -1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m + -1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m + -1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m + -2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const vf y = m * z * p + n * -2.12194440e-4f - 0.5f * z;
  const vf finite = m + y + n * 0.693359375f;
  const vf inf = splat(__builtin_inff());
  const vf edge = x == 0.0f ? -inf : (x > 0.0f ? x : splat(__builtin_nanf("")));
  return (x > 0.0f) & (x < inf) ? finite : edge;
}
FOCI_INLINE float log2(float x) { return __builtin_log2f(x); }
FOCI_INLINE vf log2(vf x) { return log(x) * 1.44269504f; }
FOCI_LANES1(log1p, __builtin_log1pf)
FOCI_LANES1(sqrt, __builtin_sqrtf)
FOCI_INLINE float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
FOCI_INLINE vf rsqrt(vf x) { return 1.0f / sqrt(x); }

FOCI_LANES1(sin, __builtin_sinf)
FOCI_LANES1(cos, __builtin_cosf)
FOCI_LANES1(tan, __builtin_tanf)
FOCI_LANES1(asin, __builtin_asinf)
FOCI_LANES1(acos, __builtin_acosf)
FOCI_LANES1(atan, __builtin_atanf)
FOCI_LANES1(sinh, __builtin_sinhf)
FOCI_LANES1(cosh, __builtin_coshf)
FOCI_LANES1(erf, __builtin_erff)
FOCI_LANES1(floor, __builtin_floorf)
FOCI_LANES1(ceil, __builtin_ceilf)
FOCI_LANES1(trunc, __builtin_truncf)
FOCI_LANES1(round, __builtin_rintf)
FOCI_LANES2(atan2, __builtin_atan2f)
FOCI_LANES2(fmod, __builtin_fmodf)

FOCI_INLINE float power(float x, float y) { return __builtin_powf(x, y); }
inline vf power(vf x, vf y) { for (int i = 0; i < WIDTH; ++i) x[i] = __builtin_powf(x[i], y[i]); return x; }
FOCI_INLINE vi power(vi x, vi y) { for (int i = 0; i < WIDTH; ++i) x[i] = (int32_t)::pow(x[i], y[i]); return x; }
inline vl power(vl x, vl y) {
  for (int i = 0; i < WIDTH / 2; ++i) x.lo[i] = (int64_t)::pow((double)x.lo[i], (double)y.lo[i]), x.hi[i] = (int64_t)::pow((double)x.hi[i], (double)y.hi[i]);
  return x;
}
FOCI_INLINE int32_t power(int32_t x, int32_t y) { return (int32_t)::pow(x, y); }
FOCI_INLINE int64_t power(int64_t x, int64_t y) { return (int64_t)::pow((double)x, (double)y); }

// ---- arithmetic -------------------------------------------------------------------------------------------------------

// On 64-bit vectors, half by half; on other 64-bit values lane by lane.
template <class F> FOCI_INLINE vl halves(vl a, vl b, F f) { return {f(a.lo, b.lo), f(a.hi, b.hi)}; }
FOCI_INLINE vb joined(half_l lo, half_l hi) {  // two 64-bit comparisons as one mask
  vi m;
  const half_i a = __builtin_convertvector(lo, half_i), b = __builtin_convertvector(hi, half_i);
  __builtin_memcpy(&m, &a, sizeof a);
  __builtin_memcpy((char*)&m + sizeof a, &b, sizeof b);
  return {m};
}

#define FOCI_BINARY(name, op) \
  FOCI_INLINE float name(float a, float b) { return a op b; } \
  FOCI_INLINE vf name(vf a, vf b) { return a op b; } \
  FOCI_INLINE int32_t name(int32_t a, int32_t b) { return (int32_t)((uint32_t)a op (uint32_t)b); } \
  FOCI_INLINE vi name(vi a, vi b) { return (vi)((vu)a op (vu)b); } \
  FOCI_INLINE int64_t name(int64_t a, int64_t b) { return (int64_t)((uint64_t)a op (uint64_t)b); } \
  FOCI_INLINE vl name(vl a, vl b) { return {a.lo op b.lo, a.hi op b.hi}; }
FOCI_BINARY(add, +)
FOCI_BINARY(sub, -)
FOCI_BINARY(mul, *)
FOCI_INLINE float div(float a, float b) { return a / b; }
FOCI_INLINE vf div(vf a, vf b) { return a / b; }

#define FOCI_COMPARE(name, op) \
  FOCI_INLINE bool name(float a, float b) { return a op b; } \
  FOCI_INLINE bool name(int32_t a, int32_t b) { return a op b; } \
  FOCI_INLINE bool name(int64_t a, int64_t b) { return a op b; } \
  FOCI_INLINE bool name(bool a, bool b) { return a op b; } \
  FOCI_INLINE vb name(vf a, vf b) { return {a op b}; } \
  FOCI_INLINE vb name(vi a, vi b) { return {a op b}; } \
  FOCI_INLINE vb name(vl a, vl b) { return joined(a.lo op b.lo, a.hi op b.hi); }
FOCI_COMPARE(eq, ==)
FOCI_COMPARE(ne, !=)
FOCI_COMPARE(lt, <)
FOCI_COMPARE(le, <=)
FOCI_INLINE vb eq(vb a, vb b) { return {~(a.bits ^ b.bits)}; }
FOCI_INLINE vb ne(vb a, vb b) { return {a.bits ^ b.bits}; }
FOCI_INLINE vb lt(vb a, vb b) { return {~a.bits & b.bits}; }
FOCI_INLINE vb le(vb a, vb b) { return {~a.bits | b.bits}; }

#define FOCI_BITWISE(name, op) \
  FOCI_INLINE bool name(bool a, bool b) { return (bool)(a op b); } \
  FOCI_INLINE int32_t name(int32_t a, int32_t b) { return a op b; } \
  FOCI_INLINE int64_t name(int64_t a, int64_t b) { return a op b; } \
  FOCI_INLINE vb name(vb a, vb b) { return {a.bits op b.bits}; } \
  FOCI_INLINE vi name(vi a, vi b) { return a op b; } \
  FOCI_INLINE vl name(vl a, vl b) { return {a.lo op b.lo, a.hi op b.hi}; }
FOCI_BITWISE(bit_and, &)
FOCI_BITWISE(bit_or, |)
FOCI_BITWISE(bit_xor, ^)
FOCI_INLINE bool bit_not(bool a) { return !a; }
FOCI_INLINE int32_t bit_not(int32_t a) { return ~a; }
FOCI_INLINE int64_t bit_not(int64_t a) { return ~a; }
FOCI_INLINE vb bit_not(vb a) { return {~a.bits}; }
FOCI_INLINE vi bit_not(vi a) { return ~a; }
FOCI_INLINE vl bit_not(vl a) { return {~a.lo, ~a.hi}; }

template <class T> FOCI_INLINE T shift_left(T a, T b) { return a << b; }
template <class T> FOCI_INLINE T shift_right(T a, T b) { return a >> b; }
template <> FOCI_INLINE vl shift_left(vl a, vl b) { return {a.lo << b.lo, a.hi << b.hi}; }
template <> FOCI_INLINE vl shift_right(vl a, vl b) { return {a.lo >> b.lo, a.hi >> b.hi}; }

template <class T> FOCI_INLINE T choose(bool c, T a, T b) { return c ? a : b; }
FOCI_INLINE vf choose(vb c, vf a, vf b) { return c.bits ? a : b; }
FOCI_INLINE vi choose(vb c, vi a, vi b) { return c.bits ? a : b; }
FOCI_INLINE vb choose(vb c, vb a, vb b) { return {c.bits ? a.bits : b.bits}; }
FOCI_INLINE vl choose(vb c, vl a, vl b) {
  half_i lo, hi;
  __builtin_memcpy(&lo, &c.bits, sizeof lo);
  __builtin_memcpy(&hi, (char*)&c.bits + sizeof lo, sizeof hi);
  return {__builtin_convertvector(lo, half_l) ? a.lo : b.lo, __builtin_convertvector(hi, half_l) ? a.hi : b.hi};
}

template <class T> FOCI_INLINE T negative(T a) { return sub(T{}, a); }
FOCI_INLINE float negative(float a) { return -a; }
FOCI_INLINE vf negative(vf a) { return -a; }

// A NaN operand makes the result NaN, as in torch.
FOCI_INLINE float least(float a, float b) { return a != a || a < b ? a : b; }
FOCI_INLINE float greatest(float a, float b) { return a != a || a > b ? a : b; }
FOCI_INLINE vf least(vf a, vf b) { return (a != a) | (a < b) ? a : b; }
FOCI_INLINE vf greatest(vf a, vf b) { return (a != a) | (a > b) ? a : b; }
FOCI_INLINE int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }
FOCI_INLINE int32_t greatest(int32_t a, int32_t b) { return a > b ? a : b; }
FOCI_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FOCI_INLINE int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }
FOCI_INLINE bool least(bool a, bool b) { return a && b; }
FOCI_INLINE bool greatest(bool a, bool b) { return a || b; }
FOCI_INLINE vi least(vi a, vi b) { return a < b ? a : b; }
FOCI_INLINE vi greatest(vi a, vi b) { return a > b ? a : b; }
FOCI_INLINE vl least(vl a, vl b) { return choose(lt(a, b), a, b); }
FOCI_INLINE vl greatest(vl a, vl b) { return choose(lt(a, b), b, a); }
FOCI_INLINE vb least(vb a, vb b) { return bit_and(a, b); }
FOCI_INLINE vb greatest(vb a, vb b) { return bit_or(a, b); }

FOCI_INLINE float absolute(float a) { return __builtin_fabsf(a); }
FOCI_INLINE vf absolute(vf a) { return as_float(as_int(a) & 0x7fffffff); }
template <class T> FOCI_INLINE T absolute(T a) { return greatest(a, negative(a)); }

FOCI_INLINE float sign(float a) { return a > 0 ? 1.0f : a < 0 ? -1.0f : a; }
FOCI_INLINE vf sign(vf a) { return a > 0.0f ? splat(1.0f) : (a < 0.0f ? splat(-1.0f) : a); }
FOCI_INLINE int32_t sign(int32_t a) { return (a > 0) - (a < 0); }
FOCI_INLINE int64_t sign(int64_t a) { return (a > 0) - (a < 0); }
FOCI_INLINE vi sign(vi a) { return (a < 0) - (a > 0); }
FOCI_INLINE vl sign(vl a) { return {(a.lo < 0) - (a.lo > 0), (a.hi < 0) - (a.hi > 0)}; }

// Integer division rounds down. A divisor 0 occurs in tiles that overhang: its result is hidden by the mask.
template <class T> FOCI_INLINE T floor_quotient(T a, T b) {
  if (b == 0 || b == -1) return b ? (T)(0 - (uint64_t)a) : 0;
  const T q = a / b;
  return q - ((a % b != 0) && ((a < 0) != (b < 0)));
}
FOCI_INLINE int32_t floor_divide(int32_t a, int32_t b) { return floor_quotient(a, b); }
FOCI_INLINE int64_t floor_divide(int64_t a, int64_t b) { return floor_quotient(a, b); }
FOCI_INLINE float floor_divide(float a, float b) {
  const float r = __builtin_fmodf(a, b);
  if (b == 0.0f) return a / b;
  float q = (a - r) / b;
  if (r != 0.0f && (b < 0) != (r < 0)) q -= 1.0f;
  return q != 0.0f ? (q - __builtin_floorf(q) > 0.5f ? __builtin_floorf(q) + 1.0f : __builtin_floorf(q)) : __builtin_copysignf(0.0f, a / b);
}
FOCI_INLINE int32_t floor_modulo(int32_t a, int32_t b) { return sub(a, mul(floor_divide(a, b), b)); }
FOCI_INLINE int64_t floor_modulo(int64_t a, int64_t b) { return sub(a, mul(floor_divide(a, b), b)); }
FOCI_INLINE float floor_modulo(float a, float b) {
  const float r = __builtin_fmodf(a, b);
  return r != 0.0f && (b < 0) != (r < 0) ? r + b : r;
}
FOCI_INLINE vf floor_divide(vf a, vf b) { for (int i = 0; i < WIDTH; ++i) a[i] = floor_divide(a[i], b[i]); return a; }
FOCI_INLINE vf floor_modulo(vf a, vf b) { for (int i = 0; i < WIDTH; ++i) a[i] = floor_modulo(a[i], b[i]); return a; }
// Quotients of 32-bit integers are exact in double precision before they are truncated.
typedef double half_d __attribute__((vector_size(4 * WIDTH)));
FOCI_INLINE vi floor_divide(vi a, vi b) {
  half_i parts[2][2], quotient[2];
  __builtin_memcpy(parts[0], &a, sizeof a);
  __builtin_memcpy(parts[1], &b, sizeof b);
  FOCI_UNROLL for (int i = 0; i < 2; ++i)
    quotient[i] = __builtin_convertvector(__builtin_convertvector(parts[0][i], half_d) / __builtin_convertvector(parts[1][i], half_d), half_i);
  vi q;
  __builtin_memcpy(&q, quotient, sizeof q);
  const vi r = a - q * b;
  return q + ((r != 0) & ((r ^ b) < 0));
}
FOCI_INLINE vi floor_modulo(vi a, vi b) { return a - floor_divide(a, b) * b; }
FOCI_INLINE vl floor_divide(vl a, vl b) {
  for (int i = 0; i < WIDTH / 2; ++i) a.lo[i] = floor_divide((int64_t)a.lo[i], (int64_t)b.lo[i]), a.hi[i] = floor_divide((int64_t)a.hi[i], (int64_t)b.hi[i]);
  return a;
}
FOCI_INLINE vl floor_modulo(vl a, vl b) { return sub(a, mul(floor_divide(a, b), b)); }
// By a constant power of two: a shift and a mask.
template <int BITS, class T> FOCI_INLINE T divide_power(T a) { return a >> BITS; }
template <int BITS, class T> FOCI_INLINE T modulo_power(T a) { return a & ((1 << BITS) - 1); }
template <int BITS> FOCI_INLINE vl divide_power(vl a) { return {a.lo >> BITS, a.hi >> BITS}; }
template <int BITS> FOCI_INLINE vl modulo_power(vl a) { return {a.lo & ((1ll << BITS) - 1), a.hi & ((1ll << BITS) - 1)}; }

FOCI_INLINE int32_t fmod(int32_t a, int32_t b) { return b == 0 || b == -1 ? 0 : a % b; }
FOCI_INLINE int64_t fmod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
FOCI_INLINE vi fmod(vi a, vi b) { for (int i = 0; i < WIDTH; ++i) a[i] = fmod((int32_t)a[i], (int32_t)b[i]); return a; }
FOCI_INLINE vl fmod(vl a, vl b) {
  for (int i = 0; i < WIDTH / 2; ++i) a.lo[i] = fmod((int64_t)a.lo[i], (int64_t)b.lo[i]), a.hi[i] = fmod((int64_t)a.hi[i], (int64_t)b.hi[i]);
  return a;
}

FOCI_INLINE bool is_nan(float a) { return a != a; }
FOCI_INLINE vb is_nan(vf a) { return {a != a}; }
FOCI_INLINE bool is_inf(float a) { return __builtin_isinf(a); }
FOCI_INLINE vb is_inf(vf a) { return {absolute(a) == __builtin_inff()}; }

// ---- conversions ------------------------------------------------------------------------------------------------------

FOCI_INLINE float to_float(float a) { return a; }
FOCI_INLINE float to_float(int32_t a) { return (float)a; }
FOCI_INLINE float to_float(int64_t a) { return (float)a; }
FOCI_INLINE float to_float(bool a) { return a; }
FOCI_INLINE vf to_float(vi a) { return __builtin_convertvector(a, vf); }
FOCI_INLINE vf to_float(vb a) { return as_float(a.bits & as_int(splat(1.0f))); }
FOCI_INLINE vf to_float(vl a) {
  const half_f lo = __builtin_convertvector(a.lo, half_f), hi = __builtin_convertvector(a.hi, half_f);
  vf x;
  __builtin_memcpy(&x, &lo, sizeof lo);
  __builtin_memcpy((char*)&x + sizeof lo, &hi, sizeof hi);
  return x;
}
FOCI_INLINE int32_t to_i32(float a) { return a >= -2147483648.0f && a < 2147483648.0f ? (int32_t)a : INT32_MIN; }
FOCI_INLINE int32_t to_i32(int64_t a) { return (int32_t)a; }
FOCI_INLINE int32_t to_i32(bool a) { return a; }
FOCI_INLINE vi to_i32(vb a) { return -a.bits; }
FOCI_INLINE vi to_i32(vf a) {
  const vi in = (a >= -2147483648.0f) & (a < 2147483648.0f);
  return in ? __builtin_convertvector(in ? a : vf{}, vi) : vi{} + INT32_MIN;
}
FOCI_INLINE vi to_i32(vl a) { return joined(a.lo, a.hi).bits; }
FOCI_INLINE int64_t to_i64(float a) { return a >= -9.2233720e18f && a < 9.2233720e18f ? (int64_t)a : INT64_MIN; }
FOCI_INLINE int64_t to_i64(int32_t a) { return a; }
FOCI_INLINE int64_t to_i64(bool a) { return a; }
FOCI_INLINE vl to_i64(vi a) {
  half_i lo, hi;
  __builtin_memcpy(&lo, &a, sizeof lo);
  __builtin_memcpy(&hi, (char*)&a + sizeof lo, sizeof hi);
  return {__builtin_convertvector(lo, half_l), __builtin_convertvector(hi, half_l)};
}
FOCI_INLINE vl to_i64(vb a) { return to_i64(-a.bits); }
FOCI_INLINE vl to_i64(vf a) {
  vl x;
  for (int i = 0; i < WIDTH / 2; ++i) x.lo[i] = to_i64(a[i]), x.hi[i] = to_i64(a[i + WIDTH / 2]);
  return x;
}
FOCI_INLINE bool to_bool(float a) { return a != 0.0f; }
FOCI_INLINE bool to_bool(int32_t a) { return a != 0; }
FOCI_INLINE bool to_bool(int64_t a) { return a != 0; }
FOCI_INLINE vb to_bool(vf a) { return {a != 0.0f}; }
FOCI_INLINE vb to_bool(vi a) { return {a != 0}; }
FOCI_INLINE vb to_bool(vl a) { return joined(a.lo != 0, a.hi != 0); }

FOCI_INLINE float round_bfloat16(float x) { bf16 y; narrow(&y, x); return widen(y); }
FOCI_INLINE float round_float16(float x) { f16 y; narrow(&y, x); return widen(y); }
FOCI_INLINE vf round_bfloat16(vf x) { return (vf)(rounded_bits(x) << 16); }
FOCI_INLINE vf round_float16(vf x) { f16 y[WIDTH]; narrow(y, x); return widen(y); }

// A scalar as the vector of its type; vectors pass.
template <class T> FOCI_INLINE auto wide(T x) { return splat(x); }
FOCI_INLINE vf wide(vf x) { return x; }
FOCI_INLINE vi wide(vi x) { return x; }
FOCI_INLINE vl wide(vl x) { return x; }
FOCI_INLINE vb wide(vb x) { return x; }

}  // namespace foci
