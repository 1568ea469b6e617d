#include "native/handles.hpp"

#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

AddressReservation::AddressReservation(std::shared_ptr<Device> device, std::size_t nbytes)
    : device_(std::move(device)),
      nbytes_(align_up(nbytes, device_->granularity(), "an address reservation")) {
    device_->refuse_after_fork();
    if (nbytes == 0) {
        throw SizeError("an address reservation has 0 bytes; ask for at least 1");
    }
    const ContextScope scope(*device_);
    check(device_->driver().address_reserve(&base_, nbytes_), "cuMemAddressReserve");
}

AddressReservation::~AddressReservation() {
    release_quietly(*device_, "cuMemAddressFree",
                    [this](Driver& driver) { return driver.address_free(base_, nbytes_); });
}

PhysicalAllocation::PhysicalAllocation(std::shared_ptr<Device> device, Budget::Charge charge)
    : device_(std::move(device)), charge_(std::move(charge)) {
    const ContextScope scope(*device_);
    check(device_->driver().memory_create(&handle_, charge_.nbytes(), device_->allocation_prop()),
          "cuMemCreate");
}

PhysicalAllocation::~PhysicalAllocation() {
    release_quietly(*device_, "cuMemRelease",
                    [this](Driver& driver) { return driver.memory_release(handle_); });
}

Mapping::Mapping(std::shared_ptr<const AddressReservation> reservation,
                 std::unique_ptr<PhysicalAllocation> allocation, std::size_t offset)
    : reservation_(std::move(reservation)), allocation_(std::move(allocation)), offset_(offset) {
    check_within(offset_, allocation_->nbytes(), reservation_->nbytes(), "a mapping");
    const Device& device = *reservation_->device();
    const ContextScope scope(device);
    check(device.driver().memory_map(address(), nbytes(), allocation_->handle()), "cuMemMap");
    const cuda::AccessDesc access{{cuda::kLocationTypeDevice, device.ordinal()},
                                  cuda::kAccessReadWrite};
    const cuda::Status status = device.driver().memory_set_access(address(), nbytes(), access);
    if (status != cuda::Status::kSuccess) {
        // This constructor fails, so the destructor won't run: undo the map here.
        unmap();
        check(status, "cuMemSetAccess");
    }
}

Mapping::~Mapping() { unmap(); }

void Mapping::unmap() noexcept {
    release_quietly(*reservation_->device(), "cuMemUnmap",
                    [this](Driver& driver) { return driver.memory_unmap(address(), nbytes()); });
}

cuda::DevicePtr Mapping::address() const noexcept { return reservation_->base() + offset_; }

}  // namespace exeunt::native
