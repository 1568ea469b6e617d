#include "native/transfer_ring.hpp"

#include <algorithm>
#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

constexpr std::size_t kSlotAlignment = 256;
constexpr unsigned kSlotBits = 16;  // of a ticket; the rest is the slot's generation
constexpr std::size_t kMaxSlots = std::size_t{1} << kSlotBits;
constexpr std::size_t kMaxTimings = 64;  // pending at a time, of copies and of stalls each

HostTier unpinned_tier(const std::shared_ptr<StagingRing>& staging) {
    return staging ? HostTier::kStaged : HostTier::kPageable;
}

}  // namespace

TransferRing::TransferRing(std::shared_ptr<Arena> arena, const RingOptions& options,
                           cuda::Stream copy_stream, std::shared_ptr<StagingRing> staging)
    : arena_(std::move(arena)),
      options_(options),
      stride_(align_up(options.slot_nbytes, kSlotAlignment, "a transfer slot")),
      copy_stream_(copy_stream),
      staging_(std::move(staging)),
      slots_(options.num_slots <= kMaxSlots ? options.num_slots : 0),
      copy_timings_(arena_->device(), kMaxTimings, options.timing_interval),
      stall_timings_(arena_->device(), kMaxTimings, options.timing_interval) {
    if (slots_.empty() || options.slot_nbytes == 0) {
        throw SizeError("a ring of " + std::to_string(options.num_slots) + " slots of " +
                        std::to_string(options.slot_nbytes) + " bytes is impossible; give 1 to " +
                        std::to_string(kMaxSlots) + " slots of at least 1 byte");
    }
    range_ = arena_->reserve(checked_multiply(stride_, slots_.size(), "a transfer ring"),
                             kSlotAlignment, DeviceUse::kRing);
    range_->commit();
    for (Slot& slot : slots_) {
        slot.ready = std::make_shared<EventFence>(arena_->device());
    }
    if (!range_->acquire()) {
        throw StateError("the ring's range was demoted while it was made; make it again");
    }
}

TransferRing::~TransferRing() {
    if (arena_->device()->is_forked()) {
        return;
    }
    try {
        close();
    } catch (const Error&) {
        // A reader that never released has no fence, and a failed wait proves nothing: only the
        // end of all work does.
        try {
            arena_->device()->synchronize();
        } catch (const Error&) {
            record_leak("cuCtxSynchronize", cuda::Status::kUnknown);
        }
        if (range_) {
            range_->unpin();
        }
    }
}

void TransferRing::refuse_closed() const {
    arena_->device()->refuse_after_fork();
    if (is_closed_) {
        throw StateError("the transfer ring is closed; open another");
    }
}

std::size_t TransferRing::slot_of(Ticket ticket) const {
    const std::size_t slot = ticket % kMaxSlots;
    if (slot >= slots_.size()) {
        throw StateError("ticket " + std::to_string(ticket) + " is of another ring");
    }
    return slot;
}

TransferRing::Slot& TransferRing::current_slot(Ticket ticket) {
    refuse_closed();
    Slot& slot = slots_[slot_of(ticket)];
    if (slot.generation != ticket >> kSlotBits || !slot.has_content) {
        throw StateError("ticket " + std::to_string(ticket) +
                         " is stale: its slot holds another unit or none; submit again");
    }
    return slot;
}

bool TransferRing::is_current(Ticket ticket) const {
    const std::lock_guard lock(mutex_);
    const Slot& slot = slots_[slot_of(ticket)];
    return !is_closed_ && slot.has_content && slot.generation == ticket >> kSlotBits;
}

std::optional<std::size_t> TransferRing::next_slot() const {
    for (std::size_t step = 0; step < slots_.size(); ++step) {
        const std::size_t index = (next_ + step) % slots_.size();
        if (slots_[index].state == SlotState::kFree ||
            slots_[index].state == SlotState::kDraining) {
            return index;
        }
    }
    return std::nullopt;
}

std::optional<Ticket> TransferRing::try_submit(const std::shared_ptr<const Unit>& unit) {
    const std::lock_guard lock(mutex_);
    refuse_closed();
    if (unit->target_nbytes() > options_.slot_nbytes) {
        throw SizeError("a unit ends at byte " + std::to_string(unit->target_nbytes()) +
                        " of its slot, which has " + std::to_string(options_.slot_nbytes) +
                        " bytes; make the slots larger or the unit smaller");
    }
    const auto index = next_slot();
    if (!index) {
        ++counters_.num_full;
        return std::nullopt;
    }
    Slot& slot = slots_[*index];
    const std::shared_ptr<const CopyPlan> plan = unit->plan(unpinned_tier(staging_));
    fill(slot, *index, plan);
    next_ = (*index + 1) % slots_.size();
    ++counters_.num_units;
    counters_.num_copies += plan->direct.size() + plan->staged.size();
    counters_.num_merged += plan->num_merged;
    counters_.copied_bytes += unit->nbytes();
    counters_.pageable_bytes += plan->pageable_bytes;
    for (const Copy& copy : plan->staged) {
        counters_.staged_bytes += copy.nbytes;
    }
    return slot.generation << kSlotBits | *index;
}

void TransferRing::fill(Slot& slot, std::size_t index,
                        const std::shared_ptr<const CopyPlan>& plan) {
    forget_completed_copies(slot);
    // A kernel of the previous reader may still read this slot; copying now would corrupt it.
    for (const Reader& reader : slot.readers) {
        if (reader.is_pending) {
            reader.done->block_stream(copy_stream_);
        }
    }
    const bool is_staged = !plan->staged.empty();
    auto timing = is_staged ? nullptr : copy_timings_.begin(copy_stream_);
    if (std::ranges::find(slot.kept, plan) == slot.kept.end()) {
        slot.kept.push_back(plan);
    }
    slot.state = SlotState::kFree;
    slot.has_content = false;
    slot.has_unfenced_copies = true;
    ++slot.generation;
    const cuda::DevicePtr base = address_of(index);
    std::size_t direct_bytes = 0;
    for (const Copy& copy : plan->direct) {
        direct_bytes += copy.nbytes;
    }
    try {
        enqueue_copies(*arena_->device(), plan->direct, base, copy_stream_);
        copy_timings_.end(std::move(timing), copy_stream_, direct_bytes);
        if (is_staged) {
            slot.transfer = staging_->start(plan, base, copy_stream_, slot.ready);
        } else {
            slot.ready->record(copy_stream_);
            slot.has_unfenced_copies = false;
        }
    } catch (...) {
        // The copies before the failed one are pending: without a fence behind them, what they
        // read could be unregistered under them. If this fails too, `kept` simply stays.
        try {
            slot.ready->record(copy_stream_);
            slot.has_unfenced_copies = false;
        } catch (const Error&) {
        }
        throw;
    }
    for (Reader& reader : slot.readers) {
        reader.is_pending = false;
    }
    slot.state = SlotState::kFilling;
    slot.has_content = true;
}

void TransferRing::forget_completed_copies(Slot& slot) {
    if (slot.transfer && slot.transfer->is_complete()) {
        slot.has_unfenced_copies = false;
        slot.transfer.reset();
    }
    if (!slot.transfer && !slot.has_unfenced_copies && !slot.kept.empty() &&
        slot.ready->is_complete()) {
        slot.kept.clear();
    }
}

void TransferRing::wait_for_transfer(Slot& slot, std::unique_lock<std::mutex>& lock) {
    const std::shared_ptr<StagedTransfer> transfer = slot.transfer;
    if (!transfer) {
        return;
    }
    lock.unlock();
    const std::exception_ptr failure = transfer->wait();
    lock.lock();
    if (failure && slot.transfer == transfer) {
        slot.transfer.reset();
        slot.has_unfenced_copies = true;
        slot.has_content = false;
        slot.state = SlotState::kFree;
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

void TransferRing::acquire(Ticket ticket, cuda::Stream stream) {
    std::unique_lock lock(mutex_);
    wait_for_transfer(current_slot(ticket), lock);
    Slot& slot = current_slot(ticket);
    auto timing = stall_timings_.begin(stream);
    slot.ready->block_stream(stream);
    stall_timings_.end(std::move(timing), stream, 0);
    ++slot.num_readers;
    slot.state = SlotState::kInUse;
}

void TransferRing::release(Ticket ticket, cuda::Stream stream) {
    const std::lock_guard lock(mutex_);
    Slot& slot = current_slot(ticket);
    if (slot.num_readers == 0) {
        throw StateError("ticket " + std::to_string(ticket) +
                         " is not acquired; release it once for each acquire");
    }
    auto reader = std::ranges::find_if(slot.readers,
                                       [&](const Reader& known) { return known.stream == stream; });
    if (reader == slot.readers.end()) {
        std::erase_if(slot.readers, [](const Reader& known) { return !known.is_pending; });
        slot.readers.push_back({stream, std::make_unique<EventFence>(arena_->device())});
        reader = std::prev(slot.readers.end());
    }
    reader->done->record(stream);
    reader->is_pending = true;
    if (--slot.num_readers == 0) {
        slot.state = SlotState::kDraining;
    }
}

void TransferRing::cancel(Ticket ticket) {
    std::unique_lock lock(mutex_);
    wait_for_transfer(current_slot(ticket), lock);
    Slot& slot = current_slot(ticket);
    if (slot.num_readers > 0) {
        throw BusyError("ticket " + std::to_string(ticket) + " is acquired; release it instead");
    }
    slot.has_content = false;
    if (slot.state == SlotState::kFilling) {
        slot.state = SlotState::kFree;  // its copies come before the next ones on their stream
    }
}

SlotState TransferRing::state(std::size_t index) const {
    const std::lock_guard lock(mutex_);
    refuse_closed();
    if (index >= slots_.size()) {
        throw StateError("slot " + std::to_string(index) + " of " + std::to_string(slots_.size()) +
                         " does not exist");
    }
    const Slot& slot = slots_[index];
    const bool is_staging = slot.transfer && !slot.transfer->is_complete();
    if (slot.state == SlotState::kFilling && !is_staging && slot.ready->is_complete()) {
        return SlotState::kReady;
    }
    if (slot.state == SlotState::kDraining &&
        std::ranges::all_of(slot.readers, [](const Reader& reader) {
            return !reader.is_pending || reader.done->is_complete();
        })) {
        return SlotState::kFree;
    }
    return slot.state;
}

cuda::DevicePtr TransferRing::slot_address(std::size_t slot) const {
    const std::lock_guard lock(mutex_);
    return address_of(slot);
}

cuda::DevicePtr TransferRing::address_of(std::size_t slot) const {
    if (slot >= slots_.size() || !range_) {
        throw StateError("slot " + std::to_string(slot) + " of " + std::to_string(slots_.size()) +
                         " does not exist or is closed");
    }
    return range_->address() + slot * stride_;
}

dlpack::ManagedTensor* TransferRing::export_slot(std::size_t slot) const {
    const std::lock_guard lock(mutex_);
    refuse_closed();
    (void)address_of(slot);
    return export_view(range_, slot * stride_, options_.slot_nbytes, Hold::kPages);
}

RingStats TransferRing::stats() {
    const std::lock_guard lock(mutex_);
    if (!is_closed_) {
        refuse_closed();
        copy_timings_.harvest();
        stall_timings_.harvest();
    }
    RingStats stats = counters_;
    stats.copies = copy_timings_.totals();
    stats.stalls = stall_timings_.totals();
    return stats;
}

void TransferRing::close() {
    std::unique_lock lock(mutex_);
    if (is_closed_) {
        return;
    }
    refuse_closed();
    for (const Slot& slot : slots_) {
        if (slot.num_readers > 0) {
            throw BusyError("a unit of the transfer ring is acquired; release it before closing");
        }
    }
    is_closed_ = true;  // keeps other threads out while this one waits without the lock
    lock.unlock();
    try {
        bool has_unfenced_copies = false;
        for (const Slot& slot : slots_) {
            if (slot.transfer) {
                (void)slot.transfer->wait();
            }
            slot.ready->synchronize();
            for (const Reader& reader : slot.readers) {
                reader.done->synchronize();
            }
            has_unfenced_copies = has_unfenced_copies || slot.has_unfenced_copies;
        }
        if (has_unfenced_copies) {
            EventFence last(arena_->device());
            last.record(copy_stream_);
            last.synchronize();
        }
        copy_timings_.harvest();
        stall_timings_.harvest();
    } catch (...) {
        lock.lock();
        is_closed_ = false;
        throw;
    }
    lock.lock();
    for (Slot& slot : slots_) {
        slot = Slot{};
    }
    range_->unpin();
    range_.reset();
}

std::shared_ptr<EventFence> upload(const std::shared_ptr<Range>& range,
                                   const std::shared_ptr<const Unit>& unit, cuda::Stream stream,
                                   const std::shared_ptr<StagingRing>& staging) {
    if (unit->target_nbytes() > range->nbytes()) {
        throw SizeError("a unit ends at byte " + std::to_string(unit->target_nbytes()) +
                        " of a range of " + std::to_string(range->nbytes()) +
                        " bytes; reserve more");
    }
    const std::shared_ptr<Device>& device = range->arena()->device();
    auto done = std::make_shared<EventFence>(device);
    const std::shared_ptr<const CopyPlan> plan = unit->plan(unpinned_tier(staging));
    if (!range->acquire()) {
        throw StateError("range " + std::to_string(range->id()) +
                         " has no pages to fill; commit it first");
    }
    std::exception_ptr failure;
    try {
        range->keep_until_idle(plan);
        enqueue_copies(*device, plan->direct, range->address(), stream);
        if (plan->staged.empty()) {
            done->record(stream);
        } else if ((failure = staging->start(plan, range->address(), stream, done)->wait())) {
            std::rethrow_exception(failure);
        }
        range->release(stream);
    } catch (...) {
        // Copies may be pending that no fence covers; the pages must not go before them.
        failure = std::current_exception();
        try {
            range->release(stream);
        } catch (const Error&) {
            device->synchronize();
            range->unpin();
        }
        std::rethrow_exception(failure);
    }
    return done;
}

}  // namespace exeunt::native
