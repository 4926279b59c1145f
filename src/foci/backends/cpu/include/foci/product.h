// The one micro-kernel: a small block of C += A B in registers.
//
// A is broadcast word by word, addressed by two strides known at compile time, so that it may be read by row or by
// column. B is a panel of PANEL columns: depth rows of PANEL words. Only the multiply-add differs between types.
#pragma once
#include "vector.h"

namespace foci {

constexpr int PANEL = 2 * WIDTH;
constexpr int MR = WIDTH == 16 ? 8 : 4;  // rows of a block: MR * 2 accumulators, and B, fit the registers

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
FOCI_INLINE int64_t round_up64(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
FOCI_INLINE int min_int(int a, int b) { return a < b ? a : b; }
FOCI_INLINE int max_int(int a, int b) { return a > b ? a : b; }

template <class E, int ROWS, int VECTORS, int A_ROW, int A_DEPTH>
FOCI_INLINE void multiply(vf (&acc)[ROWS][VECTORS], const typename E::word* __restrict a, const typename E::word* __restrict b, int depth) {
  FOCI_UNROLL for (int r = 0; r < ROWS; ++r)
    FOCI_UNROLL for (int v = 0; v < VECTORS; ++v) acc[r][v] = vf{};
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

}  // namespace foci
