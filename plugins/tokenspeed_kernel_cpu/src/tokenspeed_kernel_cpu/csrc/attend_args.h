// What the driver of attention and its kernels share. Plain types alone.
#pragma once

#include <cstdint>

namespace tokenspeed_cpu {

enum class Number : int { kFloat = 0, kBf16 = 1, kHalf = 2 };

constexpr int64_t kTileRows = 64;   // query rows (tokens times heads) that share a pass over the keys
constexpr int64_t kKeyBlock = 32;   // keys between two updates of the running maximum; blocks start at multiples of it

// Strides count elements; the last dimension is contiguous.
struct AttendArgs {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;                 // [rows, num_heads] or null
  const float* sinks;         // [num_heads] or null
  const int32_t* page_table;  // null: keys of a request follow each other from `first_key` on
  int64_t q_row, q_head, out_row, out_head;
  int64_t k_page, k_token, k_head, v_page, v_token, v_head;
  int64_t table_row, table_column;
  int64_t num_heads, head_dim, page_size, num_pages;
  int64_t window;  // 0 for none
  Number q_type;   // of out, too
  Number cache_type;
  bool causal;
  float scale;
  float cap;  // 0 for none
};

// Some query rows of one request that share a key head.
struct AttendTile {
  int64_t request;    // row of the page table
  int64_t first_row;  // of q
  int64_t tokens;     // rows of q
  int64_t position;   // of the first token among the request's keys; negative where there are more queries than keys
  int64_t num_keys;
  int64_t first_key;
  int64_t first_head;  // of q
  int64_t heads;
  int64_t key_head;
};

// Floats of memory that a tile needs.
static constexpr int64_t padded_dim(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }
static constexpr int64_t attend_scratch(int64_t head_dim) {
  return (2 * kTileRows + 2 * kKeyBlock + 1) * padded_dim(head_dim) + kTileRows * (kKeyBlock + 4);
}

}  // namespace tokenspeed_cpu
