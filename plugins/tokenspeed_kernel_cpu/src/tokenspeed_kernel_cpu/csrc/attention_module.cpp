// The binding of attention: checks lengths, cuts the work into tiles, and deals them out to the threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "binding.h"
#include "parallel.h"

namespace nb = nanobind;

namespace tokenspeed_cpu {
namespace {

constexpr int64_t kProductsForThreads = 32 * 1024;  // query rows times keys times head_dim, below which one thread is quicker

float* scratch(int64_t floats) {
  static thread_local std::unique_ptr<float[]> memory;
  static thread_local int64_t size = 0;
  if (size < floats + 16) {
    memory.reset(new float[static_cast<size_t>(floats) + 16]);
    size = floats + 16;
  }
  return memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) / sizeof(float);
}

// Lengths and offsets of a batch. Offsets are null where each request has one query.
struct Requests {
  const int32_t* query_starts;
  const int32_t* key_starts;  // null: lengths are given, and keys lie in pages
  const int32_t* lengths;
  int64_t query_stride, key_stride, length_stride;
  int64_t count;

  int64_t first_query(int64_t i) const { return query_starts == nullptr ? i : query_starts[i * query_stride]; }
  int64_t first_key(int64_t i) const { return key_starts == nullptr ? 0 : key_starts[i * key_stride]; }
  int64_t num_keys(int64_t i) const {
    return key_starts == nullptr ? lengths[i * length_stride] : first_key(i + 1) - first_key(i);
  }
};

struct Work {
  AttendTile tile;
  int64_t cost;
};

// Tiles of all requests, those with most to do first. A tile holds as many tokens as share a pass over the keys well, and fewer
// where that would leave a thread without any.
void cut(const AttendArgs& args, const Requests& requests, int64_t num_kv_heads, int threads, std::vector<Work>& work) {
  const int64_t group = args.num_heads / num_kv_heads;
  const int64_t heads = std::min(group, kTileRows);
  work.clear();
  for (int64_t request = 0; request < requests.count; ++request) {
    const int64_t first = requests.first_query(request), tokens = requests.first_query(request + 1) - first;
    if (tokens <= 0) continue;
    const int64_t num_keys = std::max<int64_t>(requests.num_keys(request), 0);
    int64_t step = std::max<int64_t>(1, kTileRows / heads);
    const int64_t pieces = num_kv_heads * ((group + heads - 1) / heads) * requests.count;
    if (threads > 1 && pieces < 4 * threads) {
      const int64_t parts = (4 * threads + pieces - 1) / pieces;
      step = std::min(step, std::max<int64_t>(std::max<int64_t>(1, 16 / heads), (tokens + parts - 1) / parts));
    }
    for (int64_t token = 0; token < tokens; token += step) {
      const int64_t count = std::min(step, tokens - token), position = num_keys - tokens + token;
      const int64_t end = args.causal ? std::min(num_keys, position + count) : num_keys;
      const int64_t start = args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0;
      for (int64_t key_head = 0; key_head < num_kv_heads; ++key_head) {
        for (int64_t head = 0; head < group; head += heads) {
          const int64_t some = std::min(heads, group - head);
          work.push_back({{request, first + token, count, position, num_keys, requests.first_key(request),
                           key_head * group + head, some, key_head},
                          std::max<int64_t>(0, end - start) * (count * some + 4)});
        }
      }
    }
  }
  std::stable_sort(work.begin(), work.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
}

void run(const AttendArgs& args, const Requests& requests, int64_t num_kv_heads, int threads) {
  static thread_local std::vector<Work> work;
  cut(args, requests, num_kv_heads, threads, work);
  int64_t products = 0;
  for (const Work& one : work) products += one.cost * args.head_dim;
  const auto attend = table().attend;
  const int64_t floats = attend_scratch(args.head_dim);
  const Work* items = work.data();
  parallel_for(static_cast<int64_t>(work.size()), products < kProductsForThreads ? 1 : threads,
               [&](int64_t i) { attend(args, items[i].tile, scratch(floats)); });
}

// Queries of a ragged batch: offsets must rise from 0 to the number of rows.
bool are_offsets(const int32_t* starts, int64_t stride, int64_t count, int64_t rows) {
  if (starts[0] != 0 || starts[count * stride] != rows) return false;
  for (int64_t i = 0; i < count; ++i)
    if (starts[i * stride] > starts[(i + 1) * stride]) return false;
  return true;
}

// Returns the longest length, having written nothing where it is beyond what the page table has room for; or -1 where the offsets
// are none.
int64_t attend_paged(uintptr_t q, int q_type, int64_t q_row, int64_t q_head, uintptr_t k, int cache_type, int64_t k_page,
                     int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_page, int64_t v_token, int64_t v_head, uintptr_t out,
                     int64_t out_row, int64_t out_head, uintptr_t page_table, int64_t table_row, int64_t table_column,
                     int64_t max_pages, uintptr_t starts, int64_t start_stride, uintptr_t lengths, int64_t length_stride,
                     int64_t rows, int64_t num_reqs, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t num_pages,
                     int64_t page_size, bool causal, float scale, int64_t window, float cap, uintptr_t sinks, uintptr_t lse,
                     int threads) {
  need_memory(q, rows * num_heads * head_dim);
  const Requests requests{at<const int32_t>(starts), nullptr, at<const int32_t>(lengths), start_stride, 0, length_stride, num_reqs};
  if (starts != 0 && !are_offsets(requests.query_starts, start_stride, num_reqs, rows)) return -1;
  int64_t longest = 0;
  for (int64_t i = 0; i < num_reqs; ++i) longest = std::max<int64_t>(longest, requests.num_keys(i));
  if (longest > max_pages * page_size) return longest;
  const AttendArgs args{at<const void>(q), at<const void>(k), at<const void>(v), at<void>(out), at<float>(lse), at<const float>(sinks),
                        at<const int32_t>(page_table), q_row, q_head, out_row, out_head, k_page, k_token, k_head, v_page, v_token,
                        v_head, table_row, table_column, num_heads, head_dim, page_size, num_pages, window,
                        static_cast<Number>(q_type), static_cast<Number>(cache_type), causal, scale, cap};
  nb::gil_scoped_release released;
  run(args, requests, num_kv_heads, threads);
  return longest;
}

// Returns 0, or 1 or 2 where the offsets of the queries or of the keys are none, having written nothing.
int attend_ragged(uintptr_t q, int q_type, int64_t q_row, int64_t q_head, uintptr_t k, int64_t k_token, int64_t k_head, uintptr_t v,
                  int64_t v_token, int64_t v_head, uintptr_t out, int64_t out_row, int64_t out_head, uintptr_t starts_q,
                  int64_t stride_q, uintptr_t starts_k, int64_t stride_k, int64_t rows, int64_t num_keys, int64_t num_reqs,
                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, bool causal, float scale, int64_t window, float cap,
                  uintptr_t sinks, uintptr_t lse, int threads) {
  need_memory(q, rows * num_heads * head_dim);
  const Requests requests{at<const int32_t>(starts_q), at<const int32_t>(starts_k), nullptr, stride_q, stride_k, 0, num_reqs};
  if (!are_offsets(requests.query_starts, stride_q, num_reqs, rows)) return 1;
  if (!are_offsets(requests.key_starts, stride_k, num_reqs, num_keys)) return 2;
  const AttendArgs args{at<const void>(q), at<const void>(k), at<const void>(v), at<void>(out), at<float>(lse), at<const float>(sinks),
                        nullptr, q_row, q_head, out_row, out_head, 0, k_token, k_head, 0, v_token, v_head, 0, 0, num_heads,
                        head_dim, 1, 0, window, static_cast<Number>(q_type), static_cast<Number>(q_type), causal, scale, cap};
  nb::gil_scoped_release released;
  run(args, requests, num_kv_heads, threads);
  return 0;
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("attend_paged", &attend_paged);
  m.def("attend_ragged", &attend_ragged);
}

}  // namespace tokenspeed_cpu
