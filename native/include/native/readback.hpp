#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "native/event_fence.hpp"
#include "native/host_memory.hpp"

namespace exeunt::native {

/// Pinned host memory that one copy at a time brings device bytes into.
class Readback {
  public:
    /// OutOfMemory when `nbytes` do not fit below the limit of pinned bytes.
    Readback(const std::shared_ptr<Device>& device, const std::shared_ptr<Budget>& host_budget,
             std::size_t nbytes);
    /// Waits for its copy, which writes into memory that goes here.
    ~Readback();
    Readback(const Readback&) = delete;
    Readback& operator=(const Readback&) = delete;

    /// Enqueues a copy of `nbytes` device bytes to the buffer's start.
    void enqueue(cuda::DevicePtr address, std::size_t nbytes, cuda::Stream stream);
    /// Waits for the copy and returns what it brought.
    [[nodiscard]] std::string take();

  private:
    std::shared_ptr<Device> device_;
    PinnedBuffer buffer_;
    EventFence copied_;
    std::size_t nbytes_ = 0;
};

}  // namespace exeunt::native
