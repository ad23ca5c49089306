// Who is served next: the order of the waiting requests, and of prompts that share a step.
//
// Levels come first: a smaller priority before a larger one, and within a priority the requests with a deadline that can still be
// met (the earliest first) before the others. Within a level tenants share by weight: the next request is of the tenant that was
// served least, in computed tokens divided by its weight, and within a tenant the one that arrived first.
//
// Nobody starves. Each admission from one level counts for all others that have requests waiting, and once a level was passed over
// `starvation_limit` times, its next request is due: it goes before all others (of several such levels, that of the one passed over most), and what was admitted so is not pre-empted for
// priority. With m levels in use a waiting level is served at the latest after starvation_limit + m - 1 admissions of others. Within a
// level the tenant that was served least is next, and one that comes back after a pause starts at the level of the others: neither
// saves up credit nor has to pay for what it took while it was alone.
//
// Everything is a function of the calls: whole numbers, ordered containers, no clock but the one that is told.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>

#include "lifetime.h"
#include "request.h"

namespace tokenspeed {

// What one tenant was served.
struct TenantAccount {
  std::int64_t tenant = 0;
  std::int64_t virtual_time = 0;  // computed tokens / weight, in units of 2^-20 tokens
  std::int64_t num_requests = 0;  // that live
  LengthEstimate output_length;
};

// A class of service. The lower, the earlier.
struct ServiceLevel {
  std::int32_t priority = 0;
  bool is_fair = true;  // false: by deadline
  auto operator<=>(const ServiceLevel&) const = default;
};

class WaitingQueue {
 public:
  explicit WaitingQueue(std::int32_t starvation_limit) : starvation_limit_(starvation_limit) {}
  WaitingQueue(const WaitingQueue&) = delete;
  WaitingQueue& operator=(const WaitingQueue&) = delete;

  // A request begins and ends its life: its tenant's account is opened and, when nothing keeps it, closed.
  void join(Request& request);
  void leave(Request& request);

  void push(Request& request);    // it waits from now on
  void remove(Request& request);  // it waits no more, without having been served
  void admit(Request& request);   // it waits no more and is served: those that it passed over are counted

  // The request to serve next, or null when none waits. Requests whose deadline went by count as those without.
  Request* front(std::int64_t now_us);
  // Order of prompts that are being computed: the better level first, then the tenant served least, then arrival.
  static bool prompt_before(const Request& a, const Request& b);

  // Puts what was computed of the request since the last call, and not found in the cache or computed before, on its tenant's account.
  // Decodes are charged page by page, so that a step need not touch every account.
  static void charge(Request& request) {
    const std::int32_t num_tokens = request.num_computed_high_water - request.num_charged;
    if (num_tokens <= 0) return;
    request.num_charged = request.num_computed_high_water;
    request.account->virtual_time += (static_cast<std::int64_t>(num_tokens) << kFractionBits) / request.options.tenant_weight;
  }

  std::size_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  // Waiting requests of a priority better than this one.
  std::int64_t num_better_than(std::int32_t priority) const;
  std::size_t num_accounts() const noexcept { return accounts_.size(); }

 private:
  static constexpr int kFractionBits = 20;
  static constexpr std::size_t kMostIdleAccounts = 2048;

  // The waiting requests of one tenant in one level, and where the tenant stands in the level's order.
  struct Flow {
    std::map<std::uint64_t, Request*> by_arrival;
    TenantAccount* account = nullptr;
    std::int64_t known_virtual_time = 0;  // as of its entry in `order`: never more than the account's
    std::uint64_t known_arrival = 0;
  };
  using FlowKey = std::tuple<std::int64_t, std::uint64_t, std::int64_t>;  // virtual time, arrival of its first request, tenant
  struct Level {
    std::map<std::int64_t, Flow> flows;  // by tenant
    std::set<FlowKey> order;
    std::map<std::pair<std::int64_t, std::uint64_t>, Request*> by_deadline;  // of a level by deadline: (deadline, arrival)
    std::int64_t num_waiting = 0;
    std::int64_t passed_over = 0;  // admissions of other levels since it was last served, while it waited
  };
  using Levels = std::map<ServiceLevel, Level>;

  static FlowKey key_of(const Flow& flow) { return {flow.known_virtual_time, flow.known_arrival, flow.account->tenant}; }
  void place(Level& level, Flow& flow);
  Request* first_of(Level& level);
  Level* due_level();
  void expire_deadlines(std::int64_t now_us);
  void take(Request& request);
  void forget_idle_accounts();

  std::int32_t starvation_limit_;
  Levels levels_;
  std::map<std::int64_t, TenantAccount> accounts_;
  std::int64_t floor_ = 0;  // virtual time of the last tenant served: where a tenant that comes back starts
  std::size_t size_ = 0;
  std::size_t num_idle_ = 0;  // accounts of tenants without requests
};

}  // namespace tokenspeed
