#include "native/device.hpp"

#include <array>
#include <utility>

#include "native/error.hpp"
#include "native/fork.hpp"

namespace exeunt::native {

using cuda::Status;

namespace {

bool has_attribute(Driver& driver, cuda::Attribute attribute, int ordinal) {
    int value = 0;
    check(driver.device_attribute(&value, attribute, ordinal), "cuDeviceGetAttribute");
    return value != 0;
}

Capabilities read_capabilities(Driver& driver, int ordinal) {
    Capabilities found;
    found.has_virtual_memory =
        has_attribute(driver, cuda::Attribute::kVirtualMemoryManagementSupported, ordinal);
    found.has_host_registration =
        has_attribute(driver, cuda::Attribute::kHostRegisterSupported, ordinal);
    found.has_read_only_registration =
        has_attribute(driver, cuda::Attribute::kReadOnlyHostRegisterSupported, ordinal);
    check(driver.device_attribute(&found.compute_major, cuda::Attribute::kComputeCapabilityMajor,
                                  ordinal),
          "cuDeviceGetAttribute");
    check(driver.device_attribute(&found.compute_minor, cuda::Attribute::kComputeCapabilityMinor,
                                  ordinal),
          "cuDeviceGetAttribute");
    return found;
}

}  // namespace

Device::Device(std::shared_ptr<Driver> driver, int ordinal)
    : driver_(std::move(driver)), ordinal_(ordinal), birth_generation_(fork_generation()) {
    int count = 0;
    check(driver_->device_count(&count), "cuDeviceGetCount");
    if (ordinal < 0 || ordinal >= count) {
        throw DriverUnavailable("there is no device " + std::to_string(ordinal) + " among " +
                                std::to_string(count) + "; choose one below that");
    }
    std::array<char, 256> name{};
    check(driver_->device_name(name.data(), static_cast<int>(name.size()), ordinal),
          "cuDeviceGetName");
    name_ = name.data();
    capabilities_ = read_capabilities(*driver_, ordinal);
    if (!capabilities_.has_virtual_memory) {
        throw DriverUnavailable("device " + std::to_string(ordinal) + " (" + name_ +
                                ") has no virtual memory management; use plain torch on it");
    }
    check(driver_->granularity(&granularity_, allocation_prop()), "cuMemGetAllocationGranularity");
    check(driver_->primary_context_retain(&context_, ordinal_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() {
    release_quietly(*this, "cuDevicePrimaryCtxRelease",
                    [this](Driver& driver) { return driver.primary_context_release(ordinal_); });
}

cuda::AllocationProp Device::allocation_prop() const noexcept {
    cuda::AllocationProp prop{};
    prop.type = cuda::kAllocationTypePinned;
    prop.location = {cuda::kLocationTypeDevice, ordinal_};
    return prop;
}

bool Device::is_forked() const noexcept { return birth_generation_ != fork_generation(); }

void Device::refuse_after_fork() const {
    if (is_forked()) {
        throw ForkedError("device " + std::to_string(ordinal_) +
                          " was opened before this process was forked, and CUDA does not survive "
                          "a fork; open it in the child, from a parent that never did");
    }
}

std::pair<std::size_t, std::size_t> Device::memory_info() const {
    refuse_after_fork();
    const ContextScope scope(*this);
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    check(driver_->memory_info(&free_bytes, &total_bytes), "cuMemGetInfo");
    return {free_bytes, total_bytes};
}

void Device::synchronize() const {
    refuse_after_fork();
    const ContextScope scope(*this);
    check(driver_->context_synchronize(), "cuCtxSynchronize");
}

ContextScope::ContextScope(const Device& device) : device_(device) {
    device.refuse_after_fork();
    cuda::Context current = nullptr;
    check(device.driver().context_current(&current), "cuCtxGetCurrent");
    if (current != device.context()) {
        check(device.driver().context_push(device.context()), "cuCtxPushCurrent");
        is_pushed_ = true;
    }
}

ContextScope::~ContextScope() {
    if (is_pushed_) {
        release_quietly(device_, "cuCtxPopCurrent", [](Driver& driver) {
            cuda::Context popped = nullptr;
            return driver.context_pop(&popped);
        });
    }
}

Stream::Stream(std::shared_ptr<Device> device) : device_(std::move(device)) {
    const ContextScope scope(*device_);
    check(device_->driver().stream_create(&handle_), "cuStreamCreate");
}

Stream::~Stream() {
    release_quietly(*device_, "cuStreamDestroy", [this](Driver& driver) {
        const ContextScope scope(*device_);
        return driver.stream_destroy(handle_);
    });
}

void Stream::synchronize() const {
    const ContextScope scope(*device_);
    check(device_->driver().stream_synchronize(handle_), "cuStreamSynchronize");
}

}  // namespace exeunt::native
