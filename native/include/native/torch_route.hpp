#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "native/arena.hpp"

namespace exeunt::native {

struct TorchStats {
    std::uint64_t num_allocations = 0;
    std::uint64_t num_refused = 0;
    std::size_t num_segments = 0;
    std::size_t segment_bytes = 0;
};

/// Serves the two C symbols below for one device from one arena, for as long as it lives.
/// Segments that are still out then keep their memory until they are freed.
class TorchRoute {
  public:
    /// StateError when the device has a route already.
    explicit TorchRoute(std::shared_ptr<Arena> arena);
    ~TorchRoute();
    TorchRoute(const TorchRoute&) = delete;
    TorchRoute& operator=(const TorchRoute&) = delete;

    void close();

  private:
    std::shared_ptr<Arena> arena_;
};

/// Of all routes of this process.
[[nodiscard]] TorchStats torch_stats();

}  // namespace exeunt::native

extern "C" {

/// Memory for one of torch's segments, or null, upon which torch raises its OutOfMemoryError. Runs
/// under torch's allocator lock and therefore takes no other lock that waits for Python: pressure
/// is relieved here, by demotion, and read by Python later.
[[gnu::visibility("default")]] void* exeunt_torch_malloc(std::ptrdiff_t nbytes, int device,
                                                         void* stream) noexcept;
/// Takes a segment back after the work that its stream has now.
[[gnu::visibility("default")]] void exeunt_torch_free(void* address, std::ptrdiff_t nbytes,
                                                      int device, void* stream) noexcept;
}
