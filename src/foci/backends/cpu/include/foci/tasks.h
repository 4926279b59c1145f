// Memory that a call borrows, and the classes of tiles.
#pragma once
#include "call.h"

extern "C" void* aligned_alloc(decltype(sizeof 0), decltype(sizeof 0)) noexcept;
extern "C" void free(void*) noexcept;

namespace foci {

enum Class { EMPTY = 0, PARTIAL = 1, FULL = 2 };

// A rectangle of scores, bounds included.
struct Rectangle {
  int b, h0, h1, q0, q1, kv0, kv1, q_len, kv_len;
};

// Aligned memory, freed at the end of its scope. `data` is null when there is none.
struct Buffer {
  char* data;
  explicit Buffer(int64_t bytes) : data((char*)aligned_alloc(64, (decltype(sizeof 0))(bytes > 0 ? (bytes + 63) / 64 * 64 : 64))) {}
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

enum Status { DONE = 0, OUT_OF_MEMORY = 1 };

}  // namespace foci
