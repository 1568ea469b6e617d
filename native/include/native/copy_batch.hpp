#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "native/budget.hpp"
#include "native/device.hpp"
#include "native/event_fence.hpp"
#include "native/unit.hpp"

namespace exeunt::native {

/// Pages of host memory that belong to the caller, pinned for as long as this lives.
class HostPages {
  public:
    /// Throws CudaError when the driver refuses, and, without asking it, for pages of a private
    /// file mapping: pinning those copies each page at best, and read-only pinning of them was
    /// seen never to return. `address` and `nbytes` are whole host pages.
    HostPages(std::shared_ptr<Device> device, void* address, std::size_t nbytes, bool is_read_only);
    ~HostPages();
    HostPages(const HostPages&) = delete;
    HostPages& operator=(const HostPages&) = delete;

  private:
    std::shared_ptr<Device> device_;
    void* address_;
    Live<ObjectKind::kRegistration> live_;
};

/// Copies between addresses that belong to the caller, submitted together again and again.
///
/// For callers that lay out their own device memory. What both sides point to must stay valid
/// until the fence of the last submission, and no copy may run from one registration into the
/// next.
class CopyBatch {
  public:
    struct Part {
        const std::byte* source;
        std::size_t nbytes;
        cuda::DevicePtr target;
    };
    /// SizeError for no part, an empty part, or an address range that wraps around.
    CopyBatch(std::shared_ptr<Device> device, const std::vector<Part>& parts);

    /// Enqueues the copies on `stream` behind `after` and records `ready` behind them. After an
    /// error `ready` covers what was enqueued, if the driver still records at all.
    void submit(cuda::Stream stream, const std::vector<std::shared_ptr<EventFence>>& after,
                EventFence& ready) const;
    [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
    [[nodiscard]] std::size_t num_copies() const noexcept { return copies_.size(); }

  private:
    std::shared_ptr<Device> device_;
    std::vector<Copy> copies_;
    std::size_t nbytes_ = 0;
};

}  // namespace exeunt::native
