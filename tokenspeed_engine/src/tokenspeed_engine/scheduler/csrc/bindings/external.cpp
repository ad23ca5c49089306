// Calls of the scheduler that carry page hashes, as Python sees them.
#include "external.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace tokenspeed {
namespace {

// A new array of `values`, one row of `columns` for each `T` (0: the array has one dimension).
template <class Scalar, class T>
nb::object array_of(std::vector<T>&& values, std::size_t columns) {
  auto* held = new std::vector<T>(std::move(values));
  nb::capsule owner(held, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  const std::array<std::size_t, 2> shape{held->size(), columns};
  return nb::cast(nb::ndarray<nb::numpy, Scalar>(held->data(), columns == 0 ? 1 : 2, shape.data(), owner), nb::rv_policy::reference);
}

nb::object hash_array(std::vector<BlockHash>&& hashes) {
  static_assert(sizeof(BlockHash) == 32);
  return array_of<std::uint8_t>(std::move(hashes), sizeof(BlockHash));
}

}  // namespace

nb::tuple missing_hashes(Scheduler& scheduler, std::span<const TokenId> tokens, const std::string& salt) {
  std::vector<BlockHash> hashes;
  const std::int32_t first = scheduler.missing_hashes(tokens, salt, hashes);
  return nb::make_tuple(first, hash_array(std::move(hashes)));
}

nb::tuple reserve_host_pages(Scheduler& scheduler, std::int32_t count) {
  const std::int64_t ticket = scheduler.reserve_host_pages(count);
  const std::span<const PageId> pages = scheduler.reserved_host_pages(ticket);
  return nb::make_tuple(ticket, array_of<std::int32_t>(std::vector<std::int32_t>(pages.begin(), pages.end()), 0));
}

nb::tuple begin_store(Scheduler& scheduler, std::int32_t max_pages) {
  std::vector<StorePage> stored;
  const TransferId id = scheduler.begin_store(max_pages, stored);
  std::vector<std::int32_t> pages;
  std::vector<BlockHash> hashes;
  for (const StorePage& one : stored) {
    pages.push_back(one.page);
    hashes.push_back(one.hash);
  }
  return nb::make_tuple(id, array_of<std::int32_t>(std::move(pages), 0), hash_array(std::move(hashes)));
}

nb::list take_kv_events(Scheduler& scheduler) {
  nb::list out;
  for (KvEvent& event : scheduler.take_kv_events()) {
    const nb::bytes parent(reinterpret_cast<const char*>(event.parent.data()), event.parent.size());
    out.append(nb::make_tuple(static_cast<int>(event.kind), static_cast<int>(event.tier), event.salt, hash_array(std::move(event.hashes)),
                              parent, array_of<std::int32_t>(std::move(event.tokens), 0)));
  }
  return out;
}

}  // namespace tokenspeed
