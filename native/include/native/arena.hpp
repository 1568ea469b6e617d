#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "native/budget.hpp"
#include "native/event_fence.hpp"
#include "native/extent_map.hpp"
#include "native/handles.hpp"
#include "native/range.hpp"

namespace exeunt::native {

struct ArenaOptions {
    /// Most device bytes backed at a time, for weights, ring and torch together.
    std::size_t limit_bytes = 0;
    /// Address space, which costs nothing: several times the limit keeps it from fragmenting.
    std::size_t reserve_bytes = 0;
};

/// One request that did not fit at first, and what was done about it.
struct PressureEvent {
    std::size_t requested_bytes = 0;
    std::size_t freed_bytes = 0;
    std::vector<std::uint64_t> demoted_range_ids;
    bool was_met = false;
};

struct ArenaStats {
    BudgetSnapshot budget;
    std::size_t address_bytes = 0;
    std::size_t free_address_bytes = 0;
    std::size_t largest_free_address_bytes = 0;
    std::size_t num_ranges = 0;
    std::size_t num_draining = 0;
    std::uint64_t num_commits = 0;
    std::uint64_t num_demotions = 0;
    std::uint64_t num_pressure_events = 0;
    std::uint64_t num_out_of_memory = 0;
};

/// Ranges of device memory handed out of one address reservation, backed under one byte limit.
///
/// A range above half a granule has pages of its own, in one allocation; smaller ranges of one use
/// share pages. Pages go only after the fences of their users and their exported views
/// (invariant 3). Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
  public:
    Arena(std::shared_ptr<Device> device, const ArenaOptions& options);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    /// Address space for `nbytes`, aligned to `alignment`, a power of two up to the granularity
    /// that is raised to 256. OutOfMemory when the address space is used up.
    [[nodiscard]] std::shared_ptr<Range> reserve(std::size_t nbytes, std::size_t alignment,
                                                 DeviceUse use);
    /// Gives back what no longer has a user. Never waits. Returns the bytes unmapped.
    std::size_t collect();
    /// Waits until `nbytes` can be backed: first for draining ranges, then by demoting demotable
    /// ones in order. False when that is not enough.
    bool reclaim(std::size_t nbytes);
    /// Events since the last call; the newest 256 are kept.
    [[nodiscard]] std::vector<PressureEvent> take_pressure_events();
    [[nodiscard]] ArenaStats stats() const;
    /// Waits for the users of all ranges and gives everything back. BusyError while an exported
    /// view, an acquired range, a ring or a torch segment lives; then nothing has changed.
    void close();

    [[nodiscard]] bool is_closed() const;
    [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }

  private:
    friend class Range;

    /// A range whose handle has gone while its fences were pending.
    struct Orphan {
        std::size_t offset;
        std::size_t extent_nbytes;
        DeviceUse use;
        std::shared_ptr<Mapping> mapping;
        std::vector<Range::Use> uses;
        std::vector<std::shared_ptr<const void>> kept;
    };
    using Lock = std::unique_lock<std::mutex>;

    // All of these expect mutex_ held.
    void refuse_closed() const;
    [[nodiscard]] std::optional<std::size_t> take_extent(std::size_t extent_nbytes,
                                                         std::size_t alignment, DeviceUse use);
    void give_extent(std::size_t offset, std::size_t extent_nbytes, DeviceUse use);
    [[nodiscard]] bool is_small(std::size_t extent_nbytes) const;
    bool try_back(Range& range, std::size_t& goal_free_bytes);
    std::size_t collect_locked();
    bool reclaim_locked(std::size_t goal_free_bytes, std::size_t requested_bytes, Lock& lock);
    enum class Among { kDraining, kAll };
    [[nodiscard]] std::shared_ptr<EventFence> pending_fence(Among among) const;
    [[nodiscard]] Range* next_demotable();
    [[nodiscard]] std::shared_ptr<Mapping> map_pages(std::size_t offset, std::size_t nbytes,
                                                     DeviceUse use, std::size_t& goal_free_bytes);

    const std::shared_ptr<Device> device_;
    const std::shared_ptr<Budget> budget_;
    mutable std::mutex mutex_;  // guards everything below and the marked members of Range
    std::shared_ptr<const AddressReservation> reservation_;
    ExtentMap pages_;
    std::array<ExtentMap, kNumUses> small_;
    std::map<std::size_t, std::weak_ptr<Mapping>> small_pages_;  // by page offset
    std::set<Range*> ranges_;
    std::deque<Orphan> orphans_;
    std::deque<PressureEvent> pressure_events_;
    std::uint64_t next_id_ = 1;
    ArenaStats counters_;
    Live<ObjectKind::kArena> live_;
};

}  // namespace exeunt::native
