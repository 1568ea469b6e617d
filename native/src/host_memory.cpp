#include "native/host_memory.hpp"

#include <unistd.h>

#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

std::size_t host_page_bytes() {
    static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return page;
}

HostRegistration::HostRegistration(std::shared_ptr<Device> device,
                                   std::shared_ptr<const FileMapping> file, std::size_t offset,
                                   std::size_t nbytes, Budget::Charge charge)
    : device_(std::move(device)),
      file_(std::move(file)),
      // The driver takes a non-const pointer but, by the flag, never writes through it.
      address_(const_cast<std::byte*>(file_->data() + offset)),
      charge_(std::move(charge)) {
    check_within(offset, nbytes, file_->nbytes(), "a host registration");
    const ContextScope scope(*device_);
    // The last page is mapped whole, also where the file ends inside it.
    const std::size_t whole_pages = align_up(nbytes, host_page_bytes(), "a host registration");
    check(device_->driver().host_register(
              address_, whole_pages, cuda::kHostRegisterPortable | cuda::kHostRegisterReadOnly),
          "cuMemHostRegister");
}

HostRegistration::~HostRegistration() {
    release_quietly(*device_, "cuMemHostUnregister", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.host_unregister(address_);
    });
}

PinnedBuffer::PinnedBuffer(std::shared_ptr<Device> device, Budget::Charge charge)
    : device_(std::move(device)), charge_(std::move(charge)) {
    const ContextScope scope(*device_);
    void* address = nullptr;
    check(device_->driver().host_alloc(&address, charge_.nbytes()), "cuMemHostAlloc");
    data_ = static_cast<std::byte*>(address);
}

PinnedBuffer::~PinnedBuffer() {
    release_quietly(*device_, "cuMemFreeHost", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.host_free(data_);
    });
}

}  // namespace exeunt::native
