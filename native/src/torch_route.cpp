#include "native/torch_route.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "native/error.hpp"
#include "native/fork.hpp"

namespace exeunt::native {

namespace {

struct Registry {
    std::mutex mutex;  // guards the rest; never held during a driver call
    std::map<int, std::shared_ptr<Arena>> arenas;
    std::map<void*, std::shared_ptr<Range>> segments;
    TorchStats stats;
};

/// Never destroyed: torch frees its last segments after this library's own statics have gone.
Registry& registry() {
    alignas(Registry) static std::byte storage[sizeof(Registry)];
    static Registry* const instance = std::construct_at(reinterpret_cast<Registry*>(storage));
    return *instance;
}

}  // namespace

TorchRoute::TorchRoute(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {
    arena_->device()->refuse_after_fork();
    const int ordinal = arena_->device()->ordinal();
    const std::lock_guard lock(registry().mutex);
    if (!registry().arenas.emplace(ordinal, arena_).second) {
        throw StateError("torch is routed to another arena on device " + std::to_string(ordinal) +
                         "; close that route first");
    }
}

TorchRoute::~TorchRoute() { close(); }

void TorchRoute::close() {
    if (!arena_ || arena_->device()->is_forked()) {
        return;
    }
    std::shared_ptr<Arena> closed;
    const std::lock_guard lock(registry().mutex);
    const auto found = registry().arenas.find(arena_->device()->ordinal());
    if (found != registry().arenas.end() && found->second == arena_) {
        closed = std::move(found->second);
        registry().arenas.erase(found);
    }
    arena_.reset();
}

TorchStats torch_stats() {
    const std::lock_guard lock(registry().mutex);
    TorchStats stats = registry().stats;
    stats.num_segments = registry().segments.size();
    for (const auto& [address, range] : registry().segments) {
        stats.segment_bytes += range->nbytes();
    }
    return stats;
}

namespace {

void* allocate_segment(std::size_t nbytes, int ordinal) {
    std::shared_ptr<Arena> arena;
    {
        const std::lock_guard lock(registry().mutex);
        const auto found = registry().arenas.find(ordinal);
        if (found == registry().arenas.end()) {
            return nullptr;
        }
        arena = found->second;
    }
    arena->collect();
    std::shared_ptr<Range> range =
        arena->reserve(nbytes, arena->device()->granularity(), DeviceUse::kTorch);
    range->commit();
    auto* address = reinterpret_cast<void*>(range->address());
    const std::lock_guard lock(registry().mutex);
    registry().segments[address] = std::move(range);
    ++registry().stats.num_allocations;
    return address;
}

void free_segment(void* address, cuda::Stream stream) {
    std::shared_ptr<Range> range;
    {
        const std::lock_guard lock(registry().mutex);
        const auto found = registry().segments.find(address);
        if (found == registry().segments.end()) {
            record_leak("torch freed an address that is no segment", cuda::Status::kInvalidValue);
            return;
        }
        range = std::move(found->second);
        registry().segments.erase(found);
    }
    if (range->arena()->device()->is_forked()) {
        return;
    }
    try {
        range->record_use(stream);
    } catch (const Error&) {
        // Without a fence on its stream only the end of all work makes the pages free; if that
        // can't be had either, the context is gone and the pages with it.
        range->arena()->device()->synchronize();
    }
    range->retire();
}

}  // namespace

}  // namespace exeunt::native

extern "C" {

void* exeunt_torch_malloc(std::ptrdiff_t nbytes, int device, void*) noexcept {
    using namespace exeunt::native;
    try {
        if (nbytes > 0) {
            if (void* address = allocate_segment(static_cast<std::size_t>(nbytes), device)) {
                return address;
            }
        }
    } catch (...) {
        // Any failure is a refusal to torch, which raises its own error; ours is counted.
    }
    try {
        const std::lock_guard lock(registry().mutex);
        ++registry().stats.num_refused;
    } catch (...) {
    }
    return nullptr;
}

void exeunt_torch_free(void* address, std::ptrdiff_t, int, void* stream) noexcept {
    using namespace exeunt::native;
    if (address == nullptr) {
        return;
    }
    try {
        free_segment(address, static_cast<cuda::Stream>(stream));
    } catch (const CudaError& error) {
        record_leak(error.call, error.status);
    } catch (...) {
        record_leak("exeunt_torch_free", cuda::Status::kUnknown);
    }
}
}
