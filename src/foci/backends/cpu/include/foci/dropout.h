// Which weights dropout keeps: Philox4x32 with 7 rounds (Salmon et al., SC 2011), WIDTH counters at a time.
#pragma once
#include "call.h"

namespace foci {

// High and low words of the products of every lane with a constant.
FOCI_INLINE void wide_multiply(vu a, uint32_t constant, vu& high, vu& low) {
  const vu c = splat(constant);
#if defined(__AVX2__)
  vu even, odd;
  const vu shifted = (vu)__builtin_shuffle(a, iota() | 1);
  asm("vpmuludq %2, %1, %0" : "=v"(even) : "v"(a), "v"(c));
  asm("vpmuludq %2, %1, %0" : "=v"(odd) : "v"(shifted), "v"(c));
  const vi evens = iota() & ~1;
  low = __builtin_shuffle(even, odd, (iota() & 1) ? evens + WIDTH : evens);
  high = __builtin_shuffle(even, odd, (iota() & 1) ? evens + WIDTH + 1 : evens + 1);
#else
  low = a * c;
  for (int i = 0; i < WIDTH; ++i) high[i] = (uint32_t)((uint64_t)a[i] * constant >> 32);
#endif
}

// Writes 1 for a kept weight and 0 for a dropped one, for `count` keys from `kv` (a multiple of 4) on; rounds `count` up
// to 4 * WIDTH.
inline void keep_row(const Call& call, int b, int h, int q, int kv, int count, float* keep) {
  const uint32_t low = (uint32_t)call.seed[0], high = (uint32_t)((uint64_t)call.seed[0] >> 32);
  const vu threshold = splat((uint32_t)call.threshold);
  const vf one = call.drop_all ? vf{} : splat(1.0f);
  for (int at = 0; at < count; at += 4 * WIDTH) {
    vu c0 = (vu)(iota() + (kv + at) / 4), c1 = splat((uint32_t)q), c2 = splat((uint32_t)h), c3 = splat((uint32_t)b);
    uint32_t key0 = low, key1 = high;
    for (int round = 0; round < 7; ++round) {
      vu high0, low0, high1, low1;
      wide_multiply(c0, 0xD2511F53u, high0, low0);
      wide_multiply(c2, 0xCD9E8D57u, high1, low1);
      c0 = high1 ^ c1 ^ key0;
      c2 = high0 ^ c3 ^ key1;
      c1 = low1;
      c3 = low0;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    const vu words[4] = {c0, c1, c2, c3};
    vf kept[4];
    FOCI_UNROLL for (int w = 0; w < 4; ++w) kept[w] = words[w] >= threshold ? one : vf{};
    for (int w = 0; w < 4; ++w)
      for (int i = 0; i < WIDTH; ++i) keep[at + 4 * i + w] = kept[w][i];
  }
}

}  // namespace foci
