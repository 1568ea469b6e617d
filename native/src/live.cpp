#include "native/live.hpp"

#include <mutex>

namespace exeunt::native {

namespace detail {
std::array<std::atomic<std::size_t>, static_cast<std::size_t>(ObjectKind::kCount)> live_counts{};
}

namespace {

constexpr std::array<const char*, static_cast<std::size_t>(ObjectKind::kCount)> kNames{
    "device", "stream", "fence", "reservation", "allocation", "mapping", "registration", "pinned",
    "file",   "arena",  "range", "export",      "source",     "staging", "ring"};

constexpr std::size_t kMaxLeaks = 64;  // the first ones tell the cause; the rest repeat it

std::mutex leak_mutex;  // guards leak_log
std::vector<Leak> leak_log;

}  // namespace

std::vector<std::pair<std::string, std::size_t>> live_objects() {
    std::vector<std::pair<std::string, std::size_t>> counts;
    for (std::size_t kind = 0; kind < kNames.size(); ++kind) {
        counts.emplace_back(kNames[kind], detail::live_counts[kind].load());
    }
    return counts;
}

std::vector<Leak> leaks() {
    const std::lock_guard lock(leak_mutex);
    return leak_log;
}

void record_leak(const char* call, cuda::Status status) noexcept {
    // After the driver has shut down, at the end of the process, everything is gone already.
    if (status == cuda::Status::kDeinitialized || status == cuda::Status::kContextIsDestroyed) {
        return;
    }
    try {
        const std::lock_guard lock(leak_mutex);
        if (leak_log.size() < kMaxLeaks) {
            leak_log.push_back({call, status});
        }
    } catch (...) {
        // Without memory for the note there is nobody left to tell.
    }
}

}  // namespace exeunt::native
