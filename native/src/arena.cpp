#include "native/arena.hpp"

#include <algorithm>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

constexpr std::size_t kMinAlignment = 256;  // what torch's own allocator promises its kernels
constexpr std::size_t kMaxPressureEvents = 256;

}  // namespace

Arena::Arena(std::shared_ptr<Device> device, const ArenaOptions& options)
    : device_(std::move(device)), budget_(std::make_shared<Budget>(options.limit_bytes)) {
    if (options.limit_bytes < device_->granularity()) {
        throw SizeError("an arena limit of " + std::to_string(options.limit_bytes) +
                        " bytes is below one page of " + std::to_string(device_->granularity()) +
                        " bytes; raise it");
    }
    reservation_ = std::make_shared<const AddressReservation>(
        device_, std::max(options.reserve_bytes, options.limit_bytes));
    pages_.give(0, reservation_->nbytes());
}

Arena::~Arena() {
    // No range is left, since ranges hold the arena; what waits here lost its handle early.
    for (const Orphan& orphan : orphans_) {
        for (const Range::Use& use : orphan.uses) {
            use.fence->synchronize_quietly();
        }
    }
}

void Arena::refuse_closed() const {
    if (reservation_ == nullptr) {
        throw StateError("the arena is closed; open another");
    }
}

bool Arena::is_closed() const {
    const std::lock_guard lock(mutex_);
    return reservation_ == nullptr;
}

bool Arena::is_small(std::size_t extent_nbytes) const {
    return extent_nbytes <= device_->granularity() / 2;
}

std::shared_ptr<Range> Arena::reserve(std::size_t nbytes, std::size_t alignment, DeviceUse use) {
    device_->refuse_after_fork();
    const std::size_t page = device_->granularity();
    check_power_of_two(alignment, "a range's alignment");
    if (alignment > page) {
        throw SizeError("a range's alignment is " + std::to_string(alignment) +
                        " bytes but pages are aligned to " + std::to_string(page) +
                        " bytes; ask for at most that");
    }
    if (nbytes == 0) {
        throw SizeError("a range has 0 bytes; ask for at least 1");
    }
    std::size_t extent_nbytes = align_up(nbytes, kMinAlignment, "a range");
    if (!is_small(extent_nbytes)) {
        extent_nbytes = align_up(nbytes, page, "a range");
    }
    const std::lock_guard lock(mutex_);
    refuse_closed();
    auto offset = take_extent(extent_nbytes, std::max(alignment, kMinAlignment), use);
    if (!offset && collect_locked() > 0) {
        offset = take_extent(extent_nbytes, std::max(alignment, kMinAlignment), use);
    }
    if (!offset) {
        throw OutOfMemory("an address range", extent_nbytes, pages_.free_bytes(),
                          reservation_->nbytes(), pages_.largest_bytes());
    }
    auto range = std::make_shared<Range>(shared_from_this(), *offset, nbytes, extent_nbytes, use,
                                         next_id_++);
    ranges_.insert(range.get());
    return range;
}

std::optional<std::size_t> Arena::take_extent(std::size_t extent_nbytes, std::size_t alignment,
                                              DeviceUse use) {
    const std::size_t page = device_->granularity();
    if (!is_small(extent_nbytes)) {
        return pages_.take(extent_nbytes, page);
    }
    ExtentMap& small = small_[static_cast<std::size_t>(use)];
    auto offset = small.take(extent_nbytes, alignment);
    if (!offset) {
        const auto fresh_page = pages_.take(page, page);
        if (!fresh_page) {
            return std::nullopt;
        }
        small.give(*fresh_page, page);
        // From within that page, so that no range crosses into a neighbour's.
        offset = small.take(extent_nbytes, alignment);
    }
    return offset;
}

void Arena::give_extent(std::size_t offset, std::size_t extent_nbytes, DeviceUse use) {
    const std::size_t page = device_->granularity();
    if (!is_small(extent_nbytes)) {
        pages_.give(offset, extent_nbytes);
        return;
    }
    ExtentMap& small = small_[static_cast<std::size_t>(use)];
    small.give(offset, extent_nbytes);
    const std::size_t page_offset = align_down(offset, page);
    if (small.take_at(page_offset, page)) {
        small_pages_.erase(page_offset);
        pages_.give(page_offset, page);
    }
}

std::shared_ptr<Mapping> Arena::map_pages(std::size_t offset, std::size_t nbytes, DeviceUse use,
                                          std::size_t& goal_free_bytes) {
    auto charge = budget_->try_charge(use, nbytes);
    if (!charge) {
        goal_free_bytes = nbytes;
        return nullptr;
    }
    std::unique_ptr<PhysicalAllocation> allocation;
    try {
        allocation = std::make_unique<PhysicalAllocation>(device_, std::move(*charge));
    } catch (const CudaError& error) {
        if (error.status != cuda::Status::kOutOfMemory) {
            throw;
        }
        // The device is fuller than the limit knows: only what the arena itself gives back helps.
        goal_free_bytes = checked_add(budget_->free_bytes(), nbytes, "a reclaim goal");
        return nullptr;
    }
    return std::make_shared<Mapping>(reservation_, std::move(allocation), offset);
}

bool Arena::try_back(Range& range, std::size_t& goal_free_bytes) {
    if (!is_small(range.extent_nbytes_)) {
        range.mapping_ =
            map_pages(range.offset_, range.extent_nbytes_, range.use_, goal_free_bytes);
    } else {
        const std::size_t page = device_->granularity();
        const std::size_t page_offset = align_down(range.offset_, page);
        range.mapping_ = small_pages_[page_offset].lock();
        if (range.mapping_ == nullptr) {
            range.mapping_ = map_pages(page_offset, page, range.use_, goal_free_bytes);
            small_pages_[page_offset] = range.mapping_;
        }
    }
    counters_.num_commits += range.mapping_ != nullptr ? 1 : 0;
    return range.mapping_ != nullptr;
}

std::size_t Arena::collect_locked() {
    std::size_t nbytes = 0;
    for (Range* range : ranges_) {
        nbytes += range->finish_if_idle();
        range->forget_completed_uses();
    }
    for (auto orphan = orphans_.begin(); orphan != orphans_.end();) {
        const bool is_idle = std::ranges::all_of(
            orphan->uses, [](const Range::Use& use) { return use.fence->is_surely_complete(); });
        if (!is_idle) {
            ++orphan;
            continue;
        }
        nbytes +=
            orphan->mapping && orphan->mapping.use_count() == 1 ? orphan->mapping->nbytes() : 0;
        orphan->mapping.reset();
        give_extent(orphan->offset, orphan->extent_nbytes, orphan->use);
        orphan = orphans_.erase(orphan);
    }
    return nbytes;
}

std::size_t Arena::collect() {
    device_->refuse_after_fork();
    const std::lock_guard lock(mutex_);
    return collect_locked();
}

std::shared_ptr<EventFence> Arena::pending_fence(Among among) const {
    const auto pending = [](const std::vector<Range::Use>& uses) -> std::shared_ptr<EventFence> {
        for (const Range::Use& use : uses) {
            if (!use.fence->is_complete()) {
                return use.fence;
            }
        }
        return nullptr;
    };
    for (const Orphan& orphan : orphans_) {
        if (auto fence = pending(orphan.uses)) {
            return fence;
        }
    }
    for (const Range* range : ranges_) {
        // Waiting for a range that a pin or a view keeps would free nothing.
        const bool is_waiting_for_fences = range->state_ == RangeState::kDraining &&
                                           range->num_pins_ == 0 && range->num_page_exports_ == 0;
        if (among == Among::kAll || is_waiting_for_fences) {
            if (auto fence = pending(range->uses_)) {
                return fence;
            }
        }
    }
    return nullptr;
}

Range* Arena::next_demotable() {
    Range* best = nullptr;
    for (Range* range : ranges_) {
        if (range->state_ == RangeState::kCommitted && range->demotion_order_ &&
            range->num_pins_ == 0 && range->num_page_exports_ == 0 &&
            (best == nullptr || std::pair(*range->demotion_order_, range->id_) <
                                    std::pair(*best->demotion_order_, best->id_))) {
            best = range;
        }
    }
    return best;
}

bool Arena::reclaim(std::size_t nbytes) {
    device_->refuse_after_fork();
    Lock lock(mutex_);
    refuse_closed();
    return reclaim_locked(nbytes, nbytes, lock);
}

bool Arena::reclaim_locked(std::size_t goal_free_bytes, std::size_t requested_bytes, Lock& lock) {
    PressureEvent event;
    event.requested_bytes = requested_bytes;
    event.freed_bytes = collect_locked();
    // A request above the limit is hopeless: demoting for it would only cost.
    while (goal_free_bytes <= budget_->limit_bytes() && budget_->free_bytes() < goal_free_bytes) {
        if (const std::shared_ptr<EventFence> fence = pending_fence(Among::kDraining)) {
            // Waiting under the lock would stop threads whose work this fence may wait for.
            lock.unlock();
            fence->synchronize();
            lock.lock();
            refuse_closed();
        } else if (Range* victim = next_demotable()) {
            victim->state_ = RangeState::kDraining;
            ++counters_.num_demotions;
            event.demoted_range_ids.push_back(victim->id_);
        } else {
            // What completed since the last look is no longer pending, but not yet collected.
            const std::size_t nbytes = collect_locked();
            event.freed_bytes += nbytes;
            if (nbytes == 0) {
                break;
            }
            continue;
        }
        event.freed_bytes += collect_locked();
    }
    event.was_met = budget_->free_bytes() >= goal_free_bytes;
    const bool was_met = event.was_met;
    ++counters_.num_pressure_events;
    pressure_events_.push_back(std::move(event));
    if (pressure_events_.size() > kMaxPressureEvents) {
        pressure_events_.pop_front();
    }
    return was_met;
}

std::vector<PressureEvent> Arena::take_pressure_events() {
    const std::lock_guard lock(mutex_);
    std::vector<PressureEvent> events(pressure_events_.begin(), pressure_events_.end());
    pressure_events_.clear();
    return events;
}

ArenaStats Arena::stats() const {
    const std::lock_guard lock(mutex_);
    ArenaStats stats = counters_;
    stats.budget = budget_->snapshot();
    stats.address_bytes = reservation_ ? reservation_->nbytes() : 0;
    stats.free_address_bytes = pages_.free_bytes();
    stats.largest_free_address_bytes = pages_.largest_bytes();
    for (const Range* range : ranges_) {
        stats.num_ranges += range->state_ == RangeState::kRetired ? 0 : 1;
        stats.num_draining += range->state_ == RangeState::kDraining ? 1 : 0;
    }
    stats.num_draining += orphans_.size();
    return stats;
}

void Arena::close() {
    device_->refuse_after_fork();
    Lock lock(mutex_);
    for (;;) {
        if (reservation_ == nullptr) {
            return;
        }
        std::size_t num_exports = 0;
        std::size_t num_pins = 0;
        std::size_t num_segments = 0;
        for (const Range* range : ranges_) {
            num_exports += range->num_page_exports_ + range->num_address_exports_;
            num_pins += range->num_pins_;
            num_segments += range->use_ == DeviceUse::kTorch && range->mapping_ ? 1 : 0;
        }
        if (num_exports + num_pins + num_segments > 0) {
            throw BusyError("the arena has " + std::to_string(num_exports) + " exported views, " +
                            std::to_string(num_pins) + " acquired ranges or rings and " +
                            std::to_string(num_segments) +
                            " torch segments; drop them before closing it");
        }
        const std::shared_ptr<EventFence> fence = pending_fence(Among::kAll);
        if (fence == nullptr) {
            break;
        }
        // Another thread may reserve or export while this one waits: look again afterwards.
        lock.unlock();
        fence->synchronize();
        lock.lock();
    }
    for (Range* range : ranges_) {
        if (range->state_ != RangeState::kRetired) {
            range->state_ = RangeState::kDraining;
            range->is_retiring_ = true;
        }
    }
    collect_locked();
    small_pages_.clear();
    reservation_.reset();
}

}  // namespace exeunt::native
