// Packing: tensors of any strides into the panels that products read, converted on the way.
#pragma once
#include "product.h"

namespace foci {

// WIDTH words of one row from column `at` on, where all of them exist and are neighbours.
template <class E> FOCI_INLINE bool whole_words(int64_t stride, int at, int columns) { return stride == 1 && E::PAIR * (at + WIDTH) <= columns; }
template <class T> FOCI_INLINE vf load_words(Single, const T* row, int at) { return widen(row + at); }
#ifdef FOCI_PAIRS
template <class T> FOCI_INLINE vu load_words(Pair, const T* row, int at) { return load<vu>(row + 2 * at); }
#endif

// The first `bytes` at an address (fewer than a vector has), zeros after them. A masked load reads no byte beyond.
#if defined(FOCI_AVX512)
template <class V> FOCI_INLINE V load_first(const void* at, int bytes) {
  V v;  // the operand is the whole vector's memory, so that earlier stores there come first
  asm("kmovq %2, %%k1\n\tvmovdqu8 %1, %0%{%%k1%}%{z%}" : "=v"(v) : "m"(*(const char(*)[sizeof(V)])at), "r"((1ull << bytes) - 1) : "k1");
  return v;
}
FOCI_INLINE vf widen_first(const float* at, int count) { return load_first<vf>(at, 4 * count); }
template <class T> FOCI_INLINE vf widen_first(const T* at, int count) {
  const vs words = load_first<vs>(at, 2 * count);
  return widen((const T*)&words);
}
#endif

// The same for any row, zero beyond `columns`.
template <class T> FOCI_INLINE vf row_words(Single, const T* row, int64_t stride, int at, int columns) {
  if (whole_words<Single>(stride, at, columns)) return load_words(Single(), row, at);
#ifdef FOCI_AVX512
  if (stride == 1 && at < columns) return widen_first(row + at, columns - at);
#endif
  vf x{};
  for (int i = 0; i < WIDTH && at + i < columns; ++i) x[i] = widen(row[(at + i) * stride]);
  return x;
}
#ifdef FOCI_PAIRS
template <class T> FOCI_INLINE vu row_words(Pair, const T* row, int64_t stride, int at, int columns) {
  if (whole_words<Pair>(stride, at, columns)) return load_words(Pair(), row, at);
#ifdef FOCI_AVX512
  if (stride == 1 && 2 * at < columns) return load_first<vu>(row + 2 * at, 2 * (columns - 2 * at));
#endif
  vu x{};
  for (int i = 0; i < 2 * WIDTH && 2 * at + i < columns; ++i) x[i / 2] |= (uint32_t)row[(2 * at + i) * stride].bits << 16 * (i & 1);
  return x;
}
#endif

constexpr int AHEAD = 8;  // rows

// Asks for a row that is soon packed, or written: rows of one head that lie a stride of all heads apart are too short for the
// hardware to foresee. Beyond the last one nothing is read.
template <bool WRITE = false, class T> FOCI_INLINE void fetch_row(const T* row, int64_t column_stride, int columns) {
  if (column_stride == 1)
    for (int at = 0; at < columns * (int)sizeof(T); at += 64) __builtin_prefetch((const char*)row + at, WRITE, WRITE ? 2 : 3);
}

FOCI_INLINE void transpose(vu (&m)[WIDTH]) {
  FOCI_UNROLL for (int s = 1; s < WIDTH; s *= 2) {
    const vi low = (iota() & s) ? iota() - s + WIDTH : iota(), high = (iota() & s) ? iota() + WIDTH : iota() + s;
    FOCI_UNROLL for (int i = 0; i < WIDTH; ++i)
      if (!(i & s)) {
        const vu a = m[i], b = m[i + s];
        m[i] = __builtin_shuffle(a, b, low);
        m[i + s] = __builtin_shuffle(a, b, high);
      }
  }
}

// WIDTH rows as columns: to[i * PANEL + row] is word `at + i` of a row, as far as there are `words`. Rows from `rows` on are zero.
template <class E, class T>
FOCI_INLINE void pack_block(typename E::word* to, const T* from, int64_t row_stride, int64_t column_stride, int rows, int at, int columns, int words) {
  vu m[WIDTH];
  if (WIDTH <= rows && whole_words<E>(column_stride, at, columns)) {
    FOCI_UNROLL for (int i = 0; i < WIDTH; ++i) {
      const T* row = from + i * row_stride;
      __builtin_prefetch(row + WIDTH * row_stride + E::PAIR * at);
      m[i] = (vu)load_words(E(), row, at);
    }
  } else {
    vu edge[WIDTH];
#pragma GCC unroll 1
    for (int i = 0; i < WIDTH; ++i) edge[i] = i < rows ? (vu)row_words(E(), from + i * row_stride, column_stride, at, columns) : vu{};
    FOCI_UNROLL for (int i = 0; i < WIDTH; ++i) m[i] = edge[i];
  }
  transpose(m);
  FOCI_UNROLL for (int i = 0; i < WIDTH; ++i)
    if (at + i < words) store(to + i * PANEL, m[i]);
}

template <class T> FOCI_INLINE vu stacked_words(Single, const T* from, int64_t row_stride, int64_t stride, int row, int rows, int at, int columns) {
  return row < rows ? (vu)row_words(Single(), from + row * row_stride, stride, at, columns) : vu{};
}

#ifdef FOCI_PAIRS
// 16 of the row's bfloat16 numbers, each in a word.
template <class T> FOCI_INLINE vu spread(const T* row, int64_t stride, int at, int columns) {
  if (stride == 1 && at + WIDTH <= columns) return __builtin_convertvector(load<vs>(row + at), vu);
#ifdef FOCI_AVX512
  if (stride == 1 && at < columns) return __builtin_convertvector(load_first<vs>(row + at, 2 * (columns - at)), vu);
#endif
  vu x{};
  for (int i = 0; i < WIDTH && at + i < columns; ++i) x[i] = row[(at + i) * stride].bits;
  return x;
}
template <class T> FOCI_INLINE vu stacked_words(Pair, const T* from, int64_t row_stride, int64_t stride, int row, int rows, int at, int columns) {
  const vu low = 2 * row < rows ? spread(from + 2 * row * row_stride, stride, at, columns) : vu{};
  const vu high = 2 * row + 1 < rows ? spread(from + (2 * row + 1) * row_stride, stride, at, columns) : vu{};
  return low | high << 16;
}
#endif

// Whether the elements of a column are contiguous, as in a transposed tensor [D, S].
FOCI_INLINE bool is_transposed(int64_t row_stride, int64_t column_stride) { return row_stride == 1 && column_stride != 1; }

// PANEL rows as columns: panel[word][row]. Rows from `rows` on are zero.
template <class E, class T>
void pack_columns(typename E::word* panel, const T* from, int64_t row_stride, int64_t column_stride, int rows, int columns) {
  const int words = (columns + E::PAIR - 1) / E::PAIR;
  for (int half = 0; half < PANEL; half += WIDTH) {
    if (is_transposed(row_stride, column_stride))
      for (int word = 0; word < words; ++word) store(panel + word * PANEL + half, stacked_words(E(), from, column_stride, 1, word, columns, half, rows));
    else
      for (int at = 0; at < words; at += WIDTH)
        pack_block<E>(panel + at * PANEL + half, from + half * row_stride, row_stride, column_stride, rows - half, at, columns, words);
  }
}

// Rows as the depth of a product: panels[column / PANEL][row / PAIR][column % PANEL], `padded` rows (zero from `rows` on).
template <class E, class T>
void pack_rows(typename E::word* panels, int64_t panel_stride, const T* from, int64_t row_stride, int64_t column_stride, int rows, int padded, int columns) {
  if (is_transposed(row_stride, column_stride)) {
    for (int column = 0; column < columns; column += WIDTH)
      for (int at = 0; at < padded / E::PAIR; at += WIDTH)
        pack_block<E>(panels + column / PANEL * panel_stride + (int64_t)at * PANEL + column % PANEL, from + column * column_stride, column_stride, 1,
                      columns - column, at, rows, padded / E::PAIR);
    return;
  }
  for (int row = 0; row < padded / E::PAIR; ++row) {
    FOCI_UNROLL for (int i = 0; i < E::PAIR; ++i) fetch_row(from + (int64_t)(E::PAIR * (row + AHEAD) + i) * row_stride, column_stride, columns);
    for (int at = 0; at < columns; at += WIDTH)
      store(panels + at / PANEL * panel_stride + (int64_t)row * PANEL + at % PANEL,
            stacked_words(E(), from, row_stride, column_stride, row, rows, at, columns));
  }
}

// ---- infinities and NaN ---------------------------------------------------------------------------------------------------

FOCI_INLINE bool is_finite(float x) { return x - x == 0; }
FOCI_INLINE vf finite_words(vf x) { return x - x == 0.0f ? x : vf{}; }
#ifdef FOCI_PAIRS
FOCI_INLINE vu finite_words(vu x) {
  const vu low = (x & 0x7f80u) == 0x7f80u ? splat(0u) : x & 0xffffu, high = (x & 0x7f800000u) == 0x7f800000u ? splat(0u) : x & 0xffff0000u;
  return low | high;
}
#endif

// Zeroes what is not finite among packed rows, so that nothing comes of it where its weight is 0. Whether anything was.
template <class E> bool clean_rows(typename E::word* panels, int64_t panel_stride, int words, int columns) {
  typedef typename E::vector vector;
  constexpr int CHAINS = 4;  // words are at least as many, and a multiple of it
  bool any = false;
  for (int at = 0; at < columns; at += WIDTH) {
    typename E::word* from = panels + at / PANEL * panel_stride + at % PANEL;
    vf zero[CHAINS] = {};  // 0 times what is not finite is NaN
    for (int row = 0; row < words; row += CHAINS)
      FOCI_UNROLL for (int i = 0; i < CHAINS; ++i) zero[i] = E::multiply_add(zero[i], load<vector>(from + (int64_t)(row + i) * PANEL), vector{});
    if (is_finite(reduce_sum((zero[0] + zero[1]) + (zero[2] + zero[3])))) continue;
    any = true;
    for (int row = 0; row < words; ++row) store(from + (int64_t)row * PANEL, finite_words(load<vector>(from + (int64_t)row * PANEL)));
  }
  return any;
}

FOCI_INLINE float negative_word(float x) { return -x; }
FOCI_INLINE uint32_t negative_word(uint32_t pair) { return pair ^ 0x80008000u; }

// One row of panels that are `panel_stride` words apart.
template <class E, class T>
FOCI_INLINE void pack_row(typename E::word* to, int64_t panel_stride, const T* row, int64_t column_stride, int columns, int words) {
  for (int at = 0; at < words; at += WIDTH) store(to + at / PANEL * panel_stride + at % PANEL, row_words(E(), row, column_stride, at, columns));
}

// `pack_row` of `rows` rows of a transposed tensor, PANEL words apart. Rows from `rows` up to `padded` repeat the last one.
template <class E, class T>
void pack_transposed(typename E::word* to, int64_t panel_stride, const T* from, int64_t column_stride, int rows, int padded, int columns, int words) {
  for (int at = 0; at < words; at += WIDTH) {
    typename E::word* panel = to + at / PANEL * panel_stride + at % PANEL;
    for (int first = 0; first < rows; first += WIDTH) {
      vu m[WIDTH];
#pragma GCC unroll 1
      for (int i = 0; i < WIDTH; ++i) m[i] = stacked_words(E(), from, column_stride, 1, at + i, columns, first, rows);
      transpose(m);
      FOCI_UNROLL for (int i = 0; i < WIDTH; ++i)
        if (first + i < rows) store(panel + (first + i) * PANEL, m[i]);
    }
    for (int r = rows; r < padded; ++r) store(panel + r * PANEL, load<vu>(panel + (rows - 1) * PANEL));
  }
}

}  // namespace foci
