// One call: the plain C structure that the launcher fills, and views of what it points to.
#pragma once
#include "product.h"

namespace foci {

// [batch, head, row, column] with strides in elements. Jagged tensors have batch stride 0 and rows by token.
struct Tensor {
  void* data;
  int64_t batch, head, row, column;
  template <class T> FOCI_INLINE T* at(int64_t b, int64_t h, int64_t r) const { return (T*)data + b * batch + h * head + r * row; }
};

// Every field has 8 bytes; the launcher packs them in this order, without addresses, threads and classes, and `ints` and `floats` behind
// them.
struct Call {
  Tensor query, key, value, out;
  Tensor grad_out, grad_query, grad_key, grad_value;
  float *lse, *row_max, *column_sums;               // [B, Hq, Sq], [B, Hq, Sq], [B, Hq, Skv], contiguous
  const float *grad_lse, *grad_column_sums;         // or null
  int64_t batch, q_heads, kv_heads, q_len, kv_len;  // batch: entries, or sequences; lengths: of all, or the longest
  int64_t q_tokens, kv_tokens;                      // rows of the contiguous outputs above: Sq and Skv, or Tq and Tkv
  const int64_t *cu_q, *cu_kv, *q_lengths, *kv_lengths;
  const int64_t* captures;   // for each tensor: address, sizes, strides (see Captured)
  const int64_t* gradients;  // for each load that is differentiated: float32 address, floats between the copies of a partition's batch entries, heads, splits
  const int64_t* ints;
  const double* floats;
  const int64_t* seed;
  double scale, keep_scale;
  int64_t threshold, drop_all, threads;
  int64_t splits;             // parts of the keys in the backward
  int64_t batch_parts, head_parts, split_parts;  // how the backward's tasks are partitioned (see Partition)
  int64_t capture_numbers, int_numbers;          // how many int64 `captures` and `ints` point at
  const uint8_t* classes;     // null, or the mask's classes, which Classified finds; then how far heads and batch entries are apart
  int64_t classes_head, classes_batch;
};

static_assert(sizeof(Call) == 75 * 8, "native_call.py packs 75 fields");

// The addresses of a call, in the order in which the launcher packs them; behind them what `captures` and `gradients` point at.
struct Addresses {
  void *query, *key, *value, *out, *grad_out, *grad_query, *grad_key, *grad_value;
  float *lse, *row_max, *column_sums;
  const float *grad_lse, *grad_column_sums;
  const int64_t *cu_q, *cu_kv, *q_lengths, *kv_lengths, *seed;
};
static_assert(sizeof(Addresses) == 18 * 8, "native_call.py packs 18 addresses");

// The call at these addresses.
FOCI_INLINE Call bound(const Call* geometry, const Addresses* at, int threads) {
  Call call = *geometry;
  call.query.data = at->query, call.key.data = at->key, call.value.data = at->value, call.out.data = at->out;
  call.grad_out.data = at->grad_out, call.grad_query.data = at->grad_query, call.grad_key.data = at->grad_key;
  call.grad_value.data = at->grad_value;
  call.lse = at->lse, call.row_max = at->row_max, call.column_sums = at->column_sums;
  call.grad_lse = at->grad_lse, call.grad_column_sums = at->grad_column_sums;
  call.cu_q = at->cu_q, call.cu_kv = at->cu_kv, call.q_lengths = at->q_lengths, call.kv_lengths = at->kv_lengths;
  call.seed = at->seed;
  call.captures = (const int64_t*)(at + 1);
  call.gradients = call.captures + call.capture_numbers;
  call.ints = (const int64_t*)(geometry + 1);
  call.floats = (const double*)(call.ints + call.int_numbers);
  call.threads = threads;
  return call;
}

// One entry or sequence of the batch.
struct Sequence {
  int b;
  int64_t batch;  // index along the tensors' batch dimension
  int64_t q_start, kv_start;
  int q_len, kv_len;
};

FOCI_INLINE Sequence sequence(const Call& call, int b) {
  if (!call.cu_q) return {b, b, 0, 0, (int)call.q_len, (int)call.kv_len};
  const int64_t q = call.cu_q[b], kv = call.cu_kv[b];
  const int64_t q_len = call.q_lengths ? call.q_lengths[b] : call.cu_q[b + 1] - q;
  const int64_t kv_len = call.kv_lengths ? call.kv_lengths[b] : call.cu_kv[b + 1] - kv;
  return {b, 0, q, kv, (int)q_len, (int)kv_len};
}

// Where the row statistics of a sequence's head begin.
FOCI_INLINE int64_t row_offset(const Call& call, const Sequence& s, int h) { return (s.batch * call.q_heads + h) * call.q_tokens + s.q_start; }

// ---- captured tensors ---------------------------------------------------------------------------------------------------

template <class T, int RANK> struct Captured {
  const T* data;
  int64_t size[RANK ? RANK : 1], stride[RANK ? RANK : 1];
};

FOCI_INLINE float value_of(float x) { return x; }
FOCI_INLINE float value_of(double x) { return (float)x; }
FOCI_INLINE float value_of(bf16 x) { return widen(x); }
FOCI_INLINE float value_of(f16 x) { return widen(x); }
FOCI_INLINE int64_t value_of(int64_t x) { return x; }
FOCI_INLINE int32_t value_of(int32_t x) { return x; }
FOCI_INLINE int32_t value_of(int16_t x) { return x; }
FOCI_INLINE int32_t value_of(int8_t x) { return x; }
FOCI_INLINE int32_t value_of(uint8_t x) { return x; }
FOCI_INLINE bool value_of(bool x) { return x; }

template <class T> struct VectorOf;
template <> struct VectorOf<float> { typedef vf type; };
template <> struct VectorOf<int32_t> { typedef vi type; };
template <> struct VectorOf<int64_t> { typedef vl type; };
template <> struct VectorOf<bool> { typedef vb type; };

template <class T> FOCI_INLINE T lane(T x, int) { return x; }
FOCI_INLINE float lane(vf x, int i) { return x[i]; }
FOCI_INLINE int32_t lane(vi x, int i) { return x[i]; }
FOCI_INLINE int64_t lane(vl x, int i) { return i < WIDTH / 2 ? x.lo[i] : x.hi[i - WIDTH / 2]; }
FOCI_INLINE bool lane(vb x, int i) { return x.bits[i] != 0; }
FOCI_INLINE void set_lane(vf& x, int i, float y) { x[i] = y; }
FOCI_INLINE void set_lane(vi& x, int i, int32_t y) { x[i] = y; }
FOCI_INLINE void set_lane(vl& x, int i, int64_t y) { i < WIDTH / 2 ? x.lo[i] = y : x.hi[i - WIDTH / 2] = y; }
FOCI_INLINE void set_lane(vb& x, int i, bool y) { x.bits[i] = -(int)y; }

// A negative index counts from the end; one out of range reads the nearest element, which a mask or a tail hides.
FOCI_INLINE int64_t wrap(int64_t index, int64_t size) {
  index = index < 0 ? index + size : index;
  index = index < size ? index : size - 1;
  return index < 0 ? 0 : index;
}

template <class T, int RANK, class... I> FOCI_INLINE int64_t offset_of(const Captured<T, RANK>& c, I... indices) {
  int64_t offset = 0;
  int dim = 0;
  ((offset += wrap((int64_t)indices, c.size[dim]) * c.stride[dim], ++dim), ...);
  return offset;
}
template <class T, int RANK> FOCI_INLINE bool is_empty(const Captured<T, RANK>& c) {
  bool empty = false;
  for (int i = 0; i < RANK; ++i) empty |= c.size[i] == 0;
  return empty;
}

// One element at scalar indices.
template <class T, int RANK, class... I> FOCI_INLINE auto element(const Captured<T, RANK>& c, I... indices) {
  typedef decltype(value_of(T())) V;
  if (is_empty(c)) return V();
  return value_of(c.data[offset_of(c, indices...)]);
}
// One element for every lane; each index is a scalar or a vector.
template <class T, int RANK, class... I> FOCI_INLINE auto gather(const Captured<T, RANK>& c, I... indices) {
  typename VectorOf<decltype(value_of(T()))>::type out{};
  if (is_empty(c)) return out;
  for (int i = 0; i < WIDTH; ++i) set_lane(out, i, value_of(c.data[offset_of(c, lane(indices, i)...)]));
  return out;
}

// The elements of one captured row that a score row meets: index start + step * kv along one dimension.
template <class T> struct Span {
  const T* data;
  int64_t start, size, stride;
};
template <int DIM, class T, int RANK, class... I> FOCI_INLINE Span<T> span(const Captured<T, RANK>& c, int64_t start, I... others) {
  // `others` holds an index for every dimension; the one at DIM is ignored.
  int64_t offset = 0;
  int dim = 0;
  ((offset += dim == DIM ? 0 : wrap((int64_t)others, c.size[dim]) * c.stride[dim], ++dim), ...);
  return {is_empty(c) ? nullptr : c.data + offset, start, c.size[DIM], c.stride[DIM]};
}

FOCI_INLINE vf load_values(const float* at) { return load<vf>(at); }
FOCI_INLINE vf load_values(const bf16* at) { return widen(at); }
FOCI_INLINE vf load_values(const f16* at) { return widen(at); }
FOCI_INLINE vf load_values(const double* at) {
  vf x;
  for (int i = 0; i < WIDTH; ++i) x[i] = (float)at[i];
  return x;
}
FOCI_INLINE vl load_values(const int64_t* at) { return {load<half_l>(at), load<half_l>(at + WIDTH / 2)}; }
FOCI_INLINE vi load_values(const int32_t* at) { return load<vi>(at); }
template <class T> FOCI_INLINE vi load_small(const T* at) {
  typedef T small __attribute__((vector_size(sizeof(T) * WIDTH)));
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 1) {  // which the compiler would convert one by one
    vi wide;
    const small bytes = load<small>(at);
    if constexpr (T(-1) < T(0)) asm("vpmovsxbd %1, %0" : "=v"(wide) : "m"(bytes));
    else asm("vpmovzxbd %1, %0" : "=v"(wide) : "m"(bytes));
    return wide;
  }
#endif
  return __builtin_convertvector(load<small>(at), vi);
}
FOCI_INLINE vi load_values(const int16_t* at) { return load_small(at); }
FOCI_INLINE vi load_values(const int8_t* at) { return load_small(at); }
FOCI_INLINE vi load_values(const uint8_t* at) { return load_small(at); }
FOCI_INLINE vb load_values(const bool* at) { return {load_small((const uint8_t*)at) != 0}; }

FOCI_INLINE vf reversed(vf x) { return __builtin_shuffle(x, WIDTH - 1 - iota()); }
FOCI_INLINE vi reversed(vi x) { return __builtin_shuffle(x, WIDTH - 1 - iota()); }
FOCI_INLINE vb reversed(vb x) { return {reversed(x.bits)}; }
FOCI_INLINE vl reversed(vl x) {
  vl y;
  for (int i = 0; i < WIDTH; ++i) set_lane(y, i, lane(x, WIDTH - 1 - i));
  return y;
}

// WIDTH elements from key `kv` on.
template <int STEP, class T> FOCI_INLINE auto read(const Span<T>& s, int kv) {
  typedef typename VectorOf<decltype(value_of(T()))>::type V;
  const int64_t first = s.start + STEP * (int64_t)kv, lowest = STEP > 0 ? first : first - (WIDTH - 1);
  if (__builtin_expect(s.stride == 1 && lowest >= 0 && lowest + WIDTH <= s.size, 1)) {
    __builtin_prefetch(s.data + lowest + STEP * (sizeof(T) == 1 ? 2 : 1) * PANEL, 0, 2);  // the next panel: rows are too short for hardware
    const V x = load_values(s.data + lowest);
    if constexpr (STEP > 0) return x; else return reversed(x);
  }
  V out{};
  if (s.data)
    for (int i = 0; i < WIDTH; ++i) set_lane(out, i, value_of(s.data[wrap(first + STEP * i, s.size) * s.stride]));
  return out;
}

// Asks for the elements of a panel from key `kv` on.
template <int STEP, class T> FOCI_INLINE void fetch(const Span<T>& s, int kv) {
  if (s.stride != 1 || !s.data) return;
  const char* at = (const char*)s.data + (s.start + STEP * (int64_t)kv) * (int64_t)sizeof(T);
  for (int i = 0; i < PANEL * (int)sizeof(T); i += 64) __builtin_prefetch(at + STEP * i, 0, 2);
}

// The one element that a whole vector of keys meets.
template <class T> FOCI_INLINE auto read_one(const Span<T>& s, int64_t index) {
  return s.data ? value_of(s.data[wrap(index, s.size) * s.stride]) : decltype(value_of(T()))();
}

// ---- gradients of captured tensors: float32, contiguous ------------------------------------------------------------------

template <class T, int RANK, class... I> FOCI_INLINE int64_t dense_offset(const Captured<T, RANK>& c, I... indices) {
  int64_t offset = 0;
  int dim = 0;
  ((offset = offset * c.size[dim] + wrap((int64_t)indices, c.size[dim]), ++dim), ...);
  return offset;
}
template <int DIM, class T, int RANK, class... I> FOCI_INLINE Span<float> dense_span(const Captured<T, RANK>& c, int64_t start, I... others) {
  int64_t stride = 1;
  for (int i = DIM + 1; i < RANK; ++i) stride *= c.size[i];
  return {(const float*)nullptr + dense_offset(c, others...), start, c.size[DIM], stride};
}

// gradient[span at kv] += x. The span's address is relative to the gradient.
template <int STEP> FOCI_INLINE void accumulate(float* gradient, const Span<float>& s, int kv, vf x) {
  float* base = gradient + (s.data - (const float*)nullptr);
  const int64_t first = s.start + STEP * (int64_t)kv, lowest = STEP > 0 ? first : first - (WIDTH - 1);
  if (__builtin_expect(s.stride == 1 && lowest >= 0 && lowest + WIDTH <= s.size, 1)) {
    if constexpr (STEP > 0) store(base + lowest, load<vf>(base + lowest) + x);
    else store(base + lowest, load<vf>(base + lowest) + reversed(x));
    return;
  }
  for (int i = 0; i < WIDTH; ++i)
    if (x[i] != 0) base[wrap(first + STEP * i, s.size) * s.stride] += x[i];
}
// What keys of one row add to the same element, one after the other: a table's ends meet most pairs, and float32 would lose digits of
// their sum if each were added by itself.
struct Run {
  int64_t at = -1;
  vf sum{};

  FOCI_INLINE void flush(float* gradient) {
    if (at >= 0) gradient[at] += reduce_sum(sum);
    *this = {};
  }
};
template <class T, int RANK, class... I> FOCI_INLINE void scatter(float* gradient, Run& run, const Captured<T, RANK>& c, vf x, I... indices) {
  int64_t at = -1;
  bool alike = true;
  for (int i = 0; i < WIDTH; ++i) {
    if (x[i] == 0) continue;  // an index may lie outside
    const int64_t offset = dense_offset(c, lane(indices, i)...);
    alike &= at < 0 || at == offset;
    at = offset;
  }
  if (at < 0) return;
  if (alike) {
    if (at != run.at) run.flush(gradient);
    run.at = at, run.sum += x;
    return;
  }
  for (int i = 0; i < WIDTH; ++i)
    if (x[i] != 0) gradient[dense_offset(c, lane(indices, i)...)] += x[i];
}

}  // namespace foci
