// Memory that a call borrows, and the classes of tiles.
#pragma once
#include "call.h"

extern "C" void* aligned_alloc(decltype(sizeof 0), decltype(sizeof 0)) noexcept;
extern "C" void free(void*) noexcept;
#if defined(__linux__)
extern "C" int madvise(void*, decltype(sizeof 0), int) noexcept;
#endif

namespace foci {

constexpr int64_t HUGE_PAGE = 2 << 20;

enum Class { EMPTY = 0, PARTIAL = 1, FULL = 2 };

// A rectangle of scores, bounds included.
struct Rectangle {
  int b, h0, h1, q0, q1, kv0, kv1, q_len, kv_len;
};

// Aligned memory, freed at the end of its scope. `data` is null when there is none. Fresh pages cost more than what is done
// with them, so large buffers ask for huge ones.
struct Buffer {
  char* data;
  explicit Buffer(int64_t bytes) {
    const int64_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : 64, whole = bytes > 0 ? (bytes + page - 1) / page * page : page;
    data = (char*)aligned_alloc((decltype(sizeof 0))page, (decltype(sizeof 0))whole);
#if defined(__linux__)
    if (data && page == HUGE_PAGE) madvise(data, (decltype(sizeof 0))whole, 14);  // MADV_HUGEPAGE; refusal is no error
#endif
#if defined(FOCI_POISON)  // for tests: every number that is read before it is written is NaN
    if (data) __builtin_memset(data, 0xff, (decltype(sizeof 0))whole);
#endif
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

enum Status { DONE = 0, OUT_OF_MEMORY = 1 };

}  // namespace foci
