#include "native/driver.hpp"

#include <dlfcn.h>

namespace exeunt::native {

Availability probe_driver() {
    void* handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* message = dlerror();
        return {false, message != nullptr ? message : "libcuda.so.1 cannot be loaded"};
    }
    dlclose(handle);
    return {true, ""};
}

void Driver::inject_fault(std::uint64_t nth, Status status) {
    was_delivered_.store(false);
    fault_status_.store(status);
    fault_at_.store(nth == 0 ? 0 : num_calls_.load() + nth);
}

Driver::Status Driver::begin_call() noexcept {
    const std::uint64_t number = num_calls_.fetch_add(1) + 1;
    if (number == fault_at_.load(std::memory_order_relaxed)) {
        was_delivered_.store(true);
        return fault_status_.load();
    }
    return Status::kSuccess;
}

}  // namespace exeunt::native
