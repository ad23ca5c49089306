// Work split over the calling thread and a team of threads of our own.
#pragma once

#include <cstdint>

namespace tokenspeed_cpu {

// Memory that is read next in all likelihood, once what is running now is done: `bytes` from `data` on, cut into `pieces` that are
// dealt out as the items of the next call will be. Only ever a hint: nothing is wrong where it is not read, or no longer there.
struct Upcoming {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

// Call task(body, i) for each i in [0, count) on up to `threads` threads, the calling one among them; each i once. Neighbouring
// items go to the same thread, in order, until that thread has none left and helps the others. Threads of the team that sleep or
// are held up elsewhere are not waited for: the caller does their share.
//
// Several callers may come at the same time: one has the team, the others work alone.
using Task = void (*)(const void* body, int64_t item);
void run_items(int64_t count, int threads, Task task, const void* body, const Upcoming& next);

// Threads of the team that were started in this process so far.
int team_size();

template <typename Body>
void parallel_for(int64_t count, int threads, const Body& body, const Upcoming& next = {}) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  run_items(count, threads, [](const void* data, int64_t item) { (*static_cast<const Body*>(data))(item); }, &body, next);
}

}  // namespace tokenspeed_cpu
