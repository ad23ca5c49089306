#include <utility>

#include "check.h"
#include "fsm/dispatch.h"

using namespace tokenspeed;

namespace {

struct Pool {
  PageAllocator allocator{8};
  RadixTree tree{allocator, 1};
  RowPool rows{2};

  Pool() {
    const std::vector<TokenId> cached{5, 6};
    std::vector<PageReplacement> replaced;
    NodeRef at = tree.lock_prefix({}, 0);
    tree.extend(at, cached, allocator.allocate(2), replaced);
  }
  KvHold hold() {
    const std::vector<TokenId> cached{5, 6};
    return KvHold{rows.lease(), tree.lock_prefix(cached, 2), allocator.allocate(3)};
  }
  bool all_back() const { return allocator.num_free() == 6 && tree.num_locked_pages() == 0 && rows.num_free() == 2; }
};

template <class State>
bool is(const RequestState& state) {
  return std::holds_alternative<State>(state);
}

}  // namespace

TEST(the_life_of_a_request) {
  Pool pool;
  RequestState state{Submitted{}};
  CHECK(!dispatch(state, Admit{pool.hold()}));
  CHECK(is<Prefilling>(state));
  CHECK_EQ(pool.allocator.num_free(), 3);
  CHECK(!dispatch(state, LastChunkPlanned{}));
  CHECK(is<Decoding>(state));
  CHECK(!dispatch(state, Retract{}));
  CHECK(is<Retracting>(state));
  CHECK_EQ(pool.allocator.num_free(), 3);  // a step in flight still writes them
  CHECK_EQ(pool.tree.num_locked_pages(), 2);
  CHECK(!dispatch(state, Drained{}));
  CHECK(is<Retracted>(state));
  CHECK(pool.all_back());
  CHECK(!dispatch(state, Admit{pool.hold()}));
  CHECK(!dispatch(state, LastChunkPlanned{}));
  CHECK(!dispatch(state, Finish{}));
  CHECK(is<Draining>(state));
  CHECK(!pool.all_back());
  CHECK(!dispatch(state, Drained{}));
  CHECK(is<Finished>(state));
  CHECK(pool.all_back());
}

TEST(abort_in_every_state) {
  Pool pool;
  const auto in = [&](auto... events) {
    RequestState state{Submitted{}};
    CHECK(!dispatch(state, Admit{pool.hold()}));
    (CHECK(!dispatch(state, std::move(events))), ...);
    return state;
  };
  RequestState submitted{Submitted{}};
  CHECK(!dispatch(submitted, Abort{}));
  CHECK(is<Finished>(submitted));
  RequestState retracted = in(Retract{}, Drained{});
  CHECK(!dispatch(retracted, Abort{}));
  CHECK(is<Finished>(retracted));

  const auto ends_after_drain = [&](RequestState state) {
    CHECK(!dispatch(state, Abort{}));
    CHECK(is<Aborting>(state));
    CHECK(!pool.all_back());
    const auto again = dispatch(state, Abort{});
    CHECK(again.has_value());
    CHECK_EQ(again->state, "Aborting");
    CHECK_EQ(again->event, "Abort");
    CHECK(!dispatch(state, Drained{}));
    CHECK(pool.all_back());
  };
  ends_after_drain(in());
  ends_after_drain(in(LastChunkPlanned{}));
  ends_after_drain(in(LastChunkPlanned{}, Retract{}));

  RequestState draining = in(LastChunkPlanned{}, Finish{});
  CHECK(dispatch(draining, Abort{}).has_value());
  CHECK(is<Draining>(draining));
  RequestState finished{Finished{}};
  CHECK(dispatch(finished, Abort{}).has_value());
}

TEST(an_event_that_does_not_fit_is_a_value_and_loses_nothing) {
  Pool pool;
  RequestState state{Submitted{}};
  CHECK(!dispatch(state, Admit{pool.hold()}));
  {
    Admit again{pool.hold()};
    const auto error = dispatch(state, std::move(again));
    CHECK(error.has_value());
    CHECK_EQ(error->state, "Prefilling");
    CHECK_EQ(error->event, "Admit");
    CHECK_EQ(again.kv.pages.size(), 3);  // NOLINT(bugprone-use-after-move): untouched on an error
  }
  CHECK(is<Prefilling>(state));
  CHECK(dispatch(state, Drained{}).has_value());
  CHECK(dispatch(state, Finish{}).has_value());
  CHECK_EQ(held_kv(state)->pages.size(), 3);
}

TEST(destroying_any_state_gives_everything_back) {
  Pool pool;
  { const RequestState state{Prefilling{pool.hold()}}; }
  CHECK(pool.all_back());
  { const RequestState state{Decoding{pool.hold()}}; }
  CHECK(pool.all_back());
  { const RequestState state{Retracting{pool.hold()}}; }
  CHECK(pool.all_back());
  { const RequestState state{Draining{pool.hold()}}; }
  CHECK(pool.all_back());
  {
    RequestState state{Aborting{pool.hold()}};
    state = Decoding{pool.hold()};
  }
  CHECK(pool.all_back());
}

// The table of the diagram: exactly these pairs exist.
template <class State, class... Events>
constexpr int num_transitions = (0 + ... + (HasTransition<State, Events> ? 1 : 0));
template <class State>
constexpr int transitions_from = num_transitions<State, Admit, LastChunkPlanned, Retract, Finish, Abort, Drained>;

static_assert(transitions_from<Submitted> == 2 && HasTransition<Submitted, Admit> && HasTransition<Submitted, Abort>);
static_assert(transitions_from<Prefilling> == 3 && HasTransition<Prefilling, LastChunkPlanned> &&
              HasTransition<Prefilling, Retract> && HasTransition<Prefilling, Abort>);
static_assert(transitions_from<Decoding> == 3 && HasTransition<Decoding, Retract> && HasTransition<Decoding, Finish> &&
              HasTransition<Decoding, Abort>);
static_assert(transitions_from<Retracting> == 3 && HasTransition<Retracting, Drained> && HasTransition<Retracting, Finish> &&
              HasTransition<Retracting, Abort>);
static_assert(transitions_from<Retracted> == 2 && HasTransition<Retracted, Admit> && HasTransition<Retracted, Abort>);
static_assert(transitions_from<Draining> == 1 && HasTransition<Draining, Drained>);
static_assert(transitions_from<Aborting> == 1 && HasTransition<Aborting, Drained>);
static_assert(transitions_from<Finished> == 0);
