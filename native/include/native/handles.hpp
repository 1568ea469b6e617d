#pragma once

#include <cstddef>
#include <memory>

#include "native/budget.hpp"
#include "native/device.hpp"

namespace exeunt::native {

/// Device address space without memory behind it.
class AddressReservation {
  public:
    /// `nbytes` is rounded up to the granularity.
    AddressReservation(std::shared_ptr<Device> device, std::size_t nbytes);
    ~AddressReservation();
    AddressReservation(const AddressReservation&) = delete;
    AddressReservation& operator=(const AddressReservation&) = delete;

    [[nodiscard]] cuda::DevicePtr base() const noexcept { return base_; }
    [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }
    [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }

  private:
    std::shared_ptr<Device> device_;
    std::size_t nbytes_;
    cuda::DevicePtr base_ = 0;
    Live<ObjectKind::kReservation> live_;
};

/// Device memory without an address, charged to a budget for as long as it lives.
class PhysicalAllocation {
  public:
    /// `charge` holds the allocation's size, a multiple of the granularity.
    PhysicalAllocation(std::shared_ptr<Device> device, Budget::Charge charge);
    ~PhysicalAllocation();
    PhysicalAllocation(const PhysicalAllocation&) = delete;
    PhysicalAllocation& operator=(const PhysicalAllocation&) = delete;

    [[nodiscard]] std::size_t nbytes() const noexcept { return charge_.nbytes(); }
    [[nodiscard]] cuda::AllocationHandle handle() const noexcept { return handle_; }

  private:
    std::shared_ptr<Device> device_;
    // Before the handle's release, so that the bytes count for as long as they are taken.
    Budget::Charge charge_;
    cuda::AllocationHandle handle_ = 0;
    Live<ObjectKind::kAllocation> live_;
};

/// An allocation mapped, readable and writable, into a reservation; it holds both.
class Mapping {
  public:
    Mapping(std::shared_ptr<const AddressReservation> reservation,
            std::unique_ptr<PhysicalAllocation> allocation, std::size_t offset);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    [[nodiscard]] cuda::DevicePtr address() const noexcept;
    [[nodiscard]] std::size_t nbytes() const noexcept { return allocation_->nbytes(); }

  private:
    void unmap() noexcept;

    std::shared_ptr<const AddressReservation> reservation_;
    std::unique_ptr<PhysicalAllocation> allocation_;
    std::size_t offset_;
    Live<ObjectKind::kMapping> live_;
};

}  // namespace exeunt::native
