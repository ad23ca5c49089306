// The Python face of the control plane. Only plain numbers and read-only integer arrays cross; no handle does.
//
// Arrays are NumPy views of the C++ buffers. A view keeps its buffer alive; what it shows is overwritten as documented in the stub.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "../invariant.h"
#include "../plan/scheduler.h"
#include "bindings.h"
#include "external.h"
#include "scheduler_docs.h"  // made from _scheduler.pyi

namespace nb = nanobind;
using namespace nb::literals;

namespace tokenspeed {
namespace {

using TokenArray = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using IdArray = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FlagArray = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int32_t> as_span(const TokenArray& array) { return {array.data(), array.shape(0)}; }
std::span<const std::int64_t> as_span(const IdArray& array) { return {array.data(), array.shape(0)}; }

// A read-only view of `size` elements that keeps `owner` alive.
template <class T>
nb::object view(const T* data, std::size_t size, nb::handle owner) {
  const std::array<std::size_t, 1> shape{size};
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(data, 1, shape.data(), owner), nb::rv_policy::reference);
}
template <class T>
nb::object view_2d(const T* data, std::size_t rows, std::size_t columns, nb::handle owner) {
  const std::array<std::size_t, 2> shape{rows, columns};
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<2>>(data, 2, shape.data(), owner), nb::rv_policy::reference);
}

// An object that keeps a shared pointer alive for views.
template <class T>
nb::object keeper(std::shared_ptr<T> shared) {
  auto* held = new std::shared_ptr<T>(std::move(shared));
  return nb::capsule(held, [](void* pointer) noexcept { delete static_cast<std::shared_ptr<T>*>(pointer); });
}

// Copies a vector that nothing else holds into a new array.
template <class T>
nb::object owned_array(std::vector<T>&& values) {
  auto shared = std::make_shared<std::vector<T>>(std::move(values));
  const T* data = shared->data();
  const std::size_t size = shared->size();
  return view(data, size, keeper(std::move(shared)));
}

// One NumPy array over the whole of a reused buffer, made once; properties slice it.
struct BaseArray {
  nb::object array;
  template <class T>
  BaseArray(const std::vector<T>& buffer, nb::handle owner) : array(view(buffer.data(), buffer.size(), owner)) {}
  nb::object first(std::int32_t count) const {
    nb::object slice = nb::steal(PySlice_New(nullptr, nb::int_(count).ptr(), nullptr));
    return nb::steal(PyObject_GetItem(array.ptr(), slice.ptr()));
  }
};

struct PlanArrays {
  explicit PlanArrays(std::shared_ptr<const StepBuffers> step_buffers)
      : buffers(std::move(step_buffers)),
        owner(keeper(buffers)),
        request_ids(buffers->request_ids, owner),
        slots(buffers->rows, owner),
        query_lens(buffers->query_lens, owner),
        cu_query_lens(buffers->cu_query_lens, owner),
        seq_lens(buffers->seq_lens, owner),
        token_ids(buffers->token_ids, owner),
        positions(buffers->positions, owner),
        slot_mapping(buffers->slot_mapping, owner),
        sample_rows(buffers->sample_rows, owner),
        output_index(buffers->output_index, owner) {}
  std::shared_ptr<const StepBuffers> buffers;
  nb::object owner;
  BaseArray request_ids, slots, query_lens, cu_query_lens, seq_lens, token_ids, positions, slot_mapping, sample_rows, output_index;
};

// What plan() returns: the numbers of one step, and access to its arrays while they last.
struct Plan {
  std::shared_ptr<const PlanArrays> arrays;  // null when nothing can run
  std::int64_t step = -1;
  std::int32_t num_requests = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_decodes = 0;
  std::int32_t num_samples = 0;
  std::shared_ptr<const std::vector<PageUpdate>> page_updates;
  Transfers transfers;

  nb::object get(const BaseArray PlanArrays::* which, std::int32_t count) const {
    if (arrays == nullptr) throw UsageError("Plan: an empty plan has no arrays. Fix: check num_requests first");
    if (arrays->buffers->step != step) {
      throw UsageError("Plan: the arrays of step " + std::to_string(step) + " were reused by step " +
                       std::to_string(arrays->buffers->step) + ". Fix: read a plan before the plan after the next");
    }
    return ((*arrays).*which).first(count);
  }
};

// [N, 2] int32 and [N] int64 of copies that are never changed any more.
nb::object pairs_of(const std::shared_ptr<const PageCopies>& copies) {
  static const auto none = std::make_shared<const PageCopies>();
  const auto& shown = copies == nullptr ? none : copies;
  return view_2d(reinterpret_cast<const std::int32_t*>(shown->pairs.data()), shown->pairs.size(), 2, keeper(shown));
}
nb::object ids_of(const std::shared_ptr<const PageCopies>& copies) {
  static const auto none = std::make_shared<const PageCopies>();
  const auto& shown = copies == nullptr ? none : copies;
  return view(shown->ids.data(), shown->ids.size(), keeper(shown));
}
nb::object remote_prefills_of(const Transfers& transfers) {
  static const auto none = std::make_shared<const std::vector<RemotePrefill>>();
  const auto& shown = transfers.remote_prefills == nullptr ? none : transfers.remote_prefills;
  return view_2d(reinterpret_cast<const std::int64_t*>(shown->data()), shown->size(), 2, keeper(shown));
}

struct CommitArrays {
  CommitArrays(const CommitBuffers& commit_buffers, nb::handle owner)
      : buffers(&commit_buffers),
        request_ids(commit_buffers.request_ids, owner),
        token_ids(commit_buffers.token_ids, owner),
        finish_reasons(commit_buffers.finish_reasons, owner),
        num_prompt_tokens(commit_buffers.num_prompt_tokens, owner),
        num_cached_tokens(commit_buffers.num_cached_tokens, owner),
        num_host_cached_tokens(commit_buffers.num_host_cached_tokens, owner),
        output_index(commit_buffers.output_index, owner) {}
  const CommitBuffers* buffers;
  BaseArray request_ids, token_ids, finish_reasons, num_prompt_tokens, num_cached_tokens, num_host_cached_tokens, output_index;
};

struct CommitResult {
  std::shared_ptr<const CommitArrays> arrays;
  std::int64_t step = -1;
  std::int32_t num_events = 0;

  nb::object get(const BaseArray CommitArrays::* which) const {
    if (arrays->buffers->step != step) {
      throw UsageError("CommitResult: the arrays of step " + std::to_string(step) + " were reused by step " +
                       std::to_string(arrays->buffers->step) + ". Fix: read a result before the commit after the next");
    }
    return ((*arrays).*which).first(num_events);
  }
};

struct DebugOwners {
  nb::object kind, request_id, num_owners;
};

// The scheduler with the arrays over its buffers, made when a buffer is first seen.
struct BoundScheduler {
  explicit BoundScheduler(const SchedulerConfig& config) : core(std::make_shared<Scheduler>(config)), owner(keeper(core)) {
    const SchedulerConfig& checked = core->config();
    page_table = view_2d(core->page_table().data(), static_cast<std::size_t>(checked.max_num_seqs),
                         static_cast<std::size_t>(checked.max_pages_per_request()), owner);
  }

  Plan plan() {
    std::shared_ptr<const StepBuffers> step = core->plan();
    if (step == nullptr) {
      Plan empty;
      empty.transfers = core->take_transfers();
      return empty;
    }
    auto found = plan_arrays.begin();
    while (found != plan_arrays.end() && (*found)->buffers != step) ++found;
    if (found == plan_arrays.end()) found = plan_arrays.insert(found, std::make_shared<const PlanArrays>(step));
    return Plan{*found, step->step, step->num_requests, step->num_tokens, step->num_decodes, step->num_samples,
                step->page_updates, core->take_transfers()};
  }

  CommitResult commit(std::int64_t step, const TokenArray& sampled, std::int64_t step_time_us) {
    const CommitBuffers& result = core->commit(step, as_span(sampled), step_time_us);
    auto found = commit_arrays.begin();
    while (found != commit_arrays.end() && (*found)->buffers != &result) ++found;
    if (found == commit_arrays.end()) found = commit_arrays.insert(found, std::make_shared<const CommitArrays>(result, owner));
    return CommitResult{*found, result.step, result.num_events};
  }

  std::shared_ptr<Scheduler> core;
  nb::object owner;
  nb::object page_table;
  std::vector<std::shared_ptr<const PlanArrays>> plan_arrays;      // one for each buffer of the ring
  std::vector<std::shared_ptr<const CommitArrays>> commit_arrays;  // two
};

std::string describe(const SchedulerConfig& c) {
  return "SchedulerConfig(num_pages=" + std::to_string(c.num_pages) + ", page_size=" + std::to_string(c.page_size) +
         ", max_num_seqs=" + std::to_string(c.max_num_seqs) + ", max_num_batched_tokens=" + std::to_string(c.max_num_batched_tokens) +
         ", max_model_len=" + std::to_string(c.max_model_len) + ", chunk_size=" + std::to_string(c.chunk_size) +
         ", enable_prefix_cache=" + (c.enable_prefix_cache ? "True" : "False") +
         ", max_in_flight_steps=" + std::to_string(c.max_in_flight_steps) +
         ", max_step_cost=" + std::to_string(c.max_step_cost) +
         ", context_cost_scale=" + std::to_string(c.context_cost_scale) +
         ", session_ttl_us=" + std::to_string(c.session_ttl_us) +
         ", inter_token_latency_us=" + std::to_string(c.inter_token_latency_us) +
         ", starvation_limit=" + std::to_string(c.starvation_limit) +
         ", num_host_pages=" + std::to_string(c.num_host_pages) +
         ", host_write_through=" + (c.host_write_through ? "True" : "False") +
         ", load_page_ns=" + std::to_string(c.load_page_ns) + ", prefill_token_ns=" + std::to_string(c.prefill_token_ns) +
         ", external_store=" + (c.external_store ? "True" : "False") +
         ", kv_event_pages=" + std::to_string(c.kv_event_pages) +
         ", adaptive_eviction=" + (c.adaptive_eviction ? "True" : "False") + ")";
}

std::string describe(const Plan& p) {
  return "Plan(step=" + std::to_string(p.step) + ", num_requests=" + std::to_string(p.num_requests) +
         ", num_tokens=" + std::to_string(p.num_tokens) + ", num_decodes=" + std::to_string(p.num_decodes) + ")";
}

}  // namespace

NB_MODULE(_scheduler, m) {
  m.doc() = "Control plane of the engine: requests, pages, prefix cache, batches.";
  // A ValueError is a call that does not fit, a RuntimeError misuse of the sequence of calls or a bug: the message tells which.

  nb::enum_<SubmitStatus>(m, "SubmitStatus", doc::SubmitStatus)
      .value("OK", SubmitStatus::kOk)
      .value("EMPTY", SubmitStatus::kEmpty)
      .value("INVALID_TOKEN", SubmitStatus::kInvalidToken)
      .value("INVALID_LENGTH", SubmitStatus::kInvalidLength)
      .value("TOO_LONG", SubmitStatus::kTooLong)
      .value("NEVER_FITS", SubmitStatus::kNeverFits)
      .value("DUPLICATE", SubmitStatus::kDuplicate);

  nb::enum_<AbortStatus>(m, "AbortStatus", doc::AbortStatus)
      .value("OK", AbortStatus::kOk)
      .value("NOT_FOUND", AbortStatus::kNotFound)
      .value("ALREADY_ENDED", AbortStatus::kAlreadyEnded);

  nb::enum_<EventStatus>(m, "EventStatus", doc::EventStatus)
      .value("OK", EventStatus::kOk)
      .value("FINISHED", EventStatus::kFinished)
      .value("NOT_FOUND", EventStatus::kNotFound)
      .value("UNEXPECTED", EventStatus::kUnexpected);

  nb::class_<SchedulerConfig>(m, "SchedulerConfig", doc::SchedulerConfig)
      .def(
          "__init__",
          [](SchedulerConfig* self, std::int32_t num_pages, std::int32_t page_size, std::int32_t max_num_seqs,
             std::int32_t max_num_batched_tokens, std::int32_t max_model_len, std::int32_t chunk_size, bool enable_prefix_cache,
             std::int32_t max_in_flight_steps, std::int32_t max_step_cost, std::int32_t context_cost_scale,
             std::int64_t session_ttl_us, std::int32_t inter_token_latency_us, std::int32_t starvation_limit,
             std::int32_t num_host_pages, bool host_write_through, std::int64_t load_page_ns, std::int64_t prefill_token_ns,
             bool external_store, std::int32_t kv_event_pages, bool adaptive_eviction) {
            SchedulerConfig config{num_pages,           page_size,     max_num_seqs,
                                   max_num_batched_tokens, max_model_len, chunk_size,
                                   enable_prefix_cache, max_in_flight_steps, max_step_cost, context_cost_scale,
                                   session_ttl_us,      inter_token_latency_us, starvation_limit, num_host_pages,
                                   host_write_through,  load_page_ns, prefill_token_ns, external_store, kv_event_pages,
                                   adaptive_eviction};
            if (const std::string problem = config.problem(); !problem.empty()) {
              throw std::invalid_argument("SchedulerConfig." + problem);
            }
            new (self) SchedulerConfig(config);
          },
          nb::kw_only(), "num_pages"_a, "page_size"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "max_model_len"_a,
          "chunk_size"_a = 0, "enable_prefix_cache"_a = true, "max_in_flight_steps"_a = 2, "max_step_cost"_a = 0,
          "context_cost_scale"_a = 0, "session_ttl_us"_a = 0, "inter_token_latency_us"_a = 0, "starvation_limit"_a = 64,
          "num_host_pages"_a = 0, "host_write_through"_a = false,
          "load_page_ns"_a = 0, "prefill_token_ns"_a = 0, "external_store"_a = false, "kv_event_pages"_a = 0,
          "adaptive_eviction"_a = true,
          doc::SchedulerConfig_init)
      .def_ro("num_pages", &SchedulerConfig::num_pages, doc::SchedulerConfig_num_pages)
      .def_ro("page_size", &SchedulerConfig::page_size, doc::SchedulerConfig_page_size)
      .def_ro("max_num_seqs", &SchedulerConfig::max_num_seqs, doc::SchedulerConfig_max_num_seqs)
      .def_ro("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens, doc::SchedulerConfig_max_num_batched_tokens)
      .def_ro("max_model_len", &SchedulerConfig::max_model_len, doc::SchedulerConfig_max_model_len)
      .def_ro("chunk_size", &SchedulerConfig::chunk_size, doc::SchedulerConfig_chunk_size)
      .def_ro("enable_prefix_cache", &SchedulerConfig::enable_prefix_cache, doc::SchedulerConfig_enable_prefix_cache)
      .def_ro("max_in_flight_steps", &SchedulerConfig::max_in_flight_steps, doc::SchedulerConfig_max_in_flight_steps)
      .def_ro("max_step_cost", &SchedulerConfig::max_step_cost, doc::SchedulerConfig_max_step_cost)
      .def_ro("context_cost_scale", &SchedulerConfig::context_cost_scale, doc::SchedulerConfig_context_cost_scale)
      .def_ro("session_ttl_us", &SchedulerConfig::session_ttl_us, doc::SchedulerConfig_session_ttl_us)
      .def_ro("inter_token_latency_us", &SchedulerConfig::inter_token_latency_us, doc::SchedulerConfig_inter_token_latency_us)
      .def_ro("starvation_limit", &SchedulerConfig::starvation_limit, doc::SchedulerConfig_starvation_limit)
      .def_ro("num_host_pages", &SchedulerConfig::num_host_pages, doc::SchedulerConfig_num_host_pages)
      .def_ro("host_write_through", &SchedulerConfig::host_write_through, doc::SchedulerConfig_host_write_through)
      .def_ro("load_page_ns", &SchedulerConfig::load_page_ns, doc::SchedulerConfig_load_page_ns)
      .def_ro("prefill_token_ns", &SchedulerConfig::prefill_token_ns, doc::SchedulerConfig_prefill_token_ns)
      .def_ro("external_store", &SchedulerConfig::external_store, doc::SchedulerConfig_external_store)
      .def_ro("kv_event_pages", &SchedulerConfig::kv_event_pages, doc::SchedulerConfig_kv_event_pages)
      .def_ro("adaptive_eviction", &SchedulerConfig::adaptive_eviction, doc::SchedulerConfig_adaptive_eviction)
      .def_prop_ro("max_pages_per_request", &SchedulerConfig::max_pages_per_request, doc::SchedulerConfig_max_pages_per_request)
      .def("__repr__", [](const SchedulerConfig& self) { return describe(self); });

  bind_options(m);

  nb::class_<SchedulerStats>(m, "SchedulerStats", doc::SchedulerStats)
      .def_ro("num_pages", &SchedulerStats::num_pages, doc::SchedulerStats_num_pages)
      .def_ro("free_pages", &SchedulerStats::free_pages, doc::SchedulerStats_free_pages)
      .def_ro("owned_pages", &SchedulerStats::owned_pages, doc::SchedulerStats_owned_pages)
      .def_ro("cached_pages", &SchedulerStats::cached_pages, doc::SchedulerStats_cached_pages)
      .def_ro("evictable_pages", &SchedulerStats::evictable_pages, doc::SchedulerStats_evictable_pages)
      .def_ro("num_waiting", &SchedulerStats::num_waiting, doc::SchedulerStats_num_waiting)
      .def_ro("num_running", &SchedulerStats::num_running, doc::SchedulerStats_num_running)
      .def_ro("num_draining", &SchedulerStats::num_draining, doc::SchedulerStats_num_draining)
      .def_ro("num_outside", &SchedulerStats::num_outside, doc::SchedulerStats_num_outside)
      .def_ro("num_sessions", &SchedulerStats::num_sessions, doc::SchedulerStats_num_sessions)
      .def_ro("num_in_flight_steps", &SchedulerStats::num_in_flight_steps, doc::SchedulerStats_num_in_flight_steps)
      .def_ro("num_steps", &SchedulerStats::num_steps, doc::SchedulerStats_num_steps)
      .def_ro("num_submitted", &SchedulerStats::num_submitted, doc::SchedulerStats_num_submitted)
      .def_ro("num_finished", &SchedulerStats::num_finished, doc::SchedulerStats_num_finished)
      .def_ro("num_aborted", &SchedulerStats::num_aborted, doc::SchedulerStats_num_aborted)
      .def_ro("num_failed", &SchedulerStats::num_failed, doc::SchedulerStats_num_failed)
      .def_ro("num_retractions", &SchedulerStats::num_retractions, doc::SchedulerStats_num_retractions)
      .def_ro("num_preemptions", &SchedulerStats::num_preemptions, doc::SchedulerStats_num_preemptions)
      .def_ro("num_evicted_pages", &SchedulerStats::num_evicted_pages, doc::SchedulerStats_num_evicted_pages)
      .def_ro("prefix_query_tokens", &SchedulerStats::prefix_query_tokens, doc::SchedulerStats_prefix_query_tokens)
      .def_ro("prefix_hit_tokens", &SchedulerStats::prefix_hit_tokens, doc::SchedulerStats_prefix_hit_tokens)
      .def_ro("prefix_host_hit_tokens", &SchedulerStats::prefix_host_hit_tokens, doc::SchedulerStats_prefix_host_hit_tokens)
      .def_ro("num_host_pages", &SchedulerStats::num_host_pages, doc::SchedulerStats_num_host_pages)
      .def_ro("host_cached_pages", &SchedulerStats::host_cached_pages, doc::SchedulerStats_host_cached_pages)
      .def_ro("num_transfers", &SchedulerStats::num_transfers, doc::SchedulerStats_num_transfers)
      .def_ro("num_written_back_pages", &SchedulerStats::num_written_back_pages, doc::SchedulerStats_num_written_back_pages)
      .def_ro("num_loaded_back_pages", &SchedulerStats::num_loaded_back_pages, doc::SchedulerStats_num_loaded_back_pages)
      .def_ro("num_failed_transfers", &SchedulerStats::num_failed_transfers, doc::SchedulerStats_num_failed_transfers)
      .def_ro("recomputed_tokens", &SchedulerStats::recomputed_tokens, doc::SchedulerStats_recomputed_tokens);

  nb::class_<Plan>(m, "Plan", doc::Plan)
      .def_ro("step", &Plan::step, doc::Plan_step)
      .def_ro("num_requests", &Plan::num_requests, doc::Plan_num_requests)
      .def_ro("num_tokens", &Plan::num_tokens, doc::Plan_num_tokens)
      .def_ro("num_decodes", &Plan::num_decodes, doc::Plan_num_decodes)
      .def_ro("num_samples", &Plan::num_samples, doc::Plan_num_samples)
      .def_prop_ro(
          "request_ids", [](const Plan& self) { return self.get(&PlanArrays::request_ids, self.num_requests); }, doc::Plan_request_ids)
      .def_prop_ro(
          "slots", [](const Plan& self) { return self.get(&PlanArrays::slots, self.num_requests); }, doc::Plan_slots)
      .def_prop_ro(
          "query_lens", [](const Plan& self) { return self.get(&PlanArrays::query_lens, self.num_requests); }, doc::Plan_query_lens)
      .def_prop_ro(
          "cu_query_lens", [](const Plan& self) { return self.get(&PlanArrays::cu_query_lens, self.num_requests + 1); }, doc::Plan_cu_query_lens)
      .def_prop_ro(
          "seq_lens", [](const Plan& self) { return self.get(&PlanArrays::seq_lens, self.num_requests); }, doc::Plan_seq_lens)
      .def_prop_ro(
          "token_ids", [](const Plan& self) { return self.get(&PlanArrays::token_ids, self.num_tokens); }, doc::Plan_token_ids)
      .def_prop_ro(
          "positions", [](const Plan& self) { return self.get(&PlanArrays::positions, self.num_tokens); }, doc::Plan_positions)
      .def_prop_ro(
          "slot_mapping", [](const Plan& self) { return self.get(&PlanArrays::slot_mapping, self.num_tokens); }, doc::Plan_slot_mapping)
      .def_prop_ro(
          "sample_rows", [](const Plan& self) { return self.get(&PlanArrays::sample_rows, self.num_samples); }, doc::Plan_sample_rows)
      .def_prop_ro(
          "output_index", [](const Plan& self) { return self.get(&PlanArrays::output_index, self.num_samples); }, doc::Plan_output_index)
      .def_prop_ro("page_updates",
                   [](const Plan& self) {
                     if (self.page_updates == nullptr) {
                       throw UsageError("Plan: an empty plan has no arrays. Fix: check num_requests first");
                     }
                     const auto* data = reinterpret_cast<const std::int32_t*>(self.page_updates->data());
                     return view_2d(data, self.page_updates->size(), 3, keeper(self.page_updates));
                   },
                   doc::Plan_page_updates)
      .def_prop_ro(
          "write_backs", [](const Plan& self) { return pairs_of(self.transfers.write_backs); }, doc::Plan_write_backs)
      .def_prop_ro(
          "write_back_ids", [](const Plan& self) { return ids_of(self.transfers.write_backs); }, doc::Plan_write_back_ids)
      .def_prop_ro(
          "load_backs", [](const Plan& self) { return pairs_of(self.transfers.load_backs); }, doc::Plan_load_backs)
      .def_prop_ro(
          "load_back_ids", [](const Plan& self) { return ids_of(self.transfers.load_backs); }, doc::Plan_load_back_ids)
      .def_prop_ro(
          "remote_prefills", [](const Plan& self) { return remote_prefills_of(self.transfers); }, doc::Plan_remote_prefills)
      .def("__bool__", [](const Plan& self) { return self.num_requests > 0; })
      .def("__repr__", [](const Plan& self) { return describe(self); });

  nb::class_<CommitResult>(m, "CommitResult", doc::CommitResult)
      .def_ro("step", &CommitResult::step, doc::CommitResult_step)
      .def_ro("num_events", &CommitResult::num_events, doc::CommitResult_num_events)
      .def_prop_ro(
          "request_ids", [](const CommitResult& self) { return self.get(&CommitArrays::request_ids); }, doc::CommitResult_request_ids)
      .def_prop_ro(
          "token_ids", [](const CommitResult& self) { return self.get(&CommitArrays::token_ids); }, doc::CommitResult_token_ids)
      .def_prop_ro(
          "finish_reasons", [](const CommitResult& self) { return self.get(&CommitArrays::finish_reasons); }, doc::CommitResult_finish_reasons)
      .def_prop_ro(
          "num_prompt_tokens", [](const CommitResult& self) { return self.get(&CommitArrays::num_prompt_tokens); }, doc::CommitResult_num_prompt_tokens)
      .def_prop_ro(
          "num_cached_tokens", [](const CommitResult& self) { return self.get(&CommitArrays::num_cached_tokens); }, doc::CommitResult_num_cached_tokens)
      .def_prop_ro(
          "num_host_cached_tokens", [](const CommitResult& self) { return self.get(&CommitArrays::num_host_cached_tokens); },
          doc::CommitResult_num_host_cached_tokens)
      .def_prop_ro(
          "output_index", [](const CommitResult& self) { return self.get(&CommitArrays::output_index); }, doc::CommitResult_output_index);

  nb::class_<DebugOwners>(m, "DebugOwners", doc::DebugOwners)
      .def_ro("kind", &DebugOwners::kind, doc::DebugOwners_kind)
      .def_ro("request_id", &DebugOwners::request_id, doc::DebugOwners_request_id)
      .def_ro("num_owners", &DebugOwners::num_owners, doc::DebugOwners_num_owners);

  nb::class_<BoundScheduler>(m, "Scheduler", doc::Scheduler)
      .def(nb::init<const SchedulerConfig&>(), "config"_a, doc::Scheduler_init)
      .def_prop_ro(
          "config", [](const BoundScheduler& self) { return self.core->config(); }, doc::Scheduler_config)
      .def_prop_ro(
          "page_table", [](const BoundScheduler& self) { return self.page_table; }, doc::Scheduler_page_table)
      .def(
          "submit",
          [](BoundScheduler& self, std::int64_t request_id, const TokenArray& token_ids, std::int64_t max_new_tokens,
             const TokenArray& stop_token_ids, std::int64_t min_new_tokens, bool use_prefix_cache, const RequestOptions& options) {
            return self.core->submit(request_id, as_span(token_ids), max_new_tokens, as_span(stop_token_ids), min_new_tokens,
                                     use_prefix_cache, options);
          },
          "request_id"_a, nb::arg("token_ids").noconvert(), "max_new_tokens"_a, nb::arg("stop_token_ids").noconvert(),
          "min_new_tokens"_a = 0, "use_prefix_cache"_a = true, "options"_a = RequestOptions{}, doc::Scheduler_submit)
      .def("plan", &BoundScheduler::plan, doc::Scheduler_plan)
      .def("commit", &BoundScheduler::commit, "step"_a, nb::arg("sampled").noconvert(), "step_time_us"_a = 0,
           doc::Scheduler_commit)
      .def(
          "advance_clock", [](BoundScheduler& self, std::int64_t now_us) { self.core->advance_clock(now_us); }, "now_us"_a,
          doc::Scheduler_advance_clock)
      .def(
          "complete_transfers",
          [](BoundScheduler& self, const IdArray& ids, const FlagArray& ok) {
            return self.core->complete_transfers(as_span(ids), {ok.data(), ok.shape(0)});
          },
          nb::arg("ids").noconvert(), nb::arg("ok").noconvert(), doc::Scheduler_complete_transfers)
      .def(
          "missing_hashes",
          [](BoundScheduler& self, const TokenArray& tokens, const std::string& salt) {
            return missing_hashes(*self.core, as_span(tokens), salt);
          },
          nb::arg("token_ids").noconvert(), "salt"_a = "", doc::Scheduler_missing_hashes)
      .def(
          "reserve_host_pages", [](BoundScheduler& self, std::int32_t count) { return reserve_host_pages(*self.core, count); },
          "count"_a, doc::Scheduler_reserve_host_pages)
      .def(
          "insert_host_pages",
          [](BoundScheduler& self, std::int64_t ticket, const TokenArray& tokens, std::int32_t first_page, const std::string& salt) {
            return self.core->insert_host_pages(ticket, as_span(tokens), first_page, salt);
          },
          "ticket"_a, nb::arg("token_ids").noconvert(), "first_page"_a, "salt"_a = "", doc::Scheduler_insert_host_pages)
      .def(
          "release_host_pages", [](BoundScheduler& self, std::int64_t ticket) { self.core->release_host_pages(ticket); },
          "ticket"_a, doc::Scheduler_release_host_pages)
      .def(
          "begin_store", [](BoundScheduler& self, std::int32_t max_pages) { return begin_store(*self.core, max_pages); },
          "max_pages"_a, doc::Scheduler_begin_store)
      .def(
          "take_kv_events", [](BoundScheduler& self) { return take_kv_events(*self.core); }, doc::Scheduler_take_kv_events)
      .def(
          "abort", [](BoundScheduler& self, std::int64_t request_id) { return self.core->abort(request_id); }, "request_id"_a,
          doc::Scheduler_abort)
      .def(
          "bootstrapped", [](BoundScheduler& self, std::int64_t request_id) { return self.core->bootstrapped(request_id); },
          "request_id"_a, doc::Scheduler_bootstrapped)
      .def(
          "remote_prefill_done",
          [](BoundScheduler& self, std::int64_t request_id, std::int32_t first_token) {
            return self.core->remote_prefill_done(request_id, first_token);
          },
          "request_id"_a, "first_token"_a, doc::Scheduler_remote_prefill_done)
      .def(
          "transfer_succeeded", [](BoundScheduler& self, std::int64_t request_id) { return self.core->transfer_succeeded(request_id); },
          "request_id"_a, doc::Scheduler_transfer_succeeded)
      .def(
          "transfer_failed", [](BoundScheduler& self, std::int64_t request_id) { return self.core->transfer_failed(request_id); },
          "request_id"_a, doc::Scheduler_transfer_failed)
      .def(
          "pages_of",
          [](const BoundScheduler& self, std::int64_t request_id) {
            const std::span<const PageId> pages = self.core->pages_of(request_id);
            return owned_array(std::vector<PageId>(pages.begin(), pages.end()));
          },
          "request_id"_a, doc::Scheduler_pages_of)
      .def(
          "end_session", [](BoundScheduler& self, std::int64_t session) { return self.core->end_session(session); }, "session"_a,
          doc::Scheduler_end_session)
      .def(
          "pause", [](BoundScheduler& self) { self.core->pause(); }, doc::Scheduler_pause)
      .def(
          "resume", [](BoundScheduler& self) { self.core->resume(); }, doc::Scheduler_resume)
      .def(
          "flush_cache", [](BoundScheduler& self) { return self.core->flush_cache(); }, doc::Scheduler_flush_cache)
      .def(
          "stats", [](const BoundScheduler& self) { return self.core->stats(); }, doc::Scheduler_stats)
      .def(
          "has_work", [](const BoundScheduler& self) { return self.core->has_work(); }, doc::Scheduler_has_work)
      .def(
          "debug_owners",
          [](const BoundScheduler& self) {
            OwnerSnapshot snapshot = self.core->owners();
            return DebugOwners{owned_array(std::move(snapshot.kind)), owned_array(std::move(snapshot.request_id)),
                               owned_array(std::move(snapshot.num_owners))};
          },
          doc::Scheduler_debug_owners);
}

}  // namespace tokenspeed
