// Work split over the threads that PyTorch computes with.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>

namespace tokenspeed_cpu {

// PyTorch's products run on its OpenMP team, whose threads go on spinning for a while: threads of our own would compete with
// them for the cores. So the same team is used, through the entry point that compilers call. It is looked up and not linked,
// because a second copy of the runtime would have a second team. Without it everything runs on the calling thread.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline GompParallel team() {
  static const GompParallel found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// Call body(i) for each i in [0, count), on up to `threads` threads; each i once, by whoever is free.
template <typename Body>
void parallel_for(int64_t count, int threads, const Body& body) {
  if (threads > count) threads = static_cast<int>(count);
  if (threads <= 1 || team() == nullptr) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next;
    int64_t count;
    const Body* body;
  } shared{{0}, count, &body};
  team()(
      [](void* data) {
        auto* work = static_cast<Shared*>(data);
        for (int64_t i = work->next.fetch_add(1, std::memory_order_relaxed); i < work->count;
             i = work->next.fetch_add(1, std::memory_order_relaxed)) {
          (*work->body)(i);
        }
      },
      &shared, static_cast<unsigned>(threads), 0);
}

}  // namespace tokenspeed_cpu
