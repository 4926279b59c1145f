// Few query rows against many keys: tasks split the keys, every key is read from memory once for all rows of its group.
#pragma once
#include "forward.h"

namespace foci {

// Parts of the keys per kv head: enough tasks for many threads, at least KEYS keys each. The sizes alone decide, so the
// number of threads does not change the result.
inline int64_t decode_splits(const Call& call) {
  const int64_t heads = call.batch * call.kv_heads, most = (call.kv_len + KEYS - 1) / KEYS, wanted = (64 + heads - 1) / heads;
  return wanted < most ? wanted : most;
}

constexpr int STEP = 128;  // keys that are packed at a time: few, so that what follows them can be fetched meanwhile

template <class P> int forward_few(const Call& call) {
  typedef Packing<P> K;
  constexpr int PART = K::O_ROW + 2;  // a row's unnormalised output, maximum and sum
  const int64_t heads = call.batch * call.kv_heads, group = call.q_heads / call.kv_heads, splits = decode_splits(call);
  const Buffer parts(heads * splits * ROWS * PART * (int64_t)sizeof(float));
  if (!parts.data) return OUT_OF_MEMORY;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads)
  {
    const Buffer tile_memory(sizeof(ForwardTile<P>)), words((int64_t)STEP * (K::D_WORDS + K::V_PANELS * PANEL) * sizeof(typename K::word));
    ForwardTile<P>& tile = *(ForwardTile<P>*)tile_memory.data;
    int not_finite = 0;
    const Panels<P> panels = {(typename K::word*)words.data, (typename K::word*)words.data + (int64_t)STEP * K::D_WORDS, (int64_t)STEP / K::E::PAIR * PANEL, &not_finite};
    const bool ready = tile_memory.data && words.data;
    if (!ready) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * splits; ++i) {
      const int64_t split = i % splits;
      const Sequence s = sequence(call, (int)(i / splits / call.kv_heads));
      const int hkv = (int)(i / splits % call.kv_heads);
      if (!ready || s.q_len <= 0) continue;
      tile.begin(call, s, hkv, 0, (int)(group * s.q_len));
      const int step = round_up((int)((s.kv_len + splits - 1) / splits), PANEL), end = min_int(s.kv_len, step * (int)(split + 1));
      for (int kv = step * (int)split; kv < end; kv += STEP) {
        const int until = min_int(kv + STEP, end);
        if (P::MASKED && tile.classify(call, kv, until) == EMPTY) continue;
        not_finite = 0;
        pack_keys<P>(call, s, hkv, panels, kv, until);
        look_ahead<P>(call, s, hkv, until, min_int(until + STEP, s.kv_len), tile);
        tile.attend(call, panels, kv, kv, until);
      }
      if (splits == 1) {
        tile.finish(call, s);
        continue;
      }
      for (int r = 0; r < tile.rows; ++r) {
        float* part = (float*)parts.data + (i * ROWS + r) * PART;
        for (int d = 0; d < K::O_ROW; ++d) part[d] = tile.out[r * K::O_ROW + d];
        part[K::O_ROW] = tile.top[r];
        part[K::O_ROW + 1] = tile.sum[r];
      }
    }
    if (splits > 1) {
#pragma omp for schedule(static) nowait
      for (int64_t i = 0; i < heads; ++i) {
        const Sequence s = sequence(call, (int)(i / call.kv_heads));
        if (!ready || s.q_len <= 0) continue;
        tile.begin(call, s, (int)(i % call.kv_heads), 0, (int)(group * s.q_len));
        for (int64_t split = 0; split < splits; ++split)
          for (int r = 0; r < tile.rows; ++r) {
            const float* part = (float*)parts.data + ((i * splits + split) * ROWS + r) * PART;
            const float top = part[K::O_ROW], now = tile.top[r] > top ? tile.top[r] : top;
            if (now == -__builtin_inff() && part[K::O_ROW + 1] == 0) continue;
            const float base = now == -__builtin_inff() ? 0.0f : now;
            const float old = K::Exp::of(splat(tile.top[r] - base))[0], fresh = K::Exp::of(splat(top - base))[0];
            for (int d = 0; d < K::O_ROW; ++d) tile.out[r * K::O_ROW + d] = tile.out[r * K::O_ROW + d] * old + part[d] * fresh;
            tile.sum[r] = tile.sum[r] * old + part[K::O_ROW + 1] * fresh;
            tile.top[r] = now;
          }
        tile.finish(call, s);
      }
    }
  }
  return status;
}

// The schedule that suits the sizes; all give the same bits for a row but the splits of the keys.
template <class P> int forward(const Call& given) {
  const Classified<P> classified(given);
  const Call& call = classified.call;
  const int64_t rows = call.q_heads / call.kv_heads * call.q_len, heads = call.batch * call.kv_heads;
  if (rows <= ROWS && (call.kv_len > KEYS)) return forward_few<P>(call);
  if (call.kv_len <= KEYS && (rows <= ROWS || heads >= 4 * call.threads)) return forward_small<P>(call);
  return forward_large<P>(call);
}

}  // namespace foci
