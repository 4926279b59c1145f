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

// Large blocks that calls are done with and the next ones take: fresh pages cost more than what is done with them. One pool
// for all kernels of a process, since a visible inline variable is the same one in every library.
struct Pool {
  static constexpr int64_t MOST = 128 << 20;  // bytes that are kept
  static constexpr int BLOCKS = 8;
  struct Block { char* data; int64_t bytes; };

  Block blocks[BLOCKS];  // the oldest first
  int count;
  bool busy;

  bool lock() { return !__atomic_exchange_n(&busy, true, __ATOMIC_ACQUIRE); }
  void unlock() { __atomic_store_n(&busy, false, __ATOMIC_RELEASE); }
  Block remove(int i) {
    const Block found = blocks[i];
    for (--count; i < count; ++i) blocks[i] = blocks[i + 1];
    return found;
  }

  // The smallest block that suffices, of at most twice the bytes; null if there is none, or another thread is here.
  Block take(int64_t bytes) {
    if (!lock()) return {nullptr, 0};
    int best = -1;
    for (int i = 0; i < count; ++i)
      if (blocks[i].bytes >= bytes && blocks[i].bytes <= 2 * bytes && (best < 0 || blocks[i].bytes < blocks[best].bytes)) best = i;
    const Block found = best < 0 ? Block{nullptr, 0} : remove(best);
    unlock();
    return found;
  }
  // Keeps the block and as many of the others, the latest, as there is room for.
  void give(Block block) {
    if (block.bytes > MOST || !lock()) return free(block.data);
    int64_t total = block.bytes;
    for (int i = 0; i < count; ++i) total += blocks[i].bytes;
    while (count == BLOCKS || total > MOST) {
      const Block old = remove(0);
      total -= old.bytes;
      free(old.data);
    }
    blocks[count++] = block;
    unlock();
  }
};
inline __attribute__((visibility("default"))) Pool pool;

// Aligned memory, given back at the end of its scope. `data` is null when there is none. Large buffers ask for huge pages.
struct Buffer {
  char* data;
  int64_t whole;
  explicit Buffer(int64_t bytes) {
    const int64_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    whole = bytes > 0 ? (bytes + page - 1) / page * page : page;
    if (whole >= HUGE_PAGE) {
      const Pool::Block block = pool.take(whole);
      data = block.data;
      if (data) whole = block.bytes;
    } else {
      data = nullptr;
    }
    if (!data) data = fresh(page);
#if defined(FOCI_POISON)  // for tests: every number that is read before it is written is NaN
    if (data) __builtin_memset(data, 0xff, (decltype(sizeof 0))whole);
#endif
  }
  char* fresh(int64_t page) const {
    char* at = (char*)aligned_alloc((decltype(sizeof 0))page, (decltype(sizeof 0))whole);
#if defined(__linux__)
    if (at && page == HUGE_PAGE) madvise(at, (decltype(sizeof 0))whole, 14);  // MADV_HUGEPAGE; refusal is no error
#endif
    return at;
  }
  ~Buffer() {
    if (data && whole >= HUGE_PAGE) pool.give({data, whole});
    else free(data);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

enum Status { DONE = 0, OUT_OF_MEMORY = 1 };

}  // namespace foci
