#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "native/abi.hpp"

namespace exeunt::native {

enum class ObjectKind : std::size_t {
    kDevice,
    kStream,
    kFence,
    kReservation,
    kAllocation,
    kMapping,
    kRegistration,
    kPinnedBuffer,
    kFile,
    kArena,
    kRange,
    kExport,
    kSource,
    kStaging,
    kRing,
    kCount
};

/// Live objects of each kind in this process (invariant 10). Lock-free.
[[nodiscard]] std::vector<std::pair<std::string, std::size_t>> live_objects();

/// What a destructor could not give back. A destructor cannot throw, so it writes it here.
struct Leak {
    std::string call;
    cuda::Status status;
};
[[nodiscard]] std::vector<Leak> leaks();
void record_leak(const char* call, cuda::Status status) noexcept;

namespace detail {
extern std::array<std::atomic<std::size_t>, static_cast<std::size_t>(ObjectKind::kCount)>
    live_counts;
}

/// Member that counts its owner for as long as the owner lives. Keeps the owner from copying.
template <ObjectKind kind>
class Live {
  public:
    Live() { detail::live_counts[static_cast<std::size_t>(kind)].fetch_add(1); }
    ~Live() { detail::live_counts[static_cast<std::size_t>(kind)].fetch_sub(1); }
    Live(const Live&) = delete;
    Live& operator=(const Live&) = delete;
};

}  // namespace exeunt::native
