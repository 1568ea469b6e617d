#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "native/event_fence.hpp"

namespace exeunt::native {

/// Device time spent between pairs of events, summed as they complete. Never waits. One in
/// `interval` is measured, since two events cost the host as much as several copies, and none while
/// more pairs are pending than it holds; what goes unmeasured is counted. Not thread-safe.
class TimingLog {
  public:
    struct Pair {
        explicit Pair(const std::shared_ptr<Device>& device)
            : begin(device, EventFence::Timing::kEnabled),
              end(device, EventFence::Timing::kEnabled) {}
        EventFence begin;
        EventFence end;
        std::size_t nbytes = 0;
    };
    struct Totals {
        double milliseconds = 0;
        std::size_t nbytes = 0;
        std::uint64_t num_measured = 0;
        std::uint64_t num_unmeasured = 0;
    };

    /// An `interval` of 0 measures nothing.
    TimingLog(std::shared_ptr<Device> device, std::size_t capacity, std::size_t interval)
        : device_(std::move(device)), capacity_(capacity), interval_(interval) {}

    /// A pair whose beginning is recorded on `stream` now, or nothing.
    [[nodiscard]] std::unique_ptr<Pair> begin(cuda::Stream stream);
    /// Records the end on `stream` now.
    void end(std::unique_ptr<Pair> pair, cuda::Stream stream, std::size_t nbytes);
    /// Adds up the pairs that have completed.
    void harvest();
    [[nodiscard]] const Totals& totals() const noexcept { return totals_; }

  private:
    std::shared_ptr<Device> device_;
    std::size_t capacity_;
    std::size_t interval_;
    std::size_t num_skipped_ = 0;  // since the last that was measured
    std::vector<std::unique_ptr<Pair>> spare_;
    std::deque<std::unique_ptr<Pair>> pending_;
    Totals totals_;
};

}  // namespace exeunt::native
