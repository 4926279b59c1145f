// The forward pass: one pass over the keys with a running softmax (Dao et al., FlashAttention, 2022; Milakov and
// Gimelshein, online softmax, 2018).
//
// `P` is the generated plan: storage type, head dims, and the score and mask functions. A tile holds up to 64 query rows
// and meets up to 512 keys at a time: scores, then row by row the softmax, then the product with V in blocks of 128 keys,
// each summed from zero before it is added to the output, which keeps the rounding error of long rows small. Scores are
// rounded before their maximum is taken off, so that the largest weight of a row is exactly 1 however large its score, and
// the backward, which subtracts the logsumexp from the same rounded score, finds the same weight.
#pragma once
#include "dropout.h"
#include "functions.h"
#include "pack.h"
#include "tasks.h"

namespace foci {

constexpr int ROWS = 64, KEYS = 512, BLOCK = 128;

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
};

// Packed keys and values of one kv head: K as panels of columns [panel][word][PANEL], V as [panel][key / PAIR][PANEL].
template <class P> struct Panels {
  typedef typename Packing<P>::word word;
  word *keys, *values;
  int64_t values_stride;  // words from one panel of V to the next
};

template <class P> void pack_keys(const Call& call, const Sequence& s, int hkv, const Panels<P>& to, int from, int until) {
  typedef Packing<P> K;
  typedef typename K::T T;
  for (int kv = from; kv < until; kv += PANEL)
    pack_columns<typename K::E>(to.keys + (int64_t)(kv - from) * K::D_WORDS, call.key.at<T>(s.batch, hkv, s.kv_start + kv), call.key.row, call.key.column,
                                min_int(PANEL, s.kv_len - kv), P::D);
  pack_rows<typename K::E>(to.values, to.values_stride, call.value.at<T>(s.batch, hkv, s.kv_start + from), call.value.row, call.value.column,
                           min_int(until, s.kv_len) - from, round_up(until - from, PANEL), P::DV);
}

template <class P> struct ForwardTile {
  typedef Packing<P> K;
  typedef typename K::E E;
  typedef typename K::word word;
  typedef typename K::Exp Exp;
  // Words from one panel to the next: no powers of two, lest the panels of a row share cache sets.
  static constexpr int Q_PANEL = (ROWS + MR) * PANEL, S_PANEL = (ROWS + 1) * PANEL;

  alignas(64) word q[K::D_CHUNKS * Q_PANEL];
  alignas(64) float scores[KEYS / PANEL * S_PANEL];  // panels; then, in place, the weights
  alignas(64) float out[ROWS * K::O_ROW];
  vf peak[ROWS];
  float top[ROWS], sum[ROWS], shrink[ROWS];  // top: the largest score, in units of the exponential
  typename P::Row row[ROWS];
  int head[ROWS], position[ROWS];
  int rows, padded;  // padded: rows of whole micro-kernel blocks
  float unit;        // what is left to multiply the products by; never negative
  Rectangle extent;
  struct { const char *key, *value; int64_t key_row, value_row; int rows; } ahead;  // what comes next in memory, if it is to be fetched

  // Takes rows `first` to `first + count` of the kv head's group, counted head by head.
  void begin(const Call& call, const Sequence& s, int hkv, int64_t first, int count) {
    typedef typename K::T T;
    const int group = (int)(call.q_heads / call.kv_heads);
    rows = count;
    ahead.rows = 0;
    unit = P::PLAIN_SCORE && call.scale != 0 ? __builtin_fabsf((float)call.scale) : 1.0f;
    padded = round_up(count, count <= 4 ? 4 : MR);
    for (int r = 0; r < padded; ++r) {
      const int64_t i = first + min_int(r, count - 1);
      head[r] = hkv * group + (int)(i / s.q_len);
      position[r] = (int)(i % s.q_len);
      const T* from = call.query.at<T>(s.batch, head[r], s.q_start + position[r]);
      fetch_row(from + AHEAD * call.query.row, call.query.column, P::D);
      pack_row<E>(q + r * PANEL, Q_PANEL, from, call.query.column, P::D, K::D_WORDS);
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
    const bool one_head = head[0] == head[rows - 1];
    extent = {s.b, head[0], head[rows - 1], one_head ? position[0] : 0, one_head ? position[rows - 1] : s.q_len - 1, 0, 0, s.q_len, s.kv_len};
    for (int i = 0; i < padded * K::O_ROW; ++i) out[i] = 0;
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

  Class classify(const Call& call, int from, int until) const {
    Rectangle r = extent;
    r.kv0 = from;
    r.kv1 = min_int(until, r.kv_len) - 1;
    return P::classify(call, r);
  }

  FOCI_INLINE float* score(int r, int key) { return scores + key / PANEL * S_PANEL + r * PANEL + key % PANEL; }

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
  void finish_panel(const Call& call, int kv, int at, Class kind) {
    const typename P::Col col[2] = {P::col(call, extent.b, kv, extent.q_len, extent.kv_len), P::col(call, extent.b, kv + WIDTH, extent.q_len, extent.kv_len)};
    const vf none = splat(-__builtin_inff());
    const float scale = (float)call.scale;
    const bool edge = kv + PANEL > extent.kv_len;
    const vb inside[2] = {{iota() + kv < (int)extent.kv_len}, {iota() + (kv + WIDTH) < (int)extent.kv_len}};
    for (int r = 0; r < padded; ++r) {
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

  // scores[:, at : at + PANEL] = score function of Q K^T for the panel of keys at `kv`.
  void score_panel(const Call& call, const word* panel, int kv, int at, Class kind) {
    const bool finished = P::PLAIN_SCORE && kind == FULL && kv + PANEL <= extent.kv_len;
    int r = 0;
    for (; r + MR <= padded; r += MR) score_block<MR>(panel, r, at, finished);
    if (MR > 4 && r < padded) score_block<4>(panel, r, at, finished);
    if (!finished) finish_panel(call, kv, at, kind);
  }

  // Turns a row of scores into weights relative to its running maximum, and rounds them to what the product takes.
  void weigh_row(const Call& call, int r, int kv, int keys) {
    const float before = top[r], factor = unit * Exp::UNIT, found = in_order(splat(reduce_max(peak[r])) * factor)[0], now = before > found ? before : found;
    const float base = now == -__builtin_inff() ? 0.0f : now;
    vf total{};
    alignas(64) float keep[P::DROPOUT ? KEYS + 4 * WIDTH : 1];
    if constexpr (P::DROPOUT) keep_row(call, extent.b, head[r], position[r], kv, keys, keep);
    for (int i = 0; i < keys; i += PANEL) {
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

  template <int N, int VECTORS> FOCI_INLINE void add_block(const word* values, int r0, int panel, int at, int depth, bool first) {
    vf acc[N][VECTORS];
    multiply_rows<E, S_PANEL>(acc, (const word*)scores + r0 * PANEL, values - at * PANEL, at, at + depth);
    FOCI_UNROLL for (int r = 0; r < N; ++r)
      FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) {
        float* o = out + (r0 + r) * K::O_ROW + panel * PANEL + v * WIDTH;
        store(o, first ? load<vf>(o) * shrink[r0 + r] + acc[r][v] : load<vf>(o) + acc[r][v]);
      }
  }
  template <int VECTORS> void add_panel(const word* values, int panel, int at, int depth, bool first) {
    int r = 0;
    for (; r + MR <= padded; r += MR) add_block<MR, VECTORS>(values, r, panel, at, depth, first);
    if (MR > 4 && r < padded) add_block<4, VECTORS>(values, r, panel, at, depth, first);
  }

  // Meets `keys` keys (whole panels, at most KEYS) from `kv` on, whose panels begin at `origin`.
  void meet(const Call& call, const Panels<P>& panels, int origin, int kv, int keys, const Class* kind) {
    for (int r = 0; r < padded; ++r) peak[r] = splat(-__builtin_inff());
    for (int i = 0; i < keys; i += PANEL) {
      fetch_ahead(PANEL / 2);
      score_panel(call, panels.keys + (int64_t)(kv - origin + i) * K::D_WORDS, kv + i, i, kind[i / PANEL]);
    }
    for (int r = 0; r < padded; ++r) weigh_row(call, r, kv, keys);
    for (int i = 0; i < keys; i += BLOCK) {
      const int depth = min_int(BLOCK, keys - i) / E::PAIR;
      for (int panel = 0; panel < K::V_PANELS; ++panel) {
        fetch_ahead(BLOCK / 2 / K::V_PANELS + 1);
        const word* values = panels.values + panel * panels.values_stride + (int64_t)(kv - origin + i) / E::PAIR * PANEL;
        if constexpr (K::V_VECTORS % 2) {
          if (panel == K::V_PANELS - 1) {
            add_panel<1>(values, panel, i / E::PAIR, depth, i == 0);
            continue;
          }
        }
        add_panel<2>(values, panel, i / E::PAIR, depth, i == 0);
      }
    }
  }

  // Calls `each(kv, keys, kinds)` for the runs of keys, at most KEYS long, in which something is attended to.
  template <class F> FOCI_INLINE void visit(const Call& call, int from, int until, F each) {
    until = min_int(until, extent.kv_len);
    for (int kv = from; kv < until; kv += KEYS) {
      const int end = min_int(kv + KEYS, until), count = (end - kv + PANEL - 1) / PANEL;
      Class kind[KEYS / PANEL];
      const Class all = P::MASKED ? classify(call, kv, end) : FULL;
      if (all == EMPTY) continue;
      for (int i = 0; i < count; ++i) kind[i] = all == FULL || count == 1 ? all : classify(call, kv + i * PANEL, min_int(end, kv + (i + 1) * PANEL));
      for (int i = 0; i < count;) {
        if (kind[i] == EMPTY) { ++i; continue; }
        int last = i;
        while (last < count && kind[last] != EMPTY) ++last;
        each(kv + i * PANEL, (last - i) * PANEL, (const Class*)kind + i);
        i = last;
      }
    }
  }

  void attend(const Call& call, const Panels<P>& panels, int origin, int from, int until) {
    visit(call, from, until, [&](int kv, int keys, const Class* kinds) { meet(call, panels, origin, kv, keys, kinds); });
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

// Every task packs its own keys: many small problems.
template <class P> int forward_small(const Call& call) {
  typedef Packing<P> K;
  const int64_t heads = call.batch * call.kv_heads, group = call.q_heads / call.kv_heads;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads) if (heads > 1)
  {
    const Buffer tile_memory(sizeof(ForwardTile<P>)), words((int64_t)KEYS * (K::D_WORDS + K::V_PANELS * PANEL) * sizeof(typename K::word));
    ForwardTile<P>& tile = *(ForwardTile<P>*)tile_memory.data;
    const Panels<P> panels = {(typename K::word*)words.data, (typename K::word*)words.data + (int64_t)KEYS * K::D_WORDS, (int64_t)KEYS / K::E::PAIR * PANEL};
    const bool ready = tile_memory.data && words.data;
    if (!ready) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1 + heads / (16 * call.threads)) nowait
    for (int64_t i = 0; i < heads; ++i) {
      const Sequence s = sequence(call, (int)(i / call.kv_heads));
      const int hkv = (int)(i % call.kv_heads);
      if (!ready || s.q_len <= 0) continue;
      pack_keys<P>(call, s, hkv, panels, 0, s.kv_len);
      for (int64_t first = 0; first < group * s.q_len; first += ROWS) {
        tile.begin(call, s, hkv, first, (int)(group * s.q_len - first < ROWS ? group * s.q_len - first : ROWS));
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
  const Buffer order_memory(call.batch * sizeof(int)), base_memory((call.batch + 1) * sizeof(int64_t) * 2);
  if (!order_memory.data || !base_memory.data) return OUT_OF_MEMORY;
  int* order = (int*)order_memory.data;
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
    return Panels<P>{all_keys + start * K::D_WORDS, all_values + start / K::E::PAIR * PANEL * K::V_PANELS, length / K::E::PAIR * PANEL};
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
