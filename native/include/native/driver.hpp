#pragma once

#include <string>

namespace exeunt::native {

/// Whether the CUDA driver library can be loaded, and why not.
struct Availability {
    bool is_available;
    std::string reason;
};

/// Loads libcuda.so.1 without calling into it.
[[nodiscard]] Availability probe_driver();

}  // namespace exeunt::native
