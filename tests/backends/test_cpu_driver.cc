// The headers of the CPU backend without Python: causal attention with an ALiBi slope per head, with and without dropout,
// forward and backward, over awkward shapes, against the plain formula in double precision. For sanitizers, and for other
// processors under an emulator; with FOCI_POISON nothing may rest on what memory held before.
#include "foci/backward.h"
#include "foci/decode.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

using namespace foci;

#ifndef STORAGE
#define STORAGE float
#endif

template <int HEAD, int VALUE, bool DROPS> struct Plan {
  typedef STORAGE Storage;
  static constexpr int D = HEAD, DV = VALUE, SITES = 0;
  static constexpr bool PLAIN_SCORE = false, MASKED = true, DROPOUT = DROPS, MASK_READS = true;
  static bool mask_by_batch(const Call&) { return false; }
  static bool mask_by_head(const Call&) { return false; }
  static constexpr bool GRAD_Q = true, GRAD_K = true, GRAD_V = true, COLUMN_SUMS = false, UNIT_SLOPE = false;
  struct Row { int q; float slope; };
  struct Col {};
  static Row row(const Call&, int, int h, int q, int, int) { return {q, 0.1f * (float)(h + 1)}; }
  static Col col(const Call&, int, int, int, int) { return {}; }
  static vf score(const Call&, const Row& r, const Col&, vf s, int kv) { return s + to_float(iota() + kv - r.q) * r.slope; }
  static vf derive(const Call& call, const Row& r, const Col& c, vf s, int kv, vf& slope) {
    slope = splat(1.0f);
    return score(call, r, c, s, kv);
  }
  static vb mask(const Call&, const Row& r, const Col&, int kv) { return {iota() + kv <= r.q}; }
  static void fetch_captures(const Row&, int) {}
  static Class classify(const Call&, const Rectangle& r) { return r.kv0 > r.q1 ? EMPTY : r.kv1 <= r.q0 ? FULL : PARTIAL; }
};

struct Array {
  STORAGE* data;
  int heads, rows, columns, row, column;  // the last two are strides
  Array(int h, int r, int c, bool transposed = false)
      : data((STORAGE*)malloc(sizeof(STORAGE) * h * r * c)), heads(h), rows(r), columns(c), row(transposed ? 1 : c), column(transposed ? r : 1) {
    for (int i = 0; i < h * r * c; ++i) narrow(data + i, (float)rand() / (float)RAND_MAX - 0.5f);
  }
  ~Array() { free(data); }
  double at(int h, int r, int c) const { return (double)widen(data[h * rows * columns + r * row + c * column]); }
  Tensor tensor() const { return {data, 0, (int64_t)rows * columns, row, column}; }
};

static int failures = 0;
static double tolerance = sizeof(STORAGE) == 4 ? 2e-5 : 3e-2;
static void expect(const char* what, double found, double wanted) {
  if (!(fabs(found - wanted) <= tolerance * (1 + fabs(wanted)))) {
    if (failures++ < 5) printf("%s: %g, not %g\n", what, found, wanted);
  }
}

template <int HEAD, int VALUE, bool DROPS = false> void check(int heads, int kv_heads, int rows, int keys, int splits, bool transposed = false) {
  const int group = heads / kv_heads;
  Array q(heads, rows, HEAD, transposed), k(kv_heads, keys, HEAD, transposed), v(kv_heads, keys, VALUE, transposed), go(heads, rows, VALUE, transposed);
  Array out(heads, rows, VALUE);
  Array gq(heads, rows, HEAD), gk(kv_heads, keys, HEAD), gv(kv_heads, keys, VALUE);
  float* lse = (float*)malloc(sizeof(float) * heads * rows);
  Call call = {};
  call.query = q.tensor(), call.key = k.tensor(), call.value = v.tensor(), call.out = out.tensor();
  call.grad_out = go.tensor(), call.grad_query = gq.tensor(), call.grad_key = gk.tensor(), call.grad_value = gv.tensor();
  call.lse = lse, call.batch = 1, call.q_heads = heads, call.kv_heads = kv_heads, call.q_len = call.q_tokens = rows, call.kv_len = call.kv_tokens = keys;
  call.scale = 0.7, call.keep_scale = 1, call.threads = 2, call.splits = splits, call.batch_parts = call.batch, call.head_parts = kv_heads, call.split_parts = splits;
  const int64_t seed = 12345;
  if (DROPS) call.seed = &seed, call.threshold = 1u << 30, call.keep_scale = 4.0 / 3;
  if (forward<Plan<HEAD, VALUE, DROPS>>(call) != DONE || backward<Plan<HEAD, VALUE, DROPS>>(call) != DONE) ++failures;
  float* kept = (float*)malloc(sizeof(float) * (keys + 4 * WIDTH));
  double* p = (double*)malloc(sizeof(double) * keys);
  double* dk = (double*)calloc((size_t)kv_heads * keys * HEAD, sizeof(double));
  double* dv = (double*)calloc((size_t)kv_heads * keys * VALUE, sizeof(double));
  for (int h = 0; h < heads; ++h)
    for (int r = 0; r < rows; ++r) {
      double sum = 0, delta = 0;
      for (int j = 0; j < keys; ++j) {
        double s = 0;
        for (int d = 0; d < HEAD; ++d) s += q.at(h, r, d) * k.at(h / group, j, d);
        sum += p[j] = j <= r ? exp(0.7 * s + 0.1 * (h + 1) * (j - r)) : 0;
      }
      expect("lse", lse[h * rows + r], log(sum));
      for (int j = 0; j < keys; ++j) kept[j] = 1;
      if (DROPS) keep_row(call, 0, h, r, 0, keys, kept);
      for (int d = 0; d < VALUE; ++d) {
        double o = 0;
        for (int j = 0; j < keys; ++j) o += p[j] / sum * kept[j] * call.keep_scale * v.at(h / group, j, d);
        expect("out", out.at(h, r, d), o);
        delta += o * go.at(h, r, d);
      }
      for (int j = 0; j < keys; ++j) {
        double dp = 0;
        for (int d = 0; d < VALUE; ++d) dp += go.at(h, r, d) * v.at(h / group, j, d), dv[(h / group * keys + j) * VALUE + d] += p[j] / sum * kept[j] * call.keep_scale * go.at(h, r, d);
        p[j] = p[j] / sum * (dp * kept[j] * call.keep_scale - delta) * 0.7;
        for (int d = 0; d < HEAD; ++d) dk[(h / group * keys + j) * HEAD + d] += p[j] * q.at(h, r, d);
      }
      for (int d = 0; d < HEAD; ++d) {
        double dq = 0;
        for (int j = 0; j < keys; ++j) dq += p[j] * k.at(h / group, j, d);
        expect("grad_query", gq.at(h, r, d), dq);
      }
    }
  for (int i = 0; i < kv_heads * keys * HEAD; ++i) expect("grad_key", widen(gk.data[i]), dk[i]);
  for (int i = 0; i < kv_heads * keys * VALUE; ++i) expect("grad_value", widen(gv.data[i]), dv[i]);
  free(p), free(dk), free(dv), free(lse), free(kept);
}

static void check_pool() {
  const int64_t size = 3 << 20;
  char *first, *second;
  {
    const Buffer a(size), b(size);  // two at once are two
    first = a.data, second = b.data;
    if (first == second) ++failures;
    a.data[0] = b.data[size - 1] = 1;
  }
  {
    const Buffer again(size), small(size / 3);
    if (again.data != first && again.data != second) ++failures;
    if (small.data == first || small.data == second) ++failures;
  }
  for (int64_t part = 2; part < 6; ++part) Buffer(Pool::MOST / part);  // more than it may keep
  int64_t total = 0;
  for (int i = 0; i < pool.count; ++i) total += pool.blocks[i].bytes;
  if (pool.count < 1 || pool.count > Pool::BLOCKS || total > Pool::MOST || pool.busy) ++failures;
}

int main() {
  check_pool();
  check<16, 16>(2, 1, 1, 1, 1);
  check<40, 24>(4, 2, 70, 130, 1);
  check<17, 33>(2, 2, 130, 66, 2);
  check<8, 8>(4, 1, 3, 700, 4);
  check<24, 40, true>(2, 1, 70, 130, 1);
  check<16, 16, true>(2, 2, 131, 700, 2);
  check<16, 16, true>(2, 1, 5, 40, 1);  // a first tile that ends within a block of rows
  check<64, 64>(1, 1, 200, 600, 2);
  check<40, 24>(4, 2, 70, 130, 1, true);
  check<17, 33>(2, 2, 130, 66, 2, true);
  check<8, 8>(4, 1, 3, 700, 4, true);
  printf("%d lanes, %d failures\n", WIDTH, failures);
  return failures != 0;
}
