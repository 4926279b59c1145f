// Classes of a mask that reads tensors, found once for all heads and batch entries that it is the same for.
//
// To see whether a tile is empty or full costs a look at every element that its mask reads. A mask that heads share is looked at
// once in each call, so nothing has to be remembered from one call to the next, where the tensor may have changed.
#pragma once
#include "product.h"
#include "tasks.h"

namespace foci {

constexpr int ROWS = 64, KEYS = 512;  // of a tile
constexpr int HALF = ROWS / 2;        // rows that a panel of keys may be empty, partial or full for

// A call with a class for every panel of keys and every half of a tile's rows, where several heads share them.
template <class P> struct Classified {
  static constexpr int64_t MOST = 64 << 20;  // bytes
  Call call;
  Buffer memory;

  explicit Classified(const Call& given) : call(given), memory(count(given)) {
    call.classes = nullptr;
    if (count(given) == 0 || !memory.data) return;
    uint8_t* classes = (uint8_t*)memory.data;
    const int64_t area = halves(call) * panels(call), tiles = (call.q_len + ROWS - 1) / ROWS;
    const int64_t heads = P::mask_by_head(call) ? call.q_heads : 1, batch = P::mask_by_batch(call) ? call.batch : 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)call.threads)
    for (int64_t i = 0; i < batch * heads * tiles; ++i) fill(classes + i / tiles * area, (int)(i / tiles / heads), (int)(i / tiles % heads), (int)(i % tiles) * ROWS);
    call.classes = classes;
    call.classes_head = heads > 1 ? area : 0;
    call.classes_batch = batch > 1 ? heads * area : 0;
  }

  static int64_t halves(const Call& c) { return (c.q_len + HALF - 1) / HALF; }
  static int64_t panels(const Call& c) { return (c.kv_len + PANEL - 1) / PANEL; }
  // Bytes of all classes; 0 where none are kept.
  static int64_t count(const Call& c) {
    if (!P::MASK_READS || c.cu_q) return 0;
    const int64_t several = (P::mask_by_head(c) ? c.q_heads : 1) * (P::mask_by_batch(c) ? c.batch : 1), bytes = several * halves(c) * panels(c);
    return several < c.q_heads * c.batch && bytes <= MOST ? bytes : 0;
  }

  // The classes of one tile's rows: of many keys at once where they are of one class, else panel by panel.
  void fill(uint8_t* classes, int b, int h, int q0) const {
    const int q1 = min_int(q0 + ROWS, (int)call.q_len), width = (int)panels(call);
    for (int kv0 = 0; kv0 < call.kv_len; kv0 += KEYS) {
      const int kv1 = min_int(kv0 + KEYS, (int)call.kv_len);
      const Class all = find(b, h, q0, q1, kv0, kv1);
      for (int q = q0; q < q1; q += HALF)
        for (int kv = kv0; kv < kv1; kv += PANEL)
          classes[q / HALF * width + kv / PANEL] = all != PARTIAL ? all : find(b, h, q, min_int(q + HALF, q1), kv, min_int(kv + PANEL, kv1));
    }
  }
  Class find(int b, int h, int q0, int q1, int kv0, int kv1) const {
    return P::classify(call, {b, h, h, q0, q1 - 1, kv0, kv1 - 1, (int)call.q_len, (int)call.kv_len});
  }
};

// The class of a rectangle, from what was found for all heads if it is made of whole halves and panels.
template <class P> Class classify(const Call& call, const Rectangle& r) {
  const bool is_whole = r.q0 % HALF == 0 && ((r.q1 + 1) % HALF == 0 || r.q1 + 1 == r.q_len) && r.kv0 % PANEL == 0 && ((r.kv1 + 1) % PANEL == 0 || r.kv1 + 1 == r.kv_len);
  if (!P::MASK_READS || !call.classes || !is_whole || (r.h0 != r.h1 && call.classes_head)) return P::classify(call, r);
  const int64_t width = Classified<P>::panels(call);
  const uint8_t* from = call.classes + r.b * call.classes_batch + r.h0 * call.classes_head + r.q0 / HALF * width;
  const uint8_t found = from[r.kv0 / PANEL];
  for (int q = r.q0; q <= r.q1; q += HALF, from += width)
    for (int panel = r.kv0 / PANEL; panel <= r.kv1 / PANEL; ++panel)
      if (from[panel] != found) return PARTIAL;
  return (Class)found;
}

}  // namespace foci
