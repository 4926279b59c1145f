// The forward pass: one pass over the keys with a running softmax (Dao et al., FlashAttention, 2022; Milakov and
// Gimelshein, online softmax, 2018).
//
// `P` is the generated plan: storage type, head dims, and the score and mask functions. A tile holds up to 64 query rows
// and meets about 512 keys at a time: scores, then row by row the softmax, then the product with V in blocks of 128 keys,
// each summed from zero before it is added to the output, which keeps the rounding error of long rows small. Scores are
// rounded before their maximum is taken off, so that the largest weight of a row is exactly 1 however large its score, and
// the backward, which subtracts the logsumexp from the same rounded score, finds the same weight.
//
// An excluded position, masked or with a score of -inf, contributes nothing, whatever its value holds: packed values are finite, and
// what was not is added to the rows that attend to it.
#pragma once
#include "classes.h"
#include "dropout.h"
#include "functions.h"
#include "pack.h"
#include "tasks.h"

namespace foci {

constexpr int BLOCK = 128, LONGEST = KEYS + BLOCK;

template <class P> struct Packing {
  typedef typename P::Storage T;
  typedef typename Computed<T>::type E;
  typedef typename E::word word;
  typedef Exponential<T> Exp;
  static constexpr int D_WORDS = (P::D + E::PAIR - 1) / E::PAIR;   // depth of Q K^T
  static constexpr int D_CHUNKS = (D_WORDS + PANEL - 1) / PANEL;   // panels of words that hold a query row
  static constexpr int V_PANELS = (P::DV + PANEL - 1) / PANEL;
  static constexpr int V_VECTORS = (P::DV + WIDTH - 1) / WIDTH;
  static constexpr int O_ROW = V_VECTORS * WIDTH;
  static constexpr bool EXCLUDES = P::MASKED || !P::PLAIN_SCORE;
};

// Packed keys and values of one kv head: K as panels of columns [panel][word][PANEL], V as [panel][key / PAIR][PANEL].
template <class P> struct Panels {
  typedef typename Packing<P>::word word;
  word *keys, *values;
  int64_t values_stride;  // words from one panel of V to the next
  int* not_finite;        // set where values were not; asked for where positions may be excluded
};

template <class P> void pack_keys(const Call& call, const Sequence& s, int hkv, const Panels<P>& to, int from, int until) {
  typedef Packing<P> K;
  typedef typename K::T T;
  for (int kv = from; kv < until; kv += PANEL)
    pack_columns<typename K::E>(to.keys + (int64_t)(kv - from) * K::D_WORDS, call.key.at<T>(s.batch, hkv, s.kv_start + kv), call.key.row, call.key.column,
                                min_int(PANEL, s.kv_len - kv), P::D);
  pack_rows<typename K::E>(to.values, to.values_stride, call.value.at<T>(s.batch, hkv, s.kv_start + from), call.value.row, call.value.column,
                           min_int(until, s.kv_len) - from, round_up(until - from, PANEL), P::DV);
  if constexpr (K::EXCLUDES)
    if (clean_rows<typename K::E>(to.values, to.values_stride, round_up(until - from, PANEL) / K::E::PAIR, P::DV)) __atomic_store_n(to.not_finite, 1, __ATOMIC_RELAXED);
}

// A panel of keys, seen from either half of a tile's rows.
struct Kinds {
  Class half[2];
  bool is_empty() const { return half[0] == EMPTY && half[1] == EMPTY; }
};

// Keys between which a half's rows attend to something, relative to the run's first one.
struct Stretch {
  int from, until;
};

template <class P> struct ForwardTile {
  typedef Packing<P> K;
  typedef typename K::E E;
  typedef typename K::word word;
  typedef typename K::Exp Exp;
  // Words from one panel to the next: no powers of two, lest the panels of a row share cache sets.
  static constexpr int Q_PANEL = (ROWS + MR) * PANEL, S_PANEL = (ROWS + 1) * PANEL;

  alignas(64) word q[K::D_CHUNKS * Q_PANEL];
  alignas(64) float scores[LONGEST / PANEL * S_PANEL];  // panels; then, in place, the weights
  alignas(64) float out[ROWS * K::O_ROW];
  vf peak[ROWS];
  float top[ROWS], sum[ROWS], shrink[ROWS];  // top: the largest score, in units of the exponential
  typename P::Row row[ROWS];
  int head[ROWS], position[ROWS];
  int rows, padded;  // padded: rows of whole micro-kernel blocks
  float unit;        // what is left to multiply the products by; never negative
  Rectangle extent, halves[2];
  const typename K::T* values;  // of the sequence and kv head, as the caller holds them
  struct { const char *key, *value; int64_t key_row, value_row; int rows; } ahead;  // what comes next in memory, if it is to be fetched

  // Takes rows `first` to `first + count` of the kv head's group, counted head by head.
  void begin(const Call& call, const Sequence& s, int hkv, int64_t first, int count) {
    typedef typename K::T T;
    const int group = (int)(call.q_heads / call.kv_heads);
    rows = count;
    values = call.value.at<T>(s.batch, hkv, s.kv_start);
    ahead.rows = 0;
    unit = P::PLAIN_SCORE && call.scale != 0 ? __builtin_fabsf((float)call.scale) : 1.0f;
    padded = round_up(count, count <= 4 ? 4 : MR);
    const bool transposed = is_transposed(call.query.row, call.query.column) && first / s.q_len == (first + count - 1) / s.q_len;
    if (transposed)
      pack_transposed<E>(q, Q_PANEL, call.query.at<T>(s.batch, hkv * group + (int)(first / s.q_len), s.q_start + first % s.q_len), call.query.column, count,
                         padded, P::D, K::D_WORDS);
    for (int r = 0; r < padded; ++r) {
      const int64_t i = first + min_int(r, count - 1);
      head[r] = hkv * group + (int)(i / s.q_len);
      position[r] = (int)(i % s.q_len);
      const T* from = call.query.at<T>(s.batch, head[r], s.q_start + position[r]);
      fetch_row(from + AHEAD * call.query.row, call.query.column, P::D);
      if (!transposed) pack_row<E>(q + r * PANEL, Q_PANEL, from, call.query.column, P::D, K::D_WORDS);
      if (P::PLAIN_SCORE && call.scale <= 0)  // the largest product stays the largest score
        for (int i = 0; i < K::D_WORDS; ++i) {
          word& x = q[i / PANEL * Q_PANEL + r * PANEL + i % PANEL];
          x = call.scale < 0 ? negative_word(x) : 0;
        }
      fetch_row<true>(call.out.at<T>(s.batch, head[r], s.q_start + position[r]), call.out.column, P::DV);  // where the row goes
      row[r] = P::row(call, s.b, head[r], position[r], s.q_len, s.kv_len);
      top[r] = -__builtin_inff();
      sum[r] = 0;
    }
    extent = rectangle(s, 0, rows);
    halves[0] = rectangle(s, 0, min_int(rows, HALF));
    if (rows > HALF) halves[1] = rectangle(s, HALF, rows);
    for (int i = 0; i < padded * K::O_ROW; ++i) out[i] = 0;
  }

  Rectangle rectangle(const Sequence& s, int first, int end) const {
    const bool one_head = head[first] == head[end - 1];
    return {s.b, head[first], head[end - 1], one_head ? position[first] : 0, one_head ? position[end - 1] : s.q_len - 1, 0, 0, s.q_len, s.kv_len};
  }

  // Asks for some of the rows ahead, so that memory is busy while products run.
  FOCI_INLINE void fetch_ahead(int count) {
    typedef typename K::T T;
    for (; count > 0 && ahead.rows > 0; --count, --ahead.rows) {
      for (int at = 0; at < P::D * (int)sizeof(T); at += 64) __builtin_prefetch(ahead.key + at, 0, 2);
      for (int at = 0; at < P::DV * (int)sizeof(T); at += 64) __builtin_prefetch(ahead.value + at, 0, 2);
      ahead.key += ahead.key_row, ahead.value += ahead.value_row;
    }
  }

  static Class classify(const Call& call, Rectangle r, int from, int until) {
    r.kv0 = from;
    r.kv1 = min_int(until, r.kv_len) - 1;
    return foci::classify<P>(call, r);
  }
  Class classify(const Call& call, int from, int until) const { return classify(call, extent, from, until); }

  // What is known of the panel at `kv` if all rows together are `all`.
  Kinds kinds_of(const Call& call, int kv, Class all) const {
    if (all != PARTIAL || rows <= HALF) return {all, all};
    return {classify(call, halves[0], kv, kv + PANEL), classify(call, halves[1], kv, kv + PANEL)};
  }

  FOCI_INLINE float* score(int r, int key) { return scores + key / PANEL * S_PANEL + r * PANEL + key % PANEL; }

  // Asks for a share of the packed words that follow these, as the rows from r on meet these.
  template <int WORDS> FOCI_INLINE static void fetch_next(const word* words, int r) {
    constexpr int LINES = WORDS * (int)sizeof(word) / 64 / (ROWS / MR);
    const char* next = (const char*)(words + WORDS) + r / MR * LINES * 64;
    FOCI_UNROLL for (int i = 0; i < LINES; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
  }

  // N rows of the panel's products. Where nothing else is to be done to a score, its maximum is taken as well.
  template <int N> FOCI_INLINE void score_block(const word* panel, int r0, int at, bool finished) {
    vf acc[N][2];
    multiply_rows<E, Q_PANEL>(acc, q + r0 * PANEL, panel, 0, K::D_WORDS);
    FOCI_UNROLL for (int r = 0; r < N; ++r) {
      float* to = score(r0 + r, at);
      store(to, acc[r][0]);
      store(to + WIDTH, acc[r][1]);
      if (finished) peak[r0 + r] = maximum(peak[r0 + r], maximum(acc[r][0], acc[r][1]));
    }
  }

  // Score function, mask and the end of the keys, in place; the row maxima.
  void finish_panel(const Call& call, int kv, int at, Class kind, int first, int end) {
    const typename P::Col col[2] = {P::col(call, extent.b, kv, extent.q_len, extent.kv_len), P::col(call, extent.b, kv + WIDTH, extent.q_len, extent.kv_len)};
    const vf none = splat(-__builtin_inff());
    const float scale = (float)call.scale;
    const bool edge = kv + PANEL > extent.kv_len;
    const vb inside[2] = {{iota() + kv < (int)extent.kv_len}, {iota() + (kv + WIDTH) < (int)extent.kv_len}};
    for (int r = first; r < end; ++r) {
      float* to = score(r, at);
      vf s[2] = {load<vf>(to), load<vf>(to + WIDTH)};
      FOCI_UNROLL for (int v = 0; v < 2; ++v) {
        if constexpr (!P::PLAIN_SCORE) s[v] = P::score(call, row[r], col[v], s[v] * scale, kv + v * WIDTH);
        if constexpr (P::MASKED)
          if (kind == PARTIAL) s[v] = select(P::mask(call, row[r], col[v], kv + v * WIDTH), s[v], none);
        if (edge) s[v] = select(inside[v], s[v], none);
        store(to + v * WIDTH, s[v]);
        peak[r] = maximum(peak[r], s[v]);
      }
    }
  }

  // scores[:, at : at + PANEL] = score function of Q K^T for the panel of keys at `kv`; for a half that attends to nothing
  // there, only what lies between keys that it does attend to.
  void score_panel(const Call& call, const word* panel, int kv, int at, Kinds kinds, const Stretch (&stretch)[2]) {
    for (int first = 0, end; first < padded; first = end) {
      const Class kind = kinds.half[first / HALF];
      end = kinds.half[0] == kinds.half[1] ? padded : min_int(padded, first + HALF);
      if (kind == EMPTY) {
        if (at > stretch[first / HALF].from && at < stretch[first / HALF].until) hide(at, first, end);
        continue;
      }
      const bool finished = P::PLAIN_SCORE && kind == FULL && kv + PANEL <= extent.kv_len;
      int r = first;
      for (; r + MR <= end; r += MR) {
        fetch_next<K::D_WORDS * PANEL>(panel, r);
        score_block<MR>(panel, r, at, finished);
      }
      if (MR > 4 && r < end) score_block<4>(panel, r, at, finished);
      if (!finished) finish_panel(call, kv, at, kind, first, end);
    }
  }
  void hide(int at, int first, int end) {
    for (int r = first; r < end; ++r)
      for (int v = 0; v < PANEL; v += WIDTH) store(score(r, at) + v, splat(-__builtin_inff()));
  }

  // Turns a row of scores into weights relative to its running maximum, and rounds them to what the product takes.
  void weigh_row(const Call& call, int r, int kv, Stretch stretch) {
    const float before = top[r], factor = unit * Exp::UNIT, found = in_order(splat(reduce_max(peak[r])) * factor)[0], now = before > found ? before : found;
    const float base = now == -__builtin_inff() ? 0.0f : now;
    vf total{};
    alignas(64) float keep[P::DROPOUT ? LONGEST + 4 * WIDTH : 1];
    if constexpr (P::DROPOUT) keep_row(call, extent.b, head[r], position[r], kv, stretch.until, keep);
    for (int i = stretch.from; i < stretch.until; i += PANEL) {
      const float* s = score(r, i);
      vf p0 = Exp::of(in_order(load<vf>(s) * factor) - base), p1 = Exp::of(in_order(load<vf>(s + WIDTH) * factor) - base);
      total += p0 + p1;
      if constexpr (P::DROPOUT) p0 *= load<vf>(keep + i), p1 *= load<vf>(keep + i + WIDTH);
#ifdef FOCI_PAIRS
      if constexpr (E::PAIR == 2) {
        store(score(r, i / 2), round_both(p0, p1));
        continue;
      }
#endif
      store(score(r, i), p0);
      store(score(r, i) + WIDTH, p1);
    }
    shrink[r] = before == now ? 1.0f : Exp::of(splat(before - base))[0];
    sum[r] = sum[r] * shrink[r] + reduce_sum(total);
    top[r] = now;
  }

  // Adds the infinities and NaN among the values of a run to the rows that attend to them.
  __attribute__((noinline)) void add_not_finite(const Call& call, int kv, int keys, const Stretch (&stretch)[2]) {
    for (int i = 0; i < min_int(keys, extent.kv_len - kv); ++i)
      for (int d = 0; d < P::DV; ++d) {
        const float x = widen(values[(kv + i) * call.value.row + d * call.value.column]);
        if (is_finite(x)) continue;
        for (int r = 0; r < rows; ++r)
          if (i >= stretch[r / HALF].from && i < stretch[r / HALF].until && *score(r, i) != -__builtin_inff()) out[r * K::O_ROW + d] += x;
      }
  }

  template <int N, int VECTORS> FOCI_INLINE void add_block(const word* values, int r0, int panel, int from, int until, bool first) {
    vf acc[N][VECTORS];
    multiply_rows<E, S_PANEL>(acc, (const word*)scores + r0 * PANEL, values, from / E::PAIR, until / E::PAIR);
    FOCI_UNROLL for (int r = 0; r < N; ++r)
      FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) {
        float* o = out + (r0 + r) * K::O_ROW + panel * PANEL + v * WIDTH;
        store(o, first ? load<vf>(o) * shrink[r0 + r] + acc[r][v] : load<vf>(o) + acc[r][v]);
      }
  }
  // out += weights V for the keys `from` to `until` of the run, as far as rows attend to them.
  template <int VECTORS> void add_panel(const word* values, int panel, int from, int until, const Stretch (&stretch)[2]) {
    for (int half = 0; half * HALF < padded; ++half) {
      const int begin = max_int(from, stretch[half].from), stop = min_int(until, stretch[half].until), end = min_int(padded, (half + 1) * HALF);
      if (begin >= stop) continue;
      const bool first = begin == stretch[half].from;
      int r = half * HALF;
      for (; r + MR <= end; r += MR) {
        fetch_next<BLOCK / E::PAIR * PANEL>(values + begin / E::PAIR * PANEL, r);
        add_block<MR, VECTORS>(values, r, panel, begin, stop, first);
      }
      if (MR > 4 && r < end) add_block<4, VECTORS>(values, r, panel, begin, stop, first);
    }
  }

  // Meets a run of `keys` keys (whole panels, at most LONGEST) from `kv` on, whose panels begin at `origin`.
  void meet(const Call& call, const Panels<P>& panels, int origin, int kv, int keys, const Kinds* kinds) {
    Stretch stretch[2] = {{0, keys}, {0, keys}};
    if constexpr (P::MASKED)
      for (int half = 0; half < 2; ++half) {
        Stretch& s = stretch[half];
        while (s.from < s.until && kinds[s.from / PANEL].half[half] == EMPTY) s.from += PANEL;
        while (s.from < s.until && kinds[s.until / PANEL - 1].half[half] == EMPTY) s.until -= PANEL;
      }
    for (int r = 0; r < padded; ++r) peak[r] = splat(-__builtin_inff());
    for (int i = 0; i < keys; i += PANEL) {
      fetch_ahead(PANEL / 2);
      score_panel(call, panels.keys + (int64_t)(kv - origin + i) * K::D_WORDS, kv + i, i, kinds[i / PANEL], stretch);
    }
    if constexpr (K::EXCLUDES)
      if (*panels.not_finite) add_not_finite(call, kv, keys, stretch);
    const word* first_values = panels.values + (int64_t)(kv - origin) / E::PAIR * PANEL;
    for (int r = 0; r < padded; ++r) {
      if (r % MR == 0 && padded >= MR) fetch_next<BLOCK / E::PAIR * PANEL>(first_values - BLOCK / E::PAIR * PANEL, r);
      if (stretch[r / HALF].from < stretch[r / HALF].until) weigh_row(call, r, kv, stretch[r / HALF]);
    }
    for (int i = 0; i < keys; i += BLOCK) {
      const int until = min_int(i + BLOCK, keys);
      for (int panel = 0; panel < K::V_PANELS; ++panel) {
        fetch_ahead(BLOCK / 2 / K::V_PANELS + 1);
        const word* values = first_values + panel * panels.values_stride;
        if constexpr (K::V_VECTORS % 2) {
          if (panel == K::V_PANELS - 1) {
            add_panel<1>(values, panel, i, until, stretch);
            continue;
          }
        }
        add_panel<2>(values, panel, i, until, stretch);
      }
    }
  }

  // Calls `each(kv, keys, kinds)` for runs of keys in which something is attended to: KEYS long, the last of neighbours up to
  // LONGEST, since a short run costs nearly as much as a long one.
  template <class F> FOCI_INLINE void visit(const Call& call, int from, int until, F each) {
    constexpr int MOST = (KEYS + LONGEST) / PANEL;
    Kinds kinds[MOST];  // of the panels that are still to be met
    until = min_int(until, extent.kv_len);
    if constexpr (!P::MASKED) {
      for (int i = 0; i < LONGEST / PANEL; ++i) kinds[i] = {FULL, FULL};
      for (int kv = from, keys; kv < until; kv += keys) {
        keys = until - kv > LONGEST ? KEYS : round_up(until - kv, PANEL);
        each(kv, keys, (const Kinds*)kinds);
      }
      return;
    }
    int waiting = 0;
    const auto emit = [&](int end, bool last) {
      while (waiting == MOST || (last && waiting > 0)) {
        const int count = waiting > LONGEST / PANEL ? KEYS / PANEL : waiting;
        each(end - waiting * PANEL, count * PANEL, (const Kinds*)kinds);
        waiting -= count;
        for (int i = 0; i < waiting; ++i) kinds[i] = kinds[i + count];
      }
    };
    for (int chunk = from; chunk < until; chunk += KEYS) {
      const int end = min_int(chunk + KEYS, until);
      const Class all = classify(call, chunk, end);
      if (all == EMPTY) {
        emit(chunk, true);
        continue;
      }
      for (int kv = chunk; kv < end; kv += PANEL) {
        const Kinds kind = kinds_of(call, kv, all == FULL || end - chunk <= PANEL ? all : classify(call, kv, min_int(end, kv + PANEL)));
        if (kind.is_empty()) {
          emit(kv, true);
        } else {
          kinds[waiting++] = kind;
          emit(kv + PANEL, false);
        }
      }
    }
    emit(from + round_up(until - from, PANEL), true);
  }

  void attend(const Call& call, const Panels<P>& panels, int origin, int from, int until) {
    visit(call, from, until, [&](int kv, int keys, const Kinds* kinds) { meet(call, panels, origin, kv, keys, kinds); });
  }

  void finish(const Call& call, const Sequence& s) {
    typedef typename K::T T;
    for (int r = 0; r < rows; ++r) {
      T* to = call.out.at<T>(s.batch, head[r], s.q_start + position[r]);
      const bool none = top[r] == -__builtin_inff() && sum[r] == 0;
      const float factor = none ? 0.0f : (P::DROPOUT ? (float)call.keep_scale : 1.0f) / sum[r];
      float* o = out + r * K::O_ROW;
      if (call.out.column == 1) {
        int d = 0;
        for (; d + WIDTH <= P::DV; d += WIDTH) narrow(to + d, load<vf>(o + d) * factor);
        for (; d < P::DV; ++d) narrow(to + d, o[d] * factor);
      } else {
        for (int d = 0; d < P::DV; ++d) narrow(to + d * call.out.column, o[d] * factor);
      }
      const int64_t at = row_offset(call, s, head[r]) + position[r];
      const float largest = top[r] / Exp::UNIT;
      call.lse[at] = none ? -__builtin_inff() : largest + __builtin_logf(sum[r]);
      if (call.row_max) call.row_max[at] = none ? -__builtin_inff() : largest;
    }
  }
};

// ---- schedules ------------------------------------------------------------------------------------------------------------

// Part of one kv head's rows, or of its keys: one task.
struct Task {
  int b, hkv;
  int64_t first;   // first row of the group, or the index of the split
  int64_t panels;  // where the sequence's packed keys begin, in keys of one head
};

// Sequences by falling power of two of their length, so that the heavy ones start first.
inline int order_sequences(const Call& call, int* order) {
  int count = 0;
  if (!call.cu_q) {
    for (int b = 0; b < call.batch; ++b) order[count++] = b;
    return count;
  }
  for (int bits = 32; bits >= 0; --bits)
    for (int b = 0; b < call.batch; ++b) {
      const int length = sequence(call, b).kv_len;
      if ((length ? 32 - __builtin_clz((unsigned)length) : 0) == bits) order[count++] = b;
    }
  return count;
}

// Points the tile to the keys and values from `from` on, if they lie row by row.
template <class P> void look_ahead(const Call& call, const Sequence& s, int hkv, int from, int until, ForwardTile<P>& tile) {
  typedef typename P::Storage T;
  if (call.key.column != 1 || call.value.column != 1) return;
  tile.ahead.key = (const char*)call.key.at<T>(s.batch, hkv, s.kv_start + from), tile.ahead.value = (const char*)call.value.at<T>(s.batch, hkv, s.kv_start + from);
  tile.ahead.key_row = call.key.row * (int64_t)sizeof(T), tile.ahead.value_row = call.value.row * (int64_t)sizeof(T);
  tile.ahead.rows = max_int(0, until - from);
}

// Every task packs its own keys, and fetches those of the next meanwhile: many small problems.
template <class P> int forward_small(const Call& call) {
  typedef Packing<P> K;
  const int64_t heads = call.batch * call.kv_heads, group = call.q_heads / call.kv_heads;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads) if (heads > 1)
  {
    const Buffer tile_memory(sizeof(ForwardTile<P>)), words((int64_t)KEYS * (K::D_WORDS + K::V_PANELS * PANEL) * sizeof(typename K::word));
    ForwardTile<P>& tile = *(ForwardTile<P>*)tile_memory.data;
    int not_finite = 0;
    const Panels<P> panels = {(typename K::word*)words.data, (typename K::word*)words.data + (int64_t)KEYS * K::D_WORDS, (int64_t)KEYS / K::E::PAIR * PANEL, &not_finite};
    const bool ready = tile_memory.data && words.data;
    if (!ready) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1 + heads / (16 * call.threads)) nowait
    for (int64_t i = 0; i < heads; ++i) {
      const Sequence s = sequence(call, (int)(i / call.kv_heads));
      const int hkv = (int)(i % call.kv_heads);
      if (!ready || s.q_len <= 0) continue;
      not_finite = 0;
      pack_keys<P>(call, s, hkv, panels, 0, s.kv_len);
      for (int64_t first = 0; first < group * s.q_len; first += ROWS) {
        tile.begin(call, s, hkv, first, (int)(group * s.q_len - first < ROWS ? group * s.q_len - first : ROWS));
        if (i + 1 < heads) {  // a tile's share of them
          const Sequence next = sequence(call, (int)((i + 1) / call.kv_heads));
          const int tiles = (int)((group * s.q_len + ROWS - 1) / ROWS), share = (next.kv_len + tiles - 1) / tiles, at = (int)(first / ROWS) * share;
          look_ahead<P>(call, next, (int)((i + 1) % call.kv_heads), min_int(at, next.kv_len), min_int(at + share, next.kv_len), tile);
        }
        tile.attend(call, panels, 0, 0, s.kv_len);
        tile.finish(call, s);
      }
    }
  }
  return status;
}

// Keys are packed once for all, then every task takes a tile of rows of one head.
template <class P> int forward_large(const Call& call) {
  typedef Packing<P> K;
  typedef typename K::word word;
  const int64_t group = call.q_heads / call.kv_heads;
  const Buffer order_memory(call.batch * sizeof(int)), base_memory((call.batch + 1) * sizeof(int64_t) * 2), flags(call.batch * call.kv_heads * sizeof(int));
  if (!order_memory.data || !base_memory.data || !flags.data) return OUT_OF_MEMORY;
  int *order = (int*)order_memory.data, *not_finite = (int*)flags.data;
  for (int64_t i = 0; i < call.batch * call.kv_heads; ++i) not_finite[i] = 0;
  int64_t *base = (int64_t*)base_memory.data, *first_task = base + call.batch + 1;
  const int sequences = order_sequences(call, order);
  int64_t keys = 0, tasks = 0;
  for (int i = 0; i < sequences; ++i) {
    const Sequence s = sequence(call, order[i]);
    base[i] = keys;
    first_task[i] = tasks;
    keys += round_up(s.kv_len, PANEL);
    tasks += (s.q_len + ROWS - 1) / ROWS * call.q_heads;
  }
  base[sequences] = keys;
  first_task[sequences] = tasks;
  const Buffer packed(keys * call.kv_heads * (K::D_WORDS + K::V_PANELS * PANEL / K::E::PAIR) * (int64_t)sizeof(word));
  if (!packed.data) return OUT_OF_MEMORY;
  word *all_keys = (word*)packed.data, *all_values = all_keys + keys * call.kv_heads * K::D_WORDS;
  const auto panels_of = [&](int i, int hkv) {
    const int64_t length = base[i + 1] - base[i], start = base[i] * call.kv_heads + length * hkv;
    return Panels<P>{all_keys + start * K::D_WORDS, all_values + start / K::E::PAIR * PANEL * K::V_PANELS, length / K::E::PAIR * PANEL, not_finite + i * call.kv_heads + hkv};
  };
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads)
  {
    const Buffer tile_memory(sizeof(ForwardTile<P>));
    ForwardTile<P>& tile = *(ForwardTile<P>*)tile_memory.data;
    if (!tile_memory.data) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < sequences * call.kv_heads * 8; ++part) {  // eighths of a head
      const int i = (int)(part / (8 * call.kv_heads)), hkv = (int)(part / 8 % call.kv_heads);
      const Sequence s = sequence(call, order[i]);
      const int length = (int)(base[i + 1] - base[i]), step = round_up((length + 7) / 8, PANEL), from = step * (int)(part % 8);
      if (from >= length) continue;
      Panels<P> to = panels_of(i, hkv);
      to.keys += (int64_t)from * K::D_WORDS;
      to.values += (int64_t)from / K::E::PAIR * PANEL;
      pack_keys<P>(call, s, hkv, to, from, min_int(from + step, length));
    }
    int i = 0;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < tasks; ++task) {
      if (!tile_memory.data) continue;
      while (task >= first_task[i + 1]) ++i;
      const Sequence s = sequence(call, order[i]);
      const int64_t tiles = (s.q_len + ROWS - 1) / ROWS, local = task - first_task[i];
      const int h = (int)(local / tiles), hkv = (int)(h / group), q = (int)(tiles - 1 - local % tiles) * ROWS;  // the last rows see most keys
      tile.begin(call, s, hkv, (h % group) * (int64_t)s.q_len + q, min_int(ROWS, s.q_len - q));
      tile.attend(call, panels_of(i, hkv), 0, 0, s.kv_len);
      tile.finish(call, s);
    }
  }
  return status;
}

}  // namespace foci
