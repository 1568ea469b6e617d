#pragma once

#include <cstdint>

namespace exeunt::native {

/// Number of forks between the first call of watch_forks() and this process. A handle that finds
/// another number than at its birth lives in a forked child, where no driver call is legal
/// (invariant 11). One atomic load.
[[nodiscard]] std::uint64_t fork_generation() noexcept;

/// Starts counting. Called before the driver is initialised; further calls do nothing.
void watch_forks();

}  // namespace exeunt::native
