// The mask over whole rectangles of scores: interval arithmetic (Moore, Interval Analysis, 1966), to skip tiles in which
// nothing is attended to and to leave out mask work where everything is.
#pragma once
#include "tasks.h"

namespace foci {

// Bounds, included; what may be nan has none. Booleans lie within [0, 1]: lo == 1 is surely true, hi == 0 surely false.
struct Range {
  double lo, hi;
};

namespace interval {

constexpr double INF = __builtin_inf();

FOCI_INLINE Range point(double x) { return x == x ? Range{x, x} : Range{-INF, INF}; }
FOCI_INLINE Range sound(double lo, double hi) { return {lo == lo ? lo : -INF, hi == hi ? hi : INF}; }
template <class... R> FOCI_INLINE Range unknown(R...) { return {-INF, INF}; }
template <class... R> FOCI_INLINE Range truth(R...) { return {0, 1}; }
FOCI_INLINE double least(double a, double b) { return a < b ? a : b; }
FOCI_INLINE double most(double a, double b) { return a > b ? a : b; }
FOCI_INLINE bool is_finite(Range a) { return a.lo > -INF && a.hi < INF; }
FOCI_INLINE bool is_unknown(Range a) { return a.lo == -INF && a.hi == INF; }
FOCI_INLINE bool is_divisor(Range a) { return (a.lo > 0 || a.hi < 0) && is_finite(a); }

// What arithmetic of the device does to a result: integers wrap, floats round, whole ones once they are large.
FOCI_INLINE Range in_32_bits(Range a) { return a.lo >= -0x1p31 && a.hi < 0x1p31 ? a : unknown(); }
FOCI_INLINE Range in_64_bits(Range a) { return a.lo > -0x1p63 && a.hi < 0x1p63 ? a : unknown(); }
FOCI_INLINE Range widened(Range a, double by) { return {a.lo * (a.lo > 0 ? 1 - by : 1 + by), a.hi * (a.hi > 0 ? 1 + by : 1 - by)}; }
FOCI_INLINE Range rounded(Range a) { return widened(a, 0x1p-20); }
FOCI_INLINE Range whole(Range a) { return a.lo >= -0x1p24 && a.hi <= 0x1p24 ? a : rounded(a); }

FOCI_INLINE Range add(Range a, Range b) { return sound(a.lo + b.lo, a.hi + b.hi); }
FOCI_INLINE Range sub(Range a, Range b) { return sound(a.lo - b.hi, a.hi - b.lo); }
FOCI_INLINE Range negative(Range a) { return {-a.hi, -a.lo}; }
FOCI_INLINE Range mul(Range a, Range b) {
  const double w = a.lo * b.lo, x = a.lo * b.hi, y = a.hi * b.lo, z = a.hi * b.hi;
  if (w != w || x != x || y != y || z != z) return unknown();
  return {least(least(w, x), least(y, z)), most(most(w, x), most(y, z))};
}
FOCI_INLINE Range div(Range a, Range b) {
  if (!is_divisor(b)) return unknown();
  const double w = a.lo / b.lo, x = a.lo / b.hi, y = a.hi / b.lo, z = a.hi / b.hi;
  return sound(least(least(w, x), least(y, z)), most(most(w, x), most(y, z)));
}
FOCI_INLINE Range floor(Range a) { return {__builtin_floor(a.lo), __builtin_floor(a.hi)}; }
FOCI_INLINE Range ceil(Range a) { return {__builtin_ceil(a.lo), __builtin_ceil(a.hi)}; }
FOCI_INLINE Range trunc(Range a) { return {__builtin_trunc(a.lo), __builtin_trunc(a.hi)}; }
FOCI_INLINE Range round(Range a) { return {__builtin_rint(a.lo), __builtin_rint(a.hi)}; }
FOCI_INLINE Range floor_divide(Range a, Range b) { return floor(div(a, b)); }
FOCI_INLINE Range floor_modulo(Range a, Range b) {
  if (!is_divisor(b) || !is_finite(a)) return unknown();
  if (b.lo == b.hi && b.lo > 0) {
    const double turn = __builtin_floor(a.lo / b.lo);
    if (turn == __builtin_floor(a.hi / b.lo)) return {a.lo - turn * b.lo, a.hi - turn * b.lo};
  }
  return {least(b.lo, 0), most(b.hi, 0)};
}
FOCI_INLINE Range both(Range a, Range b) { return {least(a.lo, b.lo), least(a.hi, b.hi)}; }  // of booleans, as `either`
FOCI_INLINE Range either(Range a, Range b) { return {most(a.lo, b.lo), most(a.hi, b.hi)}; }
FOCI_INLINE Range minimum(Range a, Range b) { return is_unknown(a) || is_unknown(b) ? unknown() : both(a, b); }
FOCI_INLINE Range maximum(Range a, Range b) { return is_unknown(a) || is_unknown(b) ? unknown() : either(a, b); }
FOCI_INLINE Range absolute(Range a) {
  if (is_unknown(a)) return unknown();
  const double low = least(__builtin_fabs(a.lo), __builtin_fabs(a.hi)), high = most(__builtin_fabs(a.lo), __builtin_fabs(a.hi));
  return {a.lo <= 0 && a.hi >= 0 ? 0 : low, high};
}
FOCI_INLINE double signum(double a) { return (a > 0) - (a < 0); }
FOCI_INLINE Range sign(Range a) { return is_unknown(a) ? a : Range{signum(a.lo), signum(a.hi)}; }
FOCI_INLINE Range unit(Range a) { return is_finite(a) ? Range{-1, 1} : unknown(); }

FOCI_INLINE Range lt(Range a, Range b) { return {(double)(a.hi < b.lo), (double)(a.lo < b.hi)}; }
FOCI_INLINE Range le(Range a, Range b) { return {(double)(a.hi <= b.lo), (double)(a.lo <= b.hi)}; }
// Of floats: what has no bounds may be nan, which is no less than infinity.
FOCI_INLINE Range float_le(Range a, Range b) {
  const Range found = le(a, b);
  return is_unknown(a) || is_unknown(b) ? Range{0, found.hi} : found;
}
FOCI_INLINE Range eq(Range a, Range b) {
  return {(double)(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo), (double)(a.lo <= b.hi && b.lo <= a.hi)};
}
FOCI_INLINE Range opposite(Range a) { return {1 - a.hi, 1 - a.lo}; }
FOCI_INLINE Range ne(Range a, Range b) { return opposite(eq(a, b)); }
FOCI_INLINE Range choose(Range c, Range a, Range b) {
  return c.lo == 1 ? a : c.hi == 0 ? b : Range{least(a.lo, b.lo), most(a.hi, b.hi)};
}
FOCI_INLINE Range to_bool(Range a) { return ne(a, {0, 0}); }
FOCI_INLINE Range to_i32(Range a) { return a.lo >= -2147483648.0 && a.hi < 2147483648.0 ? trunc(a) : unknown(); }
FOCI_INLINE Range to_i64(Range a) { return a.lo >= -9.2e18 && a.hi < 9.2e18 ? trunc(a) : unknown(); }

// ---- captured tensors: the bounds of a box of elements -------------------------------------------------------------------

// Neighbours in memory as one vector: a panel of small numbers, else a register. bfloat16 and float16 are widened.
template <class T> struct Neighbours {
  static constexpr int LANES = sizeof(T) < 4 ? PANEL : 4 * WIDTH / (int)sizeof(T);
  typedef T type __attribute__((vector_size(sizeof(T) * LANES)));
  static FOCI_INLINE T lane(T x) { return x; }
};
template <> struct Neighbours<bool> : Neighbours<uint8_t> {};
template <> struct Neighbours<bf16> : Neighbours<float> { static FOCI_INLINE float lane(bf16 x) { return widen(x); } };
template <> struct Neighbours<f16> : Neighbours<float> { static FOCI_INLINE float lane(f16 x) { return widen(x); } };

template <class T> FOCI_INLINE auto neighbours(const T* at) { return load<typename Neighbours<T>::type>(at); }
FOCI_INLINE vf neighbours(const bf16* at) { return widen(at); }
FOCI_INLINE vf neighbours(const f16* at) { return widen(at); }

// The least and the greatest element met, lane by lane, and where one was NaN.
template <class T> struct Extremes {
  typedef Neighbours<T> N;
  typedef typename N::type V;
  V low, high;
  decltype(V() != V()) is_nan{};

  explicit Extremes(T x) {
    for (int i = 0; i < N::LANES; ++i) low[i] = high[i] = N::lane(x);
  }
  FOCI_INLINE void meet(V x) {
    low = x < low ? x : low;
    high = x > high ? x : high;
    is_nan |= x != x;
  }
  // `count` elements, `step` apart. The last vector overlaps the one before it, which changes no extreme.
  FOCI_INLINE void meet(const T* at, int64_t count, int64_t step) {
    if (step == 1 && count >= N::LANES) {
      for (int64_t i = 0; i < count; i += N::LANES) meet(neighbours(at + (i + N::LANES <= count ? i : count - N::LANES)));
      return;
    }
    V x = low;
    for (int64_t i = 0; i < count; i += N::LANES) {
      for (int j = 0; j < N::LANES && i + j < count; ++j) x[j] = N::lane(at[(i + j) * step]);
      meet(x);
    }
  }
  // Whether truths of both kinds were met.
  FOCI_INLINE bool is_mixed() const {
    uint64_t some = 0, every = ~0ull, words[2][N::LANES / 8];
    __builtin_memcpy(words[0], &high, sizeof high);
    __builtin_memcpy(words[1], &low, sizeof low);
    for (int i = 0; i < N::LANES / 8; ++i) some |= words[0][i], every &= words[1][i];
    return some != 0 && every != 0x0101010101010101;
  }
  Range bounds() const {
    double lo = INF, hi = -INF;
    for (int i = 0; i < N::LANES; ++i) {
      if (is_nan[i]) return unknown();
      lo = least(lo, (double)value_of(low[i]));  // a double is rounded as the mask reads it
      hi = most(hi, (double)value_of(high[i]));
    }
    if (__is_same(T, int64_t) && !(lo > -0x1p53 && hi < 0x1p53)) return widened({lo, hi}, 0x1p-52);  // a double has rounded them
    return {lo, hi};
  }
};

// A box of a captured tensor, as runs of neighbours.
template <class T, int RANK> struct Box {
  const Captured<T, RANK>& c;
  int64_t count[RANK + 1] = {}, total = 1;
  const T* first;
  int inner = RANK - 1;  // the dimension whose elements are neighbours

  Box(const Captured<T, RANK>& c, const Range* at) : c(c), first(c.data) {
    for (int i = 0; i < RANK; ++i) {
      // what lies beyond the edges is wrapped or clamped: look at everything then
      const bool inside = at[i].lo >= 0 && at[i].hi < (double)c.size[i];
      if (inside) first += (int64_t)at[i].lo * c.stride[i];
      count[i] = inside ? (int64_t)at[i].hi - (int64_t)at[i].lo + 1 : c.size[i];
      if (c.stride[i] == 0) count[i] = 1;
      total *= count[i];
      if (c.stride[i] == 1 && count[i] > 1) inner = i;
    }
  }
  bool is_small() const { return total <= 65536; }

  // Calls `each(first, count, step)` until it is false.
  template <class F> FOCI_INLINE void each_run(F each) const {
    const int64_t run = RANK ? count[inner] : 1, step = RANK ? c.stride[inner] : 1;
    int64_t index[RANK + 1] = {};
    const T* at = first;
    for (int64_t n = 0; n < total && each(at, run, step); n += run)
      for (int i = RANK - 1; i >= 0; --i) {
        if (i == inner) continue;
        at += c.stride[i];
        if (++index[i] < count[i]) break;
        at -= count[i] * c.stride[i];
        index[i] = 0;
      }
  }
  // Whether `each(element)` is true of one of the corners.
  template <class F> FOCI_INLINE bool any_corner(F each) const {
    for (int corner = 0; corner < 1 << RANK; ++corner) {
      const T* at = first;
      for (int i = 0; i < RANK; ++i) at += corner >> i & 1 ? (count[i] - 1) * c.stride[i] : 0;
      if (each(*at)) return true;
    }
    return false;
  }
};

// The bounds of a box of a captured tensor, unless its elements are too many to look at.
template <class T, int RANK, class... I> Range element(const Captured<T, RANK>& c, I... indices) {
  if (is_empty(c)) return unknown();
  const Range at[RANK ? RANK : 1] = {indices...};
  const Box<T, RANK> box(c, at);
  if (!box.is_small()) return unknown();
  Extremes<T> found(*box.first);
  box.each_run([&](const T* first, int64_t count, int64_t step) {
    found.meet(first, count, step);
    if constexpr (__is_same(T, bool)) return !found.is_mixed();
    return true;
  });
  return found.bounds();
}

// What a box of terms leaves of scores that they are added to: EMPTY where all are -inf, PARTIAL where a corner is, so that parts of
// the box may be. A box that is -inf in its middle alone counts as FULL: to see that, one would have to look at every bias.
template <class T, int RANK, class... I> Class left_by(const Captured<T, RANK>& c, I... indices) {
  if (is_empty(c)) return FULL;
  const Range at[RANK ? RANK : 1] = {indices...};
  const Box<T, RANK> box(c, at);
  if (!box.any_corner([](T x) { return value_of(x) == -__builtin_inff(); })) return FULL;
  if (!box.is_small()) return PARTIAL;
  bool every = true;
  box.each_run([&](const T* first, int64_t count, int64_t step) {
    Extremes<T> found(*first);
    found.meet(first, count, step);
    return every = found.bounds().hi == -INF;
  });
  return every ? EMPTY : PARTIAL;
}

}  // namespace interval

FOCI_INLINE Class class_of(Range mask) { return mask.lo >= 1 ? FULL : mask.hi <= 0 ? EMPTY : PARTIAL; }
FOCI_INLINE Class both(Class a, Class b) { return a < b ? a : b; }

}  // namespace foci
