#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "native/budget.hpp"
#include "native/device.hpp"
#include "native/file_mapping.hpp"
#include "native/host_memory.hpp"

namespace exeunt::native {

/// How the bytes of a file reach the device, from the fastest to the slowest.
enum class HostTier { kRegistered, kSlab, kStaged, kPageable };

/// Why a tier holds less than was asked for. Not an error: the next tier serves the rest.
enum class TierOutcome { kComplete, kLimit, kUnsupported, kRefused };

struct TierResult {
    TierOutcome outcome = TierOutcome::kComplete;
    std::size_t requested_bytes = 0;
    /// Bytes of the request that the tier now serves.
    std::size_t held_bytes = 0;
    /// What the driver said, when it refused.
    cuda::Status status = cuda::Status::kSuccess;
};

/// A stretch of a file that is served in one way.
struct HostPiece {
    HostTier tier = HostTier::kPageable;
    std::size_t file_offset = 0;
    std::size_t nbytes = 0;
    /// Host address of the piece, except for staged pieces, which are read by offset.
    const std::byte* address = nullptr;
    /// Keeps the address valid and pinned (invariant 4).
    std::shared_ptr<const void> owner;
};

/// A weight file as a source of copies: which of its bytes are pinned, and how. Thread-safe.
class HostSource {
  public:
    /// StateError when the mapping has a source already.
    HostSource(std::shared_ptr<Device> device, std::shared_ptr<Budget> host_budget,
               std::shared_ptr<const FileMapping> file);

    /// Registers the pages of `[offset, offset + nbytes)` that no tier serves yet, in windows of
    /// at most `window_bytes`, until the limit of pinned bytes. FileChanged when the file is not
    /// the one that was opened.
    TierResult register_pages(std::size_t offset, std::size_t nbytes, std::size_t window_bytes);
    /// Reads `[offset, offset + nbytes)` into one pinned slab of exactly that size, or none of it.
    TierResult load_slab(std::size_t offset, std::size_t nbytes);
    /// Lets all tiers go. Units planned on them and pending copies keep theirs until they go.
    void release();

    /// The range in pieces of one tier each; what is not pinned is `unpinned_tier`.
    [[nodiscard]] std::vector<HostPiece> pieces(std::size_t offset, std::size_t nbytes,
                                                HostTier unpinned_tier) const;
    /// Changes whenever `pieces` may answer otherwise.
    [[nodiscard]] std::uint64_t version() const noexcept { return version_.load(); }
    [[nodiscard]] const std::shared_ptr<const FileMapping>& file() const noexcept { return file_; }
    [[nodiscard]] std::size_t registered_bytes() const;
    [[nodiscard]] std::size_t slab_bytes() const;

  private:
    struct Segment {
        HostTier tier;
        std::size_t nbytes;
        const std::byte* address;
        std::shared_ptr<const void> owner;
    };
    using Segments = std::map<std::size_t, Segment>;  // by file offset; they never overlap
    /// Released, but kept alive by somebody's copies.
    struct Lingering {
        std::size_t offset;
        HostTier tier;
        std::size_t nbytes;
        const std::byte* address;
        std::weak_ptr<const void> owner;
    };
    static std::pair<std::size_t, std::size_t> next_gap(const Segments& segments,
                                                        std::size_t offset, std::size_t end);
    static std::size_t count_bytes(const Segments& segments, HostTier tier);
    // Expects mutex_ held.

    [[nodiscard]] Segments pinned_segments() const;

    const std::shared_ptr<Device> device_;
    const std::shared_ptr<Budget> host_budget_;
    const std::shared_ptr<const FileMapping> file_;
    std::atomic<std::uint64_t> version_{1};
    mutable std::mutex mutex_;  // guards the two below
    Segments segments_;
    std::vector<Lingering> lingering_;
    Live<ObjectKind::kSource> live_;
};

}  // namespace exeunt::native
