#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "native/copy_batch.hpp"
#include "native/staging_ring.hpp"

namespace exeunt::native {

/// Copies of which some go through a staging ring, submitted together again and again.
///
/// For callers that lay out their own device memory. What both sides point to must stay valid
/// until the fence of the last submission.
class StagedBatch {
  public:
    /// Bytes of a file or, without one, of the caller's own pageable memory at `source`.
    struct Part {
        std::shared_ptr<const FileMapping> file;
        std::size_t file_offset;
        const std::byte* source;
        std::size_t nbytes;
        cuda::DevicePtr target;
    };
    /// SizeError for no staged part, an empty one, one beyond its file, or addresses that wrap.
    StagedBatch(std::shared_ptr<StagingRing> staging, const std::vector<CopyBatch::Part>& direct,
                const std::vector<Part>& staged);

    /// Enqueues the direct copies on `stream` behind `after`, and hands the others to the reader
    /// threads, which record `ready` behind all. Until the transfer is complete `ready` is where
    /// it was: wait for the transfer first, then for the fence.
    [[nodiscard]] std::shared_ptr<StagedTransfer> submit(
        cuda::Stream stream, const std::vector<std::shared_ptr<EventFence>>& after,
        std::shared_ptr<EventFence> ready) const;
    [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
    [[nodiscard]] std::size_t staged_nbytes() const noexcept { return staged_nbytes_; }

  private:
    std::shared_ptr<StagingRing> staging_;
    std::shared_ptr<const CopyPlan> plan_;  // targets are absolute
    std::size_t nbytes_ = 0;
    std::size_t staged_nbytes_ = 0;
};

}  // namespace exeunt::native
