// The one micro-kernel: a small block of C += A B in registers.
//
// All operands lie in panels of PANEL columns: [column / PANEL][row][column % PANEL]. B is read by vectors along a panel's
// rows. A is broadcast word by word, by column where the panel's rows are the depth, by row where its columns are, panel
// after panel: either way its words are neighbours, which the prefetchers need. Only the multiply-add differs by type.
#pragma once
#include "vector.h"

namespace foci {

constexpr int PANEL = 2 * WIDTH;
constexpr int MR = WIDTH == 16 ? 8 : 4;  // rows of a block: MR * 2 accumulators, and B, fit the registers

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
FOCI_INLINE int64_t round_up64(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
FOCI_INLINE int min_int(int a, int b) { return a < b ? a : b; }
FOCI_INLINE int max_int(int a, int b) { return a > b ? a : b; }

template <int ROWS, int VECTORS> FOCI_INLINE void clear(vf (&acc)[ROWS][VECTORS]) {
  FOCI_UNROLL for (int r = 0; r < ROWS; ++r)
    FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = vf{};
}

template <class E, int ROWS, int VECTORS, int A_ROW, int A_DEPTH>
FOCI_INLINE void multiply(vf (&acc)[ROWS][VECTORS], const typename E::word* __restrict a, const typename E::word* __restrict b, int depth) {
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k) {
    typename E::vector column[VECTORS];
    FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) column[v] = load<typename E::vector>(b + k * PANEL + v * WIDTH);
    FOCI_UNROLL for (int r = 0; r < ROWS; ++r) {
      const typename E::vector x = splat(a[r * A_ROW + k * A_DEPTH]);
      FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = E::multiply_add(acc[r][v], x, column[v]);
    }
  }
}

// acc = A B where the rows of A lie along the panels' columns `from` to `until`; panels are A_PANEL words apart.
template <class E, int A_PANEL, int ROWS, int VECTORS>
FOCI_INLINE void multiply_rows(vf (&acc)[ROWS][VECTORS], const typename E::word* a, const typename E::word* b, int from, int until) {
  clear(acc);
  for (int k = from, next; k < until; k = next) {
    next = min_int(until, (k / PANEL + 1) * PANEL);
    multiply<E, ROWS, VECTORS, PANEL, 1>(acc, a + k / PANEL * A_PANEL + k % PANEL, b + k * PANEL, next - k);
  }
}
// acc = A^T B: the rows of A are the depth.
template <class E, int ROWS, int VECTORS>
FOCI_INLINE void multiply_columns(vf (&acc)[ROWS][VECTORS], const typename E::word* a, const typename E::word* b, int depth) {
  clear(acc);
  multiply<E, ROWS, VECTORS, 1, PANEL>(acc, a, b, depth);
}

}  // namespace foci
