#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "native/host_source.hpp"

namespace exeunt::native {

/// File bytes and where they go in a slot or range.
struct UnitItem {
    std::shared_ptr<HostSource> source;
    std::size_t file_offset = 0;
    std::size_t nbytes = 0;
    std::size_t target_offset = 0;
};

/// One copy, by a host address or, if staged from a file, by the place in it.
struct Copy {
    const std::byte* address = nullptr;
    std::size_t nbytes = 0;
    std::size_t target_offset = 0;
    std::shared_ptr<const FileMapping> file;  // of a staged copy
    std::size_t file_offset = 0;
};

/// How a unit moves, given what is pinned now. Holds all that its copies read.
struct CopyPlan {
    std::vector<Copy> direct;
    std::vector<Copy> staged;
    std::size_t num_merged = 0;
    std::size_t pageable_bytes = 0;
    std::vector<std::shared_ptr<const void>> owners;
};

/// What moves together, immutable. Items must not overlap in their target; neighbours in file and
/// target become one copy. Thread-safe.
class Unit {
  public:
    /// SizeError for no items, an empty item, one beyond its file, or two that overlap.
    explicit Unit(std::vector<UnitItem> items);

    /// Bytes that it moves.
    [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
    /// End of the last byte in the target.
    [[nodiscard]] std::size_t target_nbytes() const noexcept { return target_nbytes_; }
    /// Cached until a source's tiers change.
    [[nodiscard]] std::shared_ptr<const CopyPlan> plan(HostTier unpinned_tier) const;

  private:
    [[nodiscard]] std::uint64_t sources_version() const noexcept;

    std::vector<UnitItem> items_;  // in file order, neighbours merged
    std::size_t num_merged_ = 0;
    std::size_t nbytes_ = 0;
    std::size_t target_nbytes_ = 0;
    mutable std::mutex mutex_;  // guards the three below
    mutable std::shared_ptr<const CopyPlan> plan_;
    mutable std::uint64_t planned_version_ = 0;
    mutable HostTier planned_tier_ = HostTier::kPageable;
};

/// Enqueues copies to `base + target_offset`. Stops at the first that fails and throws CudaError;
/// those before it are pending.
void enqueue_copies(const Device& device, std::span<const Copy> copies, cuda::DevicePtr base,
                    cuda::Stream stream);

}  // namespace exeunt::native
