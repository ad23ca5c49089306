#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "check.h"
#include "plan/queue.h"

using namespace tokenspeed;

namespace {

// A queue and the requests that wait in it.
struct Waiting {
  explicit Waiting(std::int32_t limit = 4) : queue(limit) {}
  ~Waiting() {
    for (Request& request : requests) {
      if (request.account != nullptr) queue.leave(request);
    }
  }

  Request& add(std::int32_t priority = 0, std::int64_t tenant = 0, std::int32_t weight = 1, std::int64_t deadline_us = -1) {
    Request& request = requests.emplace_back();
    request.id = request.arrival = requests.size();
    request.options.priority = priority;
    request.options.tenant = tenant;
    request.options.tenant_weight = weight;
    request.options.deadline_us = deadline_us;
    request.has_live_deadline = deadline_us >= 0;
    queue.join(request);
    queue.push(request);
    return request;
  }

  // Admits the next one, serves it `num_tokens` tokens, and ends it.
  std::int64_t serve(std::int32_t num_tokens = 1, std::int64_t now_us = 0) {
    Request* request = queue.front(now_us);
    CHECK(request != nullptr);
    queue.admit(*request);
    request->num_computed_high_water += num_tokens;
    WaitingQueue::charge(*request);
    queue.leave(*request);
    return request->id;
  }

  std::deque<Request> requests;
  WaitingQueue queue;
};

}  // namespace

TEST(alike_requests_go_in_order_of_arrival) {
  Waiting w;
  for (int i = 0; i < 20; ++i) w.add();
  for (std::int64_t id = 1; id <= 20; ++id) CHECK_EQ(w.serve(), id);
  CHECK(w.queue.front(0) == nullptr);
}

TEST(a_smaller_priority_goes_first_and_arrival_decides_within_it) {
  Waiting w;
  w.add(1), w.add(0), w.add(-5), w.add(0), w.add(-5);
  for (const std::int64_t id : {3, 5, 2, 4, 1}) CHECK_EQ(w.serve(), id);
}

TEST(the_earliest_deadline_goes_first_and_a_missed_one_is_none) {
  Waiting w;
  w.add(), w.add(0, 0, 1, 500), w.add(0, 0, 1, 300), w.add(0, 0, 1, 100), w.add(1, 0, 1, 50);
  CHECK_EQ(w.serve(1, 200), 3);  // that of 4 went by
  CHECK_EQ(w.serve(1, 200), 2);
  CHECK_EQ(w.serve(1, 200), 1);
  CHECK_EQ(w.serve(1, 200), 4);
  CHECK_EQ(w.serve(1, 200), 5);  // of a worse priority, however urgent
}

TEST(a_request_that_was_put_back_keeps_its_place) {
  Waiting w;
  w.add(), w.add(), w.add();
  Request* first = w.queue.front(0);
  w.queue.admit(*first);
  Request* second = w.queue.front(0);
  CHECK_EQ(second->id, 2);
  w.queue.admit(*second);
  w.queue.push(*second);
  w.queue.push(*first);
  for (const std::int64_t id : {1, 2, 3}) CHECK_EQ(w.serve(), id);
}

// Whatever its requests are like, each tenant that always has some waiting gets its weight's share of the computed tokens.
TEST(tenants_share_computed_tokens_by_weight) {
  Waiting w;
  const std::map<std::int64_t, std::int32_t> weights{{7, 1}, {8, 2}, {9, 5}};
  const std::map<std::int64_t, std::int32_t> sizes{{7, 900}, {8, 100}, {9, 10}};
  std::map<std::int64_t, std::int64_t> served;
  for (const auto& [tenant, weight] : weights) w.add(0, tenant, weight);
  std::int64_t total = 0;
  while (total < 400'000) {
    const Request& next = *w.queue.front(0);
    const std::int64_t tenant = next.options.tenant;
    w.add(0, tenant, weights.at(tenant));  // it always has one more
    w.serve(sizes.at(tenant));
    served[tenant] += sizes.at(tenant);
    total += sizes.at(tenant);
  }
  for (const auto& [tenant, weight] : weights) {
    const std::int64_t share = total * weight / 8;
    CHECK(served[tenant] > share - 2000 && served[tenant] < share + 2000);
  }
}

TEST(a_flood_of_one_tenant_does_not_hold_up_another) {
  Waiting w;
  for (int i = 0; i < 1000; ++i) w.add(0, 1);
  for (int i = 0; i < 3; ++i) w.add(0, 2);
  int position = 0;
  std::vector<int> positions;
  while (positions.size() < 3) {
    ++position;
    if (w.serve(100) > 1000) positions.push_back(position);
  }
  CHECK(positions.back() <= 6);
}

TEST(a_tenant_that_was_away_saves_up_nothing) {
  Waiting w;
  for (int i = 0; i < 100; ++i) {
    w.add(0, 1);
    w.serve(1000);
  }
  for (int i = 0; i < 10; ++i) w.add(0, 1), w.add(0, 2);
  int of_newcomer = 0;
  for (int i = 0; i < 10; ++i) {
    if (w.queue.front(0)->options.tenant == 2) ++of_newcomer;
    w.serve(1000);
  }
  CHECK(of_newcomer >= 4 && of_newcomer <= 6);
}

// The promise of queue.h: at most limit + levels - 1 admissions of others before a level is served.
TEST(no_level_waits_longer_than_promised) {
  for (const std::int32_t limit : {1, 3, 16}) {
    Waiting w(limit);
    constexpr std::int32_t kLevels = 5;
    std::map<std::int32_t, std::int32_t> waited;
    for (std::int32_t priority = 0; priority < kLevels; ++priority) w.add(priority), w.add(priority);
    std::int32_t worst = 0;
    for (int i = 0; i < 2000; ++i) {
      const std::int32_t served = w.queue.front(0)->options.priority;
      w.add(served);  // every level always has one waiting
      w.serve();
      for (std::int32_t priority = 0; priority < kLevels; ++priority) {
        waited[priority] = priority == served ? 0 : waited[priority] + 1;
        worst = std::max(worst, waited[priority]);
      }
    }
    CHECK(worst <= limit + kLevels - 1);
    CHECK(worst >= limit);
  }
}

TEST(a_stream_of_deadlines_does_not_starve_those_without) {
  Waiting w(8);
  Request& patient = w.add();
  for (int i = 0; i < 100 && patient.account != nullptr; ++i) {
    w.add(0, 0, 1, 1'000'000 + i);
    CHECK(i < 9);
    w.serve();
  }
  CHECK(patient.account == nullptr);
}

TEST(accounts_of_tenants_that_left_do_not_pile_up) {
  Waiting w;
  for (std::int64_t tenant = 0; tenant < 20'000; ++tenant) {
    w.add(0, tenant);
    w.serve(10);
  }
  CHECK(w.queue.num_accounts() < 3000);
}

TEST(removal_from_any_place_keeps_the_order) {
  Waiting w;
  for (int i = 0; i < 12; ++i) w.add(i % 2, i % 3, 1, i % 4 == 0 ? 1000 - i : -1);
  for (const std::size_t index : {4, 0, 11, 7}) {
    w.queue.remove(w.requests[index]);
    w.queue.leave(w.requests[index]);
  }
  CHECK_EQ(w.queue.size(), std::size_t{8});
  CHECK_EQ(w.queue.num_better_than(1), 4);
  std::int32_t priority = 0;
  while (!w.queue.empty()) {
    const Request& next = *w.queue.front(0);
    CHECK(next.options.priority >= priority);
    priority = next.options.priority;
    w.serve();
  }
}
