#include "native/readback.hpp"

#include <utility>

#include "native/error.hpp"
#include "native/sizes.hpp"

namespace exeunt::native {

namespace {

Budget::Charge charge_or_throw(Budget& budget, std::size_t nbytes) {
    auto charge = budget.try_charge(HostUse::kStaging, nbytes);
    if (!charge) {
        throw OutOfMemory("a pinned readback buffer", nbytes, budget.free_bytes(),
                          budget.limit_bytes(), budget.free_bytes());
    }
    return std::move(*charge);
}

}  // namespace

Readback::Readback(const std::shared_ptr<Device>& device,
                   const std::shared_ptr<Budget>& host_budget, std::size_t nbytes)
    : device_(device), buffer_(device, charge_or_throw(*host_budget, nbytes)), copied_(device) {}

Readback::~Readback() { copied_.synchronize_quietly(); }

void Readback::enqueue(cuda::DevicePtr address, std::size_t nbytes, cuda::Stream stream) {
    check_within(0, nbytes, buffer_.nbytes(), "a readback");
    copied_.synchronize();  // one copy at a time
    {
        const ContextScope scope(*device_);
        check(device_->driver().copy_to_host(buffer_.data(), address, nbytes, stream),
              "cuMemcpyDtoHAsync");
    }
    nbytes_ = nbytes;
    try {
        copied_.record(stream);
    } catch (const Error&) {
        device_->synchronize();  // no fence covers the copy, and its target is about to go
        throw;
    }
}

std::string Readback::take() {
    copied_.synchronize();
    return {reinterpret_cast<const char*>(buffer_.data()), nbytes_};
}

}  // namespace exeunt::native
