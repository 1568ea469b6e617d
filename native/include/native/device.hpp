#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "native/driver.hpp"
#include "native/error.hpp"
#include "native/live.hpp"

namespace exeunt::native {

/// One opened device: its driver, retained primary context, capabilities and granularity.
///
/// Everything made on it holds a shared_ptr to it, so the context outlives them all (invariant 7).
class Device {
  public:
    /// Throws DriverUnavailable when the device lacks virtual memory management.
    Device(std::shared_ptr<Driver> driver, int ordinal);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    [[nodiscard]] Driver& driver() const noexcept { return *driver_; }
    [[nodiscard]] const std::shared_ptr<Driver>& shared_driver() const noexcept { return driver_; }
    [[nodiscard]] int ordinal() const noexcept { return ordinal_; }
    [[nodiscard]] cuda::Context context() const noexcept { return context_; }
    [[nodiscard]] std::size_t granularity() const noexcept { return granularity_; }
    [[nodiscard]] const Capabilities& capabilities() const noexcept { return capabilities_; }
    [[nodiscard]] const std::string& name() const noexcept { return name_; }
    [[nodiscard]] cuda::AllocationProp allocation_prop() const noexcept;

    /// True in a child of the process that opened the device: no driver call is legal there.
    [[nodiscard]] bool is_forked() const noexcept;
    /// ForkedError in such a child (invariant 11).
    void refuse_after_fork() const;
    /// Free and total bytes of the device, by the driver.
    [[nodiscard]] std::pair<std::size_t, std::size_t> memory_info() const;
    /// Waits for all work of the context. Only for closing, never in steady state (invariant 5).
    void synchronize() const;

  private:
    std::shared_ptr<Driver> driver_;
    int ordinal_;
    std::uint64_t birth_generation_;
    cuda::Context context_ = nullptr;
    std::size_t granularity_ = 0;
    Capabilities capabilities_;
    std::string name_;
    Live<ObjectKind::kDevice> live_;
};

/// Makes the device's context current for a scope and leaves the thread as it was.
class ContextScope {
  public:
    explicit ContextScope(const Device& device);
    ~ContextScope();
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

  private:
    const Device& device_;
    bool is_pushed_ = false;
};

/// An owned, non-blocking stream. Most streams are borrowed from the caller instead, by handle.
class Stream {
  public:
    explicit Stream(std::shared_ptr<Device> device);
    ~Stream();
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    [[nodiscard]] cuda::Stream handle() const noexcept { return handle_; }
    void synchronize() const;

  private:
    std::shared_ptr<Device> device_;
    cuda::Stream handle_ = nullptr;
    Live<ObjectKind::kStream> live_;
};

/// Runs a releasing driver call from a destructor: tried twice, since a call may report the
/// failure of earlier work instead of its own, then written to the leak log. Never throws.
template <typename Release>
void release_quietly(const Device& device, const char* call, Release release) noexcept {
    if (device.is_forked()) {
        return;  // the parent still owns it
    }
    cuda::Status status = cuda::Status::kUnknown;
    for (int attempt = 0; attempt < 2 && status != cuda::Status::kSuccess; ++attempt) {
        try {
            status = release(device.driver());
        } catch (const CudaError& error) {
            status = error.status;
        } catch (...) {
            status = cuda::Status::kUnknown;
        }
    }
    if (status != cuda::Status::kSuccess) {
        record_leak(call, status);
    }
}

}  // namespace exeunt::native
