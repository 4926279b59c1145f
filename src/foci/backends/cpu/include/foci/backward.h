// The backward pass: five products per tile (Dao et al., FlashAttention-2, 2023), the score's derivative in between.
//
// A task owns a part of one kv head's keys: it meets every query row, so dK and dV need no one else. dQ of each part is
// summed privately in float32 and the parts are added in a fixed order: no atomics, the same bits every time.
//
// An excluded position has weight 0 and gradient 0, whatever key, value, query and gradient of the output hold there. So the products
// that sum over positions take those operands with zeros for what is not finite: where the position is attended to, the row's
// logsumexp or delta holds NaN. Only gradients of values see neither, and get what is not finite in the gradient of the output by itself.
#pragma once
#include "forward.h"

namespace foci {

template <class P> struct Gradient : Packing<P> {
  typedef Packing<P> K;
  typedef typename K::E E;
  typedef typename K::word word;
  static constexpr int KEYS_TILE = P::D + P::DV <= 512 ? 128 : 64;
  static constexpr int DV_WORDS = (P::DV + E::PAIR - 1) / E::PAIR;
  static constexpr int DV_CHUNKS = (DV_WORDS + PANEL - 1) / PANEL;
  static constexpr int D_PANELS = (P::D + PANEL - 1) / PANEL, D_VECTORS = (P::D + WIDTH - 1) / WIDTH;
  static constexpr int DQ_ROW = D_VECTORS * WIDTH;  // words of a row of dQ
  static constexpr bool ONE_FORM = E::PAIR == 1;  // depth along rows and along columns: the same words
  static constexpr int Q_PANEL = (ROWS + MR) * PANEL;  // words of a panel by row; not a power of two
  static constexpr int W_PANEL = ONE_FORM ? Q_PANEL : ROWS / E::PAIR * PANEL;  // and by pairs of rows
  static constexpr bool SCORES = P::GRAD_Q || P::GRAD_K || P::SITES > 0;
};

// Query rows as all products of the backward want them, made once per head and tile.
template <class P> struct QueryTile {
  typedef Gradient<P> G;
  typedef typename G::word word;
  alignas(64) word query[G::D_CHUNKS * G::Q_PANEL], grad_out[G::DV_CHUNKS * G::Q_PANEL];  // words along the columns
  alignas(64) word query_pairs[G::ONE_FORM ? 1 : G::D_PANELS * G::W_PANEL], grad_out_pairs[G::ONE_FORM ? 1 : G::V_PANELS * G::W_PANEL];  // along the rows
  float lse[ROWS], delta[ROWS];  // lse: in units of the exponential, +inf for rows without weights
  typename P::Row row[ROWS];
  int rows;
  bool undefined, not_finite;  // whether a logsumexp is NaN; whether a gradient of the output is infinite or NaN

  void pack(const Call& call, const Sequence& s, int h, int q0) {
    typedef typename G::T T;
    rows = min_int(ROWS, s.q_len - q0);
    undefined = not_finite = false;
    const T* q = call.query.at<T>(s.batch, h, s.q_start + q0);
    const T* go = call.grad_out.at<T>(s.batch, h, s.q_start + q0);
    const int64_t at = row_offset(call, s, h) + q0;
    const bool query_transposed = is_transposed(call.query.row, call.query.column), grad_transposed = is_transposed(call.grad_out.row, call.grad_out.column);
    if (query_transposed) pack_transposed<typename G::E>(query, G::Q_PANEL, q, call.query.column, rows, ROWS, P::D, G::D_WORDS);
    if (grad_transposed) pack_transposed<typename G::E>(grad_out, G::Q_PANEL, go, call.grad_out.column, rows, ROWS, P::DV, G::DV_WORDS);
    for (int r = 0; r < ROWS; ++r) {
      const bool real = r < rows;
      const int i = real ? r : rows - 1;
      row[r] = P::row(call, s.b, h, q0 + i, s.q_len, s.kv_len);
      if (!query_transposed) pack_row<typename G::E>(query + r * PANEL, G::Q_PANEL, q + i * call.query.row, call.query.column, P::D, G::D_WORDS);
      if (!grad_transposed) pack_row<typename G::E>(grad_out + r * PANEL, G::Q_PANEL, go + i * call.grad_out.row, call.grad_out.column, P::DV, G::DV_WORDS);
      const T* o = call.out.at<T>(s.batch, h, s.q_start + q0 + i);
      vf sum{};
      if (grad_transposed)
        for (int d = 0; d < G::DV_WORDS; d += WIDTH)
          sum = G::E::multiply_add(sum, load<typename G::E::vector>(grad_out + d / PANEL * G::Q_PANEL + r * PANEL + d % PANEL),
                                   (typename G::E::vector)row_words(typename G::E(), o, call.out.column, d, P::DV));
      else
        for (int d = 0; d < P::DV; d += WIDTH) sum += row_words(Single(), o, call.out.column, d, P::DV) * row_words(Single(), go + i * call.grad_out.row, call.grad_out.column, d, P::DV);
      delta[r] = reduce_sum(sum) - (call.grad_lse ? call.grad_lse[at + i] : 0.0f);
      const float l = call.lse[at + i];
      lse[r] = real && l != -__builtin_inff() ? l * G::Exp::UNIT : __builtin_inff();
      if (l == -__builtin_inff()) delta[r] = 0;
      undefined |= l != l;
    }
    if constexpr (P::GRAD_K && !G::ONE_FORM) pack_rows<typename G::E>(query_pairs, G::W_PANEL, q, call.query.row, call.query.column, rows, ROWS, P::D);
    if constexpr (P::GRAD_V && !G::ONE_FORM) pack_rows<typename G::E>(grad_out_pairs, G::W_PANEL, go, call.grad_out.row, call.grad_out.column, rows, ROWS, P::DV);
    if constexpr (G::EXCLUDES && P::GRAD_K) clean_rows<typename G::E>(G::ONE_FORM ? query : query_pairs, G::W_PANEL, ROWS / G::E::PAIR, P::D);
    if constexpr (G::EXCLUDES && P::GRAD_V) not_finite = clean_rows<typename G::E>(G::ONE_FORM ? grad_out : grad_out_pairs, G::W_PANEL, ROWS / G::E::PAIR, P::DV);
  }
  const word* query_rows() const { return G::ONE_FORM ? query : query_pairs; }
  const word* grad_out_rows() const { return G::ONE_FORM ? grad_out : grad_out_pairs; }
};

template <class P> struct BackwardTile {
  typedef Gradient<P> G;
  typedef typename G::E E;
  typedef typename G::word word;
  static constexpr int N = G::KEYS_TILE;

  alignas(64) word key_columns[N * G::D_WORDS], value_columns[N * G::DV_WORDS];
  alignas(64) word key_rows[G::D_PANELS * N / E::PAIR * PANEL];
  alignas(64) float grad_key[N * G::DQ_ROW], grad_value[N * G::O_ROW];
  alignas(64) word weights[N / PANEL * G::W_PANEL];     // panels of keys, by row or by pairs of rows
  alignas(64) word grad_pairs[N / PANEL * G::W_PANEL];  // score gradients laid out alike
  alignas(64) word grad_words[G::ONE_FORM ? 1 : (N / E::PAIR + PANEL - 1) / PANEL * G::Q_PANEL];  // and by row, in pairs of keys
  alignas(64) float panel[G::ONE_FORM ? 1 : ROWS * PANEL], slope[ROWS * PANEL], raw[ROWS * PANEL], g[ROWS * PANEL];
  alignas(64) float keep[P::DROPOUT ? ROWS * (N + 4 * WIDTH) : 1];
  Run runs[P::SITES ? P::SITES * ROWS : 1];
  Sequence s;
  int kv, keys;  // the tile's first key, and how many it has
  const float* grad_columns;
  struct { const char* query; char* sums; } ahead;  // the tile of queries that comes next, and its dQ

  // Asks for a share of what comes next, so that memory is busy while products run.
  FOCI_INLINE void fetch_ahead() {
    constexpr int BLOCKS = N / PANEL * (ROWS / MR);  // a call for each
    constexpr int QUERY = ((int)sizeof(QueryTile<P>) / 64 + BLOCKS - 1) / BLOCKS, SUMS = P::GRAD_Q ? (ROWS * G::DQ_ROW / 16 + BLOCKS - 1) / BLOCKS : 0;
    FOCI_UNROLL for (int i = 0; i < QUERY; ++i) __builtin_prefetch(ahead.query + 64 * i, 0, 2);
    FOCI_UNROLL for (int i = 0; i < SUMS; ++i) __builtin_prefetch(ahead.sums + 64 * i, 1, 2);
    ahead.query += 64 * QUERY, ahead.sums += 64 * SUMS;
  }

  void begin(const Call& call, const Sequence& sequence, int hkv, int first) {
    typedef typename G::T T;
    s = sequence;
    kv = first;
    keys = min_int(N, s.kv_len - kv);
    const T *k = call.key.at<T>(s.batch, hkv, s.kv_start + kv), *v = call.value.at<T>(s.batch, hkv, s.kv_start + kv);
    for (int i = 0; i < keys; i += PANEL) {
      const int count = min_int(PANEL, keys - i);
      pack_columns<E>(key_columns + i * G::D_WORDS, k + i * call.key.row, call.key.row, call.key.column, count, P::D);
      if constexpr (G::SCORES) pack_columns<E>(value_columns + i * G::DV_WORDS, v + i * call.value.row, call.value.row, call.value.column, count, P::DV);
    }
    if constexpr (P::GRAD_Q) pack_rows<E>(key_rows, (int64_t)N / E::PAIR * PANEL, k, call.key.row, call.key.column, keys, round_up(keys, PANEL), P::D);
    if constexpr (G::EXCLUDES && P::GRAD_Q) clean_rows<E>(key_rows, (int64_t)N / E::PAIR * PANEL, round_up(keys, PANEL) / E::PAIR, P::D);
    for (int i = 0; i < N * G::DQ_ROW; ++i) grad_key[i] = 0;
    for (int i = 0; i < N * G::O_ROW; ++i) grad_value[i] = 0;
  }

  // The weights of the panel at `at` in float32: where they stay, if the products take them so.
  FOCI_INLINE float* weights_of(int at) { return G::ONE_FORM ? (float*)weights + at / PANEL * G::W_PANEL : panel; }
  FOCI_INLINE const word* grad_rows() const { return G::ONE_FORM ? grad_pairs : grad_words; }

  // ---- weights of one panel of keys ---------------------------------------------------------------------------------------

  FOCI_INLINE void score_block(const Call& call, const QueryTile<P>& t, int r0, int at, bool finished) {
    vf acc[MR][2];
    multiply_rows<E, G::Q_PANEL>(acc, t.query + r0 * PANEL, key_columns + at * G::D_WORDS, 0, G::D_WORDS);
    const float scale = (float)call.scale * (finished ? G::Exp::UNIT : 1.0f);
    float* p = weights_of(at);
    FOCI_UNROLL for (int r = 0; r < MR; ++r)
      FOCI_UNROLL for (int v = 0; v < 2; ++v) {
        vf x = in_order(acc[r][v] * scale);
        if (finished) x = G::Exp::of(at_most_zero(x - t.lse[r0 + r]));
        store(p + (r0 + r) * PANEL + v * WIDTH, x);
      }
  }

  // From scores to weights, in place, with the score function's slope and the score itself where they are needed.
  void finish_panel(const Call& call, const QueryTile<P>& t, int rows, int at, Class kind) {
    const int first = kv + at;
    const typename P::Col col[2] = {P::col(call, s.b, first, s.q_len, s.kv_len), P::col(call, s.b, first + WIDTH, s.q_len, s.kv_len)};
    const vb inside[2] = {{iota() + first < s.kv_len}, {iota() + (first + WIDTH) < s.kv_len}};
    const bool edge = at + PANEL > keys;
    float* p = weights_of(at);
    for (int r = 0; r < rows; ++r)
      FOCI_UNROLL for (int v = 0; v < 2; ++v) {
        const int i = r * PANEL + v * WIDTH;
        vf x = load<vf>(p + i);
        if constexpr (!P::PLAIN_SCORE) {
          vf d;
          if constexpr (P::SITES > 0) store(raw + i, x);
          x = P::derive(call, t.row[r], col[v], x, first + v * WIDTH, d);
          if constexpr (!P::UNIT_SLOPE) store(slope + i, d);
        }
        const vf score = x;
        x = G::Exp::of(at_most_zero(x * G::Exp::UNIT - t.lse[r]));
        if constexpr (!P::PLAIN_SCORE)
          if (t.undefined) x = score == -__builtin_inff() ? vf{} : x;
        if constexpr (P::MASKED)
          if (kind == PARTIAL) x = select(P::mask(call, t.row[r], col[v], first + v * WIDTH), x, vf{});
        if (edge) x = select(inside[v], x, vf{});
        store(p + i, x);
      }
  }

  // Stores rows r and r + 1 of weights (or of their gradients), for the product whose depth is the rows.
  FOCI_INLINE void store_pair(word* to, int r, int column, vf even, vf odd) {
#ifdef FOCI_PAIRS
    if constexpr (E::PAIR == 2) {
      store(to + r / 2 * PANEL + column, round_pairs(even, odd));
      return;
    }
#endif
    store(to + r * PANEL + column, even);
    store(to + (r + 1) * PANEL + column, odd);
  }

  FOCI_INLINE vf dropped(const Call& call, int r, int column, vf x) {
    if constexpr (P::DROPOUT) return x * load<vf>(keep + r * (N + 4 * WIDTH) + column) * (float)call.keep_scale;
    return x;
  }

  // Weights and score gradients of MR rows, where products read them.
  FOCI_INLINE void gradient_block(const Call& call, const QueryTile<P>& t, int r0, int at) {
    vf acc[MR][2];
    if constexpr (G::SCORES) multiply_rows<E, G::Q_PANEL>(acc, t.grad_out + r0 * PANEL, value_columns + at * G::DV_WORDS, 0, G::DV_WORDS);
    const float* p = weights_of(at);
    const int panel = at / PANEL * G::W_PANEL;
    FOCI_UNROLL for (int r = 0; r < MR; ++r)
      FOCI_UNROLL for (int v = 0; v < 2; ++v) {
        const int i = (r0 + r) * PANEL + v * WIDTH, column = at + v * WIDTH;
        const vf w = load<vf>(p + i);
        if constexpr (G::SCORES) {
          vf dp = dropped(call, r0 + r, column, acc[r][v]);
          if constexpr (P::COLUMN_SUMS)
            if (grad_columns) dp += column_gradients(column);
          vf ds = w * (dp - t.delta[r0 + r]);
          if constexpr (G::EXCLUDES) ds = w == 0.0f ? vf{} : ds;
          if constexpr (P::SITES > 0) store(g + i, ds);
          if constexpr (!P::UNIT_SLOPE) ds = w == 0.0f ? vf{} : ds * load<vf>(slope + i);  // which may be infinite
          acc[r][v] = ds;
        }
      }
    if constexpr (P::GRAD_V && !(G::ONE_FORM && !P::DROPOUT))
      FOCI_UNROLL for (int r = 0; r < MR; r += 2)
        FOCI_UNROLL for (int v = 0; v < 2; ++v) {
          const int i = (r0 + r) * PANEL + v * WIDTH, column = at + v * WIDTH;
          store_pair(weights + panel, r0 + r, v * WIDTH, dropped(call, r0 + r, column, load<vf>(p + i)), dropped(call, r0 + r + 1, column, load<vf>(p + i + PANEL)));
        }
    if constexpr (P::GRAD_K || (P::GRAD_Q && G::ONE_FORM))
      FOCI_UNROLL for (int r = 0; r < MR; r += 2)
        FOCI_UNROLL for (int v = 0; v < 2; ++v) store_pair(grad_pairs + panel, r0 + r, v * WIDTH, acc[r][v], acc[r + 1][v]);
#ifdef FOCI_PAIRS
    if constexpr (P::GRAD_Q && E::PAIR == 2)
      FOCI_UNROLL for (int r = 0; r < MR; ++r)
        store(grad_words + at / 2 / PANEL * G::Q_PANEL + (r0 + r) * PANEL + at / 2 % PANEL, round_both(acc[r][0], acc[r][1]));
#endif
  }

  FOCI_INLINE vf column_gradients(int column) {
    vf x{};
    for (int i = 0; i < WIDTH && column + i < keys; ++i) x[i] = grad_columns[column + i];
    return x;
  }

  void capture_panel(const Call& call, const QueryTile<P>& t, int at, float* const* sinks) {
    if constexpr (P::SITES > 0) {
      const int first = kv + at;
      const typename P::Col col[2] = {P::col(call, s.b, first, s.q_len, s.kv_len), P::col(call, s.b, first + WIDTH, s.q_len, s.kv_len)};
      for (int r = 0; r < t.rows; ++r)
        for (int v = 0; v < 2; ++v) {
          const int i = r * PANEL + v * WIDTH;
          P::capture_gradients(call, t.row[r], col[v], load<vf>(raw + i), load<vf>(g + i), first + v * WIDTH, sinks, runs + r * P::SITES);
        }
    }
  }

  // Adds the infinities and NaN among the gradients of the output to the gradients of the values that their rows attend to.
  __attribute__((noinline)) void add_not_finite(const Call& call, const QueryTile<P>& t, int h, int q0, int first, int last) {
    typedef typename G::T T;
    for (int r = 0; r < t.rows; ++r)
      for (int d = 0; d < P::DV; ++d) {
        const float x = widen(call.grad_out.at<T>(s.batch, h, s.q_start + q0 + r)[d * call.grad_out.column]);
        if (is_finite(x)) continue;
        for (int i = first; i < min_int(last, keys); ++i)
          if (has_weight(r, i)) grad_value[i * G::O_ROW + d] += x;
      }
  }
  FOCI_INLINE bool has_weight(int r, int column) const {
    const word w = weights[column / PANEL * G::W_PANEL + r / E::PAIR * PANEL + column % PANEL];
    if constexpr (G::ONE_FORM) return w != 0;
    else return (uint32_t)w >> 16 * (r & 1) & 0x7fff;
  }

  void clear_panel(int at) {
    for (int i = 0; i < G::W_PANEL; ++i) weights[at / PANEL * G::W_PANEL + i] = 0, grad_pairs[at / PANEL * G::W_PANEL + i] = 0;
    if constexpr (!G::ONE_FORM)
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < PANEL / E::PAIR; ++i) grad_words[at / E::PAIR / PANEL * G::Q_PANEL + r * PANEL + at / E::PAIR % PANEL + i] = 0;
  }

  // ---- products -------------------------------------------------------------------------------------------------------------

  // sums[rows from .. until, :] += A^T B, where A holds the tile's rows as depth.
  template <int COLUMNS_OF_B, int ROW> FOCI_INLINE static void add_rows(float* sums, const word* a, const word* panels, int from, int until, int depth) {
    constexpr int VECTORS = (COLUMNS_OF_B + WIDTH - 1) / WIDTH;
    for (int panel = 0; panel < (VECTORS + 1) / 2; ++panel)
      for (int r = from; r < until; r += MR) {
        const word *b = panels + panel * G::W_PANEL, *rows = a + r / PANEL * G::W_PANEL + r % PANEL;
        float* to = sums + r * ROW + panel * PANEL;
        if (VECTORS % 2 && panel == VECTORS / 2) add_columns_block<1, ROW>(to, rows, b, depth);
        else add_columns_block<2, ROW>(to, rows, b, depth);
      }
  }
  template <int VECTORS, int ROW> static void add_columns_block(float* to, const word* a, const word* b, int depth) {
    vf acc[MR][VECTORS];
    multiply_columns<E>(acc, a, b, depth);
    add_to<ROW>(to, acc);
  }
  template <int VECTORS> static void add_query_block(float* to, const word* a, const word* b, int from, int until) {
    vf acc[MR][VECTORS];
    multiply_rows<E, G::Q_PANEL>(acc, a, b, from, until);
    add_to<G::DQ_ROW>(to, acc);
  }
  template <int ROW, int VECTORS> FOCI_INLINE static void add_to(float* to, vf (&acc)[MR][VECTORS]) {
    FOCI_UNROLL for (int r = 0; r < MR; ++r)
      FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) store(to + r * ROW + v * WIDTH, load<vf>(to + r * ROW + v * WIDTH) + acc[r][v]);
  }

  void meet(const Call& call, const QueryTile<P>& t, int h, int q0, float* grad_query, float* const* sinks) {
    Rectangle r = {s.b, h, h, q0, q0 + t.rows - 1, kv, kv + keys - 1, s.q_len, s.kv_len};
    const Class all = P::MASKED ? classify<P>(call, r) : FULL;
    if (all == EMPTY) return;
    const int count = (keys + PANEL - 1) / PANEL, rows = round_up(t.rows, MR);
    Class kind[N / PANEL];
    int from = count, until = 0;
    for (int i = 0; i < count; ++i) {
      r.kv0 = kv + i * PANEL;
      r.kv1 = kv + min_int(keys, (i + 1) * PANEL) - 1;
      kind[i] = all == FULL || count == 1 ? all : classify<P>(call, r);
      if (kind[i] != EMPTY) from = min_int(from, i), until = i + 1;
    }
    if (until == 0) return;
    if constexpr (P::DROPOUT)  // rows beyond the tile too: zero times what memory held before may be NaN
      for (int i = 0; i < rows; ++i) keep_row(call, s.b, h, q0 + i, kv, keys, keep + i * (N + 4 * WIDTH));
    if constexpr (P::COLUMN_SUMS)
      grad_columns = call.grad_column_sums ? call.grad_column_sums + (s.batch * call.q_heads + h) * call.kv_tokens + s.kv_start + kv : nullptr;
    for (int i = 0; i < P::SITES * ROWS; ++i) runs[i] = {};
    for (int i = from; i < until; ++i) {
      const int at = i * PANEL;
      if (kind[i] == EMPTY) {
        clear_panel(at);
        continue;
      }
      const bool finished = P::PLAIN_SCORE && kind[i] == FULL && at + PANEL <= keys;
      for (int b = 0; b < rows; b += MR) {
        if (!finished)  // what is read after the products arrives meanwhile
          for (int r = b; r < b + MR; ++r) P::fetch_captures(t.row[r], kv + at);
        score_block(call, t, b, at, finished);
        fetch_ahead();
      }
      if (!finished) finish_panel(call, t, rows, at, kind[i]);
      for (int b = 0; b < rows; b += MR) gradient_block(call, t, b, at);
      capture_panel(call, t, at, sinks);
    }
    if constexpr (P::SITES > 0)
      for (int i = 0; i < t.rows; ++i) P::flush_gradients(call, t.row[i], sinks, runs + i * P::SITES);
    const int depth = rows / E::PAIR, first = from * PANEL, last = until * PANEL;
    if constexpr (P::GRAD_V && G::EXCLUDES)
      if (t.not_finite) add_not_finite(call, t, h, q0, first, last);
    if constexpr (P::GRAD_V) add_rows<P::DV, G::O_ROW>(grad_value, weights, t.grad_out_rows(), first, last, depth);
    if constexpr (P::GRAD_K) add_rows<P::D, G::DQ_ROW>(grad_key, grad_pairs, t.query_rows(), first, last, depth);
    if constexpr (P::GRAD_Q)
      for (int panel = 0; panel < G::D_PANELS; ++panel)
        for (int b = 0; b < rows; b += MR) {
          const word *a = grad_rows() + b * PANEL, *k = key_rows + panel * N / E::PAIR * PANEL;
          float* to = grad_query + b * G::DQ_ROW + panel * PANEL;
          if (G::D_VECTORS % 2 && panel == G::D_VECTORS / 2) add_query_block<1>(to, a, k, first / E::PAIR, last / E::PAIR);
          else add_query_block<2>(to, a, k, first / E::PAIR, last / E::PAIR);
        }
  }

  void finish(const Call& call, int hkv) {
    typedef typename G::T T;
    for (int i = 0; i < keys; ++i) {
      if constexpr (P::GRAD_K) write_row(call.grad_key.at<T>(s.batch, hkv, s.kv_start + kv + i), call.grad_key.column, grad_key + i * G::DQ_ROW, P::D, (float)call.scale);
      if constexpr (P::GRAD_V) write_row(call.grad_value.at<T>(s.batch, hkv, s.kv_start + kv + i), call.grad_value.column, grad_value + i * G::O_ROW, P::DV, 1.0f);
    }
  }

  template <class T> static void write_row(T* to, int64_t stride, const float* from, int columns, float factor) {
    int d = 0;
    if (stride == 1)
      for (; d + WIDTH <= columns; d += WIDTH) narrow(to + d, load<vf>(from + d) * factor);
    for (; d < columns; ++d) narrow(to + d * stride, from[d] * factor);
  }
};

// Tasks that run one after the other, in order, and add to the same gradients of captured tensors: those whose batch entry, kv
// head and split are this one's, modulo the number of parts.
struct Partition {
  int batch, head, split;
  Partition(const Call& call, int64_t i)
      : batch((int)(i / call.split_parts / call.head_parts)), head((int)(i / call.split_parts % call.head_parts)), split((int)(i % call.split_parts)) {}

  static int64_t count(const Call& call) { return call.batch_parts * call.head_parts * call.split_parts; }

  template <class F> FOCI_INLINE void visit(const Call& call, F each) const {
    for (int b = batch; b < call.batch; b += (int)call.batch_parts)
      for (int hkv = head; hkv < call.kv_heads; hkv += (int)call.head_parts)
        for (int part = split; part < call.splits; part += (int)call.split_parts) each(b, hkv, part);
  }

  // Where the gradient of each site is added to.
  template <int SITES> FOCI_INLINE void find_sinks(const Call& call, float** sinks) const {
    for (int n = 0; n < SITES; ++n) {
      const int64_t* site = call.gradients + 4 * n;
      sinks[n] = (float*)site[0] + batch * site[1] + head * site[2] + split * site[3];
    }
  }
};

// The sum over all splits of one tile's dQ, scaled, to where the caller wants it.
template <class P> void write_grad_query(const Call& call, const Sequence& s, int h, int q0, float* total, int64_t splits, int64_t stride) {
  typedef Gradient<P> G;
  typedef typename G::T T;
  for (int64_t split = 1; split < splits; ++split)
    for (int64_t d = 0; d < ROWS * G::DQ_ROW; ++d) total[d] += total[split * stride + d];
  for (int r = 0; r < ROWS && q0 + r < s.q_len; ++r)
    BackwardTile<P>::write_row(call.grad_query.at<T>(s.batch, h, s.q_start + q0 + r), call.grad_query.column, total + r * G::DQ_ROW, P::D, (float)call.scale);
}

FOCI_INLINE void clear_floats(float* at, int64_t count) {
  for (int64_t i = 0; i < count; ++i) at[i] = 0;
}

// One task: every `splits`-th tile of a kv head's keys, so that parts of a causal problem weigh the same, against all query
// tiles of its group. `mine` is the split's private dQ.
template <class P> void backward_task(const Call& call, const Sequence& s, int hkv, int split, BackwardTile<P>& tile, const QueryTile<P>* query, float* mine, float* const* sinks) {
  typedef Gradient<P> G;
  constexpr int64_t TILE = ROWS * G::DQ_ROW;
  const int64_t group = call.q_heads / call.kv_heads, count = (s.q_len + ROWS - 1) / ROWS;
  const int64_t first = (int64_t)split * G::KEYS_TILE;
  if (P::GRAD_Q && first >= s.kv_len) clear_floats(mine, group * count * TILE);
  for (int64_t kv = first; kv < s.kv_len; kv += call.splits * G::KEYS_TILE) {
    tile.begin(call, s, hkv, (int)kv);
    for (int64_t j = 0; j < group * count; ++j) {
      if (P::GRAD_Q && kv == first) clear_floats(mine + j * TILE, TILE);  // here, so that it is in the cache
      const int64_t next = j + 1 < group * count ? j + 1 : 0;
      tile.ahead = {(const char*)(query + next), (char*)(mine + next * TILE)};
      tile.meet(call, query[j], (int)(hkv * group + j / count), (int)(j % count) * ROWS, mine + j * TILE, sinks);
    }
    tile.finish(call, hkv);
  }
}

// Many small heads: a task packs its own queries and finishes its own dQ, in memory that stays in the cache.
template <class P> int backward_small(const Call& call, int64_t most_tiles) {
  typedef Gradient<P> G;
  constexpr int64_t TILE = ROWS * G::DQ_ROW;
  const int64_t group = call.q_heads / call.kv_heads;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads)
  {
    const Buffer tile_memory(sizeof(BackwardTile<P>)), query_memory(most_tiles * (int64_t)sizeof(QueryTile<P>)), sums(most_tiles * TILE * (int64_t)sizeof(float));
    const bool ready = tile_memory.data && query_memory.data && sums.data;
    if (!ready) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
    QueryTile<P>* query = (QueryTile<P>*)query_memory.data;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < Partition::count(call); ++i) {
      const Partition partition(call, i);
      float* sinks[P::SITES ? P::SITES : 1];
      partition.template find_sinks<P::SITES>(call, sinks);
      partition.visit(call, [&](int b, int hkv, int) {
        if (!ready) return;
        const Sequence s = sequence(call, b);
        const int count = (s.q_len + ROWS - 1) / ROWS;
        for (int j = 0; j < group * count; ++j) query[j].pack(call, s, (int)(hkv * group) + j / count, j % count * ROWS);
        backward_task(call, s, hkv, 0, *(BackwardTile<P>*)tile_memory.data, query, (float*)sums.data, sinks);
        if constexpr (P::GRAD_Q)
          for (int j = 0; j < group * count; ++j) write_grad_query<P>(call, s, (int)(hkv * group) + j / count, j % count * ROWS, (float*)sums.data + j * TILE, 1, 0);
      });
    }
  }
  return status;
}

template <class P> int backward(const Call& given) {
  typedef Gradient<P> G;
  const Classified<P> classified(given);
  const Call& call = classified.call;
  const int64_t group = call.q_heads / call.kv_heads, splits = call.splits;
  const int64_t most_tiles = group * ((call.q_len + ROWS - 1) / ROWS);
  if (splits == 1 && most_tiles * (int64_t)sizeof(QueryTile<P>) <= 1 << 20) return backward_small<P>(call, most_tiles);
  const Buffer order_memory(call.batch * sizeof(int)), base_memory((call.batch + 1) * sizeof(int64_t));
  if (!order_memory.data || !base_memory.data) return OUT_OF_MEMORY;
  int* order = (int*)order_memory.data;
  int64_t* base = (int64_t*)base_memory.data;  // q tiles of all heads before the sequence
  const int sequences = order_sequences(call, order);
  int64_t tiles = 0;
  for (int i = 0; i < sequences; ++i) {
    base[i] = tiles;
    tiles += (sequence(call, order[i]).q_len + ROWS - 1) / ROWS * call.q_heads;
  }
  base[sequences] = tiles;
  constexpr int64_t TILE = ROWS * G::DQ_ROW;  // floats of dQ per tile
  const Buffer query_memory(tiles * (int64_t)sizeof(QueryTile<P>)), sums_memory(P::GRAD_Q ? tiles * splits * TILE * (int64_t)sizeof(float) : 0);
  if (!query_memory.data || !sums_memory.data) return OUT_OF_MEMORY;
  QueryTile<P>* query = (QueryTile<P>*)query_memory.data;
  float* sums = (float*)sums_memory.data;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads)
  {
    const Buffer tile_memory(sizeof(BackwardTile<P>));
    BackwardTile<P>& tile = *(BackwardTile<P>*)tile_memory.data;
    if (!tile_memory.data) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
    int i = 0;
#pragma omp for schedule(dynamic, 1)
    for (int64_t at = 0; at < tiles; ++at) {
      while (at >= base[i + 1]) ++i;
      const Sequence s = sequence(call, order[i]);
      const int64_t count = (s.q_len + ROWS - 1) / ROWS, local = at - base[i];
      query[at].pack(call, s, (int)(local / count), (int)(local % count) * ROWS);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t part = 0; part < Partition::count(call); ++part) {
      const Partition partition(call, part);
      float* sinks[P::SITES ? P::SITES : 1];
      partition.template find_sinks<P::SITES>(call, sinks);
      partition.visit(call, [&](int n, int hkv, int split) {
        if (!tile_memory.data) return;
        const Sequence s = sequence(call, order[n]);
        const int64_t count = (s.q_len + ROWS - 1) / ROWS, first = base[n] + hkv * group * count;
        backward_task(call, s, hkv, split, tile, query + first, sums + splits * first * TILE + split * group * count * TILE, sinks);
      });
    }
    if constexpr (P::GRAD_Q) {
      i = 0;
#pragma omp for schedule(dynamic, 4) nowait
      for (int64_t at = 0; at < tiles; ++at) {
        while (at >= base[i + 1]) ++i;
        const Sequence s = sequence(call, order[i]);
        const int64_t count = (s.q_len + ROWS - 1) / ROWS, local = at - base[i], h = local / count, q0 = local % count * ROWS;
        const int64_t first = base[i] + h / group * group * count, j = local - h / group * group * count;
        write_grad_query<P>(call, s, (int)h, (int)q0, sums + splits * first * TILE + j * TILE, splits, group * count * TILE);
      }
    }
  }
  return status;
}

}  // namespace foci
