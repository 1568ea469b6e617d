#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "native/budget.hpp"
#include "native/event_fence.hpp"
#include "native/handles.hpp"

namespace exeunt::native {

class Arena;

/// reserved -> committed -> draining -> reserved or retired. `commit` takes a range that drains
/// towards reserved back, contents included.
enum class RangeState { kReserved, kCommitted, kDraining, kRetired };

/// What an exported view keeps alive. Views that hold pages forbid demotion. A view that holds the
/// address alone may outlive the pages: whoever reads through it acquires the range first.
enum class Hold { kPages, kAddress };

/// Part of an arena's addresses. Retired when its last holder drops it.
class Range : public std::enable_shared_from_this<Range> {
  public:
    /// The last work of one stream that touches the range.
    struct Use {
        cuda::Stream stream;
        std::shared_ptr<EventFence> fence;
    };

    /// Made by Arena::reserve only.
    Range(std::shared_ptr<Arena> arena, std::size_t offset, std::size_t nbytes,
          std::size_t extent_nbytes, DeviceUse use, std::uint64_t id);
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

    /// Puts memory behind the addresses, under pressure after giving other ranges back.
    /// OutOfMemory otherwise. A second call does nothing.
    void commit();
    /// Gives the memory back once fences, pins and views allow; the addresses stay.
    void demote();
    /// Gives memory and addresses back once fences, pins and views allow. StateError twice.
    void retire();
    /// Pins the pages for use. False when they were demoted: commit and fill them again.
    [[nodiscard]] bool acquire();
    /// Undoes one `acquire`; the pages stay until the work enqueued on `stream` so far is done.
    void release(cuda::Stream stream);
    /// The pages stay until the work enqueued on `stream` so far is done.
    void record_use(cuda::Stream stream);
    /// Orders demotion under pressure: lowest first. Nothing: never demote.
    void set_demotion_order(std::optional<std::int64_t> order);

    [[nodiscard]] RangeState state() const;
    [[nodiscard]] cuda::DevicePtr address() const;
    [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] const std::shared_ptr<Arena>& arena() const noexcept { return arena_; }

    /// Counts a view of a committed range, StateError if it is not. See export.hpp.
    void add_export(Hold hold);
    /// Ends a view behind the work that `streams` have now.
    void drop_export(Hold hold, const std::vector<cuda::Stream>& streams) noexcept;
    /// Keeps what a copy reads alive until the range's uses so far are done.
    void keep_until_idle(std::shared_ptr<const void> owner);
    /// Undoes one `acquire` after which nothing was enqueued, or everything is done.
    void unpin() noexcept;

  private:
    friend class Arena;

    // All of these expect the arena's mutex held.
    [[nodiscard]] bool is_idle() const;
    std::size_t finish_if_idle();
    void forget_completed_uses();
    void record_use_locked(cuda::Stream stream);

    const std::shared_ptr<Arena> arena_;
    const std::size_t offset_;
    const std::size_t nbytes_;
    const std::size_t extent_nbytes_;
    const DeviceUse use_;
    const std::uint64_t id_;
    const cuda::DevicePtr address_;
    // Guarded by the arena's mutex:
    RangeState state_ = RangeState::kReserved;
    bool is_retiring_ = false;
    std::shared_ptr<Mapping> mapping_;
    std::vector<Use> uses_;
    std::vector<std::shared_ptr<const void>> kept_;
    std::size_t num_pins_ = 0;
    std::size_t num_page_exports_ = 0;
    std::size_t num_address_exports_ = 0;
    std::optional<std::int64_t> demotion_order_;
    Live<ObjectKind::kRange> live_;
};

}  // namespace exeunt::native
