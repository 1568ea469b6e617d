#pragma once

#include <memory>

#include "native/device.hpp"

namespace exeunt::native {

/// An owned CUDA event: a point in a stream that can be asked about and waited for.
///
/// A fence that was never recorded is complete. Recording again moves it to the later point.
class EventFence {
  public:
    enum class Timing { kDisabled, kEnabled };

    explicit EventFence(std::shared_ptr<Device> device, Timing timing = Timing::kDisabled);
    ~EventFence();
    EventFence(const EventFence&) = delete;
    EventFence& operator=(const EventFence&) = delete;

    void record(cuda::Stream stream);
    [[nodiscard]] bool is_complete() const;
    /// The same, with an unanswered question taken for pending: keeping is safe, freeing is not.
    [[nodiscard]] bool is_surely_complete() const noexcept;
    /// Makes later work of `stream` wait on the device; the host goes on.
    void block_stream(cuda::Stream stream) const;
    /// Blocks the host. Call it without locks and without the GIL.
    void synchronize() const;
    /// The same from a destructor: a failure goes to the leak log.
    void synchronize_quietly() const noexcept;
    /// Device time from `begin` to this fence; both must be complete and have timing.
    [[nodiscard]] double elapsed_ms_since(const EventFence& begin) const;
    [[nodiscard]] const Device& device() const noexcept { return *device_; }

  private:
    std::shared_ptr<Device> device_;
    cuda::Event handle_ = nullptr;
    Live<ObjectKind::kFence> live_;
};

}  // namespace exeunt::native
