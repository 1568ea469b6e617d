#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "native/arena.hpp"
#include "native/export.hpp"
#include "native/staging_ring.hpp"
#include "native/timing_log.hpp"
#include "native/unit.hpp"

namespace exeunt::native {

/// free -> filling -> ready -> in use -> draining -> free, or from draining to filling at once.
enum class SlotState { kFree, kFilling, kReady, kInUse, kDraining };

/// Names one filling of one slot; stale once the slot is filled anew.
using Ticket = std::uint64_t;

struct RingOptions {
    std::size_t num_slots = 2;
    std::size_t slot_nbytes = 0;
    /// One unit in so many has its copies and stall measured; 0 measures none.
    std::size_t timing_interval = 4;
};

struct RingStats {
    std::uint64_t num_units = 0;
    std::uint64_t num_copies = 0;
    std::uint64_t num_merged = 0;
    std::uint64_t num_full = 0;
    std::size_t copied_bytes = 0;
    std::size_t staged_bytes = 0;
    std::size_t pageable_bytes = 0;
    /// Device time of the copies of units without staged parts, and the bytes of those measured.
    TimingLog::Totals copies;
    /// Device time for which consumers' streams waited for a slot to become ready.
    TimingLog::Totals stalls;
};

/// A cyclic ring of equal slots on the device, filled ahead of their consumers.
///
/// Two orderings only, both by events: a slot is written after the fences of its readers
/// (invariant 2), and read after its copies. Nothing here waits on the host in steady state
/// (invariant 5), except `acquire` of a unit that reader threads are still staging. Thread-safe.
class TransferRing {
  public:
    /// Takes its memory from the arena. `copy_stream` is borrowed and must outlive the ring.
    /// Without `staging`, bytes that are not pinned are copied from pageable memory.
    TransferRing(std::shared_ptr<Arena> arena, const RingOptions& options, cuda::Stream copy_stream,
                 std::shared_ptr<StagingRing> staging);
    /// Waits for its copies and readers.
    ~TransferRing();
    TransferRing(const TransferRing&) = delete;
    TransferRing& operator=(const TransferRing&) = delete;

    /// Enqueues a unit's copies into the next slot that has no reader to come. Nothing when there
    /// is none. After an error the slot is free; what was enqueued is fenced.
    [[nodiscard]] std::optional<Ticket> try_submit(const std::shared_ptr<const Unit>& unit);
    /// Makes later work of `stream` wait for the unit and counts a reader. Works as often as
    /// wanted, until the slot is filled anew; StateError after that.
    void acquire(Ticket ticket, cuda::Stream stream);
    /// Ends one reader: the slot may be overwritten after the work that `stream` has now.
    void release(Ticket ticket, cuda::Stream stream);
    /// Gives up a unit that nobody has acquired.
    void cancel(Ticket ticket);
    /// Whether the ticket's bytes are still in its slot, or on their way.
    [[nodiscard]] bool is_current(Ticket ticket) const;

    [[nodiscard]] std::size_t slot_of(Ticket ticket) const;
    [[nodiscard]] SlotState state(std::size_t slot) const;
    [[nodiscard]] std::size_t num_slots() const noexcept { return slots_.size(); }
    [[nodiscard]] std::size_t slot_nbytes() const noexcept { return options_.slot_nbytes; }
    [[nodiscard]] cuda::DevicePtr slot_address(std::size_t slot) const;
    /// A view of one whole slot; see export.hpp.
    [[nodiscard]] dlpack::ManagedTensor* export_slot(std::size_t slot) const;
    [[nodiscard]] RingStats stats();
    /// BusyError while a unit is acquired. Waits otherwise.
    void close();

  private:
    struct Reader {
        cuda::Stream stream;
        std::unique_ptr<EventFence> done;
        bool is_pending = false;  // recorded, and not yet waited for by a refill
    };
    struct Slot {
        SlotState state = SlotState::kFree;
        std::uint64_t generation = 0;
        std::size_t num_readers = 0;
        bool has_content = false;
        /// Copies were enqueued that `ready` does not cover.
        bool has_unfenced_copies = false;
        std::shared_ptr<EventFence> ready;
        std::vector<Reader> readers;
        std::shared_ptr<StagedTransfer> transfer;
        std::vector<std::shared_ptr<const CopyPlan>> kept;  // what pending copies read
    };

    // All of these expect mutex_ held.
    void refuse_closed() const;
    [[nodiscard]] cuda::DevicePtr address_of(std::size_t slot) const;
    Slot& current_slot(Ticket ticket);
    [[nodiscard]] std::optional<std::size_t> next_slot() const;
    void fill(Slot& slot, std::size_t index, const std::shared_ptr<const CopyPlan>& plan);
    static void forget_completed_copies(Slot& slot);
    void wait_for_transfer(Slot& slot, std::unique_lock<std::mutex>& lock);

    const std::shared_ptr<Arena> arena_;
    const RingOptions options_;
    const std::size_t stride_;
    const cuda::Stream copy_stream_;
    const std::shared_ptr<StagingRing> staging_;
    std::shared_ptr<Range> range_;
    mutable std::mutex mutex_;  // guards everything below
    std::vector<Slot> slots_;   // never resized
    std::size_t next_ = 0;
    bool is_closed_ = false;
    RingStats counters_;
    TimingLog copy_timings_;
    TimingLog stall_timings_;
    Live<ObjectKind::kRing> live_;
};

/// Enqueues a unit's copies into a committed range on `stream`; work of other streams waits for
/// the returned fence. Blocks on the disk for what is staged. StateError without pages.
[[nodiscard]] std::shared_ptr<EventFence> upload(const std::shared_ptr<Range>& range,
                                                 const std::shared_ptr<const Unit>& unit,
                                                 cuda::Stream stream,
                                                 const std::shared_ptr<StagingRing>& staging);

}  // namespace exeunt::native
