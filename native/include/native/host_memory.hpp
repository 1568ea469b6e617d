#pragma once

#include <cstddef>
#include <memory>

#include "native/budget.hpp"
#include "native/device.hpp"
#include "native/file_mapping.hpp"

namespace exeunt::native {

/// Size of a page of host memory, the unit of registration.
[[nodiscard]] std::size_t host_page_bytes();

/// Pages of a mapped file that the device may read by DMA.
class HostRegistration {
  public:
    /// Registers whole host pages that cover `[offset, offset + nbytes)` of the file, read-only.
    /// Throws CudaError when the driver refuses; the caller takes the next tier.
    HostRegistration(std::shared_ptr<Device> device, std::shared_ptr<const FileMapping> file,
                     std::size_t offset, std::size_t nbytes, Budget::Charge charge);
    ~HostRegistration();
    HostRegistration(const HostRegistration&) = delete;
    HostRegistration& operator=(const HostRegistration&) = delete;

  private:
    std::shared_ptr<Device> device_;
    std::shared_ptr<const FileMapping> file_;
    void* address_;
    Budget::Charge charge_;
    Live<ObjectKind::kRegistration> live_;
};

/// Page-locked host memory of exactly the size of its charge.
class PinnedBuffer {
  public:
    PinnedBuffer(std::shared_ptr<Device> device, Budget::Charge charge);
    ~PinnedBuffer();
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t nbytes() const noexcept { return charge_.nbytes(); }

  private:
    std::shared_ptr<Device> device_;
    Budget::Charge charge_;
    std::byte* data_ = nullptr;
    Live<ObjectKind::kPinnedBuffer> live_;
};

}  // namespace exeunt::native
