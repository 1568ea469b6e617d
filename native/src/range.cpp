#include "native/range.hpp"

#include <algorithm>

#include "native/arena.hpp"
#include "native/error.hpp"

namespace exeunt::native {

Range::Range(std::shared_ptr<Arena> arena, std::size_t offset, std::size_t nbytes,
             std::size_t extent_nbytes, DeviceUse use, std::uint64_t id)
    : arena_(std::move(arena)),
      offset_(offset),
      nbytes_(nbytes),
      extent_nbytes_(extent_nbytes),
      use_(use),
      id_(id),
      address_(arena_->reservation_->base() + offset) {}

Range::~Range() {
    if (arena_->device_->is_forked()) {
        return;  // another thread of the parent may have held the mutex for ever
    }
    const std::lock_guard lock(arena_->mutex_);
    arena_->ranges_.erase(this);
    if (state_ == RangeState::kRetired) {
        return;
    }
    num_pins_ = 0;
    state_ = RangeState::kDraining;
    is_retiring_ = true;
    finish_if_idle();
    if (state_ != RangeState::kRetired) {
        arena_->orphans_.push_back({offset_, extent_nbytes_, use_, std::move(mapping_),
                                    std::move(uses_), std::move(kept_)});
    }
}

void Range::commit() {
    arena_->device_->refuse_after_fork();
    Arena::Lock lock(arena_->mutex_);
    for (;;) {
        arena_->refuse_closed();
        if (state_ == RangeState::kRetired || is_retiring_) {
            throw StateError("range " + std::to_string(id_) +
                             " is retired and can't be committed; reserve another");
        }
        std::size_t goal_free_bytes = 0;
        if (state_ == RangeState::kCommitted || mapping_ != nullptr ||
            arena_->try_back(*this, goal_free_bytes)) {
            state_ = RangeState::kCommitted;
            return;
        }
        if (!arena_->reclaim_locked(goal_free_bytes, extent_nbytes_, lock)) {
            ++arena_->counters_.num_out_of_memory;
            throw OutOfMemory("a device range", extent_nbytes_, arena_->budget_->free_bytes(),
                              arena_->budget_->limit_bytes(), arena_->pages_.largest_bytes());
        }
    }
}

void Range::demote() {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (state_ == RangeState::kCommitted) {
        state_ = RangeState::kDraining;
        ++arena_->counters_.num_demotions;
        finish_if_idle();
    }
}

void Range::retire() {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (state_ == RangeState::kRetired || is_retiring_) {
        throw StateError("range " + std::to_string(id_) + " was retired already; retire it once");
    }
    if (num_pins_ > 0) {
        throw BusyError("range " + std::to_string(id_) + " is acquired " +
                        std::to_string(num_pins_) + " times; release it first");
    }
    state_ = RangeState::kDraining;
    is_retiring_ = true;
    finish_if_idle();
}

bool Range::acquire() {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (state_ == RangeState::kRetired || is_retiring_) {
        throw StateError("range " + std::to_string(id_) + " is retired; reserve another");
    }
    if (state_ != RangeState::kCommitted) {
        return false;
    }
    ++num_pins_;
    return true;
}

void Range::release(cuda::Stream stream) {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (num_pins_ == 0) {
        throw StateError("range " + std::to_string(id_) +
                         " is not acquired; release it once for each acquire");
    }
    record_use_locked(stream);
    --num_pins_;
    finish_if_idle();
}

void Range::record_use(cuda::Stream stream) {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (state_ != RangeState::kCommitted) {
        throw StateError("range " + std::to_string(id_) +
                         " has no pages that work could use; commit it first");
    }
    record_use_locked(stream);
}

void Range::record_use_locked(cuda::Stream stream) {
    const auto found =
        std::ranges::find_if(uses_, [&](const Use& use) { return use.stream == stream; });
    if (found != uses_.end()) {
        found->fence->record(stream);
        return;
    }
    forget_completed_uses();
    auto fence = std::make_shared<EventFence>(arena_->device_);
    fence->record(stream);
    uses_.push_back({stream, std::move(fence)});
}

void Range::forget_completed_uses() {
    std::erase_if(uses_, [](const Use& use) { return use.fence->is_surely_complete(); });
    // A pinned range may be about to record the use that what it keeps is kept for.
    if (uses_.empty() && num_pins_ == 0) {
        kept_.clear();
    }
}

void Range::keep_until_idle(std::shared_ptr<const void> owner) {
    const std::lock_guard lock(arena_->mutex_);
    if (std::ranges::find(kept_, owner) == kept_.end()) {
        kept_.push_back(std::move(owner));
    }
}

void Range::unpin() noexcept {
    if (arena_->device_->is_forked()) {
        return;
    }
    const std::lock_guard lock(arena_->mutex_);
    num_pins_ -= num_pins_ > 0 ? 1 : 0;
    finish_if_idle();
}

void Range::set_demotion_order(std::optional<std::int64_t> order) {
    const std::lock_guard lock(arena_->mutex_);
    demotion_order_ = order;
}

RangeState Range::state() const {
    const std::lock_guard lock(arena_->mutex_);
    return state_;
}

cuda::DevicePtr Range::address() const {
    const std::lock_guard lock(arena_->mutex_);
    if (state_ == RangeState::kRetired) {
        throw StateError("range " + std::to_string(id_) + " is retired and has no address");
    }
    return address_;
}

void Range::add_export(Hold hold) {
    arena_->device_->refuse_after_fork();
    const std::lock_guard lock(arena_->mutex_);
    if (state_ != RangeState::kCommitted) {
        throw StateError("range " + std::to_string(id_) +
                         " has no pages to look at; commit it first");
    }
    ++(hold == Hold::kPages ? num_page_exports_ : num_address_exports_);
}

void Range::drop_export(Hold hold, const std::vector<cuda::Stream>& streams) noexcept {
    if (arena_->device_->is_forked()) {
        return;
    }
    const std::lock_guard lock(arena_->mutex_);
    try {
        for (const cuda::Stream stream : streams) {
            record_use_locked(stream);
        }
    } catch (const Error&) {
        // A stream that takes no fence any more: only the end of all work proves that it is over.
        release_quietly(*arena_->device_, "cuCtxSynchronize", [this](Driver& driver) {
            const ContextScope scope(*arena_->device_);
            return driver.context_synchronize();
        });
    }
    --(hold == Hold::kPages ? num_page_exports_ : num_address_exports_);
    finish_if_idle();
}

bool Range::is_idle() const {
    return num_pins_ == 0 && num_page_exports_ == 0 &&
           std::ranges::all_of(uses_,
                               [](const Use& use) { return use.fence->is_surely_complete(); });
}

std::size_t Range::finish_if_idle() {
    if (state_ != RangeState::kDraining || !is_idle()) {
        return 0;
    }
    const std::size_t nbytes = mapping_ && mapping_.use_count() == 1 ? mapping_->nbytes() : 0;
    mapping_.reset();
    uses_.clear();
    kept_.clear();
    if (!is_retiring_) {
        state_ = RangeState::kReserved;
    } else if (num_address_exports_ == 0) {
        arena_->give_extent(offset_, extent_nbytes_, use_);
        state_ = RangeState::kRetired;
    }
    return nbytes;
}

}  // namespace exeunt::native
