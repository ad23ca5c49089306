// Bytes become a life of the control plane: any call at any time. After each call everything is checked, and two schedulers that get the
// same calls must plan alike. Built with libFuzzer this file is its target; alone it brings a small driver, see fuzz_main.cpp.
//
// The sequence of a family of requests is fixed: token(family, position). So a fake cache of token ids, filled as plans say, must hold
// exactly those tokens wherever a planned row reads, whichever request, transfer or other engine put them there.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plan/scheduler.h"

namespace {

using namespace tokenspeed;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);       \
      std::abort();                                                              \
    }                                                                            \
  } while (false)

constexpr TokenId kGarbage = -7;

class Bytes {
 public:
  explicit Bytes(std::span<const std::uint8_t> data) : data_(data) {}
  bool empty() const { return data_.empty(); }
  std::uint32_t next() {
    if (data_.empty()) return 0;
    const std::uint8_t value = data_.front();
    data_ = data_.subspan(1);
    return value;
  }
  std::int32_t range(std::int32_t low, std::int32_t high) {
    return low + static_cast<std::int32_t>(next() % static_cast<std::uint32_t>(high - low + 1));
  }

 private:
  std::span<const std::uint8_t> data_;
};

// Families share their first tokens, so that prefixes branch.
TokenId token_of(std::int32_t family, std::int32_t position) {
  const std::uint32_t mixed = static_cast<std::uint32_t>(position < 7 ? 0 : family + 1) * 2654435761u + static_cast<std::uint32_t>(position) * 40503u;
  return static_cast<TokenId>((mixed >> 7) % 1000u);
}

struct Known {
  std::int32_t family = 0;
  std::int32_t num_prompt = 0;
  Role role = Role::kLocal;
  std::vector<PageId> sent;  // pages that another engine may touch
  std::int32_t first_sent = 0;
};

struct Copy {
  bool to_host;
  std::vector<PageId> targets;
  std::vector<TokenId> values;
};

struct Step {
  std::int64_t number;
  std::vector<TokenId> sampled;
};

class Life {
 public:
  explicit Life(Bytes& bytes) : bytes_(bytes), config_(make_config(bytes)), first_(config_), second_(config_) {
    device_.assign(static_cast<std::size_t>(config_.num_pages * config_.page_size), kGarbage);
    host_.assign(static_cast<std::size_t>(config_.num_host_pages * config_.page_size), kGarbage);
  }

  void call() {
    switch (bytes_.next() % 24) {
      case 0: case 1: case 2: case 3: submit(); break;
      case 4: case 5: case 6: case 7: case 8: case 9: case 10: plan(); break;
      case 11: case 12: case 13: case 14: commit(); break;
      case 15: case 16: end_copy(bytes_.next() % 8 != 0); break;
      case 17: both([&](Scheduler& s, std::int64_t id) { return static_cast<int>(s.abort(id)); }, any_id()); break;
      case 18: both([&](Scheduler& s, std::int64_t id) { return static_cast<int>(s.bootstrapped(id)); }, any_id()); break;
      case 19: remote_done(any_id()); break;
      case 20: transfer_ended(any_id(), bytes_.next() % 2 == 0); break;
      case 21: advance(bytes_.range(0, 40)); break;
      case 22: both([&](Scheduler& s, std::int64_t session) { return static_cast<int>(s.end_session(session)); }, bytes_.range(0, 3)); break;
      case 23: rare(); break;
    }
    first_.check();
  }

  // All that is left ends in bounded time, and every page comes back.
  void finish() {
    first_.resume();
    second_.resume();
    for (int round = 0; first_.has_work() || !steps_.empty() || first_.stats().num_transfers > 0; ++round) {
      EXPECT(round < 20000);
      for (std::int64_t id = 0; id < next_id_; ++id) {
        if (known_.contains(id) && known_[id].role != Role::kLocal) {
          both([&](Scheduler& s, std::int64_t i) { return static_cast<int>(s.bootstrapped(i)); }, id);
          transfer_ended(id, round % 2 == 0);
        }
      }
      plan();
      commit();
      while (!copies_.empty()) end_copy(true);
    }
    first_.check();
    EXPECT(first_.stats().owned_pages == 0);
    first_.flush_cache();
    second_.flush_cache();
    first_.check();
    EXPECT(first_.stats().free_pages == config_.num_pages && first_.stats().host_cached_pages == 0);
  }

 private:
  static SchedulerConfig make_config(Bytes& b) {
    SchedulerConfig c;
    c.page_size = b.range(1, 4);
    c.num_pages = b.range(2, 24);
    c.max_num_seqs = b.range(1, 4);
    c.max_num_batched_tokens = c.max_num_seqs + b.range(0, 20);
    c.max_model_len = 48;
    c.chunk_size = b.range(0, 2) * 3;
    c.max_in_flight_steps = b.range(1, 3);
    c.session_ttl_us = b.range(0, 2) * 30;
    c.enable_prefix_cache = b.next() % 8 != 0;
    if (c.enable_prefix_cache) {
      c.num_host_pages = b.range(0, 3) * 9;
      c.host_write_through = c.num_host_pages > 0 && b.next() % 2 == 0;
      c.kv_event_pages = b.range(0, 1) * 64;
    }
    c.load_page_ns = b.range(0, 3);
    c.prefill_token_ns = b.range(0, 1);
    c.starvation_limit = b.range(1, 4);
    return c;
  }

  std::int64_t any_id() { return bytes_.range(0, static_cast<std::int32_t>(std::min<std::int64_t>(next_id_, 200))); }

  template <class Call>
  int both(Call call, std::int64_t argument) {
    const int answer = call(first_, argument);
    EXPECT(answer == call(second_, argument));
    return answer;
  }

  void submit() {
    Known known;
    known.family = bytes_.range(0, 3);
    known.num_prompt = bytes_.range(0, 30);
    const std::int32_t max_new = bytes_.range(0, 12);
    std::vector<TokenId> prompt;
    for (std::int32_t p = 0; p < known.num_prompt; ++p) prompt.push_back(token_of(known.family, p));
    RequestOptions options;
    options.session = bytes_.range(0, 3);
    options.salt = std::array{"", "", "a", "b"}[static_cast<std::size_t>(bytes_.range(0, 3))];
    options.priority = bytes_.range(0, 2);
    options.tenant = bytes_.range(0, 2);
    options.tenant_weight = bytes_.range(1, 3);
    options.deadline_us = bytes_.next() % 4 == 0 ? now_us_ + bytes_.range(0, 50) : -1;
    options.role = static_cast<Role>(std::array{0, 0, 0, 0, 1, 2}[static_cast<std::size_t>(bytes_.range(0, 5))]);
    known.role = options.role;
    const bool cached = bytes_.next() % 8 != 0;
    const std::int64_t id = next_id_++;
    const auto status = first_.submit(id, prompt, max_new, {}, 0, cached, options);
    EXPECT(status == second_.submit(id, prompt, max_new, {}, 0, cached, options));
    if (status == SubmitStatus::kOk) known_[id] = known;
  }

  void advance(std::int32_t by) {
    now_us_ += by;
    first_.advance_clock(now_us_);
    second_.advance_clock(now_us_);
  }

  template <class T>
  static bool same(const std::vector<T>& a, const std::vector<T>& b, std::int32_t count) {
    return std::equal(a.begin(), a.begin() + count, b.begin());
  }

  void plan() {
    if (static_cast<std::int32_t>(steps_.size()) == config_.max_in_flight_steps) {
      bool threw = false;
      try {
        (void)first_.plan();
      } catch (const UsageError&) {
        threw = true;
      }
      EXPECT(threw);
      return;
    }
    const auto step = first_.plan();
    const auto other = second_.plan();
    EXPECT((step == nullptr) == (other == nullptr));
    const Transfers transfers = first_.take_transfers();
    const Transfers others = second_.take_transfers();
    begin_copies(transfers.write_backs.get(), others.write_backs.get(), true);
    begin_copies(transfers.load_backs.get(), others.load_backs.get(), false);
    if (transfers.remote_prefills != nullptr) {
      for (const RemotePrefill& remote : *transfers.remote_prefills) {
        Known& known = known_.at(remote.request_id);
        const auto pages = first_.pages_of(remote.request_id);
        known.sent.assign(pages.begin(), pages.end());
        known.first_sent = static_cast<std::int32_t>(remote.num_cached_tokens);
      }
    }
    if (step == nullptr) {
      // Without a step, a copy or another engine to wait for, whatever has work must run.
      EXPECT(first_.is_paused() || !first_.has_work() || !steps_.empty() || !copies_.empty() || first_.stats().num_outside > 0);
      return;
    }
    EXPECT(step->num_requests == other->num_requests && step->num_tokens == other->num_tokens && step->num_decodes == other->num_decodes);
    EXPECT(same(step->request_ids, other->request_ids, step->num_requests) && same(step->rows, other->rows, step->num_requests));
    EXPECT(same(step->slot_mapping, other->slot_mapping, step->num_tokens) && same(step->token_ids, other->token_ids, step->num_tokens));
    EXPECT(same(step->sample_rows, other->sample_rows, step->num_samples) && same(step->output_index, other->output_index, step->num_samples));
    run(*step);
  }

  void run(const StepBuffers& step) {
    for (std::int32_t row = 0; row < step.num_requests; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const Known& known = known_.at(step.request_ids[r]);
      for (std::int32_t t = step.cu_query_lens[r]; t < step.cu_query_lens[r] + step.query_lens[r]; ++t) {
        const auto i = static_cast<std::size_t>(t);
        const TokenId token = token_of(known.family, step.positions[i]);
        EXPECT(step.token_ids[i] == -1 || step.token_ids[i] == token);
        device_[static_cast<std::size_t>(step.slot_mapping[i])] = token;
      }
    }
    const std::span<const std::int32_t> table = first_.page_table();
    const auto columns = static_cast<std::size_t>(config_.max_pages_per_request());
    for (std::int32_t row = 0; row < step.num_requests; ++row) {
      const auto r = static_cast<std::size_t>(row);
      const Known& known = known_.at(step.request_ids[r]);
      for (std::int32_t p = 0; p < step.seq_lens[r]; ++p) {
        const PageId page = table[static_cast<std::size_t>(step.rows[r]) * columns + static_cast<std::size_t>(p / config_.page_size)];
        EXPECT(page >= 0);
        EXPECT(device_[static_cast<std::size_t>(page * config_.page_size + p % config_.page_size)] == token_of(known.family, p));
      }
    }
    Step open{step.step, {}};
    for (std::int32_t s = 0; s < step.num_samples; ++s) {
      const auto r = static_cast<std::size_t>(step.sample_rows[static_cast<std::size_t>(s)]);
      const Known& known = known_.at(step.request_ids[r]);
      open.sampled.push_back(token_of(known.family, known.num_prompt + step.output_index[static_cast<std::size_t>(s)]));
    }
    steps_.push_back(std::move(open));
  }

  void commit() {
    if (steps_.empty()) return;
    const Step step = steps_.front();
    steps_.pop_front();
    const std::int64_t time_us = bytes_.range(0, 9);
    const CommitBuffers& result = first_.commit(step.number, step.sampled, time_us);
    const CommitBuffers& other = second_.commit(step.number, step.sampled, time_us);
    EXPECT(result.num_events == other.num_events && same(result.request_ids, other.request_ids, result.num_events));
    EXPECT(same(result.num_cached_tokens, other.num_cached_tokens, result.num_events));
    for (std::int32_t event = 0; event < result.num_events; ++event) {
      const std::int64_t id = result.request_ids[static_cast<std::size_t>(event)];
      Known& known = known_.at(id);
      if (known.role != Role::kPrefill) continue;
      const auto pages = first_.pages_of(id);  // the other engine reads from now on
      known.sent.assign(pages.begin(), pages.end());
    }
  }

  std::vector<TokenId>& pool(bool host) { return host ? host_ : device_; }

  void begin_copies(const PageCopies* copies, const PageCopies* others, bool to_host) {
    EXPECT((copies == nullptr) == (others == nullptr));
    if (copies == nullptr) return;
    EXPECT(copies->ids == others->ids);
    for (std::size_t i = 0; i < copies->pairs.size(); ++i) {
      const PagePair pair = copies->pairs[i];
      EXPECT(pair.from == others->pairs[i].from && pair.to == others->pairs[i].to);
      Copy& copy = copies_.try_emplace(copies->ids[i], Copy{to_host, {}, {}}).first->second;
      copy.targets.push_back(pair.to);
      for (std::int32_t offset = 0; offset < config_.page_size; ++offset) {
        copy.values.push_back(pool(!to_host)[static_cast<std::size_t>(pair.from * config_.page_size + offset)]);
        pool(to_host)[static_cast<std::size_t>(pair.to * config_.page_size + offset)] = kGarbage;
      }
    }
  }

  // Any of the copies in flight, not the oldest: they end in any order.
  void end_copy(bool ok) {
    if (copies_.empty()) return;
    auto chosen = copies_.begin();
    for (std::int32_t skip = bytes_.range(0, 3); skip > 0 && std::next(chosen) != copies_.end(); --skip) ++chosen;
    std::size_t value = 0;
    for (const PageId page : chosen->second.targets) {
      for (std::int32_t offset = 0; offset < config_.page_size; ++offset, ++value) {
        pool(chosen->second.to_host)[static_cast<std::size_t>(page * config_.page_size + offset)] = ok ? chosen->second.values[value] : kGarbage;
      }
    }
    const std::array ids{chosen->first, std::int64_t{1} << 40};  // the second names nothing
    const std::array<bool, 2> oks{ok, true};
    copies_.erase(chosen);
    EXPECT(first_.complete_transfers(ids, oks) == 1);
    EXPECT(second_.complete_transfers(ids, oks) == 1);
  }

  // The other engine writes where it was told, however late.
  void remote_done(std::int64_t id) {
    const auto entry = known_.find(id);
    if (entry != known_.end() && entry->second.role == Role::kDecode) {
      Known& known = entry->second;
      for (std::int32_t p = known.first_sent; !known.sent.empty() && p < known.num_prompt; ++p) {
        const PageId page = known.sent[static_cast<std::size_t>(p / config_.page_size)];
        device_[static_cast<std::size_t>(page * config_.page_size + p % config_.page_size)] = token_of(known.family, p);
      }
      known.sent.clear();  // and once only
    }
    const TokenId token = entry == known_.end() ? 0 : token_of(entry->second.family, entry->second.num_prompt);
    both([&](Scheduler& s, std::int64_t i) { return static_cast<int>(s.remote_prefill_done(i, token)); }, id);
  }

  void transfer_ended(std::int64_t id, bool ok) {
    const auto entry = known_.find(id);
    if (entry != known_.end() && entry->second.role == Role::kPrefill && ok) {
      Known& known = entry->second;  // until now the pages were the other engine's to read
      for (std::int32_t p = 0; !known.sent.empty() && p < known.num_prompt; ++p) {
        const PageId page = known.sent[static_cast<std::size_t>(p / config_.page_size)];
        EXPECT(device_[static_cast<std::size_t>(page * config_.page_size + p % config_.page_size)] == token_of(known.family, p));
      }
    }
    if (entry != known_.end()) entry->second.sent.clear();
    if (ok) {
      both([&](Scheduler& s, std::int64_t i) { return static_cast<int>(s.transfer_succeeded(i)); }, id);
      if (entry == known_.end() || entry->second.role != Role::kDecode) return;
    }
    both([&](Scheduler& s, std::int64_t i) { return static_cast<int>(s.transfer_failed(i)); }, id);
  }

  void rare() {
    switch (bytes_.next() % 4) {
      case 0: EXPECT(first_.flush_cache() == second_.flush_cache()); break;
      case 1: first_.pause(); second_.pause(); break;
      case 2: first_.resume(); second_.resume(); break;
      case 3: EXPECT(first_.take_kv_events().size() == second_.take_kv_events().size()); break;
    }
  }

  Bytes& bytes_;
  SchedulerConfig config_;
  Scheduler first_;
  Scheduler second_;
  std::vector<TokenId> device_;
  std::vector<TokenId> host_;
  std::map<std::int64_t, Known> known_;
  std::map<std::int64_t, Copy> copies_;
  std::deque<Step> steps_;
  std::int64_t next_id_ = 0;
  std::int64_t now_us_ = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes({data, size});
  Life life(bytes);
  while (!bytes.empty()) life.call();
  life.finish();
  return 0;
}
