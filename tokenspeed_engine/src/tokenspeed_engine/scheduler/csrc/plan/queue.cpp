#include "queue.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "../invariant.h"

namespace tokenspeed {

namespace {
ServiceLevel level_of(const Request& request) { return {request.options.priority, !request.has_live_deadline}; }
}  // namespace

void WaitingQueue::join(Request& request) {
  const auto [entry, is_new] = accounts_.try_emplace(request.options.tenant);
  TenantAccount& account = entry->second;
  account.tenant = request.options.tenant;
  if (!is_new && account.num_requests == 0) --num_idle_;
  if (account.num_requests++ == 0) account.virtual_time = std::max(account.virtual_time, floor_);
  request.account = &account;
}

void WaitingQueue::leave(Request& request) {
  if (--request.account->num_requests == 0 && ++num_idle_ > kMostIdleAccounts) forget_idle_accounts();
  request.account = nullptr;
}

// Half of them, those that were served least beyond what a new tenant starts with: the least is forgiven.
void WaitingQueue::forget_idle_accounts() {
  std::vector<std::pair<std::int64_t, std::int64_t>> idle;  // (virtual time, tenant)
  for (const auto& [tenant, account] : accounts_) {
    if (account.num_requests == 0) idle.emplace_back(account.virtual_time, tenant);
  }
  std::sort(idle.begin(), idle.end());
  idle.resize(idle.size() / 2);
  for (const auto& [virtual_time, tenant] : idle) accounts_.erase(tenant);
  num_idle_ -= idle.size();
}

void WaitingQueue::push(Request& request) {
  request.is_due = false;
  Level& level = levels_[level_of(request)];
  if (request.has_live_deadline) {
    level.by_deadline.emplace(std::pair{request.options.deadline_us, request.arrival}, &request);
  } else {
    Flow& flow = level.flows[request.options.tenant];
    const bool is_new = flow.by_arrival.empty();
    flow.account = request.account;
    flow.by_arrival.emplace(request.arrival, &request);
    if (!is_new) level.order.erase(key_of(flow));
    place(level, flow);
  }
  ++level.num_waiting;
  ++size_;
}

void WaitingQueue::place(Level& level, Flow& flow) {
  flow.known_virtual_time = flow.account->virtual_time;
  flow.known_arrival = flow.by_arrival.begin()->first;
  level.order.insert(key_of(flow));
}

void WaitingQueue::remove(Request& request) {
  take(request);
  request.is_due = false;
}

void WaitingQueue::take(Request& request) {
  const auto found = levels_.find(level_of(request));
  TOKENSPEED_INVARIANT(found != levels_.end());
  Level& level = found->second;
  if (request.has_live_deadline) {
    TOKENSPEED_INVARIANT(level.by_deadline.erase({request.options.deadline_us, request.arrival}) == 1);
  } else {
    const auto tenant = level.flows.find(request.options.tenant);
    TOKENSPEED_INVARIANT(tenant != level.flows.end());
    Flow& flow = tenant->second;
    level.order.erase(key_of(flow));
    TOKENSPEED_INVARIANT(flow.by_arrival.erase(request.arrival) == 1);
    if (flow.by_arrival.empty()) {
      level.flows.erase(tenant);
    } else {
      place(level, flow);
    }
  }
  --size_;
  if (--level.num_waiting == 0) levels_.erase(found);  // and with it the count of how often it was passed over: nobody waits
}

void WaitingQueue::admit(Request& request) {
  const ServiceLevel served = level_of(request);
  floor_ = std::max(floor_, request.account->virtual_time);
  const bool is_due = request.is_due;
  levels_.at(served).passed_over = 0;
  take(request);
  request.is_due = is_due;
  for (auto& [key, level] : levels_) {
    if (served != key) ++level.passed_over;
  }
}

Request* WaitingQueue::front(std::int64_t now_us) {
  if (size_ == 0) return nullptr;
  expire_deadlines(now_us);
  if (Level* due = due_level()) {
    Request* request = first_of(*due);
    request->is_due = true;
    return request;
  }
  Request* request = first_of(levels_.begin()->second);
  request->is_due = false;
  return request;
}

// Of the levels that were passed over too often, the one that was so most often; of equals, the worst.
WaitingQueue::Level* WaitingQueue::due_level() {
  Level* due = nullptr;
  for (auto& [key, level] : levels_) {
    if (level.passed_over >= starvation_limit_ && (due == nullptr || level.passed_over >= due->passed_over)) due = &level;
  }
  return due;
}

Request* WaitingQueue::first_of(Level& level) {
  if (!level.by_deadline.empty()) return level.by_deadline.begin()->second;
  // Accounts only grow, so an entry that is out of date stands too early: move it until the first is up to date.
  for (;;) {
    Flow& flow = level.flows.at(std::get<2>(*level.order.begin()));
    if (flow.known_virtual_time == flow.account->virtual_time) return flow.by_arrival.begin()->second;
    level.order.erase(level.order.begin());
    place(level, flow);
  }
}

void WaitingQueue::expire_deadlines(std::int64_t now_us) {
  for (auto entry = levels_.begin(); entry != levels_.end();) {
    Level& level = entry->second;
    ++entry;  // the level may go with its last request
    while (!level.by_deadline.empty() && level.by_deadline.begin()->first.first < now_us) {
      Request& request = *level.by_deadline.begin()->second;
      const bool was_last = level.num_waiting == 1;
      take(request);
      request.has_live_deadline = false;
      push(request);
      if (was_last) break;
    }
  }
}

bool WaitingQueue::prompt_before(const Request& a, const Request& b) {
  if (a.is_due != b.is_due) return a.is_due;
  if (const auto order = level_of(a) <=> level_of(b); order != 0) return order < 0;
  if (a.has_live_deadline && a.options.deadline_us != b.options.deadline_us) return a.options.deadline_us < b.options.deadline_us;
  const std::int64_t served_a = a.has_live_deadline ? 0 : a.account->virtual_time;
  const std::int64_t served_b = b.has_live_deadline ? 0 : b.account->virtual_time;
  return std::tie(served_a, a.arrival) < std::tie(served_b, b.arrival);
}

std::int64_t WaitingQueue::num_better_than(std::int32_t priority) const {
  std::int64_t count = 0;
  for (const auto& [key, level] : levels_) {
    if (key.priority >= priority) break;
    count += level.num_waiting;
  }
  return count;
}

}  // namespace tokenspeed
