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

}  // namespace exeunt::native
