#include <type_traits>
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

TEST(a_prompt_computed_elsewhere) {
  Pool pool;
  RequestState state{Bootstrapping{}};
  CHECK(dispatch(state, RemotePrefillDone{}).has_value());  // before its time: an error of this request alone
  CHECK(!dispatch(state, Bootstrapped{}));
  CHECK(!dispatch(state, Load{pool.hold()}));
  CHECK(is<LoadingBack>(state));
  CHECK(dispatch(state, Succeeded{}).has_value());
  CHECK(!dispatch(state, RemotePrefillDone{}));
  CHECK(is<Decoding>(state));
  CHECK(dispatch(state, RemotePrefillDone{}).has_value());  // twice
  CHECK(dispatch(state, Failed{}).has_value());             // the transfer is over
  CHECK(!dispatch(state, Finish{}));
  CHECK(!dispatch(state, Drained{}));
  CHECK(pool.all_back());
}

TEST(a_prompt_computed_for_elsewhere) {
  Pool pool;
  RequestState state{Bootstrapping{}};
  CHECK(!dispatch(state, Bootstrapped{}));
  CHECK(!dispatch(state, Admit{pool.hold()}));
  CHECK(!dispatch(state, HandOver{}));
  CHECK(is<PrefillDone>(state));
  CHECK(dispatch(state, Finish{}).has_value());
  CHECK(!dispatch(state, Succeeded{}));
  CHECK(is<Draining>(state));
  CHECK(!pool.all_back());
  CHECK(!dispatch(state, Drained{}));
  CHECK(pool.all_back());
}

TEST(a_conversation_keeps_its_prefix_and_nothing_else) {
  Pool pool;
  RequestState state{Draining{pool.hold()}};
  CHECK(!dispatch(state, Park{}));
  CHECK(is<Paused>(state));
  CHECK_EQ(pool.allocator.num_free(), 6);
  CHECK_EQ(pool.rows.num_free(), 2);
  CHECK_EQ(pool.tree.num_locked_pages(), 2);
  CHECK(dispatch(state, Abort{}).has_value());
  CHECK(!dispatch(state, Resume{}));
  CHECK(is<Finished>(state));
  CHECK(pool.all_back());
}

TEST(retracted_by_way_of_the_host) {
  Pool pool;
  RequestState state{Decoding{pool.hold()}};
  CHECK(dispatch(state, WriteBack{}).has_value());  // a step may still write its pages
  CHECK(!dispatch(state, Retract{}));
  CHECK(!dispatch(state, WriteBack{}));
  CHECK(is<WritingBack>(state));
  CHECK(!pool.all_back());
  CHECK(!dispatch(state, Drained{}));
  CHECK(is<Retracted>(state));
  CHECK(pool.all_back());
  CHECK(!dispatch(state, Load{pool.hold()}));
  CHECK(!dispatch(state, Loaded{}));
  CHECK(is<Prefilling>(state));
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

  ends_after_drain(in(HandOver{}));
  ends_after_drain(in(Retract{}, WriteBack{}));
  ends_after_drain(RequestState{LoadingBack{pool.hold()}});
  RequestState bootstrapping{Bootstrapping{}};
  CHECK(!dispatch(bootstrapping, Abort{}));
  CHECK(is<Finished>(bootstrapping));

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
constexpr int transitions_from =
    num_transitions<State, Bootstrapped, Abort, Failed, Admit, Load, Loaded, RemotePrefillDone, Retract, LastChunkPlanned,
                    HandOver, Succeeded, Finish, WriteBack, Drained, Park, Resume, Expire, Offload>;
template <class State, class Event, class Next>
constexpr bool leads_to = std::is_same_v<decltype(transition(std::declval<State&&>(), std::declval<Event&&>())), Next>;

static_assert(transitions_from<Bootstrapping> == 3 && leads_to<Bootstrapping, Bootstrapped, Submitted> &&
              leads_to<Bootstrapping, Abort, Finished> && leads_to<Bootstrapping, Failed, Finished>);
static_assert(transitions_from<Submitted> == 4 && leads_to<Submitted, Admit, Prefilling> &&
              leads_to<Submitted, Load, LoadingBack> && leads_to<Submitted, Abort, Finished> &&
              leads_to<Submitted, Failed, Finished>);
static_assert(transitions_from<Finished> == 0);
static_assert(transitions_from<Prefilling> == 5 && leads_to<Prefilling, LastChunkPlanned, Decoding> &&
              leads_to<Prefilling, HandOver, PrefillDone> && leads_to<Prefilling, Retract, Retracting> &&
              leads_to<Prefilling, Abort, Aborting> && leads_to<Prefilling, Failed, Draining>);
static_assert(transitions_from<LoadingBack> == 5 && leads_to<LoadingBack, Loaded, Prefilling> &&
              leads_to<LoadingBack, RemotePrefillDone, Decoding> && leads_to<LoadingBack, Retract, Retracting> &&
              leads_to<LoadingBack, Abort, Aborting> && leads_to<LoadingBack, Failed, Draining>);
static_assert(transitions_from<Decoding> == 3 && leads_to<Decoding, Finish, Draining> &&
              leads_to<Decoding, Retract, Retracting> && leads_to<Decoding, Abort, Aborting>);
static_assert(transitions_from<Retracting> == 5 && leads_to<Retracting, Finish, Draining> &&
              leads_to<Retracting, WriteBack, WritingBack> && leads_to<Retracting, Drained, Retracted> &&
              leads_to<Retracting, Abort, Aborting> && leads_to<Retracting, Failed, Draining>);
static_assert(transitions_from<Aborting> == 1 && leads_to<Aborting, Drained, Finished>);
static_assert(transitions_from<Draining> == 2 && leads_to<Draining, Park, Paused> && leads_to<Draining, Drained, Finished>);
static_assert(transitions_from<PrefillDone> == 3 && leads_to<PrefillDone, Succeeded, Draining> &&
              leads_to<PrefillDone, Failed, Draining> && leads_to<PrefillDone, Abort, Aborting>);
static_assert(transitions_from<WritingBack> == 3 && leads_to<WritingBack, Drained, Retracted> &&
              leads_to<WritingBack, Abort, Aborting> && leads_to<WritingBack, Failed, Draining>);
static_assert(transitions_from<Retracted> == 4 && leads_to<Retracted, Admit, Prefilling> &&
              leads_to<Retracted, Load, LoadingBack> && leads_to<Retracted, Abort, Finished> &&
              leads_to<Retracted, Failed, Finished>);
static_assert(transitions_from<Paused> == 3 && leads_to<Paused, Offload, Paused> && leads_to<Paused, Resume, Finished> && leads_to<Paused, Expire, Finished>);
