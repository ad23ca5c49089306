// A team of threads that look out for the next call for a while after the last one, and then sleep.
//
// PyTorch's own team (OpenMP) is not used: a call of it waits for every thread to come and to leave, some 100 times for each token of
// a small model, and its threads sleep after a few microseconds or spin for milliseconds, as the process was started. With it two
// threads were no faster than one in decoding a model of 135M parameters (EPYC of 2022, two cores; 8.4 ms a token, 6.2 ms with this).
#include "parallel.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <csignal>
#include <mutex>
#include <new>

namespace tokenspeed_cpu {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxThreads = 256;
// How long a thread looks out for work before it sleeps. An engine's steps follow each other with a fraction of a millisecond
// between them, and waking a thread takes as long as a product does.
constexpr auto kSpin = std::chrono::microseconds(1000);
// After this much of it, anyone else who wants the core goes first.
constexpr auto kSpinAlone = std::chrono::microseconds(200);
constexpr int kPausesPerLook = 32;  // between two looks at the clock
// What a thread fetches ahead at most: it is to stay in its own second-level cache, of which recent processors have a megabyte or more.
constexpr int64_t kFetchedBytes = 640 * 1024;
constexpr int64_t kFetchedAtOnce = 1024;  // between two looks for work

// The state of the team in one word, its gate, so that joining is one atomic step: which call, how many threads it wants beside the caller,
// whether it still takes any, and how many are inside.
constexpr uint64_t kInside = 0xFFFF;
constexpr uint64_t kOpen = 1 << 16;
constexpr int kWantedShift = 17;
constexpr int kCallShift = 32;

struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t last;
};

struct Job {
  Task task;
  const void* body;
  int shares;
  Upcoming next;
};

void work_on(const Job& job, Share* shares, int own) {
  for (int turn = 0; turn < job.shares; ++turn) {
    Share& share = shares[(own + turn) % job.shares];
    while (share.next.load(std::memory_order_relaxed) < share.last) {
      const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= share.last) break;
      job.task(job.body, item);
    }
  }
}

class Team {
 public:
  // False where the team is taken: nothing was done.
  bool run(int64_t count, int threads, Task task, const void* body, const Upcoming& next);
  int size() const { return size_.load(std::memory_order_relaxed); }

 private:
  struct Start {
    Team* team;
    int own;
  };
  static void* enter(void* data);
  void serve(int own);
  void wait_for_call(uint64_t seen, const Upcoming& next, int own, int shares);
  void fetch_ahead(uint64_t seen, const Upcoming& next, int own, int shares) const;
  void grow(int threads);

  bool has_new_call(uint64_t seen) const { return gate_.load(std::memory_order_acquire) >> kCallShift != seen; }

  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<uint32_t> bell_{0};
  alignas(64) Job job_{};
  Share shares_[kMaxThreads];
  std::mutex taken_;
  std::atomic<int> size_{0};
  bool is_refused_ = false;
};

// Never destroyed: its threads may run until the process ends.
std::atomic<Team*> team{nullptr};

Team& the_team() {
  static const int registered = [] {
    team.store(new Team);
    // A child has none of its parent's threads, and nobody can say what state the parent's team was in.
    return pthread_atfork(nullptr, nullptr, [] { team.store(new (std::nothrow) Team); });
  }();
  (void)registered;
  return *team.load(std::memory_order_acquire);
}

void Team::grow(int threads) {
  while (!is_refused_ && size_.load(std::memory_order_relaxed) < threads) {
    // Signals are the main thread's business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    auto* start = new Start{this, size_.load(std::memory_order_relaxed) + 1};
    pthread_t thread;
    is_refused_ = pthread_create(&thread, nullptr, &Team::enter, start) != 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (is_refused_) {
      delete start;
      return;
    }
    pthread_setname_np(thread, "cpu_native");
    pthread_detach(thread);
    size_.fetch_add(1, std::memory_order_relaxed);
  }
}

bool Team::run(int64_t count, int threads, Task task, const void* body, const Upcoming& next) {
  std::unique_lock lock(taken_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  grow(threads - 1);
  job_ = {task, body, threads, next};
  for (int i = 0; i < threads; ++i) {
    shares_[i].next.store(count * i / threads, std::memory_order_relaxed);
    shares_[i].last = count * (i + 1) / threads;
  }
  const uint64_t call = (gate_.load(std::memory_order_relaxed) >> kCallShift) + 1;
  gate_.store(call << kCallShift | static_cast<uint64_t>(threads - 1) << kWantedShift | kOpen, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    syscall(SYS_futex, &bell_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
  work_on(job_, shares_, 0);
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int64_t turn = 1; (gate_.load(std::memory_order_acquire) & kInside) != 0; ++turn) {
    _mm_pause();
    if (turn % 4096 == 0) sched_yield();  // whoever is inside may be waiting for this core
  }
  return true;
}

void* Team::enter(void* data) {
  const Start start = *static_cast<Start*>(data);
  delete static_cast<Start*>(data);
  start.team->serve(start.own);
  return nullptr;
}

void Team::serve(int own) {
  uint64_t seen = 0;
  Upcoming next;
  int shares = 1;
  while (true) {
    wait_for_call(seen, next, own, shares);
    next = {};
    uint64_t gate = gate_.load(std::memory_order_acquire);
    seen = gate >> kCallShift;
    bool inside = false;
    while ((gate & kOpen) != 0 && own <= static_cast<int>(gate >> kWantedShift & (kMaxThreads - 1))) {
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        inside = true;
        break;
      }
    }
    if (!inside) continue;
    seen = gate >> kCallShift;
    work_on(job_, shares_, own);
    next = job_.next;
    shares = job_.shares;
    gate_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

// While the caller is busy with what is not worth sharing, the memory would stand idle.
void Team::fetch_ahead(uint64_t seen, const Upcoming& next, int own, int shares) const {
  const uint8_t* from = next.data + next.bytes * own / shares;
  const int64_t bytes = std::min(next.bytes * (own + 1) / shares - next.bytes * own / shares, kFetchedBytes);
  for (int64_t i = 0; i < bytes; i += kFetchedAtOnce) {
    for (int64_t line = 0; line < kFetchedAtOnce; line += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i + line), _MM_HINT_T1);
    if (has_new_call(seen)) return;
  }
}

void Team::wait_for_call(uint64_t seen, const Upcoming& next, int own, int shares) {
  if (next.data != nullptr) fetch_ahead(seen, next, own, shares);
  const auto start = Clock::now();
  for (int turn = 1; !has_new_call(seen); ++turn) {
    _mm_pause();
    if (turn % kPausesPerLook != 0) continue;
    const auto waited = Clock::now() - start;
    if (waited > kSpin) break;
    if (waited > kSpinAlone) sched_yield();
  }
  while (!has_new_call(seen)) {
    const uint32_t bell = bell_.load(std::memory_order_seq_cst);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // The caller opens the gate before it looks for sleepers: one of the two sees the other.
    if (gate_.load(std::memory_order_seq_cst) >> kCallShift == seen) {
      syscall(SYS_futex, &bell_, FUTEX_WAIT_PRIVATE, bell, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace

int team_size() { return the_team().size(); }

void run_items(int64_t count, int threads, Task task, const void* body, const Upcoming& next) {
  threads = static_cast<int>(std::min<int64_t>({threads, count, kMaxThreads - 1}));
  if (threads > 1 && the_team().run(count, threads, task, body, next)) return;
  for (int64_t i = 0; i < count; ++i) task(body, i);
}

}  // namespace tokenspeed_cpu
