#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "native/driver.hpp"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
    m.def(
        "available",
        [] {
            auto [is_available, reason] = exeunt::native::probe_driver();
            return std::pair<bool, std::string>{is_available, reason};
        },
        "Whether libcuda can be loaded, with the reason when it cannot. Makes no CUDA call.");
}
