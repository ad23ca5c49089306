// Pages between the host's pool and a store outside of the engine: what a prompt lacks, room for what is fetched, what is to be kept.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler.h"

namespace tokenspeed {

std::int32_t Scheduler::missing_hashes(std::span<const TokenId> tokens, std::string_view salt, std::vector<BlockHash>& hashes) {
  if (!host_allocator_) return 0;  // what was fetched would have no place
  return tree_->missing_hashes(tokens, static_cast<std::int32_t>(tokens.size()) / config_.page_size, salt, hashes);
}

std::int64_t Scheduler::reserve_host_pages(std::int32_t count) {
  if (!host_allocator_) throw std::invalid_argument("reserve_host_pages: expected a host tier. Fix: set num_host_pages");
  if (count < 0) throw std::invalid_argument("reserve_host_pages: expected a count of at least 0, got " + std::to_string(count));
  const std::int64_t ticket = next_host_ticket_++;
  host_tickets_.emplace(ticket, tree_->host_allocate(count));
  return ticket;
}

std::span<const PageId> Scheduler::reserved_host_pages(std::int64_t ticket) const { return host_ticket(ticket)->second.ids(); }

std::int32_t Scheduler::insert_host_pages(std::int64_t ticket, std::span<const TokenId> tokens, std::int32_t first_page,
                                          std::string_view salt) {
  const auto found = host_ticket(ticket);
  const auto page_size = static_cast<std::size_t>(config_.page_size);
  const auto num_pages = static_cast<std::int64_t>(tokens.size() / page_size) - first_page;
  if (first_page < 0 || tokens.size() % page_size != 0 || num_pages < 0 || num_pages > found->second.size()) {
    throw std::invalid_argument("insert_host_pages: expected whole pages of tokens, " + std::to_string(first_page) + " to " +
                                std::to_string(first_page + found->second.size()) + " of " + std::to_string(page_size) + ", got " +
                                std::to_string(tokens.size()) + " tokens");
  }
  OwnedPages pages(std::move(host_tickets_.extract(found->first).mapped()));
  if (num_pages == 0) return 0;
  tree_->tick();
  return tree_->insert_host(tokens, first_page, pages.take_front(static_cast<std::int32_t>(num_pages)), salt);
}

void Scheduler::release_host_pages(std::int64_t ticket) { host_tickets_.erase(host_ticket(ticket)->first); }

TransferId Scheduler::begin_store(std::int32_t max_pages, std::vector<StorePage>& pages) {
  return tree_ && config_.external_store ? tree_->begin_store(max_pages, pages) : kNoTransfer;
}

std::map<std::int64_t, OwnedPages>::const_iterator Scheduler::host_ticket(std::int64_t ticket) const {
  const auto found = host_tickets_.find(ticket);
  if (found == host_tickets_.end()) {
    throw std::invalid_argument("host pages: expected a ticket of reserve_host_pages that is not over, got " + std::to_string(ticket));
  }
  return found;
}

}  // namespace tokenspeed
