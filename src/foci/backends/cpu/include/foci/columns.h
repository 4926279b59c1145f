// Sums of the weights over queries, and for their gradient the sums over keys of weight times gradient: a second pass over
// the scores, once the logsumexp of every row is known. A task owns a head, so that sums are in a fixed order.
#pragma once
#include "forward.h"

namespace foci {

// call.lse is read; call.column_sums is added to where it is given; where call.grad_column_sums is, call.row_max receives
// each row's sum of weight times gradient.
template <class P> int columns(const Call& given) {
  typedef Packing<P> K;
  typedef typename K::word word;
  typedef typename K::T T;
  const Classified<P> classified(given);
  const Call& call = classified.call;
  const int64_t heads = call.batch * call.q_heads, group = call.q_heads / call.kv_heads;
  int status = DONE;
#pragma omp parallel num_threads((int)call.threads)
  {
    const int64_t most = round_up64(call.kv_len, PANEL);
    const Buffer tile_memory(sizeof(ForwardTile<P>)), keys(most * K::D_WORDS * (int64_t)sizeof(word)), sums(most * 4), gradients(most * 4);
    const bool ready = tile_memory.data && keys.data && sums.data && gradients.data;
    if (!ready) __atomic_store_n(&status, (int)OUT_OF_MEMORY, __ATOMIC_RELAXED);
    ForwardTile<P>& tile = *(ForwardTile<P>*)tile_memory.data;
    word* panels = (word*)keys.data;
    float *sum = (float*)sums.data, *gradient = (float*)gradients.data;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t i = 0; i < heads; ++i) {
      const Sequence s = sequence(call, (int)(i / call.q_heads));
      const int h = (int)(i % call.q_heads), hkv = (int)(h / group), padded = round_up(s.kv_len, PANEL);
      if (!ready || s.q_len <= 0) continue;
      for (int kv = 0; kv < s.kv_len; kv += PANEL)
        pack_columns<typename K::E>(panels + (int64_t)kv * K::D_WORDS, call.key.at<T>(s.batch, hkv, s.kv_start + kv), call.key.row, call.key.column,
                                    min_int(PANEL, s.kv_len - kv), P::D);
      const int64_t at = (s.batch * call.q_heads + h) * call.kv_tokens + s.kv_start, row = row_offset(call, s, h);
      for (int kv = 0; kv < padded; ++kv) sum[kv] = 0, gradient[kv] = call.grad_column_sums && kv < s.kv_len ? call.grad_column_sums[at + kv] : 0;
      for (int q = 0; q < s.q_len; q += ROWS) {
        tile.begin(call, s, hkv, (h % group) * (int64_t)s.q_len + q, min_int(ROWS, s.q_len - q));
        float lse[ROWS];
        vf dots[ROWS];
        for (int r = 0; r < tile.rows; ++r) {
          const float l = call.lse[row + q + r];
          lse[r] = l == -__builtin_inff() ? __builtin_inff() : l;
          dots[r] = vf{};
        }
        tile.visit(call, 0, s.kv_len, [&](int kv, int count, const Kinds* kinds) {
          const Stretch all[2] = {{-PANEL, count}, {-PANEL, count}};
          for (int k = 0; k < count; k += PANEL) tile.score_panel(call, panels + (int64_t)(kv + k) * K::D_WORDS, kv + k, k, kinds[k / PANEL], all);
          for (int k = 0; k < count; k += WIDTH) {
            vf total = load<vf>(sum + kv + k);
            const vf weight = load<vf>(gradient + kv + k);
            for (int r = 0; r < tile.rows; ++r) {
              const vf s = load<vf>(tile.score(r, k));
              vf w = exp_negative(at_most_zero(in_order(s * tile.unit) - lse[r]));
              if (lse[r] != lse[r]) w = s == -__builtin_inff() ? vf{} : w;
              total += w;
              dots[r] += w * weight;
            }
            store(sum + kv + k, total);
          }
        });
        if (call.grad_column_sums)
          for (int r = 0; r < tile.rows; ++r) call.row_max[row + q + r] = reduce_sum(dots[r]);
      }
      if (call.column_sums)
        for (int kv = 0; kv < s.kv_len; ++kv) call.column_sums[at + kv] = sum[kv];
    }
  }
  return status;
}

}  // namespace foci
